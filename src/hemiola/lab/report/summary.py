"""How every run ended, over its seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hemiola.lab.report import words
from hemiola.lab.report.curves import STRETCHES, Curve, curve, thin
from hemiola.lab.report.log import Point, table
from hemiola.lab.report.paired import FEWEST, interval
from hemiola.lab.report.read import Folder, Row
from hemiola.lab.report.seeds import SeedCurve, seed_curves
from hemiola.lab.results import BY_NAME, SCHEMA

# The columns of the table, in order; a column appears when a run has something to show in it.
RESULTS = ("train_gap", "train_loss", "test_loss", "test_metric", "epochs", "seconds", "bytes_per_worker")
POLICIES = tuple(column.name for column in SCHEMA if column.title and column.name not in RESULTS)
# More runs than this cannot be told apart in a chart.
DRAWN = 20


@dataclass(frozen=True)
class MeanOfSeeds:
    """One measure of one run: the mean and the sample standard deviation over the seeds that finished.

    Attributes:
        mean, deviation: NaN when there is none; the deviation of a single seed is NaN.
        best: Whether it is the best mean of its column, or not shown to be worse than it.
    """

    mean: float
    deviation: float
    best: bool = False


@dataclass(frozen=True)
class Ended:
    """How a run ended at one point of the sweep.

    Attributes:
        counts: Seeds by status: done, diverged, failed, running.
        cells: By measure.
        rows: By seed, the rows of the seeds that finished.
        curves: By seed, the objective of the seeds that finished.
        diverged: The seeds that diverged.
    """

    point: Point
    counts: Mapping[str, int]
    cells: Mapping[str, MeanOfSeeds]
    rows: Mapping[str, Row]
    curves: Mapping[str, SeedCurve]
    diverged: tuple[str, ...]

    @property
    def final(self) -> MeanOfSeeds:
        """The objective over the last few evaluations of each seed: what runs and points of the sweep are judged by."""
        return _cell([curve.final for curve in self.curves.values()])

    @property
    def sound(self) -> bool:
        """Whether some seed finished and none diverged or failed."""
        return self.counts["done"] > 0 and self.counts["diverged"] + self.counts["failed"] == 0

    @property
    def seeds(self) -> str:
        """``"5 seeds"``, ``"3 seeds, 2 diverged"``."""
        done = self.counts["done"]
        text = "1 seed" if done == 1 else f"{done} seeds"
        others = [f"{count} {status}" for status, count in self.counts.items() if count and status != "done"]
        return ", ".join([text, *others] if done or not others else others)


@dataclass(frozen=True)
class RunSummary:
    """One run: its best point of the sweep first among all its points."""

    name: str
    points: tuple[Ended, ...]

    @property
    def best(self) -> Ended:
        return self.points[0]

    def at_edge(self) -> list[str]:
        """Swept keys whose best value is the smallest or largest tried, so that a wider sweep may find a better one."""
        edges = []
        for key, value in self.best.point:
            tried = {dict(one.point)[key] for one in self.points if one.counts["done"] or one.counts["diverged"]}
            try:
                values = sorted(map(float, tried))
            except ValueError:
                continue
            # Where the neighbour beyond the edge was tried and diverged, the edge is a real one: it is among the tried.
            if len(values) > 2 and float(value) in (values[0], values[-1]):
                edges.append(key)
        return edges


@dataclass(frozen=True)
class Summary:
    """All runs of a folder, over their seeds.

    Attributes:
        folder: What it is made from.
        objective: What runs and points of the sweep are judged by: ``train_gap`` or ``train_loss``.
        runs: In the order of the experiment file.
    """

    folder: Folder
    objective: str
    runs: tuple[RunSummary, ...]

    @property
    def task(self) -> Mapping[str, Any]:
        """The facts of the task."""
        return self.folder.task

    @property
    def swept(self) -> bool:
        return any(len(run.points) > 1 for run in self.runs)

    @cached_property
    def groups(self) -> list[list[RunSummary]]:
        """Runs that may be ranked against each other, in the order of the file; the first of each is the reference."""
        return groups(self.folder, self.runs)

    @cached_property
    def drawn(self) -> list[RunSummary]:
        """The runs that charts show: all, or the references and those that end best."""
        if len(self.runs) <= DRAWN:
            return list(self.runs)
        ends = sorted(self.runs, key=lambda run: _rank(run.best))
        kept = [group[0].name for group in self.groups] + [run.name for run in ends]
        chosen = set(list(dict.fromkeys(kept))[:DRAWN])
        return [run for run in self.runs if run.name in chosen]

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """The drawn runs' curves at their best points of the sweep, thinned to what can be seen."""
        made = {run.name: curve(self.folder, run.name, run.best.point) for run in self.drawn}
        stretches = max(10, min(STRETCHES, 300 // max(1, len(made))))
        measures = ("train_gap", "train_loss", "test_loss", "test_metric", "herding", "herding_ratio")
        return {name: thin(line, measures, stretches) for name, line in made.items() if len(line)}

    def columns(self, among: Iterable[str]) -> list[str]:
        """The measures that at least one run has a number for."""
        return [name for name in among if any(math.isfinite(run.best.cells[name].mean) for run in self.runs)]

    def unit(self, measure: str) -> tuple[float, str]:
        """The one unit in which a column is shown: (divisor, name), the name empty for a plain number."""
        means = [run.best.cells[measure].mean for run in self.runs]
        return words.unit_of(measure, max(filter(math.isfinite, means), default=0.0))

    def title(self, measure: str) -> str:
        """A column's heading, with its unit."""
        unit = self.unit(measure)[1]
        return words.measure_name(measure, self.task) + (f" ({unit})" if unit else "")

    def shown(self, measure: str, cell: MeanOfSeeds) -> tuple[str, str]:
        """A cell in its column's unit: (mean, deviation), the deviation empty where there is none."""
        unit = self.unit(measure)[0]
        return words.with_deviation(cell.mean / unit, cell.deviation / unit)


def summarise(folder: Folder) -> Summary:
    """Average every run over its seeds and choose each run's best point of the sweep."""
    objective = "train_gap" if folder.task.get("convex") and _has_gap(folder) else "train_loss"
    runs = [RunSummary(name, tuple(_points(folder, name, objective))) for name in folder.runs]
    started = [run for run in runs if run.points]
    for measure in RESULTS:
        if direction := _direction(measure, folder):
            for group in groups(folder, started):
                best = _best(folder, group, measure, direction)
                started = [_marked(run, measure) if run.name in best else run for run in started]
    return Summary(folder, objective, tuple(started))


def groups(folder: Folder, runs: Iterable[RunSummary]) -> list[list[RunSummary]]:
    """See `Summary.groups`.

    Virtual seconds are a prediction and those of a real cluster a measurement: they stand beside each other and do not
    compete. Nor do different tasks.
    """
    made: dict[tuple[bool, str], list[RunSummary]] = {}
    for run in runs:
        settings = folder.settings(run.name)
        made.setdefault((measured(settings), str(settings.get("task"))), []).append(run)
    return list(made.values())


def measured(settings: Mapping[str, object]) -> bool:
    """Whether the run's seconds were measured on a real cluster."""
    cluster = settings.get("cluster")
    name = cluster if isinstance(cluster, str) else table(cluster).get("name", "simulated")
    return name != "simulated"


def _has_gap(folder: Folder) -> bool:
    rows = any(math.isfinite(row.numbers["train_gap"]) for row in folder.rows)
    return rows or any(np.isfinite(log.numbers["train_gap"]).any() for log in folder.log.values())


def _points(folder: Folder, run: str, objective: str) -> list[Ended]:
    return sorted((_ended(folder, run, point, objective) for point in folder.points(run)), key=_rank)


def _number(folder: Folder, row: Row, name: str) -> float:
    """A number of results.csv; what only the log has, from the last line of the cell."""
    if name in row.numbers:
        return row.numbers[name]
    log = folder.log.get((row.run, row.point, row.seed))
    return float(log.numbers[name][-1]) if log else math.nan


def _rank(ended: Ended) -> tuple[bool, int, bool, float]:
    """The best point has the lowest mean over seeds of the final objective, among those that lost the fewest seeds."""
    value = ended.final.mean
    lost = ended.counts["diverged"] + ended.counts["failed"]
    return (not ended.counts["done"], lost, math.isnan(value), 0.0 if math.isnan(value) else value)


def _ended(folder: Folder, run: str, point: Point, objective: str) -> Ended:
    statuses = folder.seeds(run, point)
    counts = {status: sum(one == status for one in statuses.values()) for status in ("done", "diverged", "running")}
    counts |= {"failed": len(statuses) - sum(counts.values())}
    rows = {seed: folder.ended[run, point, seed] for seed, status in statuses.items() if status == "done"}
    cells = {name: _cell([_number(folder, row, name) for row in rows.values()]) for name in (*RESULTS, *POLICIES)}
    diverged = tuple(seed for seed, status in statuses.items() if status == "diverged")
    return Ended(point, counts, cells, rows, seed_curves(folder, run, point, objective), diverged)


def _cell(values: Sequence[float]) -> MeanOfSeeds:
    if not values or not all(map(math.isfinite, values)):
        return MeanOfSeeds(math.nan, math.nan)
    count = len(values)
    mean = math.fsum(value / count for value in values)
    try:
        squares = math.fsum((value - mean) ** 2 for value in values)
    except OverflowError:
        return MeanOfSeeds(math.nan, math.nan)
    return MeanOfSeeds(mean, math.sqrt(squares / (count - 1)) if count > 1 else math.nan)


def _direction(measure: str, folder: Folder) -> int:
    """+1 where more is better, -1 where less is, 0 where neither is (or where the experiment fixed it)."""
    better = BY_NAME[measure].better
    if better == "task":
        return 1 if folder.task.get("higher_is_better", True) else -1
    fixed = table(folder.shared.get("stop")).get(measure) is not None
    return -1 if better == "lower" and not fixed else 0


def _best(folder: Folder, runs: Sequence[RunSummary], measure: str, direction: int) -> set[str]:
    """The runs with the best mean of a column, and those not shown to be worse than it; none if that is all of them.

    "Shown" means by the differences seed by seed. Runs that lost a seed are not marked: their mean is that of the seeds
    that survived. Below three seeds nothing is shown and nothing is marked.
    """
    sound = [run for run in runs if run.best.sound and math.isfinite(run.best.cells[measure].mean)]
    if not sound:
        return set()
    best = max(sound, key=lambda run: direction * run.best.cells[measure].mean)
    slack = 1e-6 * abs(best.best.cells[measure].mean)
    worse = set()
    for run in sound:
        seeds = [seed for seed in best.best.rows if seed in run.best.rows]
        here, there = ([_number(folder, one.best.rows[seed], measure) for seed in seeds] for one in (best, run))
        behind = [direction * (one - other) for one, other in zip(here, there, strict=True)]
        if len(seeds) >= FEWEST and all(map(math.isfinite, behind)):
            over = interval(behind)
            if over.sign > 0 and over.mean > slack:
                worse.add(run.name)
    return {run.name for run in sound} - worse if worse else set()


def _marked(run: RunSummary, measure: str) -> RunSummary:
    cells = {**run.best.cells, measure: replace(run.best.cells[measure], best=True)}
    return replace(run, points=(replace(run.best, cells=cells), *run.points[1:]))
