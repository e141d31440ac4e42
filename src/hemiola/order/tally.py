"""From rows of examples, or of batches, to rows of units."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hemiola.contracts import State


class Tally:
    """Adds up the rows of each unit's examples, across batches where a unit lies in several.

    Args:
        unit: Examples per unit.
        units: In an epoch; what comes after them is not ordered and is left out.
    """

    def __init__(self, unit: int, units: int) -> None:
        self._unit, self._units = unit, units
        self._place, self._count = -1, 0
        self._sum: Tensor | None = None

    def add(self, start: int, examples: int, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Take a batch: the epoch's examples from ``start`` on, with a row each, or one row, their mean, for all.

        Yields:
            The place in the epoch's order of the first of some completed units, and a row for each of them.
        """
        stop = min(start + examples, self._unit * self._units)
        if self._unit == 1:
            if stop > start:
                yield start, rows.expand(examples, -1)[: stop - start]
            return
        if len(rows) == 1 and stop - start == self._unit and start % self._unit == 0:
            yield start // self._unit, rows  # a batch that is a unit: nothing to add up
            return
        at = start
        while at < stop:
            place = at // self._unit
            end = min((place + 1) * self._unit, stop)
            if place != self._place or self._sum is None:
                self._place, self._count, self._sum = place, 0, torch.zeros_like(rows[0])
            part = rows.expand(examples, -1)[at - start : end - start]
            self._sum = self._sum + part.sum(0)
            self._count += len(part)
            if end == (place + 1) * self._unit:
                yield place, (self._sum / self._count).unsqueeze(0)
                self._sum = None
            at = end

    def state_dict(self) -> State:
        """The unit that is not complete yet."""
        return {"place": self._place, "count": self._count, "sum": self._sum}

    def load_state_dict(self, state: State) -> None:
        """Restore what ``state_dict`` returned."""
        self._place, self._count, self._sum = int(state["place"]), int(state["count"]), state["sum"]
