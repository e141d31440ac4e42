"""Clocked averaging on the simulated cluster: against hand, against a naive event loop, and against its reductions."""

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hemiola.clusters.simulated.machines import Machines
from hemiola.clusters.simulated.timeline import Timeline
from hemiola.contracts import Batch, Clock, Stint
from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.lab.tasks import Task, load_task
from hemiola.timing.delays import DelayStreams, parse_delay
from hemiola.timing.link import Link
from hemiola.training import Training

STRAGGLING = {
    "name": "simulated",
    "delay": "shifted-exponential(1, 1)",
    "link": {"bandwidth": "10 kbit/s", "latency": "10 ms"},  # a ring of 4 workers takes 6 (0.01 + 0.52) seconds
}


def training(task: Task | None = None, **fields) -> Training:
    base = {"task": "digits-logistic", "workers": 4, "batch": 25, "stop": {"epochs": 1}, "period": "clocked"}
    (cell,) = Experiment(base | fields).cells
    if task is not None:
        object.__setattr__(cell, "task", lambda data: task)
    return Training(*cell.plan(None))


def finished(**fields) -> Training:
    run = training(**fields)
    assert run.run() == "done"
    return run


def weights(run: Training) -> torch.Tensor:
    return run.read(run.version)


# ---------------------------------------------------------------------------------------------------------- reductions


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("deal", ["shards", "deck"])
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_equal_delays_and_a_free_link_are_synchronous_training_bit_for_bit(mix, deal, wire):
    """1500 examples: 15 steps of 4 workers x 25."""
    shared = {
        "optimizer": {"lr": 0.1, "momentum": 0.9},
        "stop": {"epochs": 2},
        "shards": {"deal": deal},
        "order": {"name": "cd-grab", "sketch": "fold:16", "unit": 5},
        "cluster": {"name": "simulated", "sketch_cost": 1.0},
    }
    clocked = finished(period={"name": "clocked", "mix": mix, "wire": wire}, **shared)
    synchronous = finished(period={"name": "constant", "p": 1, "wire": wire}, **shared)
    assert torch.equal(weights(clocked), weights(synchronous))
    assert clocked.version == synchronous.version == 30
    for key in ("seconds", "epochs", "train_loss", "test_metric", "bytes_per_worker", "weighted_spread"):
        assert [r[key] for r in clocked.records] == [r[key] for r in synchronous.records], key
    assert clocked.ledger.max_staleness == 0


def test_one_worker_is_plain_sgd():
    clocked = finished(workers=1, cluster=STRAGGLING)
    plain = finished(workers=1, cluster=STRAGGLING, period={"name": "constant", "p": 1})
    torch.testing.assert_close(weights(clocked), weights(plain), rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------------------------------- by hand


class Endless:
    """Work that never ends, and that nobody computes."""

    version = 0

    def assign(self, worker: int) -> Stint:
        return Stint(worker, 0, self.version, (Batch(0, 0, np.arange(1)),), (0.1,))

    def wants_sketches(self, stint: Stint) -> tuple[bool, ...]:
        return (False,)


def timeline(every: float, slow: float, exchange: float) -> Timeline:
    """Two workers, whose steps take 1 second and ``slow`` seconds; a ring of two is two messages."""
    delays = DelayStreams(parse_delay("constant(1)"), 2, 0, {1: slow})
    return Timeline(Endless(), Clock(every, 0.5), Machines(delays, Link(latency=exchange / 2)), 0)


def averagings(made: Timeline, count: int) -> list[tuple]:
    """Of each averaging: when it began, when it arrived, and the versions that each worker's steps in it had read."""
    seen = []
    for _ in range(count):
        this = made.next_averaging()
        seen.append((this.snapshot, made.now, [[step.stint.version for step in steps] for steps in this.steps]))
        made.version = made.work.version = made.version + 1
    return seen


def test_a_timeline_by_hand():
    """Steps of 1 and 3 seconds, an exchange of 1.5.

    At 1 worker 0 ends a step, and the first averaging begins; it arrives at 2.5, in the middle of a step. By then
    worker 0 has ended another at 2, which goes with the averaging that begins at 2.5; and so on.
    """
    assert averagings(timeline(0.0, 3.0, 1.5), 4) == [
        (1.0, 2.5, [[0], []]),
        (2.5, 4.0, [[0], []]),
        (4.0, 5.5, [[0, 1], [0]]),  # the step that ended at 3 had begun at 2
        (5.5, 7.0, [[2], []]),
    ]


def test_averagings_keep_their_distance():
    assert averagings(timeline(2.5, 3.0, 0.5), 3) == [
        (1.0, 1.5, [[0], []]),
        (3.5, 4.0, [[0, 1], [0]]),
        (6.0, 6.5, [[1, 2, 2], [1]]),
    ]


def test_over_a_free_link_whoever_ends_a_step_is_averaged_at_once():
    assert averagings(timeline(0.0, 2.5, 0.0), 4) == [
        (1.0, 1.0, [[0], []]),
        (2.0, 2.0, [[1], []]),
        (2.5, 2.5, [[], [0]]),
        (3.0, 3.0, [[2], []]),
    ]


# ------------------------------------------------------------------------------------------ against a naive event loop


def naive(run: Training, mix: float, momentum: float, exchange: float, averagings: int) -> torch.Tensor:
    """The method as it is told, one event after the other, every worker with weights of its own."""
    plan, workers = run.plan, run.workers
    delays = DelayStreams(parse_delay("shifted-exponential(1, 1)"), workers, plan.seed)
    shared = run.read(0).clone()
    own = [shared.clone() for _ in range(workers)]
    velocity = [torch.zeros_like(shared) for _ in range(workers)]
    found = [torch.zeros_like(shared) for _ in range(workers)]
    orders = [plan.order.sequence(worker, 0) for worker in range(workers)]
    taken = [0] * workers
    arrived: list[list] = [[] for _ in range(workers)]  # means a worker has not taken in yet, with its own part of each
    events = [(delays.seconds(worker, 0), 0, worker) for worker in range(workers)]
    heapq.heapify(events)
    under_way, given, averaged = False, False, 0
    parts: list = []

    def begin(now: float) -> None:
        nonlocal parts, under_way, given
        parts = [part.clone() for part in found]
        for part in found:
            part.zero_()
        under_way, given = True, False
        heapq.heappush(events, (now + exchange, 1, 0))

    while averaged < averagings:
        now, kind, worker = heapq.heappop(events)
        if kind == 0:
            units = orders[worker][taken[worker] * 25 : taken[worker] * 25 + 25]
            inputs, targets = plan.task.train.batch(plan.shards[worker][units])
            w = own[worker].clone().requires_grad_()
            loss = nn.functional.cross_entropy(inputs @ w[:640].view(10, 64).T + w[640:], targets)
            (loss + plan.task.l2 / 2 * w.square().sum()).backward()
            velocity[worker] = momentum * velocity[worker] + w.grad
            step = -0.1 * velocity[worker]
            found[worker] += step
            own[worker] = own[worker] + mix * step
            for mean, part in arrived[worker]:
                own[worker] = own[worker] + mean - mix * part
            arrived[worker].clear()
            taken[worker] += 1
            given = True
            heapq.heappush(events, (now + delays.seconds(worker, taken[worker]), 0, worker))
        else:
            mean = sum(parts) / workers
            shared = shared + mean
            averaged += 1
            under_way = False
            for pile, part in zip(arrived, parts, strict=True):
                pile.append((mean, part))
        if not under_way and given:
            begin(now)
    return shared


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kilobits", [10, 40])
def test_it_is_what_a_naive_event_loop_gives(mix, kilobits):
    """650 numbers, so a ring of 4 workers is 6 messages of 650 bytes: 3.12 or 0.78 seconds."""
    fields = {
        "period": {"name": "clocked", "mix": mix},
        "optimizer": {"lr": 0.1, "momentum": 0.5},
        "cluster": STRAGGLING | {"link": {"bandwidth": f"{kilobits} kbit/s"}},
    }
    run = training(**fields)
    run.run(lambda now: now.version < 8)
    assert run.version == 8
    expected = naive(training(**fields), mix, 0.5, exchange=6 * 650 * 8 / (kilobits * 1000), averagings=8)
    torch.testing.assert_close(weights(run), expected, rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------------------------- nothing lost or doubled


@given(
    workers=st.integers(1, 5),
    mix=st.sampled_from([0.0, 0.5]),
    every=st.sampled_from(["0 s", "2 s"]),
    bandwidth=st.sampled_from(["5 kbit/s", "500 kbit/s"]),
    stops=st.lists(st.integers(1, 25), max_size=2),
    deal=st.sampled_from(["shards", "deck"]),
)
@settings(max_examples=20, deadline=None)
def test_resumed_anywhere_it_is_the_same_run_and_every_unit_comes_once(workers, mix, every, bandwidth, stops, deal):
    fields = {
        "workers": workers,
        "batch": 50,
        "period": {"name": "clocked", "mix": mix, "every": every, "wire": "int8"},
        "optimizer": {"lr": 0.05, "momentum": 0.9},
        "order": {"name": "cd-grab", "sketch": "fold:8", "unit": 10},
        "shards": {"deal": deal},
        "cluster": {"name": "simulated", "delay": "shifted-exponential(1, 1)", "link": {"bandwidth": bandwidth}},
    }
    whole, parts = finished(**fields), training(**fields)
    for stop in sorted(stops):
        parts.run(lambda now, stop=stop: now.version < stop)
        state = parts.state_dict()
        parts = training(**fields)
        parts.load_state_dict(state)
    assert parts.run() == "done"
    assert torch.equal(weights(parts), weights(whole))
    assert parts.cluster.now == whole.cluster.now
    assert [record["train_loss"] for record in parts.records] == [record["train_loss"] for record in whole.records]
    if deal == "deck":
        waiting = [
            *whole.cluster.timeline.running.values(),
            *(s for steps in whole.cluster.timeline.ended for s in steps),
        ]
        seen = whole.ledger.counts["used"][0].copy()
        for step in waiting:
            for batch in step.stint.batches:
                seen[batch.units] += 1
        dealt = whole.queues.state_dict()
        sequence = whole.plan.order.sequence(0, dealt["epoch"])[: dealt["position"]]
        expected = np.full(150, dealt["epoch"])
        expected[sequence] += 1
        assert seen.tolist() == expected.tolist()


def test_a_worker_five_times_slower_costs_its_own_share_and_no_more():
    even = finished(shards={"deal": "deck"}, cluster={"name": "simulated", "link": {"bandwidth": "1 Mbit/s"}})
    slow = {"name": "simulated", "slow": {"0": 5.0}, "link": {"bandwidth": "1 Mbit/s"}}
    one_slow = finished(shards={"deal": "deck"}, cluster=slow)
    assert one_slow.cluster.now <= even.cluster.now / (3.2 / 4) + 2.0  # and the ends of two steps
    used = [worker["used"] for worker in one_slow.ledger.per_worker()]
    assert used[0] < min(used[1:]) / 3


# ------------------------------------------------------------------------------------------------- odd models and data


class Exploding(nn.Module):
    """Gives a NaN for inputs that carry a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) / (inputs[:, :1] < 100)


@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_a_contribution_that_is_not_finite_is_refused_and_the_others_count(mix):
    inputs = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    inputs[0, 0] = 1000.0
    targets = (inputs[:, 1] > 0).long()
    task = Task(name="marked", model=Exploding, train=(inputs, targets), test=(inputs[-8:], targets[-8:]))
    run = training(
        task,
        batch=2,
        period={"name": "clocked", "mix": mix},
        cluster=STRAGGLING,
        stop={"epochs": 3},
        optimizer={"lr": 0.1, "momentum": 0.9},
    )
    run._evaluate = lambda: run.records.append({"train_loss": 0.0})
    assert run.run() == "done"
    assert bool(torch.isfinite(weights(run)).all())
    assert 0 < run.ledger.total("refused") <= 64  # the spoilt contributions, not all that follow
    assert run.ledger.total("used") + run.ledger.total("refused") >= 3 * 64


@pytest.mark.parametrize("mix", [0.0, 1.0])
def test_running_means_stay_within_what_batches_showed_however_many_steps_an_averaging_holds(mix):
    """At one place 60 steps of 0.1 towards the batch's mean would make 6 times the way."""
    digits = load_task("digits-mlp")
    normed = Task(
        name="normed",
        model=lambda: nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10)),
        train=(digits.train.inputs, digits.train.targets),
        test=(digits.test.inputs, digits.test.targets),
    )
    run = training(
        normed,
        period={"name": "clocked", "mix": mix, "every": "60 s"},
        cluster={"name": "simulated"},
        optimizer={"lr": 1e-3},
        stop={"epochs": 20},
    )
    assert run.run() == "done"
    mean = weights(run)[run.parameters : run.parameters + 64]
    torch.testing.assert_close(mean, digits.train.inputs.mean(0), rtol=0.3, atol=0.15)


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"period": {"name": "clocked", "mix": 1.5}}, "period: mix must be between 0 and 1, got 1.5"),
        ({"period": {"name": "clocked", "mix": -0.1}}, "period: mix must be between 0 and 1, got -0.1"),
        ({"period": {"name": "clocked", "every": "5"}}, "period: every must be a number and a unit"),
        (
            {"period": {"name": "clocked", "every": "-1 s"}},
            "period: every must not be negative or infinite, got '-1 s'",
        ),
        ({"pace": {"name": "k-async", "k": 2}}, "period: where averagings follow the clock nobody is waited for"),
        ({"period": {"name": "clocked", "overlap": 2}}, "period: overlap = 2: averagings that follow the clock always"),
        (
            {"period": {"name": "clocked", "momentum": "average"}},
            "period: momentum = 'average' needs workers that meet",
        ),
        ({"cluster": "ray"}, "period.name: 'clocked' needs averagings among the workers"),
    ],
)
def test_what_cannot_be_is_one_clear_line(fields, line):
    with pytest.raises(InputError) as error:
        Experiment({"task": "digits-logistic", "workers": 4, "period": "clocked"} | fields)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
