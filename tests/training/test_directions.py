"""Ghost directions are found by one rule: at first, and with an epoch that everyone begins together."""

import itertools

import pytest
import torch

from hemiola.contracts import Directions
from hemiola.gradients.units import UnitGradients
from hemiola.lab.experiment import Experiment
from hemiola.training import Training

GIVEN = {
    "task": {"name": "digits-mlp", "hidden": [8]},
    "workers": 2,
    "batch": 50,
    "stop": {"epochs": 3},
    "evaluate": {"every_epochs": 3},
    "optimizer": {"lr": 0.1},
    "order": {"name": "cd-grab", "sketch": "ghost:2"},
}


def training(**changed: object) -> Training:
    plan, make = Experiment({**GIVEN, **changed}).cells[0].plan(None)
    return Training(plan, make)


@pytest.mark.parametrize(
    ("changed", "epochs"),
    [
        ({}, [0, 1, 2]),
        ({"order": {"name": "cd-grab", "sketch": "ghost:2", "every": 2}}, [0, 2]),
        ({"period": {"name": "constant", "p": 2}}, [0]),
        ({"pace": {"name": "k-async", "k": 1}}, [0]),
        ({"shards": {"deal": "deck"}}, [0]),
    ],
    ids=["together", "every other epoch", "local steps", "asynchronous", "deck"],
)
def test_they_are_found_again_where_everyone_begins_an_epoch_together(changed, epochs):
    run, seen = training(**changed), []

    def look(now: Training) -> bool:
        if not seen or now.directions is not seen[-1]:
            seen.append(now.directions)
        return True

    assert run.run(look) == "done"
    assert [each.epoch for each in seen] == epochs
    assert run.cluster.runner.directions_of == epochs[-1]
    for before, after in itertools.pairwise(seen):
        # The first layer's inputs are the same at every epoch, those of the second are not.
        torch.testing.assert_close(before.found[0].abs(), after.found[0].abs())
        assert not torch.allclose(before.found[1].abs(), after.found[1].abs(), atol=1e-4)


def test_they_see_the_first_batch_of_every_shard():
    run = training(batch=5)
    seen = torch.cat([run.plan.task.train.batch(shard[:5])[0] for shard in run.plan.shards]).double()
    _, _, principal = torch.linalg.svd(seen)
    found = run.directions.found[0][0].double()
    torch.testing.assert_close((found @ principal[:2].T).abs(), torch.eye(2).double(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("stop", [13, 20])
def test_a_restart_does_not_show(stop):
    whole = training()
    whole.run()
    first = training()
    first.run(lambda now: now.version < stop)
    second = training()
    second.load_state_dict(first.state_dict())
    second.run()
    assert torch.equal(whole.versions[whole.version], second.versions[second.version])
    assert [each.tolist() for each in whole.directions.found] == [each.tolist() for each in second.directions.found]


def test_where_ghosts_see_no_layer_nothing_is_looked_for(monkeypatch):
    monkeypatch.setattr(UnitGradients, "compute", None)
    monkeypatch.setattr("hemiola.gradients.ghost.find_layers", lambda *_: ([], ["everything"]))
    assert training().directions == Directions(0, [])
