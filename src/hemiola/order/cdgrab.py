"""Pair balance: CD-GraB (Cooper et al., NeurIPS 2023, arXiv 2302.00845, algorithms 2 and 3), and each worker alone.

    s = 0;  l = 0;  r = n - 1
    for t = 0, 2, 4, ...:
        for worker j = 0 .. m-1:
            c = g[j,t] - g[j,t+1]
            if <s, c> <= 0:  next[j,l] = order[j,t];    next[j,r] = order[j,t+1];  s += c      # sign +1
            else:            next[j,l] = order[j,t+1];  next[j,r] = order[j,t];    s -= c      # sign -1
        l += 1;  r -= 1
    order = next                                                                               # at the epoch's end

====================  =============================================================================================
m, n                  workers, units of a worker
t                     place in a worker's order; places 2i and 2i + 1 are its i-th pair, whoever visited them and
                      in whatever order their rows come
order[j], next[j]     ``Pass.order`` of worker j, and what `PairBalance._end` makes of it and the signs
g[j,t]                the row (gradient or sketch) of the unit at place t
s                     ``_sums[epoch, ALL]``; where workers balance alone ``_sums[epoch, worker]``
====================  =============================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np

from hemiola.contracts import State, Visit
from hemiola.order.balanced import MINUS, PLUS, Balanced, Pass

ALL = -1  # in place of a worker: the sum of all workers
FULL_DRIFT = 16.0  # units apart at which workers balance alone; docs/order.md has the runs that set it
LONG_STINT = 8  # local steps

Pair = tuple[int, Pass, int, float, Any, Any]
"""A pair to be signed: its turn, of which pass, its number, blend, and the rows of its places 2i and 2i + 1."""


class PairBalance(Balanced):
    """The loop above, against one sum of all workers or one of each."""

    shares: ClassVar[bool]

    def observe(self, visits: Sequence[Visit]) -> None:
        pairs: list[Pair] = []
        turns: dict[int, int] = {}  # how many of them each worker has
        for visit, this, places, rows in self._arrived(visits):
            blend = 0.0 if self._lockstep and visit.local_steps <= LONG_STINT else self._blend(visit)
            if this.s is None or (blend and this.own is None):
                self._attach(this, blend, rows)
            turn, waiting, signs = turns.get(visit.worker, 0), this.waiting, this.signs
            for at, place in enumerate(places):
                i, mate = place // 2, waiting.pop(place ^ 1, None)
                if mate is not None:
                    first, second = (mate, rows[at]) if place & 1 else (rows[at], mate)
                    pairs.append((turn, this, i, blend, first, second))
                    turn += 1
                elif i == len(signs) or not signs[i]:  # else it has come before
                    waiting[place] = rows[at]
            turns[visit.worker] = turn
        if len(pairs) > len(turns):
            pairs.sort(key=itemgetter(0))  # for t: for worker j
        for block in self._blocks(pairs):
            self._balance(block)

    @np.errstate(over="ignore", invalid="ignore")
    def _balance(self, pairs: Iterable[Pair]) -> None:
        for _, this, i, blend, first, second in pairs:
            s, own = this.s, this.own
            c = first - second
            value = float(s.dot(c))
            if own is not None:
                value = (1 - blend) * value + blend * float(own.dot(c))
            threshold = 0.0 if this.coins is None else self._threshold(this, i, c)
            if not isfinite(value):
                this.signs[i] = PLUS  # it stays as it is: its first unit goes to the front
                self._skipped += 1
            elif value <= threshold:
                this.signs[i] = PLUS
                s += c
                if own is not None:
                    own += c
            else:
                this.signs[i] = MINUS
                s -= c
                if own is not None:
                    own -= c

    def _attach(self, this: Pass, blend: float, rows: np.ndarray) -> None:
        """Find the sums of a pass. A worker's own is kept from where it is first needed."""
        this.s = self._sum(this.epoch, ALL if self.shares else this.worker, rows)
        if self.shares and (blend or not self._lockstep or (this.epoch, this.worker) in self._sums):
            this.own = self._sum(this.epoch, this.worker, rows)

    def _blend(self, visit: Visit) -> float:
        """How much of the worker's own sum is blended into the one that its pairs are balanced against, from 0 to 1."""
        return 0.0

    def _sign_count(self, units: int) -> int:
        return units // 2

    def _heard(self, this: Pass) -> int:
        return 2 * (len(this.signs) - this.signs.count(0)) + len(this.waiting)

    def _end(self, this: Pass) -> np.ndarray:
        """The i-th pair goes to the i-th place from the front and from the back; what has no sign goes between."""
        signs, pairs = np.array(this.signs), this.order[: 2 * len(this.signs)].reshape(-1, 2)
        front, back = np.where(signs == PLUS, *pairs.T), np.where(signs == PLUS, *pairs.T[::-1])
        between = np.ones(len(this.order), bool)
        between[: 2 * len(signs)] = np.repeat(signs == 0, 2)
        return np.concatenate([front[signs != 0], this.order[between], back[signs != 0][::-1]])


class IDPairGraB(PairBalance):
    """ID-GraB with pairs: every worker balances alone, against its own sum."""

    kind = "id-pair-grab"
    shares = False


class CDGraB(PairBalance):
    """CD-GraB: all workers balance against one shared sum.

    Coordination needs lockstep. When workers are not at the same place of their epochs at the same time, a sum of
    theirs that is kept short by place is long in time, and balancing alone is better. So signs are blended by drift: s
    is (1 - blend) times the shared sum plus blend times the worker's own, with blend = drift / `FULL_DRIFT` up to 1,
    where drift is how many units the other workers are away on average; and at least a half in stints of more than
    `LONG_STINT` local steps.
    """

    kind = "cd-grab"
    shares = True

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        super().begin(sizes, seed, lockstep)
        self._entered = np.zeros(len(sizes), np.int64)  # of each worker, the newest epoch it has reported from
        self._used = np.zeros(len(sizes), np.int64)  # and how many units of it

    def _note(self, visit: Visit) -> None:
        if visit.epoch > self._entered[visit.worker]:
            self._entered[visit.worker], self._used[visit.worker] = visit.epoch, 0
        if visit.epoch == self._entered[visit.worker]:
            self._used[visit.worker] += len(visit.units)

    def _blend(self, visit: Visit) -> float:
        blend = 0.5 if visit.local_steps > LONG_STINT else 0.0
        if self._lockstep or len(self._sizes) == 1:
            return blend
        # Reports arrive one after the other, so even in step the others are up to a stint away.
        drift = self._drift(visit.worker) - len(visit.units) * visit.local_steps
        return max(blend, min(1.0, drift / FULL_DRIFT))

    def _drift(self, worker: int) -> float:
        """How far the other workers are ahead or behind in their epochs, on average, counted in this worker's units."""
        mine, others = self._sizes[worker], len(self._sizes) - 1
        places = self._entered * mine + self._used * (mine / np.array(self._sizes))
        return float(np.abs(places - places[worker]).sum()) / others

    def state_dict(self) -> State:
        return {**super().state_dict(), "entered": self._entered.tolist(), "used": self._used.tolist()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._entered[:] = state["entered"]
        self._used[:] = state["used"]
