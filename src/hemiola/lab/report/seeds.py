"""One seed's way down: where it ended, and what it had cost when it was below a target for good."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from hemiola.lab.report.log import Point
from hemiola.lab.report.read import Folder

# What reaching a target can cost.
COSTS = ("epochs", "seconds", "bytes_per_worker")


# The end of a run is this last share of its epochs: a single evaluation of stochastic training is a matter of luck.
END = 0.1


@dataclass(frozen=True)
class SeedCurve:
    """The objective of one finished seed at its evaluations.

    Attributes:
        values: The objective; infinite where it was not finite.
        places: By cost, what it had cost until each evaluation.
    """

    values: tuple[float, ...]
    places: dict[str, tuple[float, ...]]

    @cached_property
    def final(self) -> float:
        """The mean over the last tenth of the run; infinite if it was not finite there.

        It is the mean along the curve, geometric where that is possible, so that runs evaluated at other times, or more
        often, have the same.
        """
        at, values, start = self.places["epochs"], self.values, self._end_begins
        if not start < at[-1]:
            return values[-1]
        inside = [i for i, place in enumerate(at) if place > start]
        before = inside[0] - 1
        if math.isinf(max(values[before:])):
            return math.inf if math.isinf(max(values[inside[0] :])) else values[-1]
        log = min(values[before:]) > 0
        heights = [math.log(value) if log else value for value in values[before:]]
        share = (start - at[before]) / (at[before + 1] - at[before])
        line = [
            (start, heights[0] + share * (heights[1] - heights[0])),
            *zip(at[before + 1 :], heights[1:], strict=True),
        ]
        mean = sum((b[1] / 2 + a[1] / 2) * ((b[0] - a[0]) / (at[-1] - start)) for a, b in pairwise(line))
        return math.exp(mean) if log else mean

    @property
    def _end_begins(self) -> float:
        """The epoch at which the end of the run begins; infinite if the epochs do not tell."""
        at = self.places["epochs"]
        rising = all(one < other for one, other in pairwise(at)) and math.isfinite(at[-1] - at[0])
        return at[-1] - END * (at[-1] - at[0]) if rising and len(at) > 1 else math.inf

    @cached_property
    def smooth(self) -> tuple[float, ...]:
        """The values after a running median of three, so that one lucky or unlucky evaluation decides nothing.

        A curve that only falls is left as it is. The last value follows Tukey's rule: the median of itself, the
        smoothed value before it, and the line through the two smoothed values before it.
        """
        values = self.values
        if len(values) < 3:
            return values
        made = [values[0], *(median(values[i - 1 : i + 2]) for i in range(1, len(values) - 1))]
        return (*made, median((values[-1], made[-1], _extrapolated(made[-2], made[-1]))))

    @property
    def settled(self) -> float:
        """The level it stays at or below to its end."""
        start = min(self._end_begins, self.places["epochs"][-1])
        return max((y for x, y in zip(self.places["epochs"], self.smooth, strict=True) if x >= start), default=math.inf)

    def stays_below(self, target: float, cost: str) -> float:
        """What it had cost when the smoothed curve came to the target to stay at or below it; NaN if it never did.

        Between two evaluations the curve is taken to fall geometrically where it is positive, else linearly.
        """
        above = [at for at, value in enumerate(self.smooth) if value > target]
        if not above:
            return self.places[cost][0] if self.values else math.nan
        before = above[-1]
        if before + 1 == len(self.smooth):
            return math.nan
        start, end = self.places[cost][before : before + 2]
        return start + _share(self.smooth[before], self.smooth[before + 1], target) * (end - start)


def _extrapolated(before: float, last: float) -> float:
    """Two steps on along the line from ``before`` to ``last``, geometrically where both are positive."""
    if not (math.isfinite(before) and math.isfinite(last)):
        return last
    if before > 0 and last > 0:
        steps = 2 * (math.log(last) - math.log(before))
        return last * math.exp(min(steps, 700.0 - max(0.0, math.log(last))))
    return 3 * last - 2 * before


def _share(high: float, low: float, target: float) -> float:
    """How far from ``high`` to ``low`` the target is."""
    if math.isinf(high):
        return 1.0
    ends = (high, low, target)
    top, bottom, aim = map(math.log, ends) if min(ends) > 0 else ends
    return min(max((top - aim) / (top - bottom), 0.0), 1.0) if top > bottom else 1.0


def seed_curves(folder: Folder, run: str, point: Point, objective: str) -> dict[str, SeedCurve]:
    """By seed, the curves of the finished seeds of a run at a point of the sweep.

    A finished seed without a log has its row of results.csv as its only evaluation.
    """
    made = {}
    for seed, status in folder.seeds(run, point).items():
        if status != "done":
            continue
        log, row = folder.log.get((run, point, seed)), folder.ended[run, point, seed].numbers
        columns = {name: log.numbers[name].tolist() if log else [row[name]] for name in (objective, *COSTS)}
        values = tuple(value if math.isfinite(value) else math.inf for value in columns[objective])
        made[seed] = SeedCurve(values, {cost: tuple(columns[cost]) for cost in COSTS})
    return made
