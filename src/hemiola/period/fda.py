"""FDA: average when the ranks have come far apart, not after a number of steps (arXiv 2405.20988).

Every few steps the ranks probe how far they are apart: they add up ||u||^2 and a short sketch of u, each rank's drift u
since the last averaging, and have an estimate of the spread, mean ||u||^2 - ||mean u||^2, for a thousand numbers
instead of a model. They average when it exceeds a threshold.

The threshold is found as in FDA-Opt (arXiv 2505.04535), which needs no tuning: after a round of p_r steps that ended
with the spread V_r, the next threshold is what a round of half the longest length would end with, if spread grew
evenly::

    threshold <- (most / 2) / p_r * V_r

Symbols: Theta ``threshold``, max_epochs ``most``, in local steps here.
"""

from __future__ import annotations

from hemiola.contracts import Averaging, Period, State
from hemiola.options import whole


class FDA(Period):
    """Average when the ranks are far apart.

    Args:
        most: The longest stint, in local steps; the first one has half as many.
        every: Probe after every so many steps.
    """

    kind = "fda"
    probes = True
    saved = ("threshold",)

    def __init__(self, *, most: int = 64, every: int = 1) -> None:
        self.most, self.every = whole("most", most, 2), whole("every", every, 1)
        self.threshold: float | None = None

    def length(self, lr: float, progress: float) -> int:
        return self.every

    def due(self, spread: float, steps: int) -> bool:
        if self.threshold is None:
            return steps >= self.most // 2
        # Not "spread > threshold": workers whose weights are not finite average at once, and find out who it is.
        return steps >= self.most or not spread <= self.threshold

    def averaged(self, seen: Averaging) -> None:
        if seen.spread > 0.0:
            self.threshold = (self.most / 2) / seen.local_steps * seen.spread

    def telemetry(self) -> State:
        return {"threshold": self.threshold}
