"""The loop against what one would write by hand, and against its own reductions."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.lab.tasks import Task
from hemiola.streams import seed_torch
from hemiola.training import Training
from hemiola.training.loop import HOPELESS


def training(task: Task | None = None, deal: list[np.ndarray] | None = None, **fields) -> Training:
    """A run of an experiment; with ``task``, of that task instead of the named one; with ``deal``, on those shards."""
    experiment = Experiment({"task": "digits-logistic", "workers": 4, "batch": 5, "stop": {"epochs": 1}, **fields})
    (cell,) = experiment.cells
    if task is not None:
        object.__setattr__(cell, "task", lambda data: task)
    plan, make_cluster = cell.plan(None)
    return Training(plan if deal is None else replace(plan, shards=deal), make_cluster)


def finished(**fields) -> Training:
    run = training(**fields)
    assert run.run() == "done"
    return run


def weights(run: Training) -> torch.Tensor:
    return run.read(run.version)


def hand_written(
    run: Training, optimizer: torch.optim.Optimizer, model: nn.Module, steps: int, epochs: int = 1
) -> torch.Tensor:
    """Synchronous training as one would write it: the workers' mean gradients over their number, one optimizer step."""
    plan = run.plan
    for epoch in range(epochs):
        orders = [plan.order.sequence(worker, epoch) for worker in range(run.workers)]
        for step in range(steps):
            losses = []
            for worker, order in enumerate(orders):
                indices = plan.shards[worker][order[step * plan.batch : (step + 1) * plan.batch]]
                if len(indices):
                    inputs, targets = plan.task.train.batch(indices)
                    losses.append(nn.functional.cross_entropy(model(inputs), targets))
            squares = sum(p.square().sum() for p in model.parameters())
            loss = (torch.stack(losses) + plan.task.l2 / 2 * squares).sum() / run.workers
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_synchronous_training_is_the_loop_one_writes_by_hand():
    run = finished(optimizer={"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}, stop={"epochs": 2})
    seed_torch("model", 0)
    model = run.plan.task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    expected = hand_written(run, optimizer, model, steps=75, epochs=2)
    assert run.version == 150
    torch.testing.assert_close(weights(run), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("batch", "steps"), [(5, 43), (1, 215)])
def test_short_last_batches_and_resting_workers_count_as_by_hand(batch, steps):
    # 1500 examples over 7 workers: two shards of 215 and five of 214. In the last step of an epoch the five have a
    # batch of 4 instead of 5 examples, or rest; then the examples of the two must not weigh more for it.
    run = finished(workers=7, batch=batch, optimizer={"lr": 0.1}, stop={"epochs": 2})
    seed_torch("model", 0)
    model = run.plan.task.model()
    expected = hand_written(run, torch.optim.SGD(model.parameters(), lr=0.1), model, steps, epochs=2)
    torch.testing.assert_close(weights(run), expected, rtol=1e-4, atol=1e-6)
    assert [worker["used"] for worker in run.ledger.per_worker()] == [2 * len(shard) for shard in run.plan.shards]


@pytest.mark.parametrize(
    ("outer", "by_hand"),
    [({}, {"lr": 1.0}), ({"outer": "diloco"}, {"lr": 0.7, "momentum": 0.9, "nesterov": True})],
    ids=["averaging", "diloco"],
)
def test_local_steps_are_sgd_at_every_worker_and_an_average(outer, by_hand):
    """ADPSGD's loop with constant p, written out: local momentum, averaging of weights every p steps; and DiLoCo's."""
    run = finished(period={"name": "constant", "p": 4}, optimizer={"lr": 0.05, "momentum": 0.9}, **outer)
    plan = run.plan
    seed_torch("model", 0)
    common = plan.task.model()
    models = [plan.task.model() for _ in range(4)]
    for model in models:
        model.load_state_dict(common.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    outer_step = torch.optim.SGD(common.parameters(), **by_hand)
    orders = [plan.order.sequence(worker, 0) for worker in range(4)]
    for step in range(75):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inputs, targets = plan.task.train.batch(plan.shards[worker][orders[worker][step * 5 : step * 5 + 5]])
            squares = sum(p.square().sum() for p in model.parameters())
            loss = nn.functional.cross_entropy(model(inputs), targets) + plan.task.l2 / 2 * squares
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if (step + 1) % 4 == 0 or step == 74:
            with torch.no_grad():
                for shared, *group in zip(*(m.parameters() for m in (common, *models)), strict=True):
                    shared.grad = shared - torch.stack(group).mean(0)
                outer_step.step()
            for model in models:
                model.load_state_dict(common.state_dict())
    expected = torch.cat([p.detach().reshape(-1) for p in models[0].parameters()])
    assert run.averages.count == 19  # 18 of four steps and a closing one of three
    torch.testing.assert_close(weights(run), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"period": {"name": "adaptive", "start": 2, "wire": "int8"}},
        {"period": {"name": "constant", "p": 2}, "pace": {"name": "k-async", "k": 2}},
    ],
)
def test_an_outer_optimizer_with_rate_one_is_none_bit_for_bit(fields):
    plain = finished(**fields)
    outer = finished(**fields, outer={"name": "SGD", "lr": 1.0})
    assert torch.equal(weights(plain), weights(outer))
    assert [r["train_loss"] for r in plain.records] == [r["train_loss"] for r in outer.records]
    other = finished(**fields, outer={"name": "SGD", "lr": 1.0, "momentum": 0.1})
    assert not torch.equal(weights(plain), weights(other))


def test_a_run_does_not_go_on_with_another_outer_optimizer():
    fields = {"period": {"name": "constant", "p": 2}}
    state = finished(**fields, outer="diloco").state_dict()
    for outer, line in [({}, "saved with another outer optimizer"), ({"outer": "slowmo"}, "slowmo")]:
        with pytest.raises(InputError, match=line):
            training(**fields, **outer).load_state_dict(state)


def test_period_one_is_full_communication():
    options = {"optimizer": {"lr": 0.1, "momentum": 0.9}}
    full, one = finished(**options), finished(period={"name": "constant", "p": 1}, **options)
    torch.testing.assert_close(weights(one), weights(full), rtol=1e-4, atol=1e-6)


SHIFTED = {"name": "simulated", "delay": "shifted-exponential(1, 1)"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "k-async", "k": 4}, {"name": "k-sync", "k": 4}),
        ({"name": "k-batch-sync", "k": 1}, {"name": "k-sync", "k": 1}),
        ({"name": "k-batch-async", "k": 1}, {"name": "k-async", "k": 1}),
    ],
)
def test_paces_that_must_be_the_same_are_the_same_bit_for_bit(one, other):
    a, b = finished(pace=one, cluster=SHIFTED), finished(pace=other, cluster=SHIFTED)
    assert torch.equal(weights(a), weights(b))
    assert a.cluster.now == b.cluster.now
    assert [r["train_loss"] for r in a.records] == [r["train_loss"] for r in b.records]


def test_the_learning_rate_drops_at_the_milestone_step():
    schedule = {"name": "MultiStepLR", "milestones": [0.5], "gamma": 0.1}
    run = training(period={"name": "constant", "p": 3}, optimizer={"lr": 1.0, "schedule": schedule}, stop={"epochs": 2})
    rates: list[float] = []
    apply = run._apply

    def watched(update):
        rates.extend(next(r.stint.rates for r in update.reports if r.stint.worker == 0))
        apply(update)

    run._apply = watched
    run.run()
    assert len(rates) == 150
    assert rates == pytest.approx([1.0] * 75 + [0.1] * 75)


class Exploding(nn.Module):
    """Gives a NaN for inputs that carry a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) / (inputs[:, :1] < 100)


def marked_task(share: float) -> Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 2, generator=generator)
    inputs[: int(64 * share), 0] = 1000.0
    targets = (inputs[:, 1] > 0).long()
    return Task(name="marked", model=Exploding, train=(inputs, targets), test=(inputs[-8:], targets[-8:]))


def unseen(run: Training) -> Training:
    """Without evaluations: they would see the marked examples too, and find the loss not finite."""
    run._evaluate = lambda: run.records.append({"train_loss": 0.0})
    return run


@pytest.mark.parametrize("period", ["full", {"name": "constant", "p": 2}])
def test_a_report_that_is_not_finite_is_refused_and_the_others_count(period):
    run = unseen(training(marked_task(1 / 64), workers=4, batch=4, period=period, stop={"epochs": 1}))
    assert run.run() == "done"
    assert bool(torch.isfinite(weights(run)).all())
    refused = run.ledger.total("refused")
    assert refused == (4 if period == "full" else 8)
    assert refused + run.ledger.total("used") == 64


@pytest.mark.parametrize("pace", ["k-sync", "k-async", "k-batch-async"])
@pytest.mark.parametrize("workers", [1, 4])
def test_an_update_of_nothing_but_nan_leaves_the_weights_and_the_run_goes_on(pace, workers):
    moved = []

    def after_update(run: Training) -> bool:
        moved.append((run.ledger.total("used"), weights(run).clone()))
        return True

    run = unseen(
        training(
            marked_task(1 / 64),
            workers=workers,
            batch=4,
            pace={"name": pace, "k": 1},
            cluster=SHIFTED,
            stop={"epochs": 3},
        )
    )
    assert run.run(after_update) == "done"
    assert run.ledger.total("refused") > 0
    assert run.ledger.total("refused") + run.ledger.total("used") >= 3 * 64
    for (used, before), (used_after, after) in itertools.pairwise(moved):
        assert torch.equal(before, after) == (used == used_after)
    assert len(moved) == run.version


def test_a_worker_of_nothing_but_nan_does_not_end_the_run_of_the_others_though_it_is_faster():
    others = {"1": 8, "2": 8, "3": 8}
    run = training(
        marked_task(1 / 4), np.split(np.arange(64), 4), workers=4, batch=4, pace={"name": "k-async", "k": 1},
        cluster={"name": "simulated", "delay": "shifted-exponential(1, 1)", "slow": others}, stop={"epochs": 30},
    )  # fmt: skip
    assert unseen(run).run() == "done"
    refused, used = run.ledger.totals["refused"], run.ledger.totals["used"]
    assert used[0] == 0
    assert refused[1:] == [0, 0, 0]
    assert refused[0] > sum(used[1:]) > 0


def test_a_run_ends_as_diverged_when_reports_are_refused_and_nothing_else_comes():
    run = unseen(training(marked_task(1.0), workers=4, batch=4, pace={"name": "k-async", "k": 1}, stop={"epochs": 99}))
    assert run.run() == "diverged"
    assert run.version == HOPELESS * 4


def test_a_short_run_in_which_nothing_was_used_ends_as_diverged():
    run = unseen(training(marked_task(1.0), workers=4, batch=4, stop={"epochs": 1}))
    assert run.run() == "diverged"


def test_a_run_of_nothing_but_nan_ends_as_diverged():
    run = training(marked_task(1.0), workers=4, batch=4, stop={"epochs": 1})
    assert run.run() == "diverged"
    assert run.version == 0


def test_a_learning_rate_far_too_large_ends_as_diverged():
    run = training(task=None, optimizer={"lr": 1e30}, stop={"epochs": 3})
    assert run.run() == "diverged"
    assert not np.isfinite(run.records[-1]["train_loss"])


def test_weight_versions_are_kept_only_while_someone_holds_them():
    run = training(workers=100, batch=1, pace={"name": "k-async", "k": 50}, cluster=SHIFTED)
    held = []
    run.run(lambda r: held.append(len(r.versions)) or True)
    assert max(held) < 12  # far fewer than the 100 workers


def test_stale_reports_are_dropped_and_counted():
    run = finished(
        pace={"name": "k-batch-async", "k": 1, "max_staleness": 2},
        cluster={**SHIFTED, "slow": {"3": 10.0}},
    )
    assert run.ledger.total("dropped") > 0
    assert run.ledger.max_staleness <= 2
    slow = run.ledger.per_worker()[3]  # ten times as long: every report of it is far more than 2 updates old
    assert slow["used"] == 0
    assert slow["dropped"] > 0


def test_late_results_are_ignored_and_their_units_come_again():
    run = finished(pace={"name": "k-batch-sync", "k": 4, "late": "ignore"}, cluster=SHIFTED)
    assert run.ledger.total("cancelled") > 0
    for worker in range(4):
        counts = run.ledger.counts["used"][worker]
        assert counts.max() - counts.min() <= 1


def test_overlap_by_hand():
    """Snapshot, go on for n steps, then w_i += mean - snapshot_i; written out for p = 3 and n = 2."""
    run = training(workers=2, batch=50, period={"name": "constant", "p": 3, "overlap": 2}, stop={"epochs": 1})
    plan = run.plan
    orders = [plan.order.sequence(worker, 0) for worker in range(2)]

    def gradient(weights: torch.Tensor, worker: int, step: int) -> torch.Tensor:
        inputs, targets = plan.task.train.batch(plan.shards[worker][orders[worker][step * 50 : step * 50 + 50]])
        w = weights.clone().requires_grad_()
        outputs = inputs @ w[:640].view(10, 64).T + w[640:]
        (nn.functional.cross_entropy(outputs, targets) + plan.task.l2 / 2 * w.square().sum()).backward()
        return w.grad

    mean = run.read(0).clone()
    now = [mean.clone(), mean.clone()]
    ends = None
    for first in range(0, 15, 3):
        for step in range(first, first + 3):
            for worker in range(2):
                now[worker] = now[worker] - 0.2 * gradient(now[worker], worker, step)
                if ends is not None and step == first + 1:
                    now[worker] = now[worker] + mean - ends[worker]
        ends = [w.clone() for w in now]
        mean = (now[0] + now[1]) / 2
    assert run.run() == "done"
    torch.testing.assert_close(weights(run), mean, rtol=1e-4, atol=1e-6)


def test_overlap_hides_the_exchange():
    # 650 numbers are 2600 bytes; with 2 workers a ring sends 2 messages of 1300 bytes: 1.04 s each at 10 kbit/s.
    cluster = {"name": "simulated", "delay": "constant(1.0)", "link": {"bandwidth": "10 kbit/s"}}
    times = {}
    for overlap in (0, 2, 3, "auto"):
        period = {"name": "constant", "p": 4, "overlap": overlap}
        run = finished(workers=2, batch=50, cluster=cluster, period=period)  # 15 steps: stints of 4, 4, 4, 3
        times[overlap] = run.cluster.now
    assert times[0] == pytest.approx(15 + 4 * 2.08)
    assert times[2] == pytest.approx(15 + 3 * 0.08 + 2.08)  # two steps hide two of the 2.08 seconds
    assert times[3] == times["auto"] == pytest.approx(15 + 2.08)  # only the closing exchange shows


@pytest.mark.parametrize("pace", ["k-sync", "k-batch-sync", "k-async", "k-batch-async"])
@pytest.mark.parametrize("epochs", [0.05, 0.5])
def test_long_stints_do_not_run_past_the_end(pace, epochs):
    """4 workers x 5 of 1500 examples: a step is 1/300 epoch. Stints of 100 steps would end up to 200 steps too late."""
    cluster = {"name": "simulated", "delay": "shifted-exponential(1, 1)"}
    period = {"name": "constant", "p": 100}
    run = finished(stop={"epochs": epochs}, period=period, pace={"name": pace, "k": 2}, cluster=cluster)
    assert epochs <= run.epochs <= epochs + 10 / 300


@pytest.mark.parametrize("epochs", [0.001, 0.013, 0.1, 1.004])
def test_a_run_that_ends_within_a_step_takes_that_step(epochs):
    run = finished(stop={"epochs": epochs})  # 75 steps an epoch
    assert run.version == int(np.ceil(75 * epochs))
