"""The orders that are fixed by the seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hemiola.contracts import Order, State
from hemiola.errors import InputError
from hemiola.state import own_state, stamped
from hemiola.streams import stream

VERSION = 7


def check_begin(sizes: Sequence[int]) -> list[int]:
    """Validated shard sizes."""
    if len(sizes) == 0:
        raise InputError("an order needs at least 1 worker, got none")
    for worker, size in enumerate(sizes):
        if size < 1:
            raise InputError(f"every worker needs at least 1 unit, worker {worker} has {size}")
    return [int(size) for size in sizes]


class RandomReshuffling(Order):
    """D-RR: a fresh, independent permutation for every worker and epoch.

    Args:
        unit: Examples per unit.
        reverse: Run every second epoch in the order of the one before it, backwards (FlipFlop, arXiv 2102.09718).
    """

    kind = "rr"

    def __init__(self, *, unit: int = 1, reverse: bool = False) -> None:
        if unit < 1:
            raise InputError(f"unit must be at least 1, got {unit}")
        self.unit, self.reverse = unit, reverse

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        self._sizes, self._seed = check_begin(sizes), seed

    def sequence(self, worker: int, epoch: int) -> np.ndarray:
        if self.reverse and epoch % 2:
            return self._forwards(worker, epoch - 1)[::-1].copy()
        return self._forwards(worker, epoch)

    def _forwards(self, worker: int, epoch: int) -> np.ndarray:
        return stream("order", self._seed, epoch, worker).permutation(self._sizes[worker])

    def state_dict(self) -> State:
        return stamped(self.kind, VERSION, **self._facts())

    def load_state_dict(self, state: State) -> None:
        own_state(state, self.kind, VERSION, self._facts())

    def _facts(self) -> State:
        return {"seed": self._seed, "sizes": self._sizes, "unit": self.unit, "reverse": self.reverse}


class ShuffleOnce(RandomReshuffling):
    """The random permutation of epoch 0 in every epoch."""

    kind = "shuffle-once"

    def _forwards(self, worker: int, epoch: int) -> np.ndarray:
        return super()._forwards(worker, 0)


class InOrder(RandomReshuffling):
    """The units of a shard as they lie in it."""

    kind = "in-order"

    def _forwards(self, worker: int, epoch: int) -> np.ndarray:
        return np.arange(self._sizes[worker])
