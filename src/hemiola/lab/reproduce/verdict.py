"""Does a claim hold? Its checks against its numbers, in a word and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hemiola.lab.reproduce.numbers import Measured
from hemiola.lab.reproduce.table import Check, PublishedClaim


@dataclass(frozen=True)
class Judged:
    """One check: what was found, what was asked, and whether it holds."""

    check: Check
    value: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the number keeps the bound; one that is missing does not."""
        return self.value >= self.bound if self.check.most is None else self.value <= self.bound

    @property
    def words(self) -> str:
        asked = "at least" if self.check.most is None else "at most"
        return f"{self.check.number}: {shown(self.value)}, {asked} {shown(self.bound)} was asked"


def judge(claim: PublishedClaim, numbers: Mapping[str, Measured], quick: bool) -> list[Judged]:
    """Every check of this version."""
    missing = Measured(math.nan)
    return [
        Judged(check, numbers.get(check.number, missing).value, bound)
        for check in claim.checks
        if (bound := check.bound(quick)) is not None
    ]


def in_words(judged: list[Judged]) -> str:
    """The verdict in one sentence or two."""
    kept, missed = [one for one in judged if one.holds], [one for one in judged if not one.holds]
    if not missed:
        return f"Reproduced. {_sentence(kept)}"
    start = "Not reproduced." if not kept else f"Not reproduced: {len(kept)} of {len(judged)} checks hold."
    return f"{start} Missed: {_sentence(missed)}" + (f" Kept: {_sentence(kept)}" if kept else "")


def _sentence(judged: list[Judged]) -> str:
    return "; ".join(one.words for one in judged) + "."


def shown(value: float) -> str:
    """Four digits, fewer where the last are zeros."""
    if math.isnan(value):
        return "not measured"
    if math.isinf(value):
        return "never" if value > 0 else "-∞"
    return f"{value:.4g}"


def in_minutes(minutes: float) -> str:
    """One digit; what takes seconds takes some time, too."""
    return "< 0.1" if minutes < 0.05 else f"{minutes:.1f}"


def with_deviation(measured: Measured) -> str:
    """Value and deviation over seeds, as many digits of the value as the deviation leaves."""
    if not math.isfinite(measured.value) or not math.isfinite(measured.deviation):
        return shown(measured.value)
    if measured.deviation == 0:
        return f"{shown(measured.value)} ± 0"
    digits = max(0, 1 - math.floor(math.log10(measured.deviation)))
    if abs(measured.value) >= 1e5 or 0 < abs(measured.value) < 1e-3 or digits > 6:
        return f"{measured.value:.3g} ± {measured.deviation:.2g}"
    return f"{measured.value:.{digits}f} ± {measured.deviation:.{digits}f}"
