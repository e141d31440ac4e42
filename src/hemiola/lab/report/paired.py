"""Differences seed by seed, and how sure one can be of their mean.

The same seed has the same shards, delays and noise in every run, so runs are compared within each seed and only the
differences are averaged: what all runs of a seed have in common drops out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

# A difference is ranked over at least this many seeds. Student's interval exists for two, but is then so wide, and
# depends so much on the normal law, that it says nothing.
FEWEST = 3
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """The mean of paired differences and where it lies.

    Attributes:
        mean: Over the seeds.
        low, high: Ends of Student's interval; NaN below `FEWEST` seeds.
        differences: One for every seed, in the order of the seeds.
    """

    mean: float
    low: float
    high: float
    differences: tuple[float, ...]

    @property
    def sign(self) -> int:
        """+1 or -1 if zero lies outside of the interval, else 0; 0 too where there is no interval."""
        return (self.low > 0) - (self.high < 0)

    def within(self, slack: float) -> bool:
        """Whether the whole interval lies within the slack on both sides of zero."""
        return -slack <= self.low and self.high <= slack


def interval(differences: Sequence[float], statements: int = 1) -> Interval:
    """Student's interval for the mean of paired differences.

    Args:
        differences: One finite number for every seed, at least one.
        statements: How many intervals are to hold together with `CONFIDENCE`: each is made so much wider (Bonferroni).
    """
    from scipy.special import stdtrit  # scipy.stats would take a second to import

    count = len(differences)
    mean = sum(difference / count for difference in differences)
    if count < FEWEST:
        return Interval(mean, math.nan, math.nan, tuple(differences))
    quantile = float(stdtrit(count - 1, 1 - (1 - CONFIDENCE) / (2 * statements)))
    try:
        reach = quantile * stdev(differences) / math.sqrt(count)
    except OverflowError:  # of numbers near the largest float
        reach = math.inf
    return Interval(mean, mean - reach, mean + reach, tuple(differences))
