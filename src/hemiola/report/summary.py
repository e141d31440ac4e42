"""How every run ended, over its seeds, and what that means in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from hemiola.report import words
from hemiola.report.curves import Curve, curve, reached
from hemiola.report.read import Folder, Point, Row, table

# The columns of the table, in order; a column appears when a run has something to show in it.
RESULTS = ("train_gap", "train_loss", "test_loss", "test_metric", "epochs", "seconds", "bytes_per_worker")
POLICIES = (
    "updates",
    "averagings",
    "mean_period",
    "weighted_spread",
    "mean_staleness",
    "max_staleness",
    "mean_update_seconds",
    "units_cancelled",
    "units_dropped",
    "idle_share",
    "wasted_share",
    "wall_seconds",
)
# Cheaper than this factor, or dearer, is worth a number; in between is "about the same".
SAME = 1.02


@dataclass(frozen=True)
class Cell:
    """One measure of one run: the mean and the sample standard deviation over the seeds that finished.

    Attributes:
        mean, deviation: NaN when there is none; the deviation of a single seed is NaN.
        best: Whether no other run's mean is better by more than the best one's deviation.
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
    """

    point: Point
    counts: Mapping[str, int]
    cells: Mapping[str, Cell]

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
    """The table of the report.

    Attributes:
        objective: What runs and points of the sweep are judged by: ``train_gap`` or ``train_loss``.
        runs: In the order of the experiment file.
        task: The facts of the task.
    """

    objective: str
    runs: tuple[RunSummary, ...]
    task: Mapping[str, Any]

    @property
    def swept(self) -> bool:
        return any(len(run.points) > 1 for run in self.runs)

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

    def shown(self, measure: str, cell: Cell) -> tuple[str, str]:
        """A cell in its column's unit: (mean, deviation), the deviation empty where there is none."""
        unit = self.unit(measure)[0]
        return words.with_deviation(cell.mean / unit, cell.deviation / unit)


def summarise(folder: Folder) -> Summary:
    """Average every run over its seeds and choose each run's best point of the sweep."""
    objective = "train_gap" if folder.task.get("convex") and _has_gap(folder) else "train_loss"
    runs = [RunSummary(name, tuple(_points(folder, name, objective))) for name in folder.runs]
    started = [run for run in runs if run.points]
    for measure in (*RESULTS, *POLICIES):
        started = _mark_best(started, measure, _direction(measure, folder))
    return Summary(objective, tuple(started), folder.task)


def _has_gap(folder: Folder) -> bool:
    logged = (seen.numbers["train_gap"] for log in folder.log.values() for seen in log)
    return any(map(math.isfinite, (*(row.numbers["train_gap"] for row in folder.rows), *logged)))


def _points(folder: Folder, run: str, objective: str) -> list[Ended]:
    finished: dict[Point, dict[str, Row]] = {}
    for row in folder.rows:
        if row.run == run:
            finished.setdefault(row.point, {})[row.seed] = row
    for name, point, _ in folder.log:
        if name == run:
            finished.setdefault(point, {})
    running = {
        point: sum(key[:2] == (run, point) and key[2] not in rows for key in folder.log)
        for point, rows in finished.items()
    }
    ended = [_ended(folder, point, list(rows.values()), running[point]) for point, rows in finished.items()]
    return sorted(ended, key=lambda one: _rank(one, objective))


def _number(folder: Folder, row: Row, name: str) -> float:
    """A number of results.csv; what only the log has, from the last line of the run."""
    if name in row.numbers:
        return row.numbers[name]
    log = folder.log.get((row.run, row.point, row.seed))
    return log[-1].numbers[name] if log else math.nan


def _rank(ended: Ended, objective: str) -> tuple[bool, int, bool, float]:
    value = ended.cells[objective].mean
    lost = ended.counts["diverged"] + ended.counts["failed"]
    return (not ended.counts["done"], lost, math.isnan(value), 0.0 if math.isnan(value) else value)


def _ended(folder: Folder, point: Point, rows: Sequence[Row], running: int) -> Ended:
    counts = {status: sum(row.status == status for row in rows) for status in ("done", "diverged")}
    counts |= {"failed": len(rows) - sum(counts.values()), "running": running}
    done = [row for row in rows if row.status == "done"]
    cells = {name: _cell([_number(folder, row, name) for row in done]) for name in (*RESULTS, *POLICIES)}
    return Ended(point, counts, cells)


def _cell(values: Sequence[float]) -> Cell:
    if not values or not all(map(math.isfinite, values)):
        return Cell(math.nan, math.nan)
    try:
        return Cell(fmean(values), stdev(values) if len(values) > 1 else math.nan)
    except OverflowError:
        return Cell(math.nan, math.nan)


def _direction(measure: str, folder: Folder) -> int:
    """+1 where more is better, -1 where less is, 0 where neither is (or where the experiment fixed it)."""
    if measure == "test_metric":
        return 1 if folder.task.get("higher_is_better", True) else -1
    if measure in ("train_gap", "train_loss", "test_loss"):
        return -1
    fixed = table(folder.shared.get("stop")).get(measure) is not None
    return -1 if measure in ("seconds", "bytes_per_worker") and not fixed else 0


def _mark_best(runs: list[RunSummary], measure: str, direction: int) -> list[RunSummary]:
    """Mark the best mean of a column, and every mean within its standard deviation; nothing if that is all of them.

    Runs that lost a seed are not marked: their mean is that of the seeds that survived.
    """
    sound = [run.best.cells[measure] for run in runs if run.best.sound and math.isfinite(run.best.cells[measure].mean)]
    if not direction or not sound:
        return runs
    best = max(sound, key=lambda cell: direction * cell.mean)
    slack = max(best.deviation if math.isfinite(best.deviation) else 0.0, 1e-6 * abs(best.mean))
    if all(abs(cell.mean - best.mean) <= slack for cell in sound):
        return runs
    marked = []
    for run in runs:
        cell = run.best.cells[measure]
        wins = run.best.sound and abs(cell.mean - best.mean) <= slack
        first = replace(run.best, cells={**run.best.cells, measure: replace(cell, best=wins)})
        marked.append(replace(run, points=(first, *run.points[1:])))
    return marked


# ------------------------------------------------------------------------------------------------------- the headline


def sentences(folder: Folder, summary: Summary) -> list[str]:
    """What was gained over the first run, in words, computed from the mean lines of the log.

    The target is where the first run ended, rounded up to three digits so that the number in the sentence is the
    number that was used. Epochs, seconds and bytes to reach it are interpolated between evaluations.
    """
    if not summary.runs:
        return ["No run has results yet."]
    base, *others = summary.runs
    objective = summary.objective
    name = words.OBJECTIVES[objective]
    base_curve = curve(folder, base.name, base.best.point)
    line = base_curve.line("epochs", objective)
    if not base.best.counts["done"] or not line:
        return [_unfinished(run) for run in summary.runs]
    target = _round_up(line[-1][1])
    after = [words.amount(x, base_curve.steps[-1][x].mean) for x in ("seconds", "bytes_per_worker")]
    first = (
        f"{_called(base, summary)} ends at a {name} of {words.figure(line[-1][1])} after "
        f"{words.figure(line[-1][0])} epochs, {after[0]} of cluster time and {after[1]} sent per worker"
        f"{_over(base_curve)}."
    )
    edges = [_edge(run, key) for run in summary.runs for key in run.at_edge()]
    return [first, *(_compare(folder, summary, base, base_curve, run, target) for run in others), *edges]


def _compare(
    folder: Folder, summary: Summary, base: RunSummary, base_curve: Curve, run: RunSummary, target: float
) -> str:
    if not run.best.counts["done"]:
        return _unfinished(run)
    name = words.OBJECTIVES[summary.objective]
    own = curve(folder, run.name, run.best.point)
    values = own.line("epochs", summary.objective)
    if not values:
        return f"{words.called(run.name)} has no finite {name} to compare."
    final = f"ends at {words.figure(values[-1][1])}"
    lost = run.best.counts["diverged"] + run.best.counts["failed"]
    caveat = f" (over the {run.best.seeds})" if lost else ""
    lowest = min(value for _, value in values)
    if lowest > target:
        short = f": its lowest is {words.figure(lowest)}" if lowest < values[-1][1] else ""
        return f"{_called(run, summary)} does not reach a {name} of {words.figure(target)}{short}; it {final}{caveat}."
    costs = []
    for x, noun in _COSTS.items():
        there, here = (reached(made.line(x, summary.objective), target) for made in (base_curve, own))
        costs += _ratio(there, here, noun)
    needs = f"needs {words.listed(costs)}" if costs else "cannot be compared by cost"
    goal = f"to reach a {name} of {words.figure(target)}"
    return f"Compared with {words.called(base.name)}, {_called(run, summary)} {needs} {goal}; it {final}{caveat}."


_COSTS = {"epochs": "epochs", "seconds": "seconds", "bytes_per_worker": "bytes"}


def _ratio(base: float, own: float, noun: str) -> list[str]:
    """One cost in words; none where a ratio has no meaning."""
    if not (math.isfinite(base) and math.isfinite(own)) or base <= 0 or own <= 0:
        return []
    if max(base, own) / min(base, own) < SAME:
        return [f"about as many {noun}"]
    if base > own:
        return [f"{words.figure(base / own)}x fewer {noun}"]
    return [f"{words.figure(own / base)}x as many {noun}"]


def _called(run: RunSummary, summary: Summary) -> str:
    name = words.called(run.name)
    return f"{name} (at its best {words.point(run.best.point)})" if len(run.points) > 1 else name


def _edge(run: RunSummary, key: str) -> str:
    values = [float(dict(one.point)[key]) for one in run.points]
    best = float(dict(run.best.point)[key])
    end = "largest" if best == max(values) else "smallest"
    name = words.called(run.name)
    return f"{name} does best at the {end} {key} that was tried, {best:g}; a wider sweep may find a better one."


def _over(made: Curve) -> str:
    return f" (mean of {made.seeds} seeds)" if made.seeds > 1 else ""


def _unfinished(run: RunSummary) -> str:
    counts = run.best.counts
    if counts["running"] or not sum(counts.values()):
        return f"{words.called(run.name)} has not finished yet."
    return (
        f"{words.called(run.name)} diverged at every seed."
        if counts["diverged"]
        else f"{words.called(run.name)} failed at every seed."
    )


def _round_up(value: float) -> float:
    """The next number with three significant digits that is not below the value."""
    if value == 0 or not math.isfinite(value):
        return value
    rounded = float(f"{value:.2e}")
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    return rounded if rounded >= value else float(f"{rounded + step:.2e}")
