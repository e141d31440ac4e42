"""Every run against the reference: better, worse, or no difference shown.

The reference is the first run of the file. Two questions are asked, each seed by seed (see `paired`): where does a run
end, and what does it cost, in epochs, seconds and bytes, to come below a target for good. There are up to four
targets, and one number per seed is the mean of its log ratios over them, so no conclusion hangs on one target, and
asking for four costs nothing in certainty. The intervals of one run hold together with 95 % confidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from hemiola.lab.report.paired import FEWEST, Interval, interval
from hemiola.lab.report.seeds import COSTS, SeedCurve
from hemiola.lab.report.summary import RunSummary, Summary

# Below this there are no powers of ten to round to.
SMALLEST = 1e-300
# What a difference can be called.
BETTER, WORSE, SAME, NOT_SHOWN, MIXED = "better", "worse", "the same", "no difference shown", "mixed"
NOT_RANKED = "not ranked"
TARGETS = 4
# Costs closer than this factor are the same, however surely they differ; so are ends equal to this relative precision.
SAME_COST, SAME_END = 1.02, 1e-6
# The lowest target is one that this share of the runs reach at every seed, the reference among them.
MOST = 0.75


@dataclass(frozen=True)
class Aspect:
    """One thing in which a run is compared; less is better in all of them.

    Attributes:
        name: ``end``, ``epochs``, ``seconds`` or ``bytes_per_worker``.
        ratio: Whether the numbers are logarithms of run / reference; differences run - reference otherwise.
        over: The numbers of all seeds and their mean; of a cost, the mean over the targets within each seed.
        verdict: better, worse, the same, no difference shown, mixed (it depends on the target), or not ranked.
        by_target: Of a cost, the same for each target that both reach at every seed.
    """

    name: str
    ratio: bool
    over: Interval
    verdict: str
    by_target: Mapping[float, Interval] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """One run against the reference.

    Attributes:
        run, reference: Their names.
        seeds: How many seeds both finished.
        lost: How many seeds the run lost, diverged or without a finite end, that the reference finished.
        targets: What the objective had to come down to.
        aspects: By name; the end first. A cost is missing where fewer than two targets can be compared.
        unreached: By target, at how many of the seeds the run does not come to stay below it although the reference
            does.
    """

    run: str
    reference: str
    seeds: int
    lost: int
    targets: tuple[float, ...]
    aspects: Mapping[str, Aspect]
    unreached: Mapping[float, int]

    @property
    def ranked(self) -> bool:
        return self.seeds >= FEWEST or (self.seeds == 0 and self.lost >= FEWEST)

    def which(self, verdict: str) -> list[str]:
        """The aspects with this verdict."""
        return [name for name, aspect in self.aspects.items() if aspect.verdict == verdict]

    @property
    def word(self) -> str:
        """``better``, ``worse``, ``better and worse``, ``no difference shown`` or ``not ranked``."""
        if not self.ranked:
            return NOT_RANKED
        good = bool(self.which(BETTER) + self.which(MIXED)) and not self.lost
        bad = bool(self.which(WORSE) + self.which(MIXED)) or not self.seeds
        return "better and worse" if good and bad else BETTER if good else WORSE if bad else NOT_SHOWN


def verdicts(summary: Summary) -> list[Verdict]:
    """Every run but the references, against the reference of its group."""
    found = []
    for group in summary.groups:
        aims = targets(group)
        found += [compare(group[0], run, aims, summary.objective) for run in group[1:]]
    return found


def targets(group: Sequence[RunSummary]) -> tuple[float, ...]:
    """Up to four targets, evenly spaced on the logarithm from where the runs start to where the worse ones stay.

    The start is the median over runs of their first evaluation after the start of training: before it there is nothing
    but interpolation. The lowest target is one that the reference and most runs come to stay below at every seed.
    """
    curves = [list(finite.values()) for run in group if (finite := _finite(run))]
    if not _finite(group[0]) or any(len(one.values) < 3 for seeds in curves for one in seeds):
        return ()
    first = 1 if min(len(one.values) for seeds in curves for one in seeds) > TARGETS else 0
    start = median(median(one.smooth[first] for one in seeds) for seeds in curves)
    stays = [max(one.settled for one in seeds) for seeds in curves]
    end = max(stays[0], sorted(stays)[math.ceil(MOST * len(stays)) - 1])
    return _rounded_up(_levels(start, end)) if math.inf > start > end > -math.inf else ()


def _levels(start: float, end: float) -> list[float]:
    """Evenly spaced on the logarithm, or linearly where there is none."""
    parts = [part / TARGETS for part in range(1, TARGETS + 1)]
    return [start * (end / start) ** part if end > 0 else start + (end - start) * part for part in parts]


def _rounded_up(levels: Sequence[float]) -> tuple[float, ...]:
    """Two significant digits, or as many as tell neighbours well apart, rounded up: the text has the number used."""
    made = []
    for level, step in zip(
        levels, [high - low for high, low in pairwise([2 * levels[0] - levels[1], *levels])], strict=True
    ):
        sizes = [abs(size) for size in (level, step) if abs(size) > SMALLEST]
        unit = 10.0 ** (math.floor(math.log10(min(sizes, default=1.0))) - 1)
        rounded = math.ceil(level / unit * (1 - 1e-12)) * unit if unit and math.isfinite(level / unit) else level
        made.append(max(float(f"{rounded:.10g}"), level))
    return tuple(dict.fromkeys(made))


def compare(reference: RunSummary, run: RunSummary, aims: Sequence[float], objective: str) -> Verdict:
    """One run against the reference, over the seeds that both finished."""
    base, own = _finite(reference), _finite(run)
    seeds = [seed for seed in base if seed in own]
    lost = sum(seed in base for seed in run.best.diverged if seed not in own)
    lost += sum(seed in base for seed in run.best.curves if seed not in own)
    pairs = [(base[seed], own[seed]) for seed in seeds]
    unreached = {aim: missing for aim in aims if (missing := _missing(pairs, aim))}
    logs = {cost: found for cost in COSTS if (found := dict(_log_ratios(pairs, aims, cost)))}
    # One target alone decides nothing, unless there is only one.
    logs = {cost: found for cost, found in logs.items() if len(found) >= min(2, len(aims))}
    statements = len(logs) + 1
    aspects = {}
    if pairs:
        aspects["end"] = _end(pairs, objective, statements)
    for cost, found in logs.items():
        aspects[cost] = _cost(cost, found, statements)
    return Verdict(run.name, reference.name, len(seeds), lost, tuple(aims), aspects, unreached)


def _finite(run: RunSummary) -> dict[str, SeedCurve]:
    return {seed: one for seed, one in run.best.curves.items() if math.isfinite(one.final)}


def _missing(pairs: Sequence[tuple[SeedCurve, SeedCurve]], aim: float) -> int:
    return sum(base.smooth[-1] <= aim < own.smooth[-1] for base, own in pairs)


def _log_ratios(
    pairs: Sequence[tuple[SeedCurve, SeedCurve]], aims: Sequence[float], cost: str
) -> Iterator[tuple[float, list[float]]]:
    """For every target that both reach at every seed: the log ratios of what it cost, one for every seed."""
    for aim in aims:
        costs = [(base.stays_below(aim, cost), own.stays_below(aim, cost)) for base, own in pairs]
        if costs and all(0 < one < math.inf for both in costs for one in both):
            yield aim, [math.log(own) - math.log(base) for base, own in costs]


def _end(pairs: Sequence[tuple[SeedCurve, SeedCurve]], objective: str, statements: int) -> Aspect:
    """A gap is compared by ratio, a loss, whose zero means nothing, by difference."""
    ratio = objective == "train_gap" and all(one.final > 0 for both in pairs for one in both)
    if ratio:
        differences = [math.log(own.final) - math.log(base.final) for base, own in pairs]
        slack = SAME_END
    else:
        differences = [max(-1e300, min(1e300, own.final - base.final)) for base, own in pairs]
        slack = SAME_END * max(abs(base.final) for base, _ in pairs)
    over = interval(differences, statements)
    return Aspect("end", ratio, over, _called(over, slack))


def _cost(cost: str, found: Mapping[float, Sequence[float]], statements: int) -> Aspect:
    slack = math.log(SAME_COST)
    means = [sum(logs) / len(logs) for logs in zip(*found.values(), strict=True)]
    over = interval(means, statements)
    by_target = {aim: interval(logs, statements * len(found)) for aim, logs in found.items()}
    shown = {_called(one, slack) for one in by_target.values()}
    verdict = _called(over, slack)
    opposite = {BETTER: WORSE, WORSE: BETTER}.get(verdict)
    if opposite in shown or {BETTER, WORSE} <= shown:
        verdict = MIXED
    return Aspect(cost, True, over, verdict, by_target)


def _called(over: Interval, slack: float) -> str:
    if len(over.differences) < FEWEST:
        return NOT_RANKED
    if abs(over.mean) <= slack and (over.sign or over.within(slack)):
        return SAME
    return {-1: BETTER, 1: WORSE, 0: NOT_SHOWN}[over.sign]
