"""Clocked averaging between real ranks: what must hold whenever averagings happen to come."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from torch_ranks import TASKS, Job, train_on_ranks, visits_dealt

from hemiola.lab.experiment import Experiment

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SMALL = {"name": f"{TASKS}:small", "examples": 61}
BASE = {
    "task": SMALL,
    "workers": 3,
    "batch": 2,
    "stop": {"epochs": 12},
    "evaluate": {"every_epochs": 3},
    "optimizer": {"lr": 0.2, "momentum": 0.5},
    "period": {"name": "clocked", "wire": "int8"},
    "shards": {"deal": "deck"},
    "cluster": {"name": "torch", "device": "cpu", "delay": "constant(0.002)"},
}
ORDERED = BASE | {"order": {"name": "cd-grab", "sketch": "fold:16"}}
JOBS = {
    "deck": ORDERED,
    "shards": BASE | {"shards": {"deal": "shards"}, "period": {"name": "clocked", "mix": 1.0}},
    "spoilt": ORDERED
    | {"task": SMALL | {"spoilt": 1}, "evaluate": {"every_epochs": 3, "train_examples": 60}, "stop": {"epochs": 6}},
    "slow": BASE | {"cluster": BASE["cluster"] | {"slow": {"2": 100.0}}, "stop": {"epochs": 20}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every job on three ranks, one of them stopped and resumed; and that one resumed on two ranks."""
    folder = tmp_path_factory.mktemp("clocked")
    cells = [folder / name for name in ("three", "two")]
    for cell in cells:
        cell.mkdir()
    jobs = {name: Job(given) for name, given in JOBS.items()}
    jobs |= {
        name: Job(ORDERED, cell, stop_at=6) for name, cell in zip(("stopped", "stopped again"), cells, strict=True)
    }
    jobs["resumed"] = Job(ORDERED, cells[0])
    found = train_on_ranks(list(jobs.values()), 3, folder / "rendezvous")
    state = Job(ORDERED, cells[1]).cell_folder.load_checkpoint(print)
    fewer = train_on_ranks([Job(ORDERED | {"workers": 2}, cells[1])], 2, folder / "rendezvous of two")
    return dict(zip(jobs, found, strict=True)) | {"on two": fewer[0], "state": state}


def visits(run):
    return [
        [used + refused for used, refused in zip(mine, spoilt, strict=True)]
        for mine, spoilt in zip(run.counts["used"], run.counts["refused"], strict=True)
    ]


@pytest.mark.parametrize("name", ["deck", "shards", "spoilt", "slow", "resumed", "on two"])
def test_all_ranks_end_alike_and_no_example_is_left_out(trained, name):
    ranks = trained[name]
    first = ranks[0]
    for rank in ranks:
        assert rank.status == "done"
        assert torch.equal(rank.weights, first.weights)
        assert rank.counts == first.counts
        assert rank.curve() == first.curve()
    assert bool(torch.isfinite(first.weights).all())
    if name != "spoilt":  # which has an example whose loss is not a number
        assert first.curve()[-1] < 0.9 * first.curve()[0]
    epochs = {"spoilt": 6, "slow": 20}.get(name, 12)
    assert sum(map(sum, visits(first))) >= epochs * 61
    assert visits(first) == first.dealt  # nothing is lost or doubled
    assert all(a < b for a, b in zip(first.curve("seconds"), first.curve("seconds")[1:], strict=False))


def test_a_slow_rank_takes_fewer_batches(trained):
    used = [worker["used"] for worker in trained["slow"][0].log[-1]["workers"]]
    assert used[2] < 0.5 * min(used[:2])


def test_what_is_not_finite_is_refused_and_the_others_go_on(trained):
    run = trained["spoilt"][0]
    assert sum(sum(counts) for counts in run.counts["refused"]) > 0
    assert sum(sum(counts) for counts in run.counts["used"]) > 0


def test_a_stopped_run_has_visited_exactly_what_its_deck_has_dealt(trained):
    """Which is what its checkpoint says: places before the deck's own are done, but for those that came back."""
    state = trained["state"]
    assert trained["stopped again"][0].status == "running"
    plan, _ = Experiment(ORDERED).cells[0].plan(None)
    plan.order.begin([61], plan.seed, False)
    plan.order.load_state_dict(state["order"])
    counts = state["ledger"]["counts"]
    visited = (counts["used"][0] + counts["refused"][0]).tolist()
    assert [visited] == visits_dealt(state["queues"], plan.order, [61]) == visits(trained["stopped again"][0])
