"""FDA: when it is due by hand, and on the simulated cluster against its reductions and a loop written out."""

import math

import pytest
import torch
from torch import nn

from hemiola.contracts import Averaging
from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.period import FDA
from hemiola.streams import seed_torch
from hemiola.training import Training


def averaging(spread, steps):
    return Averaging(step=0, progress=0.0, lr=0.1, spread=spread, movement=1.0, loss=1.0, local_steps=steps)


def test_thresholds_follow_from_rounds():
    period = FDA(most=16)
    assert [period.due(1e9, steps) for steps in (7, 8)] == [False, True]  # nothing is known: half of the longest
    period.averaged(averaging(spread=4.0, steps=8))  # the aim itself
    assert period.threshold == 4.0
    assert [period.due(spread, 1) for spread in (3.9, 4.0, 4.1, math.nan, math.inf)] == [False, False, True, True, True]
    assert period.due(0.0, 16)
    period.averaged(averaging(spread=4.2, steps=4))  # too soon: twice as far is allowed
    assert period.threshold == 8.4
    period.averaged(averaging(spread=6.0, steps=16))  # it took the longest: half as far
    assert period.threshold == 3.0
    period.averaged(averaging(spread=0.0, steps=16))  # one worker alone says nothing
    assert period.threshold == 3.0
    again = FDA(most=16)
    again.load_state_dict(period.state_dict())
    assert again.threshold == 3.0


def training(**fields):
    base = {"task": "digits-logistic", "workers": 4, "batch": 5, "stop": {"epochs": 1}, "optimizer": {"lr": 0.05}}
    return Training(*Experiment(base | fields).cells[0].plan(None))


def finished(**fields):
    run = training(**fields)
    assert run.run() == "done"
    return run


def weights(run):
    return run.read(run.version)


class Always(FDA):
    def due(self, spread, steps):
        return True


def test_averaging_after_every_look_is_a_constant_period():
    """Seven workers: shards of different sizes, so that some rest at the end of an epoch."""
    shared = {"optimizer": {"lr": 0.05, "momentum": 0.9}, "workers": 7, "stop": {"epochs": 2}}
    always = finished(period=Always(), **shared)
    constant = finished(period={"name": "constant", "p": 1}, **shared)
    torch.testing.assert_close(weights(always), weights(constant), rtol=1e-5, atol=1e-7)
    assert always.version == constant.version
    assert always.ledger.per_worker() == constant.ledger.per_worker()


def test_one_worker_is_never_apart():
    run = finished(workers=1, period={"name": "fda", "most": 10})
    assert run.averages.count == 60  # 300 steps in rounds of half the longest: no spread, no threshold


def test_rounds_end_when_workers_are_far_apart_as_written_out():
    run = finished(period={"name": "fda", "most": 12}, cluster={"name": "simulated", "delay": "constant(1)"})
    plan = run.plan
    seed_torch("model", 0)
    common = plan.task.model()
    models = [plan.task.model() for _ in range(4)]
    for model in models:
        model.load_state_dict(common.state_dict())
    orders = [plan.order.sequence(worker, 0) for worker in range(4)]
    period, steps, expected = FDA(most=12), 0, []
    for step in range(75):
        for worker, model in enumerate(models):
            inputs, targets = plan.task.train.batch(plan.shards[worker][orders[worker][step * 5 : step * 5 + 5]])
            squares = sum(p.square().sum() for p in model.parameters())
            loss = nn.functional.cross_entropy(model(inputs), targets) + plan.task.l2 / 2 * squares
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * p.grad
        flat = torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models])
        spread, steps = (flat - flat.mean(0)).square().sum(1).mean().item(), steps + 1
        # The cluster has the spread from sketches of 650 numbers, which are those numbers themselves.
        if period.due(spread, steps) or step == 74:
            period.averaged(averaging(spread, steps))
            expected.append((steps, pytest.approx(spread, rel=1e-3)))
            steps = 0
            with torch.no_grad():
                for group in zip(*(m.parameters() for m in models), strict=True):
                    mean = torch.stack(group).mean(0)
                    for p in group:
                        p.copy_(mean)
    found = [(one["period"], one["spread"]) for record in run.records for one in record["period"].get("history", [])]
    assert found == expected
    assert len({steps for steps, _ in found}) > 1
    torch.testing.assert_close(
        weights(run), torch.cat([p.detach().flatten() for p in models[0].parameters()]), rtol=1e-4, atol=1e-6
    )
    assert run.cluster.now == 75.0


def test_it_is_resumed_bit_for_bit_and_looks_cost_bytes():
    fields = {
        "period": {"name": "fda", "most": 8, "wire": "int8"},
        "order": {"name": "cd-grab", "sketch": "fold:16"},
        "optimizer": {"lr": 0.05, "momentum": 0.9},
        "cluster": {"name": "simulated", "delay": "exponential(0.1)", "link": {"bandwidth": "1 Mbit/s"}},
        "workers": 7,
    }
    whole = finished(**fields)
    first = training(**fields)
    first.run(lambda now: now.version < 5)
    second = training(**fields)
    second.load_state_dict(first.state_dict())
    second.run()
    assert torch.equal(weights(whole), weights(second))
    assert whole.cluster.now == second.cluster.now
    assert [worker["used"] for worker in whole.ledger.per_worker()] == [len(shard) for shard in whole.plan.shards]
    # 43 probes of 653 float32 numbers beside the averagings' int8 messages, round a ring of seven
    averagings = whole.averages.count * (12 / 7) * whole.cluster.sender.message_bytes
    assert whole.averages.bytes_per_worker - averagings >= 43 * (12 / 7) * 4 * 653


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"period": {"name": "fda", "most": 1}}, "period: most must be at least 2, got 1"),
        ({"period": "fda", "cluster": "ray"}, "period.name: 'fda' needs workers that meet after every stint"),
        ({"period": "fda", "pace": {"name": "k-async", "k": 2}}, "period: a period that probes how far workers are"),
        ({"period": {"name": "fda", "overlap": 1}}, "period: a period that probes how far workers are apart"),
    ],
)
def test_bad_input_is_one_line(fields, line):
    with pytest.raises(InputError) as caught:
        Experiment({"task": "digits-logistic", **fields})
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
