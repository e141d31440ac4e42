"""``every = "auto"``: sketches are made, and orders balanced, only in epochs where that is worth it.

Balancing shortens the herding bound of the order over the first few epochs, then the bound stays where it is: the order
has settled, and keeps being good for as long as the gradients point where they did. So an order is *measured* in an
epoch that makes sketches, and with b its bound there and r the bound before that,

    new order, b < 0.9 r    balancing still helps          take the next order, and measure it in the next epoch
    any order, b > 1.1 r    it is worse by a tenth         take the next order, and measure it in the next epoch
    otherwise               it has settled                 keep it, and measure it again after 2, 4, 8, ... epochs

A kept order is compared with what its bound was when it settled, or later at its best, so that it cannot get worse
unnoticed in many small steps. The sketches of an epoch that measures an order are those that the next one is made from,
so taking it costs nothing more.

Where workers are in different epochs at the same time, an epoch is not over when the first of them asks for the next
one; then b is the bound of the newest epoch that is.
"""

from __future__ import annotations

from hemiola.contracts import State

TOLERANCE = 0.1


class Settling:
    """Which epochs measure the order, and whether the order that follows from one is taken.

    With ``reverse`` two epochs that share an order count as one here.
    """

    def __init__(self) -> None:
        self._next = 0  # epoch that measures, unless something is learnt before
        self._distance = 1  # epochs between two that measure
        self._bound: float | None = None  # r
        self._used = -1  # the epoch that it is of
        self._new = True  # whether the order that is measured next has not been measured before
        self._measured: list[int] = []
        self._takes: dict[int, bool] = {}  # by epoch that measured

    def enter(self, epoch: int) -> None:
        """A worker begins this epoch. What is decided for the first worker holds for the others."""
        if epoch >= self._next:
            self._measured.append(epoch)
            self._next = epoch + 1

    def measures(self, epoch: int) -> bool:
        """Whether this epoch, which a worker has entered, makes sketches."""
        return epoch in self._measured

    @property
    def count(self) -> int:
        """How many epochs have measured."""
        return len(self._measured)

    def takes(self, epoch: int, bound: float | None, of: int) -> bool:
        """Whether the order that follows from this epoch replaces the one that was run in it.

        Args:
            epoch: One that measured.
            bound: The herding bound of the newest epoch that is over.
            of: The number of that epoch.
        """
        if epoch not in self._takes:
            self._takes[epoch] = self._decide(epoch, bound, of)
        return self._takes[epoch]

    def _decide(self, epoch: int, bound: float | None, of: int) -> bool:
        if bound is None or of <= self._used:
            return True
        before, self._used = self._bound, of
        holds = before is not None and bound <= (1 + TOLERANCE) * before
        if holds and before is not None and not (self._new and bound < (1 - TOLERANCE) * before):
            self._bound = bound if self._new else min(bound, before)
            self._new = False
            self._distance *= 2
            self._next = max(self._next, epoch + self._distance)
            return False
        self._bound, self._new, self._distance = bound, True, 1
        return True

    def state_dict(self) -> State:
        """Plain numbers."""
        return {
            "next": self._next,
            "distance": self._distance,
            "bound": self._bound,
            "used": self._used,
            "new": self._new,
            "measured": list(self._measured),
            "takes": dict(self._takes),
        }

    def load_state_dict(self, state: State) -> None:
        """Restore what ``state_dict`` returned."""
        self._next, self._distance, self._bound = state["next"], state["distance"], state["bound"]
        self._used, self._new = state["used"], state["new"]
        self._measured, self._takes = list(state["measured"]), dict(state["takes"])
