"""One worker of the Ray cluster, called as Ray calls it, without Ray."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from hemiola.clusters.ray import worker as ray_worker
from hemiola.clusters.ray.worker import Assignment, Momentum, Outcome, Setup, Worker, pack_assignment, unpack_outcome
from hemiola.contracts import Batch, Stint
from hemiola.lab.experiment import Experiment
from hemiola.optimizers import Optimizer
from hemiola.wire.exchange import Exchange

LONG = 1e5  # seconds that no test may take: what sleeps so long is woken, or the test does not end


def setup_of(local: bool = False, hidden: int = 8) -> Setup:
    task = {"name": "digits-mlp", "hidden": [hidden]}
    plan, _ = Experiment({"task": task, "workers": 2, "batch": 4}).cells[0].plan(None)
    optimizer = Optimizer("SGD", 0.1, {"momentum": 0.9})
    return Setup(plan.task, plan.shards, 1, None, optimizer, Exchange(), local, 0, "cpu", 1)


def worker_of(setup: Setup, session: int = 1) -> Worker:
    worker = Worker()
    worker.begin(session, 0, setup, None)
    return worker


def run(
    worker: Worker,
    number: int,
    sleep: float = 0.0,
    session: int = 1,
    counted: int = -1,
    momentum: Momentum | None = None,
) -> Outcome:
    stint = Stint(0, number, number, (Batch(0, 0, np.arange(4 * number, 4 * number + 4)),), (0.1,))
    message = pack_assignment(session, Assignment(stint, (False,), (sleep,), counted))
    return unpack_outcome(worker.run(message, worker.runner.initial.numpy().tobytes(), momentum))


def asleep(worker: Worker, number: int) -> tuple[threading.Thread, list[Outcome]]:
    """A stint that has begun and will sleep longer than anybody waits, and where its outcome will be."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run(worker, number, sleep=LONG)))
    thread.start()
    while not worker._running:
        time.sleep(0.001)
    return thread, outcomes


def test_a_stint_stops_the_one_before_it() -> None:
    worker = worker_of(setup_of())
    thread, first = asleep(worker, 0)
    second = run(worker, 1)
    thread.join()
    assert first[0].payload is None
    assert second.payload is not None
    np.testing.assert_array_equal(second.payload, run(worker_of(setup_of()), 1).payload)


@pytest.mark.parametrize("local", [False, True])
def test_a_delayed_step_computes_last_and_not_at_all_if_it_is_cancelled(local: bool) -> None:
    worker = worker_of(setup_of(local))
    computed: list[float] = []
    backward = worker.runner._backward
    worker.runner._backward = lambda *args, **options: (
        computed.append(time.perf_counter()) or backward(*args, **options)
    )
    run(worker, 0, sleep=1e-4)
    assert 0 < worker._step_seconds.most < LONG  # how long it takes is known from now on
    worker._step_seconds.most = 0.05
    began = time.perf_counter()
    assert run(worker, 1, sleep=0.3).seconds >= 0.3
    assert len(computed) == 2
    assert computed[1] - began >= 0.25
    thread, _ = asleep(worker, 2)
    run(worker, 3)
    thread.join()
    assert len(computed) == 3


def test_a_stint_whose_turn_comes_after_that_of_a_later_one_is_not_run() -> None:
    worker = worker_of(setup_of())
    assert run(worker, 5).payload is not None
    assert run(worker, 4).payload is None
    assert run(worker, 6).payload is not None


def test_an_unwanted_stint_does_not_wait_for_its_turn() -> None:
    """It would take the place of the message that stops the one that runs."""
    worker = worker_of(setup_of())
    thread, _ = asleep(worker, 5)
    began = time.monotonic()
    assert run(worker, 4).payload is None
    assert time.monotonic() - began < LONG / 2
    assert worker._running
    run(worker, 6)
    thread.join()


def test_a_new_session_stops_the_stint_of_the_one_before() -> None:
    worker = worker_of(setup_of())
    thread, first = asleep(worker, 7)
    worker.begin(2, 0, setup_of(), None)
    thread.join()
    assert first[0].payload is None
    assert run(worker, 0, session=2).payload is not None
    worker.begin(1, 0, setup_of(), None)  # a message that comes too late
    assert run(worker, 1, session=2).payload is not None


def test_messages_of_an_earlier_session_are_void() -> None:
    worker = worker_of(setup_of(hidden=8), session=7)
    worker.begin(6, 1, setup_of(hidden=16), None)
    assert worker.worker == 0
    assert run(worker, 1_000_000, session=6).payload is None
    outcome = run(worker, 0, session=7)  # not cancelled by the higher number of the other session
    assert outcome.payload is not None
    assert len(outcome.payload) == worker_of(setup_of(hidden=8)).runner.initial.numel()


@pytest.mark.parametrize("rule", ["average", "reset"])
def test_momentum_may_be_told_again_until_a_stint_counted(rule: str) -> None:
    setup = setup_of(local=True)

    def told(worker: Worker) -> Momentum:
        size = worker.runner.initial.numel()
        return Momentum({"momentum_buffer": np.full(size, 0.5, np.float32)} if rule == "average" else None)

    straight, repeated = worker_of(setup), worker_of(setup)
    for worker in (straight, repeated):
        assert run(worker, 0).payload is not None
    run(repeated, 1, counted=0, momentum=told(repeated))  # its report comes too late and does not count
    one = run(straight, 2, counted=0, momentum=told(straight)).payload
    two = run(repeated, 2, counted=0, momentum=told(repeated)).payload
    assert one is not None
    assert two is not None
    np.testing.assert_array_equal(one, two)
    without = run(worker_of(setup), 2).payload
    assert without is not None
    assert torch.equal(torch.from_numpy(one), torch.from_numpy(without)) == (rule == "reset")


# ------------------------------------------------------------------------------------------------- cut, and a notice


def begun(worker: Worker, number: int, steps: int, quick: int) -> tuple[threading.Thread, list[Outcome]]:
    """A stint of so many steps that has done the quick ones, and sleeps before the next one."""
    outcomes: list[Outcome] = []
    worker._step_seconds.most = 0.0  # as if it were known by now, so that it sleeps first
    batches = tuple(Batch(0, 4 * step, np.arange(4 * step, 4 * step + 4)) for step in range(steps))
    stint = Stint(0, number, 0, batches, (0.1,) * steps)
    sleeps = (0.0,) * quick + (LONG,) * (steps - quick)
    message = pack_assignment(1, Assignment(stint, (False,) * steps, sleeps, -1))
    weights = worker.runner.initial.numpy().tobytes()
    thread = threading.Thread(target=lambda: outcomes.append(unpack_outcome(worker.run(message, weights))))
    thread.start()
    while thread.is_alive() and not (worker._running and worker._done == quick):
        time.sleep(0.001)
    return thread, outcomes


def after_two_steps(worker: Worker) -> Outcome:
    """What a stint of two steps gives."""
    thread, outcomes = begun(worker, 0, 2, 2)
    thread.join()
    return outcomes[0]


def test_a_cut_stint_reports_the_steps_it_has_done() -> None:
    worker = worker_of(setup_of(local=True))
    thread, outcomes = begun(worker, 0, 5, 2)
    assert worker.cut(1, 0) == 2
    thread.join()
    whole = worker_of(setup_of(local=True))
    expected = after_two_steps(whole)
    assert outcomes[0].steps == expected.steps == 2
    np.testing.assert_array_equal(outcomes[0].payload, expected.payload)
    assert outcomes[0].loss == expected.loss
    assert outcomes[0].leaves is None
    memories = worker.memory(0), whole.memory(0)
    buffers = [memory["optimizer"]["state"][0]["momentum_buffer"] for memory in memories]
    assert torch.equal(*buffers)


def test_a_stint_that_has_done_nothing_is_cancelled_by_a_cut() -> None:
    worker = worker_of(setup_of(local=True))
    thread, outcomes = begun(worker, 0, 5, 0)
    assert worker.cut(1, 0) == 0
    thread.join()
    assert (outcomes[0].steps, outcomes[0].payload) == (0, None)
    assert worker.cut(1, 1) == 0  # not begun
    assert run(worker, 1).payload is None
    assert run(worker, 2).payload is not None
    assert worker.cut(7, 2) == 0  # of another session


@pytest.mark.parametrize("quick", [0, 2])
def test_a_worker_that_is_told_to_leave_reports_what_it_has_done_and_what_it_remembers(
    quick: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_worker, "IDLE_SECONDS", 3600.0)  # it would end this process, the tests' own
    worker = worker_of(setup_of(local=True))
    thread, outcomes = begun(worker, 0, 5, quick)
    worker._noticed(15, None)
    thread.join()
    assert outcomes[0].steps == quick
    assert (outcomes[0].payload is None) == (quick == 0)
    assert outcomes[0].leaves is not None
    assert (outcomes[0].leaves["optimizer"] is None) == (quick == 0)
    after = run(worker, 1, counted=0 if quick else -1)  # it takes no more
    assert after.steps == 0
    assert after.leaves is not None


def test_a_worker_that_nobody_asks_leaves_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_of(setup_of())
    left = threading.Event()
    monkeypatch.setattr(ray_worker, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(ray_worker.os, "_exit", lambda code: left.set())
    worker._noticed(15, None)
    assert left.wait(LONG)
