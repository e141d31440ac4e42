"""Which input directions ghost sketches are taken along: decided here, once, for every cluster.

Rows can be balanced together only if all of them were made along the same directions. So one rule holds wherever a run
takes place: directions are the principal ones of the first batch of every shard, at weights that everyone has. They are
found before the run, and again when an epoch begins in which everyone begins that epoch with the same update. That is
so where each update waits for all workers and takes one step of each. Everywhere else epochs overlap, and the first
directions stay.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hemiola.clusters.batches import BatchReader
from hemiola.contracts import Batch, Directions
from hemiola.flat import FlatModel
from hemiola.gradients.units import UnitGradients
from hemiola.plan import Plan
from hemiola.streams import seed_torch


class DirectionFinder:
    """Finds the directions of a run's ghosts.

    Args:
        plan: The run; its order must ask for ghosts.
        initial: The weights it starts from.

    Attributes:
        found: The directions in use.
    """

    def __init__(self, plan: Plan, initial: Tensor) -> None:
        assert plan.order.sketch is not None
        self._plan = plan
        seed_torch("model", plan.seed)
        self._flat = FlatModel(plan.task.model())
        self._reader = BatchReader(plan.task, plan.shards, plan.order.unit, plan.seed, deck=plan.deck)
        self._units = UnitGradients(self._flat.module, plan.task.losses, plan.order.sketch, plan.seed)
        sees = self._units.kind == "ghost"  # else rows are folded gradients, and there are no directions
        self._again = sees and plan.lockstep and not plan.period.local and not plan.deck
        self.found = self._find(0, initial) if sees else Directions(0, [])

    def due(self, epoch: int) -> bool:
        """Whether rows of this epoch are to be made along new directions."""
        return self._again and epoch > self.found.epoch

    def begin(self, epoch: int, weights: Tensor) -> None:
        """A worker is about to make the first rows of an epoch that is due, from these weights."""
        self._units.refresh()
        self.found = self._find(epoch, weights)

    def _find(self, epoch: int, weights: Tensor) -> Directions:
        plan = self._plan
        shards, batch = (plan.shards[:1], plan.batch * len(plan.shards)) if plan.deck else (plan.shards, plan.batch)
        counts = [-(-min(batch, len(shard)) // plan.order.unit) for shard in shards]
        read = self._reader.read([(worker, Batch(0, 0, np.arange(count))) for worker, count in enumerate(counts)])
        self._flat.load(weights)
        self._flat.module.train()
        seed_torch("directions", plan.seed, epoch)  # for dropout
        shares = torch.full((len(read.rows),), 1 / len(read.rows), dtype=weights.dtype)
        self._units.compute(read.inputs, read.targets, shares, read.rows)
        return Directions(epoch, self._units.directions())


def wants_ghosts(plan: Plan) -> bool:
    """Whether the run's order asks for ghost sketches."""
    return plan.order.sketch is not None and plan.order.sketch.startswith("ghost")
