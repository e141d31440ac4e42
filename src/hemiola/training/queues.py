"""Every worker's queue of batches: the order policy's sequence, cut into batches, with what was given back at its head.

Epochs are a worker's own: it starts its next pass when its shard is through, however far the others are. Where every
update waits for every worker (lockstep) that would let shards whose sizes differ by one drift apart, so there an epoch
has as many slots as the largest shard has batches, and a worker whose shard is through rests until the epoch ends.

Where updates do not wait for everyone, nobody knows who will give the last report of a run. So that no long stint ends
far beyond the run's length, stints get shorter towards it: at most 1/P of what nobody was given yet, and at least one
batch (guided self-scheduling: Polychronopoulos and Kuck, IEEE Transactions on Computers, 1987).
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hemiola.contracts import Batch, Order, State


@dataclass
class _Queue:
    """One worker's place: epoch, next position in its order, slot, whether it rests, what came back, the order."""

    epoch: int = 0
    position: int = 0
    slot: int = 0
    rests: bool = False
    returned: deque[Batch] = field(default_factory=deque)
    sequence: np.ndarray | None = None


class Queues:
    """The queues of all workers.

    Args:
        order: Gives the sequence of every worker and epoch.
        sizes: Units of every worker.
        units_per_batch: How many units a local step visits; the last batch of an epoch may be shorter.
        lockstep: Whether workers rest until everyone's epoch ends.
        epochs: The run's length in epochs, if that is what ends it. In lockstep a run has as many slots as cover it, at
            least one, and nothing is given out beyond them.
    """

    def __init__(self, order: Order, sizes: Sequence[int], units_per_batch: int, lockstep: bool, epochs: float | None):
        self.order = order
        self.sizes = list(sizes)
        self.units_per_batch = units_per_batch
        self.lockstep = lockstep
        self.slots_per_epoch = -(-max(sizes) // units_per_batch)
        self.last_slot = None if epochs is None or not lockstep else covering(epochs * self.slots_per_epoch)
        self._last_unit = None if epochs is None or lockstep else covering(epochs * sum(sizes))
        self._given = 0
        self._queues = [_Queue() for _ in sizes]

    def take(self, worker: int, batches: int) -> list[Batch]:
        """The next batches of a worker; fewer, or none, where it has to rest or the run ends."""
        queue = self._queues[worker]
        taken: list[Batch] = []
        for _ in range(min(batches, self._longest)):
            if self.last_slot is not None and queue.slot >= self.last_slot:
                break
            queue.slot += 1
            if queue.returned:
                taken.append(queue.returned.popleft())
                continue
            if queue.position >= self.sizes[worker]:
                if self.lockstep and queue.slot <= (queue.epoch + 1) * self.slots_per_epoch:
                    continue
                queue.epoch += 1
                queue.position = 0
                queue.sequence = None
            if queue.sequence is None:
                queue.sequence = self.order.sequence(worker, queue.epoch)
            units = queue.sequence[queue.position : queue.position + self.units_per_batch]
            taken.append(Batch(queue.epoch, queue.position, units))
            queue.position += len(units)
        queue.rests = not taken
        self._given += _units(taken)
        return taken

    @property
    def _longest(self) -> int:
        """The most batches that a stint may have now."""
        if self._last_unit is None:
            return sys.maxsize
        share = (self._last_unit - self._given) / (len(self.sizes) * self.units_per_batch)
        return max(1, math.ceil(share))

    def give_back(self, worker: int, batches: Sequence[Batch]) -> None:
        """Put batches that were not used at the head of the worker's queue."""
        queue = self._queues[worker]
        queue.returned.extendleft(reversed(batches))
        queue.slot -= len(batches)
        self._given -= _units(batches)

    def wake(self) -> int:
        """An update is complete: how many workers rested through it."""
        resting = sum(queue.rests for queue in self._queues)
        for queue in self._queues:
            queue.rests = False
        return resting

    def slots_done(self, worker: int) -> int:
        """How many local steps the worker was given or rested through."""
        return self._queues[worker].slot

    def state_dict(self) -> State:
        return {
            "queues": [
                {
                    "epoch": queue.epoch,
                    "position": queue.position,
                    "slot": queue.slot,
                    "rests": queue.rests,
                    "returned": [[batch.epoch, batch.position, batch.units.tolist()] for batch in queue.returned],
                }
                for queue in self._queues
            ]
        }

    def load_state_dict(self, state: State) -> None:
        for queue, saved in zip(self._queues, state["queues"], strict=True):
            queue.epoch, queue.position, queue.slot = saved["epoch"], saved["position"], saved["slot"]
            queue.rests = saved["rests"]
            queue.sequence = None
            queue.returned = deque(
                Batch(epoch, position, np.asarray(units, dtype=np.int64))
                for epoch, position, units in saved["returned"]
            )
        self._given = sum(
            queue.epoch * size + queue.position - _units(queue.returned)
            for queue, size in zip(self._queues, self.sizes, strict=True)
        )


def covering(amount: float) -> int:
    """The least whole number that is not below ``amount`` but for rounding, and at least 1."""
    return max(1, math.ceil(amount * (1 - 1e-12)))


def _units(batches: Iterable[Batch]) -> int:
    return sum(len(batch.units) for batch in batches)
