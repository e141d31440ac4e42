"""The rows behind every chart, shared by the page and the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hemiola.lab.report import charts, words
from hemiola.lab.report.curves import Curve, averagings, curve, logs_of, over_steps, thin
from hemiola.lab.report.read import Folder
from hemiola.lab.report.summary import RunSummary, Summary

MEASURES = ("train_gap", "train_loss", "test_loss", "test_metric")
AGAINST = ("epochs", "seconds", "bytes_per_worker")
TAIL = 24  # stalenesses from here on share one bar: a long tail of single reports cannot be seen
GROUPS = 120  # more workers than this are shown as the means of so many groups


def mean_curves(folder: Folder, summary: Summary) -> dict[str, Curve]:
    """Every run's curve at its best point of the sweep, thinned to what can be seen."""
    made = {run.name: curve(folder, run.name, run.best.point) for run in summary.runs}
    return {name: thin(line, (*MEASURES, "herding")) for name, line in made.items() if line.steps}


def available(lines: dict[str, Curve], measures: Sequence[str]) -> list[str]:
    """The measures that have at least one finite number."""
    return [
        measure
        for measure in measures
        if any(math.isfinite(step[measure].mean) for line in lines.values() for step in line.steps)
    ]


def axis(lines: dict[str, Curve], x: str) -> tuple[float, str]:
    """Divisor and title of a horizontal axis: times and sizes in one unit that suits the largest."""
    largest = max(
        (step[x].mean for line in lines.values() for step in line.steps if math.isfinite(step[x].mean)), default=0.0
    )
    if x == "seconds":
        unit, name = words.time_unit(largest)
        return unit, f"cluster time ({name})"
    if x == "bytes_per_worker":
        unit, name = words.size_unit(largest)
        return unit, f"sent per worker ({name})"
    return 1.0, "epochs"


def curve_rows(lines: dict[str, Curve], x: str, y: str) -> charts.Rows:
    """Rows of one curve chart."""
    unit, _ = axis(lines, x)
    return [
        {"run": run, "x": step[x].mean / unit, "mean": step[y].mean, "low": step[y].low, "high": step[y].high}
        for run, line in lines.items()
        for step in line.steps
        if math.isfinite(step[x].mean) and math.isfinite(step[y].mean)
    ]


def period_rows(folder: Folder, summary: Summary, name: str) -> charts.Rows:
    """Rows of ``period`` or ``spread`` over local steps, for the runs that average."""
    return [
        {"run": run.name, "x": at, "mean": span.mean, "low": span.low, "high": span.high}
        for run in summary.runs
        for at, span in over_steps(averagings(folder, run.name, run.best.point), name)
    ]


def staleness_rows(folder: Folder, run: RunSummary) -> charts.Rows:
    """Rows of one run's histogram with its rules; empty when nothing was ever stale."""
    logs, _ = logs_of(folder, run.name, run.best.point)
    counts: dict[int, float] = {}
    for log in logs:
        for stale, count in log[-1].staleness.items():
            counts[stale] = counts.get(stale, 0.0) + count
    if not any(counts) or not math.isfinite(total := sum(counts.values())):
        return []
    mean = sum(stale * (count / total) for stale, count in counts.items())
    bars: dict[int, float] = {}
    for stale, count in sorted(counts.items()):
        place = min(stale, TAIL)
        bars[place] = bars.get(place, 0.0) + count / total
    rows: charts.Rows = [{"staleness": stale, "share": share} for stale, share in bars.items()]
    rows.append({"rule": "measured mean", "at": mean})
    law = folder.predicted.get(run.name, {}).get("staleness", math.nan)
    if math.isfinite(law):
        rows.append({"rule": "mean of the law", "at": law})
    return rows


def ledger_rows(folder: Folder, run: RunSummary) -> charts.Rows:
    """Rows of one run's ledger, summed over seeds; empty when every unit was used and none was stale."""
    logs, _ = logs_of(folder, run.name, run.best.point)
    last = [log[-1].workers for log in logs if log[-1].workers]
    workers = max(map(len, last), default=0)

    def units(worker: int, fate: str) -> float:
        found = (one[worker].get(fate, 0.0) for one in last if worker < len(one))
        return sum(count for count in found if math.isfinite(count))

    counts = [{fate: units(worker, fate) for fate in charts.FATES} for worker in range(workers)]
    lost = any(count[fate] for count in counts for fate in charts.FATES if fate != "used")
    if not lost and not staleness_rows(folder, run):
        return []
    groups = min(workers, GROUPS)
    rows: charts.Rows = []
    for group in range(groups):
        first, end = group * workers // groups, (group + 1) * workers // groups
        for place, fate in enumerate(charts.FATES):
            mean = sum(count[fate] for count in counts[first:end]) / (end - first)
            if mean:
                rows.append({"worker": first, "fate": fate, "units": mean, "place": place})
    return rows


def prefers_log(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a logarithmic axis shows more: every mean positive, over more than one decade."""
    means = [row["mean"] for row in rows]
    return bool(means) and min(means) > 0 and max(means) / min(means) > 10
