"""The Ray cluster on real processes: equal to the simulator where it must be, and alive when workers are not.

All tests share one Ray and four actors, since starting either takes seconds; each run tells the actors anew what to do.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hemiola
from hemiola.clusters.ray import roster
from hemiola.clusters.ray.cluster import RayCluster
from hemiola.clusters.ray.engine import Engine
from hemiola.clusters.ray.roster import Roster, check_versions, new_actor, start_actors
from hemiola.clusters.ray.worker import Setup
from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.lab.tasks.task import Task
from hemiola.timing.delays import DelayStreams, parse_delay
from hemiola.timing.traces import read_trace
from hemiola.training import Training, split_examples

pytestmark = pytest.mark.real
WORKERS = 4


class SharedRay:
    """Trains one plan after the other on the same actors."""

    def __init__(self):
        self.engine = Engine(None, WORKERS)
        self.actors = start_actors(self.engine, WORKERS, "cpu")
        self.cluster = None

    def training(self, *, delay=None, slow=None, max_restarts=0, hang_seconds=600.0, on=None, **experiment):
        plan = plan_of(on, **experiment)

        def make(plan, work):
            setup = Setup(
                task=plan.task,
                shards=plan.shards,
                unit=plan.order.unit,
                sketch=plan.order.sketch,
                optimizer=plan.optimizer,
                exchange=plan.exchange,
                local=plan.period.local,
                seed=plan.seed,
                device="cpu",
                threads=1,
            )
            if self.cluster is not None:  # Whoever died in the test before has a successor, or gets one now.
                slots = self.cluster.roster.slots
                self.actors = [slot.actor or new_actor(self.engine, WORKERS, "cpu") for slot in slots]
            roster = Roster(self.engine, self.actors, setup, max_restarts, hang_seconds)
            delays = None if delay is None else DelayStreams(parse_delay(delay), WORKERS, plan.seed, slow)
            self.cluster = RayCluster(work, self.engine, roster, setup, plan.pace, delays)
            return self.cluster

        return Training(plan, make)

    def close(self):
        if self.cluster is not None:
            self.cluster.close()
        self.engine.close()


def plan_of(on=None, **experiment):
    plan, _ = Experiment({"task": "digits-logistic", "workers": WORKERS, "batch": 16} | experiment).cells[0].plan(None)
    if on is None:
        return plan
    return replace(plan, task=on, shards=split_examples(on.train, WORKERS, "iid", plan.seed))


def simulate(**experiment):
    cell = Experiment({"task": "digits-logistic", "workers": WORKERS, "batch": 16} | experiment).cells[0]
    training = Training(*cell.plan(None))
    training.run()
    return training


@pytest.fixture(scope="module")
def ray():
    shared = SharedRay()
    yield shared
    shared.close()


def assert_every_epoch_is_a_permutation(training):
    """A worker has one stint at a time, so its units' counts differ by one at most: nothing is lost or doubled."""
    for worker in range(WORKERS):
        counts = sum(training.ledger.counts[fate][worker] for fate in ("used", "dropped", "refused"))
        assert counts.max() - counts.min() <= 1, f"worker {worker}"


MOMENTUM = {"name": "SGD", "lr": 0.1, "momentum": 0.9}

# ------------------------------------------------------------------------------------------- equal to the simulator


@pytest.mark.parametrize(
    "experiment",
    [
        {},
        {"order": {"name": "cd-grab", "sketch": "exact"}},
        {"order": {"name": "cd-grab", "sketch": "fold:64:int8"}, "period": {"name": "constant", "p": 3}},
        {"period": {"name": "adaptive", "start": 2}, "optimizer": MOMENTUM},
        {"period": {"name": "constant", "p": 3, "wire": "int8", "momentum": "average"}, "optimizer": MOMENTUM},
        {"period": {"name": "constant", "p": 2, "momentum": "reset"}, "optimizer": {"name": "Adam", "lr": 0.01}},
        {"period": {"name": "full", "wire": "int4"}, "optimizer": MOMENTUM},
        {"period": {"name": "full", "quantise": 8}},
        {"pace": "k-async", "period": {"name": "constant", "p": 4, "wire": "bf16", "weigh": "work"}},
        {"task": {"name": "digits-mlp", "hidden": [16], "input_noise": 0.3, "label_noise": 0.1}},
    ],
    ids=lambda experiment: "-".join(str(value) for value in experiment.values())[:60] or "full",
)
def test_waiting_for_all_equals_the_simulator(ray, experiment):
    both = {"stop": {"epochs": 1}, "evaluate": {"every_epochs": 0.5}} | experiment
    simulated, real = simulate(**both), ray.training(**both)
    assert real.run() == "done"
    assert real.version == simulated.version
    for mine, its in zip(real.records, simulated.records, strict=True):
        assert mine["train_loss"] == pytest.approx(its["train_loss"], rel=1e-4)
        spread = its["weighted_spread"] or 0.0
        assert (mine["weighted_spread"] or 0.0) == pytest.approx(spread, rel=1e-3, abs=1e-9)
    weights, expected = real.versions[real.version], simulated.versions[simulated.version]
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)
    for mine, its in zip(real.ledger.counts["used"], simulated.ledger.counts["used"], strict=True):
        np.testing.assert_array_equal(mine, its)


# ------------------------------------------------------------------------------------------------------- all paces


@pytest.mark.parametrize(
    ("pace", "law"),
    [
        ({"name": "k-sync", "k": 2}, 0.0),
        ({"name": "k-sync", "k": 2, "late": "ignore"}, 0.0),
        ({"name": "k-batch-sync", "k": 6}, 0.0),
        ({"name": "k-async", "k": 2}, WORKERS / 2 - 1),
        ({"name": "k-batch-async", "k": 2}, (WORKERS - 1) / 2),
        ({"name": "k-async", "k": "adasync", "start": 1}, None),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_every_pace_follows_its_staleness_law_and_keeps_epochs_whole(ray, pace, law):
    training = ray.training(
        pace=pace, delay="exponential(0.01)", stop={"updates": 160}, evaluate={"every_updates": 160}
    )
    assert training.run() == "done"
    assert training.version == 160
    assert_every_epoch_is_a_permutation(training)
    record = training.records[-1]
    if law is not None:
        # the identity is exact but for the reports that were under way at the end
        assert record["mean_staleness"] == pytest.approx(law, abs=0.05)
        merged = sum(training.ledger.staleness.values())
        assert merged == 160 * pace["k"]
    assert record["train_loss"] < training.records[0]["train_loss"]
    if pace["name"] in ("k-sync", "k-batch-sync"):
        assert record["units_cancelled"] > 0


def test_reports_that_are_too_old_are_dropped_and_counted(ray):
    pace = {"name": "k-batch-async", "k": 1, "max_staleness": 1}
    training = ray.training(pace=pace, delay="exponential(0.01)", stop={"updates": 60})
    training.run()
    assert training.records[-1]["max_staleness"] <= 1
    assert training.ledger.total("dropped") > 0
    assert_every_epoch_is_a_permutation(training)


def test_a_cancelled_worker_wakes_from_its_sleep(ray):
    """Every step but worker 0's sleeps longer than any test may take; twenty updates end because the others wake up."""
    training = ray.training(
        pace={"name": "k-sync", "k": 1}, delay="constant(100000)", slow={0: 1e-7}, stop={"updates": 20}
    )
    training.run()
    assert training.ledger.totals["cancelled"][1] == 20 * 16


def test_what_was_cancelled_leaves_no_trace_in_optimizer_or_residual(ray):
    """Worker 0 alone counts; the others' memories must stay empty though they took local steps."""
    experiment = {"period": {"name": "constant", "p": 3, "wire": "int8"}, "optimizer": MOMENTUM}
    slow = dict.fromkeys((1, 2, 3), 1e7)  # a day a step: longer than any machine keeps worker 0 waiting
    training = ray.training(
        pace={"name": "k-sync", "k": 1}, delay="constant(0.01)", slow=slow, stop={"updates": 10}, **experiment
    )
    training.run()
    memories = ray.cluster.roster.memories()
    assert memories[0]["optimizer"] is not None
    assert memories[0]["residuals"][0].abs().sum() > 0
    assert [memories[worker]["optimizer"] for worker in (1, 2, 3)] == [None] * 3
    assert [memories[worker]["residuals"] for worker in (1, 2, 3)] == [{}] * 3


def test_the_log_is_a_trace_for_predictions(ray, tmp_path):
    training = ray.training(delay="constant(0.02)", stop={"epochs": 0.5}, evaluate={"every_epochs": 0.25})
    training.run()
    trace = tmp_path / "log.jsonl"
    trace.write_text("".join(json.dumps(record) + "\n" for record in training.records))
    read = read_trace(trace)
    steps = read.seconds
    assert set(read.workers) == set(range(WORKERS))
    assert len(steps) == sum(training.ledger.staleness.values())
    assert min(steps) >= 0.02
    assert training.records[-1]["alive"] == WORKERS
    assert training.records[-1]["deaths"] == 0
    assert len(training.records[-1]["exchange_seconds"]) > 0


# ------------------------------------------------------------------------------------- death, silence, bad numbers


def kill(slot):
    os.kill(slot.pid, signal.SIGKILL)


def test_workers_killed_at_random_moments(ray, caplog):
    """Ten kills while stints are under way. The run goes on, the epochs stay whole, and the loss falls."""
    kills, wanted, chance = [], 10, random.Random(0)
    training = ray.training(
        pace={"name": "k-async", "k": 2}, order="cd-grab", delay="exponential(0.02)", max_restarts=wanted,
        stop={"epochs": 500}, evaluate={"every_updates": 50},
    )  # fmt: skip
    slots = ray.cluster.roster.slots
    killing = threading.Event()

    def strike():
        working = [slot for slot in slots if slot.stint is not None and not slot.hung]
        if len(working) >= 2:  # someone has to go on
            victim = chance.choice(working)
            kill(victim)
            kills.append((victim.worker, victim.pid))
        killing.clear()

    def after_update(training):
        deaths = sum(slot.deaths for slot in slots)
        if deaths >= wanted:
            return training.epochs < 2
        if deaths == len(kills) and not killing.is_set():
            killing.set()
            threading.Timer(chance.uniform(0, 0.1), strike).start()
        return True

    with caplog.at_level(logging.WARNING):
        training.run(after_update)
    assert len(kills) >= wanted
    assert len(set(kills)) == len(kills)
    assert sum(slot.deaths for slot in slots) == len(kills)
    assert_every_epoch_is_a_permutation(training)
    assert training.ledger.total("cancelled") > 0
    training._evaluate()
    assert training.records[-1]["train_loss"] < 0.5 * training.records[0]["train_loss"]
    assert training.records[-1]["deaths"] == len(kills)
    assert sum("died" in record.message for record in caplog.records) == len(kills)


def test_a_death_while_everyone_waits_for_everyone(ray):
    """The others go on, the successor catches up, and the epoch is exactly one visit of every unit."""
    training = ray.training(order="cd-grab", delay="constant(0.02)", max_restarts=1, stop={"epochs": 1})

    def after_update(training):
        if training.version == 5:
            kill(ray.cluster.roster.slots[3])
        return True

    assert training.run(after_update) == "done"
    assert ray.cluster.roster.slots[3].deaths == 1
    for counts in training.ledger.counts["used"]:
        assert counts.tolist() == [1] * len(counts)


def test_an_update_takes_what_stints_have_done_that_it_cuts(ray):
    """Steps of worker 1 take twice as long as those of worker 0: when one of the two ends, the other is not through."""
    training = ray.training(
        pace={"name": "k-sync", "k": 1, "late": "cut"}, period={"name": "constant", "p": 8}, delay="constant(0.02)",
        slow={1: 2.0, 2: 3000.0, 3: 3000.0}, stop={"updates": 8}, optimizer=MOMENTUM,
        order={"name": "cd-grab", "sketch": "fold:64"},
    )  # fmt: skip
    lengths, units, collect = [], [0] * WORKERS, ray.cluster.collect

    def watched():
        update = collect()
        lengths.append({report.stint.worker: len(report.stint.batches) for report in update.reports})
        for report in update.reports:
            units[report.stint.worker] += sum(len(batch.units) for batch in report.stint.batches)
        return update

    ray.cluster.collect = watched
    assert training.run() == "done"
    assert [max(update.values()) for update in lengths] == [8] * 8
    assert any(0 < steps < 8 for update in lengths for steps in update.values())
    assert training.ledger.totals["used"] == units
    assert_every_epoch_is_a_permutation(training)


@pytest.mark.parametrize(("grace", "updates"), [(10_000.0, 5), (1.0, 3)])
def test_an_update_waits_for_more_than_k_until_its_deadline(ray, grace, updates):
    """Stints take 20, 40, 60 and 80 ms, so median + grace * MAD is minutes with one grace and 70 ms with the other.

    With the latter three updates: where the machine is so slow that only one worker of four keeps to its deadline, more
    than half of the times are unknown after these, and the fourth update rightly waits for all.
    """
    training = ray.training(
        pace={"name": "k-sync", "k": 1, "grace": grace}, delay="constant(0.02)", slow={1: 2.0, 2: 3.0, 3: 4.0},
        stop={"updates": updates},
    )  # fmt: skip
    cluster, workers = ray.cluster, []
    collect = cluster.collect

    def watched():
        update = collect()
        workers.append({report.stint.worker for report in update.reports})
        if grace == 1.0:  # a minute from now on
            cluster.delays = DelayStreams(parse_delay("constant(0.02)"), WORKERS, 0, {1: 2.0, 2: 3.0, 3: 3000.0})
        return update

    cluster.collect = watched
    assert training.run() == "done"
    assert workers[0] == {0, 1, 2, 3}  # all are waited for, once
    if grace == 1.0:
        assert all(update and 3 not in update for update in workers[1:])
    else:
        assert workers[1:] == [{0, 1, 2, 3}] * 4
    assert_every_epoch_is_a_permutation(training)


def test_a_worker_that_is_told_to_leave_reports_and_is_replaced(ray, caplog):
    """It counts for what it did, its successor remembers what it did, and the epoch is one visit of every unit."""
    training = ray.training(
        delay="constant(0.02)", max_restarts=0, stop={"epochs": 2}, optimizer=MOMENTUM,
        period={"name": "constant", "p": 5},
    )  # fmt: skip
    slot = ray.cluster.roster.slots[3]
    told = []

    def tell():
        while slot.stint is None:
            time.sleep(0.001)
        told.append(slot.pid)
        os.kill(slot.pid, signal.SIGTERM)

    def after_update(training):
        if training.version == 2:
            threading.Timer(0.05, tell).start()
        return True

    with caplog.at_level(logging.WARNING):
        assert training.run(after_update) == "done"
    assert "worker 3 was told to leave; another one takes its place" in caplog.text
    assert [slot.pid != pid for pid in told] == [True]
    assert [slot.deaths for slot in ray.cluster.roster.slots] == [0] * WORKERS
    assert ray.cluster.roster.memories()[3]["optimizer"] is not None
    for counts in training.ledger.counts["used"]:
        assert counts.tolist() == [2] * len(counts)


def test_a_worker_that_may_not_come_back_is_done_without(ray):
    """With max_restarts = 0 the run goes on with three; waiting for all then means waiting for three."""
    training = ray.training(pace={"name": "k-batch-async", "k": 4}, stop={"updates": 40})
    kill(ray.cluster.roster.slots[2])
    assert training.run() == "done"
    assert [slot.worker for slot in ray.cluster.roster.slots if slot.actor is None] == [2]
    assert training.ledger.totals["used"][2] == 0
    assert training.records[-1]["alive"] == 3
    assert_every_epoch_is_a_permutation(training)


def test_a_run_that_cannot_visit_its_examples_any_more_says_so(ray):
    training = ray.training(pace="k-sync", stop={"epochs": 0.5})
    kill(ray.cluster.roster.slots[1])
    with pytest.raises(RuntimeError, match=r"cannot go on: workers \[1\] died more than max_restarts = 0 times"):
        training.run()
    assert training.version > 0


class Examples:
    """The training examples of digits."""

    def __init__(self, size=1000):
        self.inputs, self.targets = plan_of().task.train.batch(np.arange(size))

    def __len__(self):
        return len(self.inputs)

    def batch(self, indices):
        return self.inputs[indices], self.targets[indices]

    def labels(self):
        return None


class Stuck(Examples):
    """Examples that keep whoever reads them for ever, once, when a file appears; then there is another one."""

    def __init__(self, flag: Path, taken: Path):
        super().__init__()
        self.flag, self.taken = flag, taken

    def batch(self, indices):
        with suppress(FileNotFoundError):
            self.flag.rename(self.taken)  # which only one of them can
            time.sleep(1e6)
        return super().batch(indices)


class Spoilt(Examples):
    """Examples of which some are not numbers, for workers; the server, which evaluates, sees them as they are."""

    def __init__(self, size, spoilt):
        super().__init__(size)
        self.spoilt = np.asarray(spoilt)
        self.server = os.getpid()

    def batch(self, indices):
        inputs, targets = super().batch(indices)
        if os.getpid() != self.server:
            inputs[np.isin(indices, self.spoilt)] = float("nan")
        return inputs, targets


def digits_with(train):
    """digits-logistic with other training examples."""
    known = plan_of().task
    return Task(name="digits", model=known.model, train=train, test=known.test, losses=known.losses)


def test_a_worker_that_hangs_is_late_and_then_dead(ray, tmp_path, monkeypatch):
    flag, taken, seconds = tmp_path / "flag", tmp_path / "taken", [0.0]
    task = digits_with(Stuck(flag, taken))
    training = ray.training(on=task, max_restarts=1, hang_seconds=3.0, stop={"epochs": 500})
    before = []

    def monotonic():
        """Time passes only while nobody but the stuck worker is busy: on a slow machine, too, no other is ever late."""
        busy = [slot for slot in ray.cluster.roster.slots if slot.stint is not None]
        if taken.exists() and len(busy) == 1 and not busy[0].hung:
            seconds[0] += 0.5
        return seconds[0]

    monkeypatch.setattr(roster, "PATIENCE", 0.0)
    monkeypatch.setattr(roster, "time", SimpleNamespace(monotonic=monotonic))

    def after_update(training):
        if training.version == 5:
            flag.touch()
        if ray.cluster.roster.hangs:
            seconds[0] += 0.5
            before.append(training.version)
        return not any(slot.deaths for slot in ray.cluster.roster.slots)

    training.run(after_update)
    assert ray.cluster.roster.hangs == 1
    assert before[0] < training.version  # updates went on without it before it was given up
    assert sum(slot.deaths for slot in ray.cluster.roster.slots) == 1
    assert_every_epoch_is_a_permutation(training)


def test_a_report_that_is_not_finite_is_refused_and_counted(ray):
    training = ray.training(on=digits_with(Spoilt(1000, [7])), stop={"epochs": 2}, optimizer=MOMENTUM)
    assert training.run() == "done"
    assert training.ledger.total("refused") == 2 * 16  # its batch, once an epoch
    assert training.records[-1]["units_dropped"] == 2 * 16
    assert [worker["refused"] for worker in training.records[-1]["workers"]].count(32) == 1
    assert bool(torch.isfinite(training.versions[training.version]).all())
    assert training.records[-1]["test_loss"] < training.records[0]["test_loss"]


def test_one_bad_report_does_not_end_a_run_that_waits_for_one(ray):
    # A bad example at every worker: on a busy machine any of them may do most of the work, and another none.
    spoilt = [shard[0] for shard in split_examples(Examples(400), WORKERS, "iid", plan_of().seed)]
    training = ray.training(
        on=digits_with(Spoilt(400, spoilt)), pace={"name": "k-batch-async", "k": 1}, stop={"epochs": 2},
        period={"name": "constant", "p": 2, "wire": "int8"}, optimizer=MOMENTUM,
    )  # fmt: skip
    assert training.run() == "done"
    assert training.ledger.total("refused") > 0
    assert bool(torch.isfinite(training.versions[training.version]).all())


def test_a_run_in_which_nothing_is_finite_is_diverged(ray):
    training = ray.training(on=digits_with(Spoilt(400, range(400))), stop={"epochs": 2})
    assert training.run() == "diverged"


def test_what_a_task_raises_reaches_the_user(ray):
    task = digits_with(Examples())

    def losses(outputs, targets):
        if torch.is_grad_enabled():
            raise KeyError("no such class")
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    task.losses = losses
    with pytest.raises(RuntimeError, match="a worker failed: KeyError: 'no such class'"):
        ray.training(on=task, stop={"updates": 2}).run()


# --------------------------------------------------------------------------------------------------- stop and go on


def test_waiting_for_all_goes_on_exactly_where_it_was_saved(ray, tmp_path):
    experiment = {
        "stop": {"epochs": 1},
        "order": "cd-grab",
        "period": {"name": "constant", "p": 2, "wire": "int8", "momentum": "average"},
        "optimizer": MOMENTUM,
    }
    whole = simulate(**experiment)
    first = ray.training(**experiment)
    first.run(lambda training: training.version < 4)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = ray.training(**experiment)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    seconds = second.cluster.now
    assert seconds >= first.records[-1]["seconds"]
    assert second.run() == "done"
    assert second.cluster.now > seconds
    torch.testing.assert_close(second.versions[second.version], whole.versions[whole.version], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pace", ["k-async", "k-batch-async", "k-batch-sync"])
def test_stints_under_way_come_again_after_a_save(ray, pace, tmp_path):
    experiment = {"pace": {"name": pace, "k": 2}, "stop": {"epochs": 1}, "delay": "exponential(0.01)"}
    first = ray.training(**experiment)
    first.run(lambda training: training.version < 15)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = ray.training(**experiment)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.run() == "done"
    assert_every_epoch_is_a_permutation(second)
    assert second.ledger.visited >= 1437


def test_a_state_of_another_cluster_is_refused(ray):
    training = ray.training(stop={"updates": 1})
    with pytest.raises(InputError, match="not the state of a 'hemiola-ray': its kind is 'other'"):
        training.cluster.load_state_dict({"kind": "other", "version": 1})


# -------------------------------------------------------------------------------------------------------- bad input


def test_other_versions_on_the_nodes_are_refused(ray, monkeypatch):
    hello = ray.engine.ray.get(ray.cluster.roster.slots[0].actor.hello.remote())
    monkeypatch.setattr(hemiola, "__version__", "9.9.9")
    with pytest.raises(InputError, match=r"worker 0 on node .* has hemiola .*, this process has 9\.9\.9; install"):
        check_versions([hello])


def test_ray_listens_on_the_loopback_interface_only(ray):
    nodes = ray.engine.ray.nodes()
    assert [node["NodeManagerAddress"] for node in nodes] == ["127.0.0.1"]


def test_a_crowded_machine_is_told_about(ray, monkeypatch, caplog):
    monkeypatch.setattr(ray.engine, "cpus", 1)
    monkeypatch.setattr(roster, "new_actor", lambda *args: ray.cluster.roster.slots[0].actor)
    with caplog.at_level(logging.WARNING):
        start_actors(ray.engine, 2, "cpu")
    assert "2 workers share 1 CPUs: steps take longer than on machines of their own" in caplog.text


def test_a_task_that_cannot_be_sent_is_refused(ray):
    task = digits_with(Examples())
    task.lock = threading.Lock()
    with pytest.raises(InputError, match="the task cannot be sent to other processes"):
        ray.training(on=task, stop={"updates": 1})
