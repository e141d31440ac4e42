"""The ramp 1 -> 2 -> 4 ...: make stints longer only while that does no harm."""

from __future__ import annotations

import math
from statistics import fmean, median

from hemiola.contracts import Averaging, State

# Averagings spent at each rung. The first half of them settles (momentum, the change of p), the second half is judged.
RUNG = 6

# When p doubles, noise alone leaves S / movement unchanged, common progress makes it smaller, and workers that pull in
# different directions double it. Beyond that something else is wrong. (It also grows as training settles, and the loss
# falls then: that is why the loss has the last word.)
APART = 2.0

# A training loss above that of the rung before by this share is not noise: means of some hundred examples are compared.
RISEN = 0.05


class Ramp:
    """Climbs from p = 1 to ``start`` by doubling, and steps back for good when a rung does harm.

    The measure is S / ||mean change||^2: how far the workers are apart, in units of how far they went together. With n
    workers and pure noise it is n - 1 at any p. A rung does harm when, against the rung before, the training loss has
    risen by the share `RISEN`, or has not fallen while this ratio grew by more than `APART`.

    Where the loss is not known (NaN) the ratio decides alone. It also grows as training settles, so it is measured
    twice: one rung back, now, and only if it is smaller there by `APART` it was the longer stints that did the harm.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.p = 1
        self.over = start == 1
        self._ratios: list[float] = []
        self._losses: list[float] = []
        self._before: tuple[float, float] | None = None
        self._suspected: float | None = None  # ratio of the rung above, while this one is measured a second time
        self._cleared = 1  # the highest rung that a second measurement has shown to do no harm

    def climb(self, seen: Averaging) -> int:
        """Take note of an averaging at ``p``; return the next ``p``."""
        self._ratios.append(seen.spread / seen.movement if seen.movement > 0.0 else math.inf)
        self._losses.append(seen.loss)
        if len(self._ratios) < RUNG:
            return self.p
        now = median(self._ratios[RUNG // 2 :]), fmean(self._losses[RUNG // 2 :])
        self._ratios, self._losses = [], []
        if self._suspected is not None:
            return self._judge_again(now)
        if self._before is not None and self._harms(now, self._before):
            if _losses_unknown(now, self._before):
                self._suspected = now[0]
            else:
                self.over = True
            self.p = max(1, self.p // 2)
        else:
            self._go_on(now)
        return self.p

    def _judge_again(self, now: tuple[float, float]) -> int:
        """The rung above was suspected; here is this rung's second measurement."""
        assert self._suspected is not None
        if self._suspected > APART * now[0]:
            self.over = True
        else:
            self._cleared = min(2 * self.p, self.start)
            self._go_on(now)
        self._suspected = None
        return self.p

    def _go_on(self, now: tuple[float, float]) -> None:
        if self.p >= self.start:
            self.over = True
        else:
            self._before = now
            self.p = min(2 * self.p, self.start)

    def _harms(self, now: tuple[float, float], before: tuple[float, float]) -> bool:
        (ratio, loss), (ratio_before, loss_before) = now, before
        if _losses_unknown(now, before):
            return ratio > APART * ratio_before and self.p > self._cleared
        risen = loss - loss_before > RISEN * abs(loss_before)
        return risen or (ratio > APART * ratio_before and not loss < loss_before)

    def state_dict(self) -> State:
        return {
            "p": self.p,
            "over": self.over,
            "ratios": list(self._ratios),
            "losses": list(self._losses),
            "before": None if self._before is None else list(self._before),
            "suspected": self._suspected,
            "cleared": self._cleared,
        }

    def load_state_dict(self, state: State) -> None:
        self.p, self.over = state["p"], state["over"]
        self._ratios, self._losses = list(state["ratios"]), list(state["losses"])
        self._before = None if state["before"] is None else (state["before"][0], state["before"][1])
        self._suspected, self._cleared = state["suspected"], state["cleared"]


def _losses_unknown(now: tuple[float, float], before: tuple[float, float]) -> bool:
    return math.isnan(now[1]) or math.isnan(before[1])
