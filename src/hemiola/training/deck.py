"""One deck of batches for the whole cluster: whoever is free takes the next one from the top.

The other way to deal than `hemiola.training.queues`, with the same interface. There is one order over all units instead
of one for every worker's shard. A batch belongs to whoever takes it, so slow workers take fewer, nobody's shard is
through before the others', and the order's sequence is the sequence in which the whole cluster visits units, whatever
the pace. The price: every worker must be able to read every example.

What comes back goes to the top of the deck again, by its old place.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from hemiola.contracts import Batch, Order, State
from hemiola.own import checked_sequence
from hemiola.training.queues import Guide, covering


class Deck:
    """The deck, and whoever takes from it.

    Args:
        order: Gives the sequence of every epoch; for it there is one worker, number 0, that has all units.
        units: How many there are.
        workers: How many take from the deck.
        units_per_batch: How many units a local step visits; the last batch of an epoch may be shorter.
        lockstep: Whether every update waits for every worker. Then a run deals exactly the batches that cover its
            epochs, and a worker for whom none is left rests.
        epochs: The run's length in epochs, if that is what ends it.

    Attributes:
        slots_per_epoch: Local steps of the whole cluster in an epoch; not a whole number where the last step of an
            epoch and the first of the next are taken side by side.
    """

    def __init__(
        self, order: Order, units: int, workers: int, units_per_batch: int, lockstep: bool, epochs: float | None
    ):
        self.order = order
        self.units = units
        self.workers = workers
        self.units_per_batch = units_per_batch
        self.batches_per_epoch = -(-units // units_per_batch)
        self.slots_per_epoch = self.batches_per_epoch / workers
        self._last_batch = None if epochs is None or not lockstep else covering(epochs * self.batches_per_epoch)
        self._guide = Guide(None if lockstep else epochs, units, workers, units_per_batch)
        self._epoch = 0
        self._position = 0
        self._sequence: np.ndarray | None = None
        self._returned: list[tuple[int, int, Batch]] = []  # a heap by place
        self._dealt = 0
        self._dealt_before = 0  # when the last update was complete
        self._resting: set[int] = set()

    def take(self, worker: int, batches: int) -> list[Batch]:
        """The next batches from the top; fewer, or none, where the run ends."""
        taken = [self._next() for _ in range(min(batches, self._longest))]
        self._dealt += len(taken)
        self._guide.given(taken)
        (self._resting.discard if taken else self._resting.add)(worker)
        return taken

    def _next(self) -> Batch:
        if self._returned:
            return heapq.heappop(self._returned)[-1]
        if self._position >= self.units:
            self._epoch, self._position, self._sequence = self._epoch + 1, 0, None
        if self._sequence is None:
            self._sequence = checked_sequence(self.order, 0, self._epoch, self.units)
        units = self._sequence[self._position : self._position + self.units_per_batch]
        batch = Batch(self._epoch, self._position, units)
        self._position += len(units)
        return batch

    @property
    def _longest(self) -> int:
        """The most batches that a stint may have now; in lockstep what is left is shared evenly."""
        if self._last_batch is None:
            return self._guide.longest
        left = self._last_batch - self._dealt
        return -(-left // self.workers)

    def give_back(self, worker: int, batches: Sequence[Batch]) -> None:
        """Put batches that were not used on top of the deck, whoever had them."""
        for batch in batches:
            heapq.heappush(self._returned, (batch.epoch, batch.position, batch))
        self._dealt -= len(batches)
        self._guide.taken_back(batches)

    def wake(self) -> set[int]:
        """An update is complete: who has rested in it."""
        resting = set(self._resting)
        self._resting.clear()
        self._dealt_before = self._dealt
        return resting

    @property
    def epochs(self) -> list[int]:
        """The epoch the deck is in."""
        return [self._epoch]

    def slots_done(self, worker: int) -> float:
        """How many local steps of the whole cluster were dealt before the present update; the same for every worker."""
        return self._dealt_before / self.workers

    def state_dict(self) -> State:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "returned": [batch.as_state() for *_, batch in sorted(self._returned)],
            "dealt_before": self._dealt_before,
            "resting": sorted(self._resting),
        }

    def load_state_dict(self, state: State) -> None:
        self._epoch, self._position, self._sequence = state["epoch"], state["position"], None
        batches = [Batch.from_state(batch) for batch in state["returned"]]
        self._returned = [(batch.epoch, batch.position, batch) for batch in batches]
        self._dealt = self._epoch * self.batches_per_epoch - (-self._position // self.units_per_batch) - len(batches)
        self._guide.restore(self._epoch * self.units + self._position, batches)
        self._dealt_before = state["dealt_before"]
        self._resting = set(state["resting"])
