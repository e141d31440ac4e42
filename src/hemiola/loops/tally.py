"""From rows of examples, or of batches, to rows of units."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hemiola.contracts import State


class Tally:
    """Adds up the rows of each unit's examples, across batches where a unit lies in several.

    A unit is complete when the loop is through with all of its examples; its row is the mean over those that were
    trained on.

    Args:
        unit: Examples per unit.
        units: How many.
    """

    def __init__(self, unit: int, units: int) -> None:
        self._unit = unit
        self._missing = np.full(units, unit)
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    def add(self, units: np.ndarray, rows: Tensor | None, done: np.ndarray) -> tuple[np.ndarray, Tensor] | None:
        """Take what a batch has taught.

        Args:
            units: Each example's unit.
            rows: A row each, or one row, their mean, for all; None where nothing is known of them.
            done: The units of all examples that the loop is through with since the last call, repeated for each.

        Returns:
            The completed units and a row for each of them, or None if there are none.
        """
        if self._unit == 1:
            return None if rows is None or not len(units) else (units, rows.expand(len(units), -1))
        if rows is not None:
            for unit in dict.fromkeys(units.tolist()):
                self._note(unit, units == unit, rows)
        np.subtract.at(self._missing, done, 1)
        complete = [unit for unit in dict.fromkeys(done.tolist()) if not self._missing[unit] and unit in self._sums]
        if not complete:
            return None
        return np.array(complete), torch.stack([self._sums.pop(unit) / self._counts.pop(unit) for unit in complete])

    def _note(self, unit: int, mine: np.ndarray, rows: Tensor) -> None:
        count = int(np.count_nonzero(mine))
        if len(rows) == 1 and count == self._unit:
            total, count = rows[0], 1  # a batch that is a unit: its mean as it is
        else:
            total = rows[0] * count if len(rows) == 1 else rows[torch.from_numpy(mine)].sum(0)
        self._sums[unit] = self._sums[unit] + total if unit in self._sums else total
        self._counts[unit] = self._counts.get(unit, 0) + count

    def state_dict(self) -> State:
        """The units that are not complete yet."""
        return {
            "missing": torch.from_numpy(self._missing.copy()),
            "sums": [[unit, total, self._counts[unit]] for unit, total in self._sums.items()],
        }

    def load_state_dict(self, state: State) -> None:
        """Restore what ``state_dict`` returned."""
        self._missing = state["missing"].numpy().copy()
        self._sums = {int(unit): total for unit, total, _ in state["sums"]}
        self._counts = {int(unit): int(count) for unit, _, count in state["sums"]}
