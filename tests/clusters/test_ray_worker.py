"""One worker of the Ray cluster, called as Ray calls it, without Ray."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from hemiola.clusters.ray.worker import Assignment, Momentum, Outcome, Setup, Worker, pack_assignment, unpack_outcome
from hemiola.contracts import Batch, Stint
from hemiola.lab.experiment import Experiment
from hemiola.optimizers import Optimizer
from hemiola.wire.exchange import Exchange

LONG = 60.0  # seconds nobody wants to wait for


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
    began = time.monotonic()
    second = run(worker, 1)
    thread.join()
    assert time.monotonic() - began < LONG / 2
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
    run(worker, 0, sleep=LONG / 1e6)
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


def test_a_new_session_stops_the_stint_of_the_one_before() -> None:
    worker = worker_of(setup_of())
    thread, first = asleep(worker, 7)
    began = time.monotonic()
    worker.begin(2, 0, setup_of(), None)
    thread.join()
    assert time.monotonic() - began < LONG / 2
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
