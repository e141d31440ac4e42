"""Unequal machines: stints by speed, and reports that count by their work."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.clusters.merging import relative_weights
from hemiola.contracts import Batch, Report, Stint
from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.training import Training
from hemiola.training.speeds import MEMORY, Speeds

BALANCED = {"name": "constant", "p": 8, "balance": "speed"}
UNEQUAL = {"name": "simulated", "delay": "constant(1)", "slow": {"2": 2.0, "3": 4.0}}


def stint(worker: int, *units: int) -> Stint:
    batches = tuple(Batch(0, 0, np.arange(count)) for count in units)
    return Stint(worker, 0, 0, batches, (0.1,) * len(batches))


def report(worker: int, seconds: float, steps: int = 1) -> Report:
    return Report(stint(worker, *[1] * steps), 0, seconds, 1.0, (), compute=seconds)


def training(**fields) -> Training:
    base = {"task": "digits-logistic", "workers": 4, "batch": 5, "stop": {"epochs": 1}, "shards": {"deal": "deck"}}
    (cell,) = Experiment(base | fields).cells
    return Training(*cell.plan(None))


def test_stints_are_as_long_as_each_worker_is_fast():
    speeds = Speeds(5)
    assert [speeds.length(worker, 8) for worker in range(5)] == [8] * 5
    speeds.note([report(0, 8.0, 8), report(1, 2.0, 2), report(2, 16.0, 8), report(3, 40.0, 1)])
    assert [speeds.length(worker, 8) for worker in range(5)] == [8, 8, 4, 1, 8]  # nothing is known of the last one


def test_a_straggling_step_weighs_little_and_a_slowed_machine_is_followed():
    speeds = Speeds(2)
    for _ in range(50):
        speeds.note([report(0, 1.0), report(1, 1.0)])
    speeds.note([report(1, 3.0)])
    assert speeds.length(1, 8) == round(8 / (1 + 2 / MEMORY))
    for _ in range(100):
        speeds.note([report(1, 4.0)])
    assert speeds.length(1, 8) == 2
    resumed = Speeds(2)
    resumed.load_state_dict(speeds.state_dict())
    assert resumed.length(1, 8) == 2


def test_what_reports_count_by_hand():
    stints = [stint(0, 2, 2), stint(0, 2), stint(1, 2, 2, 2)]
    assert relative_weights(stints, "reports") == [1, 1, 1]
    assert relative_weights(stints, "work") == [1, 0.5, 1.5]
    assert relative_weights(stints, "workers") == [0.75, 0.75, 1.5]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=9))
def test_weights_are_1_on_average_whatever_they_count(reports):
    stints = [stint(worker, *[1] * steps) for worker, steps in reports]
    for weigh in ("reports", "work", "workers"):
        assert sum(relative_weights(stints, weigh)) == pytest.approx(len(stints))


def test_unequal_workers_arrive_together_and_every_unit_comes_once():
    run = training(cluster=UNEQUAL, period=BALANCED, stop={"epochs": 2}, batch=10)
    seen: list[tuple[list[int], float]] = []
    run._apply = (lambda apply: lambda update: (seen.append(_stints(update)), apply(update)))(run._apply)
    assert run.run() == "done"
    steps, idle = zip(*seen, strict=True)
    assert steps[:3] == ([8, 8, 8, 8], [8, 8, 4, 2], [8, 8, 4, 2])
    assert idle[0] == 0
    assert idle[1] > 0  # before anything was measured they waited for the slowest
    assert idle[2:6] == (0, 0, 0, 0)
    assert np.array_equal(run.ledger.counts["used"][0], np.full(1500, 2))


def _stints(update) -> tuple[list[int], float]:
    return [len(report.stint.batches) for report in update.reports], update.idle_seconds


def test_equal_speeds_change_nothing_bit_for_bit():
    for fields in (
        {"stop": {"epochs": 2}},
        {"stop": {"updates": 20}, "shards": {}},
        {"stop": {"updates": 20}, "shards": {}, "pace": {"name": "k-async", "k": 2}},
    ):
        plain = training(period=BALANCED | {"balance": "none", "weigh": "work"}, **fields)
        balanced = training(period=BALANCED, **fields)
        plain.run()
        balanced.run()
        assert torch.equal(plain.read(plain.version), balanced.read(balanced.version))
        assert plain.cluster.now == balanced.cluster.now


@settings(max_examples=5, deadline=None)
@given(
    slow=st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=3, max_size=3),
    deal=st.sampled_from(["deck", "shards"]),
    weigh=st.sampled_from(["work", "workers"]),
    cut=st.integers(1, 12),
)
def test_a_resumed_balanced_run_is_the_same_run(slow, deal, weigh, cut):
    fields = {
        "workers": 3,
        "batch": 25,
        "stop": {"epochs": 2},
        "shards": {"deal": deal},
        "period": {"name": "constant", "p": 4, "balance": "speed", "weigh": weigh},
        "cluster": {"name": "simulated", "delay": "exponential(1)", "slow": dict(zip("012", slow, strict=True))},
    }
    whole, first, second = training(**fields), training(**fields), training(**fields)
    whole.run()
    first.run(lambda run: run.version < cut)
    second.load_state_dict(first.state_dict())
    second.run()
    assert torch.equal(whole.read(whole.version), second.read(second.version))
    assert whole.ledger.total("used") >= 2 * 1500


@pytest.mark.parametrize(
    ("period", "message"),
    [
        ({"name": "full", "balance": "speed"}, "full communication has steps only"),
        ({"name": "constant", "balance": "fast"}, "balance: must be 'none' or 'speed', got 'fast'"),
        ({"name": "constant", "weigh": "loss"}, "weigh: must be 'reports', 'work' or 'workers', got 'loss'"),
        ({"name": "clocked", "balance": "speed"}, "by the clock every worker gives what it has found"),
    ],
)
def test_bad_options_are_one_clear_line(period, message):
    with pytest.raises(InputError, match=message):
        training(period=period)
