"""Every worker's queue of batches: the order policy's sequence, cut into batches, with what was given back at its head.

Epochs are a worker's own: it starts its next pass when its shard is through, however far the others are. Where every
update waits for every worker (lockstep) that would let shards whose sizes differ by one drift apart, so there an epoch
has as many slots as the largest shard has batches, and a worker whose shard is through rests until the epoch ends.

`hemiola.training.deck` is the other way to deal: one queue for all workers.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hemiola.contracts import Batch, Order, State
from hemiola.own import checked_sequence


class Guide:
    """How long stints may be towards the end of a run whose updates do not wait for everyone.

    There nobody knows who will give the last report. So that no long stint ends far beyond the run's length, stints get
    shorter towards it: at most 1/P of what nobody was given yet, and at least one batch (guided self-scheduling:
    Polychronopoulos and Kuck, IEEE Transactions on Computers, 1987).

    Args:
        epochs: The run's length in epochs; None if something else ends it, and stints may be as long as they like.
        units: In an epoch, of all workers.
        workers: P.
        units_per_batch: Of a local step.
    """

    def __init__(self, epochs: float | None, units: int, workers: int, units_per_batch: int):
        self._last_unit = None if epochs is None else covering(epochs * units)
        self._round = workers * units_per_batch
        self._given = 0

    @property
    def longest(self) -> int:
        """The most batches that a stint may have now."""
        if self._last_unit is None:
            return sys.maxsize
        return max(1, math.ceil((self._last_unit - self._given) / self._round))

    def given(self, batches: Iterable[Batch]) -> None:
        """Somebody has these now."""
        self._given += _units(batches)

    def taken_back(self, batches: Iterable[Batch]) -> None:
        """Nobody has these any more."""
        self._given -= _units(batches)

    def restore(self, reached: int, returned: Iterable[Batch]) -> None:
        """Orders were followed for so many units in all, of which these batches have come back."""
        self._given = reached - _units(returned)


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
        self._guide = Guide(None if lockstep else epochs, sum(sizes), len(sizes), units_per_batch)
        self._queues = [_Queue() for _ in sizes]

    def take(self, worker: int, batches: int) -> list[Batch]:
        """The next batches of a worker; fewer, or none, where it has to rest or the run ends."""
        queue = self._queues[worker]
        taken: list[Batch] = []
        for _ in range(min(batches, self._guide.longest)):
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
                queue.sequence = checked_sequence(self.order, worker, queue.epoch, self.sizes[worker])
            units = queue.sequence[queue.position : queue.position + self.units_per_batch]
            taken.append(Batch(queue.epoch, queue.position, units))
            queue.position += len(units)
        queue.rests = not taken
        self._guide.given(taken)
        return taken

    def give_back(self, worker: int, batches: Sequence[Batch]) -> None:
        """Put batches that were not used at the head of the worker's queue."""
        queue = self._queues[worker]
        queue.returned.extendleft(reversed(batches))
        queue.slot -= len(batches)
        self._guide.taken_back(batches)

    def wake(self) -> set[int]:
        """An update is complete: who has rested in it."""
        resting = {worker for worker, queue in enumerate(self._queues) if queue.rests}
        for queue in self._queues:
            queue.rests = False
        return resting

    @property
    def epochs(self) -> list[int]:
        """The epoch each worker is in."""
        return [queue.epoch for queue in self._queues]

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
                    "returned": [batch.as_state() for batch in queue.returned],
                }
                for queue in self._queues
            ]
        }

    def load_state_dict(self, state: State) -> None:
        for queue, saved in zip(self._queues, state["queues"], strict=True):
            queue.epoch, queue.position, queue.slot = saved["epoch"], saved["position"], saved["slot"]
            queue.rests = saved["rests"]
            queue.sequence = None
            queue.returned = deque(Batch.from_state(batch) for batch in saved["returned"])
        reached = sum(queue.epoch * size + queue.position for queue, size in zip(self._queues, self.sizes, strict=True))
        self._guide.restore(reached, [batch for queue in self._queues for batch in queue.returned])


def covering(amount: float) -> int:
    """The least whole number that is not below ``amount`` but for rounding, and at least 1."""
    return max(1, math.ceil(amount * (1 - 1e-12)))


def _units(batches: Iterable[Batch]) -> int:
    return sum(len(batch.units) for batch in batches)
