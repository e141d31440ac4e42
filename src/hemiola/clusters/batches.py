"""From a worker's batch of units to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hemiola.contracts import Batch, TaskLike
from hemiola.streams import torch_stream


@dataclass(frozen=True)
class Read:
    """Batches of several workers, read in one go.

    Attributes:
        inputs, targets: Examples of all batches, one after the other.
        counts: Examples of each batch.
        rows: For each example the number of its unit, counted over all batches.
        units: Units of each batch.
    """

    inputs: Tensor
    targets: Tensor
    counts: list[int]
    rows: Tensor
    units: list[int]


class BatchReader:
    """Reads units of the workers' shards, with the noise of this visit.

    Args:
        task: Where the examples come from.
        shards: For each worker, the indices of its examples; unit u of worker j is ``shards[j][u*unit : (u+1)*unit]``.
        unit: Examples per unit; the last unit of a shard may be shorter.
        seed: Names the streams of the noise, together with worker, epoch and position: the same visit has the same
            noise under every policy.
        device: Where the tensors go; noise is drawn before, so it is the same on every device.
        deck: Whether places are those of one deck, so that a visit's noise is the same whoever makes it.
    """

    def __init__(
        self,
        task: TaskLike,
        shards: Sequence[np.ndarray],
        unit: int,
        seed: int,
        device: torch.device | str = "cpu",
        deck: bool = False,
    ):
        self.task = task
        self.shards = shards
        self.unit = unit
        self.seed = seed
        self.device = device
        self.deck = deck

    def examples(self, worker: int, units: np.ndarray) -> np.ndarray:
        """Indices of the units' examples in the training set."""
        shard = self.shards[worker]
        if self.unit == 1:
            return np.asarray(shard[units])
        return np.concatenate([shard[u * self.unit : (u + 1) * self.unit] for u in units])

    def read(self, wanted: Sequence[tuple[int, Batch]]) -> Read:
        """Read these workers' batches in one call of the task."""
        indices = [self.examples(worker, batch.units) for worker, batch in wanted]
        counts = [len(part) for part in indices]
        inputs, targets = self.task.train.batch(np.concatenate(indices))
        if self.task.noisy:
            parts = [
                self.task.perturb(x, y, self._noise(worker, batch))
                for (worker, batch), x, y in zip(
                    wanted, torch.split(inputs, counts), torch.split(targets, counts), strict=True
                )
            ]
            inputs, targets = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        units = [len(batch.units) for _, batch in wanted]
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        return Read(inputs, targets, counts, self._rows(wanted), units)

    def _noise(self, worker: int, batch: Batch) -> torch.Generator:
        return torch_stream("visit", self.seed, 0 if self.deck else worker, batch.epoch, batch.position)

    def _rows(self, wanted: Sequence[tuple[int, Batch]]) -> Tensor:
        units = np.concatenate([batch.units for _, batch in wanted])
        if self.unit == 1:
            return torch.arange(len(units))
        sizes = np.concatenate([self._unit_sizes(worker, batch.units) for worker, batch in wanted])
        return torch.from_numpy(np.repeat(np.arange(len(units)), sizes))

    def _unit_sizes(self, worker: int, units: np.ndarray) -> np.ndarray:
        return np.asarray(np.minimum(self.unit, len(self.shards[worker]) - units * self.unit))
