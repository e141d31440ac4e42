"""Going on with another number of workers: a checkpoint made fit for a new deal of the examples.

Weights, the server's optimizer, the period's state, the log and all totals carry over. Examples are dealt again by the
experiment's own split, so orders begin anew, and every worker starts at the place of the epoch that had been reached:
an example may come twice or not at all in that one epoch. Each worker's own optimizer starts with the mean of what the
old ones remembered; what a narrow wire still owed is forgotten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hemiola.contracts import State
from hemiola.training.loop import Training


def redeal(state: State, training: Training) -> State:
    """The state of a run in lockstep, for a training that has just begun with other workers."""
    sizes, queues = training.sizes, training.queues
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
    weights = state["weights"]
    return state | {
        "weights": {"now": weights["now"], "held": {weights["now"]: weights["held"][weights["now"]]}},
        "order": training.plan.order.state_dict(),
        "pace": training.plan.pace.state_dict(),
        "queues": {
            "queues": [
                {"epoch": epoch, "position": place, "slot": slot, "rests": False, "returned": []} for place in places
            ]
        },
        "ledger": ledger | {"counts": fresh["counts"], "totals": fresh["totals"]},
        "cluster": _redeal_cluster(state["cluster"], training.workers),
        "stints_given": [max(state["stints_given"])] * training.workers,
    }


def _redeal_cluster(cluster: State, workers: int) -> State:
    runners = [rank["runner"] for rank in cluster["ranks"]]
    known = [optimizer for runner in runners for optimizer in runner["local"].values()]
    mean = _mean_optimizer(known) if known else None
    shared = {key: runners[0][key] for key in ("unit_gradients", "directions_of")}
    ranks = [
        {"runner": {"local": {} if mean is None else {worker: mean}, **shared}, "mean": None, "drawn": 0}
        for worker in range(workers)
    ]
    return cluster | {"workers": workers, "ranks": ranks}


def _mean_optimizer(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One optimizer's state: vectors averaged, everything else (step counts) from the first."""
    memories = [state["state"][0] for state in states if 0 in state["state"]]
    merged = {
        key: torch.stack([memory[key] for memory in memories]).mean(0)
        if isinstance(value, Tensor) and value.dim() == 1
        else value
        for key, value in (memories[0] if memories else {}).items()
    }
    return {**states[0], "state": {0: merged} if memories else {}}
