"""Curves over seeds: a mean line and a band from the lowest to the highest seed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from hemiola.lab.report.read import Averaged, Evaluation, Folder, Point

# A long log is thinned to at most this many stretches, and from each stretch the points with the lowest and the highest
# value of every measure are kept, as are the first and the last point. A stretch is a few pixels wide, so the drawn
# line keeps its envelope and its ends.
STRETCHES = 60


@dataclass(frozen=True)
class Span:
    """Mean, lowest and highest over seeds of one number; NaN unless every seed has a finite one."""

    mean: float
    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Span:
        if not values or not all(map(math.isfinite, values)):
            return cls(math.nan, math.nan, math.nan)
        # A mean of huge floats may overflow, and one of equal floats may round past its own ends.
        low, high = min(values), max(values)
        mean = fmean(value / len(values) for value in values) * len(values)
        return cls(min(max(mean, low), high), low, high)


@dataclass(frozen=True)
class Curve:
    """One run at one point of the sweep, over its seeds.

    Attributes:
        steps: One for every evaluation: each number's `Span` over the seeds.
        seeds: How many seeds it is made of.
    """

    steps: tuple[dict[str, Span], ...]
    seeds: int

    def line(self, x: str, y: str) -> list[tuple[float, float]]:
        """The mean line, without the points that have no finite place."""
        places = ((step[x].mean, step[y].mean) for step in self.steps)
        return [(at, value) for at, value in places if math.isfinite(at) and math.isfinite(value)]


def logs_of(folder: Folder, run: str, point: Point) -> tuple[list[tuple[Evaluation, ...]], bool]:
    """The logs a run's curve is made of, one per seed, and whether they are finished.

    Seeds that diverged would pull the mean to infinity, and seeds still running would shift it as they join; so
    finished seeds count if there are any, then running ones, and diverged ones only if there is nothing else.
    """
    status = {(row.run, row.point, row.seed): row.status for row in folder.rows}
    by_status: dict[str, list[tuple[Evaluation, ...]]] = defaultdict(list)
    for key, log in folder.log.items():
        if key[:2] == (run, point):
            by_status[status.get(key, "running")].append(log)
    for kind in ("done", "running", "diverged", "failed"):
        if by_status[kind]:
            return by_status[kind], kind == "done"
    return [], False


def curve(folder: Folder, run: str, point: Point) -> Curve:
    """Average the seeds of a run, evaluation by evaluation.

    The i-th evaluations of all seeds make one point, placed at the mean of their epochs, seconds and bytes, as far as
    every seed has one. Where finished seeds differ in the number of evaluations, their last ones still make the last
    point, so that the curve ends where the table says.
    """
    logs, finished = logs_of(folder, run, point)
    if not logs:
        return Curve((), 0)
    length = min(map(len, logs))
    moments: list[tuple[Evaluation, ...]] = [tuple(log[i] for log in logs) for i in range(length)]
    if finished:
        moments[-1] = tuple(log[-1] for log in logs)
    steps = tuple(
        {name: Span.over([seen.numbers[name] for seen in moment]) for name in moment[0].numbers} for moment in moments
    )
    return Curve(steps, len(logs))


def thin(curve: Curve, measures: Iterable[str]) -> Curve:
    """Keep of a long curve what can be seen: see `STRETCHES`."""
    count = len(curve.steps)
    if count <= 2 * STRETCHES:
        return curve
    kept = {0, count - 1}
    for stretch in range(STRETCHES):
        inside = range(stretch * count // STRETCHES, (stretch + 1) * count // STRETCHES)
        for measure in measures:
            finite = [i for i in inside if math.isfinite(curve.steps[i][measure].mean)]
            if finite:
                kept.add(min(finite, key=lambda i: curve.steps[i][measure].mean))
                kept.add(max(finite, key=lambda i: curve.steps[i][measure].mean))
    return Curve(tuple(curve.steps[i] for i in sorted(kept)), curve.seeds)


def averagings(folder: Folder, run: str, point: Point) -> list[list[Averaged]]:
    """Every averaging of a run, one list per seed that `logs_of` counts."""
    logs, _ = logs_of(folder, run, point)
    return [[one for seen in log for one in seen.history] for log in logs]


def over_steps(histories: Sequence[Sequence[Averaged]], name: str) -> list[tuple[float, Span]]:
    """Period or spread over local steps: mean and range over all seeds' averagings within each stretch of steps.

    Averagings of different seeds fall on different steps, so there is no common moment; stretches of equal length,
    three for every one of `STRETCHES`, take its place.
    """
    seen = [(one.step, getattr(one, name)) for history in histories for one in history]
    places = [(step, value) for step, value in seen if math.isfinite(step) and math.isfinite(value)]
    if not places:
        return []
    first, last = min(places)[0], max(places)[0]
    width = (last - first) / (3 * STRETCHES) or 1.0
    stretches: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for step, value in places:
        stretches[int((step - first) / width)].append((step, value))
    return [
        (Span.over([step for step, _ in inside]).mean, Span.over([value for _, value in inside]))
        for _, inside in sorted(stretches.items())
    ]
