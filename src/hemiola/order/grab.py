"""Mean balance: GraB (Lu, Guo, De Sa, NeurIPS 2022, arXiv 2205.10733, algorithm 4), and at every worker alone.

    s = 0;  l = 0;  r = n - 1;  m = mean of g over the epoch before (0 in the first)
    for t = 0 .. n-1:
        c = g[t] - m
        if <s, c> <= 0:  next[l] = order[t];  l += 1;  s += c      # sign +1
        else:            next[r] = order[t];  r -= 1;  s -= c      # sign -1
    order = next                                                   # at the epoch's end

====================  ==========================================================================
n                     units of a worker
t                     place in the worker's order
order, next           ``Pass.order``, and what `IDGraB._end` makes of it and the signs
g[t]                  the row (gradient or sketch) of the unit at place t
m                     ``_means[worker]``, and ``_tallies[worker, epoch]`` is what will be the next
s                     ``_sums[epoch, worker]``
====================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch

from hemiola.contracts import State, Visit
from hemiola.errors import InputError
from hemiola.order.balanced import MINUS, PLUS, SKIPPED, Balanced, Pass

Unit = tuple[int, Pass, int, Any, Any]
"""A unit to be signed: 0, of which pass, its place t, its row and the mean."""


@dataclass
class RowTotal:
    """Sum of the rows of a pass, and how many they are."""

    total: np.ndarray
    rows: int = 0


class IDGraB(Balanced):
    """ID-GraB: every worker runs the loop above alone."""

    kind = "id-grab"

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        super().begin(sizes, seed, lockstep)
        self._means: dict[int, np.ndarray] = {}
        self._tallies: dict[tuple[int, int], RowTotal] = {}

    def observe(self, visits: Sequence[Visit]) -> None:
        units: list[Unit] = []
        for _, this, places, rows in self._arrived(visits):
            if this.s is None:
                this.s = self._sum(this.epoch, this.worker, rows)
                self._tallies.setdefault((this.worker, this.epoch), RowTotal(np.zeros(rows.shape[1])))
            mean = self._means.get(this.worker, 0.0)
            units += [(0, this, place, rows[at], mean) for at, place in enumerate(places) if not this.signs[place]]
        for block in self._blocks(units):
            self._balance(block)
        for _, this, place, g, _ in units:
            if this.signs[place] != SKIPPED:
                tally = self._tallies[this.worker, this.epoch]
                tally.total += g
                tally.rows += 1

    @np.errstate(over="ignore", invalid="ignore")
    def _balance(self, units: list[Unit]) -> None:
        for _, this, t, g, mean in units:
            s = this.s
            c = g - mean
            value = float(s.dot(c))
            threshold = 0.0 if this.coins is None else self._threshold(this, t, c)
            if not isfinite(value):
                this.signs[t] = SKIPPED
                self._skipped += 1
            elif value <= threshold:
                this.signs[t] = PLUS
                s += c
            else:
                this.signs[t] = MINUS
                s -= c

    def _sign_count(self, units: int) -> int:
        return units

    def _heard(self, this: Pass) -> int:
        return len(this.signs) - this.signs.count(0)

    def _end(self, this: Pass) -> np.ndarray:
        """+1 is the next place from the front, -1 the next from the back; what has no sign goes between."""
        tally = self._tallies.get((this.worker, this.epoch))
        if tally is not None and tally.rows:
            self._means[this.worker] = (tally.total / tally.rows).astype(self._sums[this.epoch, this.worker].dtype)
        self._tallies = {
            key: value for key, value in self._tallies.items() if key[0] != this.worker or key[1] > this.epoch
        }
        signs = np.array(this.signs)
        front, back = signs == PLUS, signs == MINUS
        return np.concatenate([this.order[front], this.order[~(front | back)], this.order[back][::-1]])

    def state_dict(self) -> State:
        return {
            **super().state_dict(),
            "means": {worker: torch.from_numpy(mean.copy()) for worker, mean in self._means.items()},
            "tallies": {key: (torch.from_numpy(t.total.copy()), t.rows) for key, t in self._tallies.items()},
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._means = {worker: mean.numpy().copy() for worker, mean in state["means"].items()}
        self._tallies = {key: RowTotal(total.numpy().copy(), rows) for key, (total, rows) in state["tallies"].items()}


class GraB(IDGraB):
    """GraB: mean balance for one worker."""

    kind = "grab"

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        if len(sizes) > 1:
            raise InputError(f"the order 'grab' is for 1 worker, got {len(sizes)}; use 'id-grab' or 'cd-grab'")
        super().begin(sizes, seed, lockstep)
