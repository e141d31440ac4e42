"""The deck: one order for all workers, every place dealt once, whoever comes, goes, gives back or is resumed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.order import RandomReshuffling
from hemiola.streams import seed_torch
from hemiola.training import Training
from hemiola.training.deck import Deck

SHIFTED = {"name": "simulated", "delay": "shifted-exponential(1, 1)"}
DECK = {"deal": "deck"}
PACES = ["k-sync", "k-batch-sync", "k-async", "k-batch-async"]


def deck(units, workers=3, units_per_batch=2, lockstep=False, epochs=None):
    order = RandomReshuffling()
    order.begin([units], seed=0, lockstep=lockstep)
    return Deck(order, units, workers, units_per_batch, lockstep, epochs)


def training(**fields) -> Training:
    base = {"task": "digits-logistic", "workers": 4, "batch": 5, "stop": {"epochs": 1}, "shards": DECK}
    (cell,) = Experiment(base | fields).cells
    return Training(*cell.plan(None))


def finished(**fields) -> Training:
    run = training(**fields)
    assert run.run() == "done"
    return run


def weights(run: Training) -> torch.Tensor:
    return run.read(run.version)


# ------------------------------------------------------------------------------------------------------- the deck alone


MOVES = st.lists(
    st.tuples(st.sampled_from(["take", "use", "give back", "resume"]), st.integers(0, 3), st.integers(1, 3)),
    max_size=60,
)


@given(units=st.integers(1, 11), units_per_batch=st.integers(1, 4), moves=MOVES)
@settings(max_examples=200)
def test_no_place_is_lost_or_doubled_whoever_takes_uses_dies_or_is_resumed(units, units_per_batch, moves):
    """Workers hold batches, use them or lose them, and come and go; what was used and is held are the first places."""
    now = deck(units, 4, units_per_batch)
    held: dict[int, list] = {}
    used: list = []
    for move, worker, steps in moves:
        if move == "take":
            held.setdefault(worker, []).extend(now.take(worker, steps))
        elif move == "use":
            used += held.pop(worker, [])
        elif move == "give back":
            now.give_back(worker, held.pop(worker, []))
        else:  # another number of workers goes on; what was held by those that are gone comes back
            state = now.state_dict()
            now = deck(units, 1 + steps, units_per_batch)
            now.load_state_dict(state)
            for gone in [other for other in held if other > steps]:
                now.give_back(gone, held.pop(gone))
    while now.state_dict()["returned"]:
        used += now.take(0, 1)
    everyone = used + [batch for batches in held.values() for batch in batches]
    places = sorted((batch.epoch, batch.position + i) for batch in everyone for i in range(len(batch.units)))
    assert places == [divmod(place, units) for place in range(len(places))]
    sequences = [now.order.sequence(0, epoch) for epoch in range(len(places) // units + 1)]
    for batch in everyone:
        expected = sequences[batch.epoch][batch.position : batch.position + len(batch.units)]
        assert batch.units.tolist() == expected.tolist()


def test_what_comes_back_is_dealt_first_and_by_place():
    now = deck(8, units_per_batch=1)
    mine, yours = now.take(0, 2), now.take(1, 2)
    now.give_back(1, yours)
    now.give_back(0, mine)
    assert [batch.position for batch in now.take(2, 6)] == [0, 1, 2, 3, 4, 5]


def test_in_lockstep_what_is_left_is_shared_and_then_workers_rest():
    """9 batches and 4 workers with stints of 2: the last of them gets one, so that the 2 that are left are for two."""
    now = deck(9, 4, units_per_batch=1, lockstep=True, epochs=1)
    first = [len(now.take(worker, 2)) for worker in range(4)]
    resting = now.wake()
    second = [len(now.take(worker, 2)) for worker in range(4)]
    assert (first, resting) == ([2, 2, 2, 1], set())
    assert (second, now.wake()) == ([1, 1, 0, 0], {2, 3})


def test_towards_the_end_of_a_run_stints_get_shorter_as_with_shards():
    now = deck(16, 2, units_per_batch=1, epochs=1)
    assert [len(now.take(worker, 100)) for worker in (0, 1, 0, 1, 0, 1)] == [8, 4, 2, 1, 1, 1]


# ---------------------------------------------------------------------------------------------------------- whole runs


def test_synchronous_training_from_a_deck_is_the_loop_one_writes_by_hand():
    """1500 examples, 7 workers x 5: 300 batches an epoch, so an update may hold batches of two epochs."""
    run = finished(workers=7, optimizer={"lr": 0.1, "momentum": 0.9}, stop={"epochs": 2})
    plan = run.plan
    seed_torch("model", 0)
    model = plan.task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    units = np.concatenate([plan.order.sequence(0, epoch) for epoch in range(2)])
    for first in range(0, 3000, 35):
        inputs, targets = plan.task.train.batch(units[first : first + 35])
        squares = sum(p.square().sum() for p in model.parameters())
        losses = torch.nn.functional.cross_entropy(model(inputs), targets, reduction="sum") / 5
        workers = -(-len(targets) // 5)  # in the last update five of them rest
        optimizer.zero_grad()
        ((losses + workers * plan.task.l2 / 2 * squares) / 7).backward()
        optimizer.step()
    assert run.version == 86
    expected = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(weights(run), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("order", ["rr", "cd-grab", "grab"])
@pytest.mark.parametrize("period", ["full", {"name": "constant", "p": 3}])
@pytest.mark.parametrize("pace", ["k-sync", "k-batch-async"])
def test_for_one_worker_deck_and_shard_are_the_same_bit_for_bit(order, period, pace):
    task = {"name": "digits-mlp", "input_noise": 0.3}
    schedule = {"name": "LinearLR"}
    runs = [
        finished(
            task=task,
            workers=1,
            batch=40,
            stop={"epochs": 1.3},
            optimizer={"lr": 0.1, "momentum": 0.9, "schedule": schedule},
            order=order,
            period=period,
            pace={"name": pace},
            shards={"deal": deal},
            evaluate={"every_epochs": 0.5},
        )
        for deal in ("shards", "deck")
    ]
    assert torch.equal(weights(runs[0]), weights(runs[1]))
    first, second = ([{k: v for k, v in r.items() if k != "wall_seconds"} for r in run.records] for run in runs)
    assert first == second


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("p", [1, 4])
def test_every_epoch_visits_every_unit_once_under_every_pace_stopped_and_resumed(pace, p):
    """With one worker five times slower than the others, which then simply takes fewer."""
    fields = {
        "pace": {"name": pace, "k": 2},
        "period": {"name": "constant", "p": p},
        "order": {"name": "cd-grab", "sketch": "fold:16"},
        "cluster": SHIFTED | {"slow": {"0": 5.0}},
        "batch": 20,
        "stop": {"epochs": 2},
    }
    run, stopped = finished(**fields), training(**fields)
    for at in (5, 12):
        stopped.run(lambda now, at=at: now.version < at)
        state = stopped.state_dict()
        stopped = training(**fields)
        stopped.load_state_dict(state)
    assert stopped.run() == "done"
    assert torch.equal(weights(run), weights(stopped))
    used = run.ledger.counts["used"]
    assert len(used) == 1
    held = sum(len(batch.units) for one in run.cluster.clock.running.values() for batch in one.stint.batches)
    dealt = run.queues.state_dict()
    back = sum(len(units) for _, _, units in dealt["returned"])
    assert int(used[0].sum()) + held + back == dealt["epoch"] * 1500 + dealt["position"]
    assert int(used[0].min()) >= 1
    per_worker = [one["used"] for one in run.ledger.per_worker()]
    assert sum(per_worker) == int(used[0].sum())
    assert per_worker[0] < min(per_worker[1:])


def test_noise_belongs_to_the_place_and_not_to_whoever_visits_it():
    runs = [training(task={"name": "digits-mlp", "input_noise": 1.0}, workers=workers) for workers in (1, 4)]
    batches = [run.queues.take(0, 1)[0] for run in runs]
    alone = runs[0].cluster.runner.reader.read([(0, batches[0])])
    other = runs[1].cluster.runner.reader.read([(3, batches[1])])
    assert torch.equal(alone.inputs, other.inputs)


@pytest.mark.parametrize("split", ["label-sorted", {"dirichlet": 0.3}])
def test_a_deck_has_no_shards_to_split_by_label(split):
    with pytest.raises(InputError, match=r"^shards: deal = 'deck' has no shards.*it cannot go with split = "):
        Experiment({"task": "digits-logistic", "shards": {"deal": "deck", "split": split}})


def test_an_unknown_deal_is_one_clear_line():
    with pytest.raises(InputError, match=r"shards.deal: must be 'shards' or 'deck', got 'dek'"):
        Experiment({"task": "digits-logistic", "shards": {"deal": "dek"}})
