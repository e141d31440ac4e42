"""Numbers measured on the folders of experiments: a declared `Number` in, its value and deviation out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from hemiola.lab.report.log import Log, Point
from hemiola.lab.report.read import Folder
from hemiola.lab.reproduce.table import Cost, Number

# Columns that say how good a run is; by any other column the best point of a sweep is that of the training loss.
_GOODNESS = ("train_loss", "train_gap", "test_loss", "test_metric")
Evaluation = Mapping[str, float]  # the numbers of one evaluation, by name
_NEAR = 0.03  # an evaluation this near, relatively, is at the place that was asked for


@dataclass(frozen=True)
class Measured:
    """A number and how far it can be trusted.

    Attributes:
        value: From means over seeds; infinite for what was never reached, NaN where something is missing.
        deviation: Standard deviation of the same number seed by seed; NaN below two seeds.
        seeds: How many seeds it is made of.
    """

    value: float
    deviation: float = math.nan
    seeds: int = 1

    @classmethod
    def over_seeds(cls, values: Sequence[float], value: float | None = None) -> Measured:
        """From one number per seed; ``value`` where it is not their mean."""
        finite = len(values) > 1 and all(map(math.isfinite, values))
        return cls(_mean(values) if value is None else value, stdev(values) if finite else math.nan, len(values))


def measure(number: Number, folder: Folder) -> Measured:
    """Measure a number on the folder of its experiment."""
    if number.slope is not None:
        return _slope(number, folder, number.slope)
    others: Sequence[str | list[str]] = number.way or [number.over or number.minus]
    combine: Callable[..., float] = _share if number.way else _ratio if number.over else _difference
    read = [_best(number, folder, _listed(runs)) for runs in (number.run, *others) if runs]
    if len(read) == 1:
        return read[0].scaled(number.times).measured()
    value = combine(*(one.value for one in read)) * number.times
    common = set.intersection(*(set(one.by_seed) for one in read))
    seeds = [combine(*(one.by_seed[seed] for one in read)) * number.times for seed in sorted(common)]
    return Measured.over_seeds(seeds, value)


@dataclass(frozen=True)
class _Read:
    """One run at one point: the number from means over seeds, and seed by seed."""

    value: float
    by_seed: Mapping[str, float]

    def scaled(self, factor: float) -> _Read:
        return _Read(self.value * factor, {seed: value * factor for seed, value in self.by_seed.items()})

    def measured(self) -> Measured:
        return Measured.over_seeds(list(self.by_seed.values()), self.value)


def _best(number: Number, folder: Folder, runs: Sequence[str]) -> _Read:
    """The best of several runs, each at its best point."""
    found = [_at_best_point(number, folder, run) for run in runs]
    return _better(folder, number, found)[0]


def _at_best_point(number: Number, folder: Folder, run: str) -> tuple[_Read, float]:
    """A run read at its best point, and how good it is there."""
    read = []
    for point in points_of(folder, run):
        logs = logs_at(folder, run, point)
        found = _read(number, logs, _ends(number, folder))
        goodness = found.value if _tells(number) else _Goal("train_loss").read(logs).value
        read.append((found, goodness))
    return _better(folder, number, read) if read else (_Read(math.nan, {}), math.nan)


def _better(folder: Folder, number: Number, found: Sequence[tuple[_Read, float]]) -> tuple[_Read, float]:
    highest = number.measure == "test_metric" and bool(folder.task.get("higher_is_better")) and not _reaches(number)
    sign = -1 if highest else 1
    return min(found, key=lambda one: sign * one[1] if math.isfinite(one[1]) else math.inf)


def _reaches(number: Number) -> bool:
    return number.reach is not None or bool(number.until)


def _tells(number: Number) -> bool:
    return number.measure in _GOODNESS


def best_point(folder: Folder, run: str, measure: str) -> Point:
    """The point of the sweep at which a run ends best; the first where none has a finite end."""
    goal = _Goal(measure if measure in _GOODNESS else "train_loss")
    sign = -1 if measure == "test_metric" and folder.task.get("higher_is_better") else 1

    def badness(point: Point) -> float:
        value = goal.read(logs_at(folder, run, point)).value
        return sign * value if math.isfinite(value) else math.inf

    return min(points_of(folder, run), key=badness, default=())


def points_of(folder: Folder, run: str) -> list[Point]:
    """The points of the sweep that a run was evaluated at."""
    return list(dict.fromkeys(point for name, point, _ in folder.log if name == run))


def logs_at(folder: Folder, run: str, point: Point) -> dict[str, list[Evaluation]]:
    """The evaluations of a run at a point, by seed."""
    logs = {seed: log for (name, where, seed), log in folder.log.items() if (name, where) == (run, point)}
    return {seed: _evaluations(log) for seed, log in logs.items()}


def _evaluations(log: Log) -> list[Evaluation]:
    columns = {name: values.tolist() for name, values in log.numbers.items()}
    return [{name: values[place] for name, values in columns.items()} for place in range(len(log))]


# ----------------------------------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class _Goal:
    """A column at a place, over the last share of the evaluations, or at the end."""

    column: str
    at: Mapping[Cost, float] | None = None
    last: float | None = None

    def read(self, logs: Mapping[str, Sequence[Evaluation]]) -> _Read:
        by_seed = {seed: self._one(log) for seed, log in logs.items()}
        return _Read(_mean(list(by_seed.values())), by_seed)

    def _one(self, log: Sequence[Evaluation]) -> float:
        if not self.at:
            count = 1 if self.last is None else max(1, round(self.last * len(log)))
            return _mean([_value(seen, self.column) for seen in log[-count:]])
        ((axis, place),) = self.at.items()
        nearest = min(log, key=lambda seen: abs(_value(seen, axis) - place))
        there = abs(_value(nearest, axis) - place) <= _NEAR * place
        return _value(nearest, self.column) if there else math.nan


def _read(number: Number, logs: Mapping[str, Sequence[Evaluation]], ends: _Read | None) -> _Read:
    if ends is not None:
        goals, goal = ends.by_seed, ends.value
    elif number.reach is not None:
        goals, goal = dict.fromkeys(logs, number.reach), number.reach
    else:
        return _Goal(number.measure, number.at, number.last).read(logs)
    by_seed = {seed: _first(_line(log, number), goals[seed]) for seed, log in logs.items() if seed in goals}
    if number.curve == "seeds":
        return _Read(_mean(list(by_seed.values())), by_seed)
    return _Read(_first(_mean_line(logs, number), goal), by_seed)


def _ends(number: Number, folder: Folder) -> _Read | None:
    """Where the run that a number counts until stands at its end, at its best point; None for other numbers."""
    if not number.until:
        return None
    goal = _Goal(number.measure)
    return goal.read(logs_at(folder, number.until, best_point(folder, number.until, number.measure)))


def _line(log: Sequence[Evaluation], number: Number) -> list[tuple[float, float]]:
    return [(_value(seen, number.cost), _value(seen, number.measure)) for seen in log]


def _mean_line(logs: Mapping[str, Sequence[Evaluation]], number: Number) -> list[tuple[float, float]]:
    """Evaluation by evaluation over all seeds, as long as all of them have one."""
    lines = [_line(log, number) for log in logs.values()]
    return [(_mean([x for x, _ in seen]), _mean([y for _, y in seen])) for seen in zip(*lines, strict=False)]


def _first(line: Sequence[tuple[float, float]], goal: float) -> float:
    """Where a line is at or below the goal for the first time; infinite if never."""
    return next((x for x, y in line if y <= goal), math.inf)


def _value(seen: Evaluation, column: str) -> float:
    value = seen.get(column, math.nan)
    return math.inf if math.isnan(value) and column in _GOODNESS else value  # a diverged run is infinitely bad


# ------------------------------------------------------------------------------------------------------- several


def _slope(number: Number, folder: Folder, places: Mapping[str, float]) -> Measured:
    """Least squares of log(number) on log(x), of the means and seed by seed."""
    read = {run: _at_best_point(number, folder, run)[0] for run in places}
    value = fit_slope(list(places.values()), [one.value for one in read.values()])
    common = set.intersection(*(set(one.by_seed) for one in read.values()))
    seeds = [fit_slope(list(places.values()), [one.by_seed[seed] for one in read.values()]) for seed in sorted(common)]
    return Measured.over_seeds([seed * number.times for seed in seeds], value * number.times)


def fit_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of log(y) on log(x); NaN unless every number is positive and finite."""
    if not all(value > 0 and math.isfinite(value) for value in (*x, *y)):
        return math.nan
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def _listed(runs: str | list[str]) -> list[str]:
    return [runs] if isinstance(runs, str) else runs


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _ratio(a: float, b: float) -> float:
    if math.isinf(a) and math.isinf(b):
        return math.nan
    return a / b if b else math.inf


def _share(gone: float, start: float, goal: float) -> float:
    """How much of the way from start to goal is gone."""
    return _ratio(start - gone, start - goal) if all(map(math.isfinite, (gone, start, goal))) else math.nan


def _difference(a: float, b: float) -> float:
    return math.nan if math.isinf(a) and math.isinf(b) else a - b
