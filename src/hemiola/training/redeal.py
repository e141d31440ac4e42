"""Going on with another number of workers: a checkpoint made fit for a new deal of the examples.

Weights, the server's optimizer, the period's state, the log and all totals carry over. Each worker's own optimizer
starts with the mean of what the old ones remembered; residuals of a narrow wire are forgotten.

One deck knows nothing of workers: it goes on where it was, with its order, and no example comes twice or not at all.
Shards are dealt again by the experiment's own split, so orders begin anew, and every worker starts at the place of the
epoch that had been reached: there an example may come twice or not at all in that one epoch.
"""

from __future__ import annotations

import torch

from hemiola.contracts import State
from hemiola.optimizers import mean_state
from hemiola.training.deck import Deck
from hemiola.training.loop import Training
from hemiola.training.queues import Queues


def redeal(state: State, training: Training) -> State:
    """The state of a run in lockstep, for a training that has just begun with other workers."""
    weights = state["weights"]
    dealt = _same_deck(state, training) if isinstance(training.queues, Deck) else _new_shards(state, training)
    return (
        state
        | {
            "weights": {"now": weights["now"], "held": {weights["now"]: weights["held"][weights["now"]]}},
            "pace": training.plan.pace.state_dict(),
            "cluster": _redeal_cluster(state["cluster"], training.workers),
            "stints_given": [max(state["stints_given"])] * training.workers,
            "speeds": training.speeds.state_dict(),
        }
        | dealt
    )


def _same_deck(state: State, training: Training) -> State:
    """Who had what is forgotten: the first worker's totals stand for everybody's."""
    ledger, others = state["ledger"], [0] * (training.workers - 1)
    totals = {fate: [sum(parts), *others] for fate, parts in ledger["totals"].items()}
    return {"queues": state["queues"] | {"resting": []}, "ledger": ledger | {"totals": totals}}


def _new_shards(state: State, training: Training) -> State:
    """Everyone at the place of the epoch that had been reached."""
    sizes, queues = training.sizes, training.queues
    assert isinstance(queues, Queues)
    ledger = state["ledger"]
    visited = sum(sum(ledger["totals"][fate]) for fate in ("used", "dropped", "refused"))
    epochs = visited / sum(len(counts) for counts in ledger["counts"]["used"])
    slot = round(epochs * queues.slots_per_epoch)
    if queues.last_slot is not None:
        slot = min(slot, queues.last_slot - 1)
    epoch, step = divmod(slot, queues.slots_per_epoch)
    places = [min(step * queues.units_per_batch, size) for size in sizes]
    fresh = training.ledger.state_dict()
    for worker, (size, place) in enumerate(zip(sizes, places, strict=True)):
        counts = fresh["counts"]["used"][worker]
        counts += epoch
        counts[torch.from_numpy(training.plan.order.sequence(worker, epoch)[:place].copy())] += 1
        fresh["totals"]["used"][worker] = epoch * size + place
    return {
        "order": training.plan.order.state_dict(),
        "queues": {
            "queues": [
                {"epoch": epoch, "position": place, "slot": slot, "rests": False, "returned": []} for place in places
            ]
        },
        "ledger": ledger | {"counts": fresh["counts"], "totals": fresh["totals"]},
    }


def _redeal_cluster(cluster: State, workers: int) -> State:
    runners = [rank["runner"] for rank in cluster["ranks"]]
    known = [optimizer for runner in runners for optimizer in runner["local"].values()]
    mean = mean_state(known) if known else None
    ranks = [
        {"runner": {"local": {} if mean is None else {worker: mean}}, "mean": None, "drawn": 0}
        for worker in range(workers)
    ]
    return cluster | {"workers": workers, "ranks": ranks}
