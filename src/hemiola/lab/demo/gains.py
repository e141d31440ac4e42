"""What a scene of the demo shows, in one line: how much a run gains on the ordinary one, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hemiola.lab.report.paired import Interval, interval
from hemiola.lab.report.seeds import SeedCurve
from hemiola.lab.report.summary import RunSummary, Summary

Pairs = Sequence[tuple[SeedCurve, SeedCurve]]  # by seed: the curve of the run compared with, and the run's own


@dataclass(frozen=True)
class Gain:
    """How many times better a run is, from its paired seeds; below 1 it is worse.

    Attributes:
        mean, low, high: Geometric mean over the seeds, and the ends of its interval of 95 %.
    """

    mean: float
    low: float
    high: float

    @property
    def shown(self) -> bool:
        """Whether it is better beyond doubt, as far as the seeds can tell."""
        return self.low > 1

    @property
    def loss(self) -> Gain:
        """The other way round: how many times worse."""
        return Gain(1 / self.mean, 1 / self.high, 1 / self.low)

    def __str__(self) -> str:
        return f"{_factor(self.mean)} times ({_factor(self.low)} to {_factor(self.high)})"


def end_gain(summary: Summary, run: str) -> Gain:
    """How many times closer to the optimum it ends."""
    return _gain([math.log(base.final / own.final) for base, own in _pairs(summary, run)])


def cost_gain(summary: Summary, run: str, cost: str, target: float, base: str | None = None) -> Gain | None:
    """How many times less of a cost (``seconds``, ``bytes_per_worker``) it takes to a target than another run.

    Args:
        summary: Of the scene.
        run: Whose gain.
        cost: What is counted.
        target: A gap.
        base: The other run; the ordinary one unless given.

    Returns:
        The gain; None where one of the two misses the target.
    """
    pairs = _pairs(summary, run, base)
    costs = [(other.stays_below(target, cost), own.stays_below(target, cost)) for other, own in pairs]
    if not all(0 < one < math.inf for both in costs for one in both):
        return None
    return _gain([math.log(other / own) for other, own in costs])


def ordinary_end(summary: Summary) -> float:
    """The gap that the ordinary run comes to stay below at every seed, rounded up to two digits."""
    level = max(curve.settled for curve in summary.runs[0].best.curves.values())
    unit = 10.0 ** (math.floor(math.log10(level)) - 1)
    return float(f"{math.ceil(level / unit) * unit:.2g}")


def _pairs(summary: Summary, run: str, base: str | None = None) -> Pairs:
    runs: dict[str, RunSummary] = {one.name: one for one in summary.runs}
    other, own = runs[base or summary.runs[0].name].best.curves, runs[run].best.curves
    return [(other[seed], own[seed]) for seed in other]


def _gain(logs: Sequence[float]) -> Gain:
    found: Interval = interval(logs)
    return Gain(*(math.exp(one) for one in (found.mean, found.low, found.high)))


def _factor(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"
