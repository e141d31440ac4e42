"""The rows behind every chart: plain numbers, with what a chart must not show already left out.

A function returns no rows where the folder has nothing of its kind; the chart is then not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import stdev

import numpy as np

from hemiola.contracts import FOLLOWED, LINK
from hemiola.lab.report import words
from hemiola.lab.report.curves import logs_of, over, spans_of
from hemiola.lab.report.log import Counts, Log, Point, number
from hemiola.lab.report.marks import DOINGS, FATES, Rows
from hemiola.lab.report.summary import RunSummary, Summary
from hemiola.lab.results import BY_NAME

AGAINST = ("epochs", "seconds", "bytes_per_worker")
TAIL = 24  # stalenesses from here on share one bar: a long tail of single reports cannot be seen
GROUPS = 120  # more workers than this are shown as the means of so many groups
LABELS = 40  # more labels than this cannot be told apart
MOMENTS = 120  # places at which a step function of time is drawn


# ------------------------------------------------------------------------------------------------------ what is reached


def target_rows(runs: Sequence[RunSummary], cost: str, aim: float) -> Rows:
    """What a target costs every run, as bars, and every seed, as dots; the cost ``end`` is where they end."""
    unit, name = bar_unit(runs, cost, aim)
    rows: Rows = []
    for run in runs:
        if every := len(run.best.curves):
            values = {seed: value / unit for seed, value in _costs(run, cost, aim).items()}
            rows += [{"run": run.name, "seed": seed, "value": value} for seed, value in values.items()]
            bar = {"mean": sum(values.values()) / every} if len(values) == every else {}
            text = _bar_text(cost, list(values.values()), every, name)
            rows.append({"run": run.name, **bar, "text": text, "end": max(values.values(), default=0.0)})
    return rows if any("mean" in row for row in rows) else []


def bar_unit(runs: Sequence[RunSummary], cost: str, aim: float) -> tuple[float, str]:
    """The unit of the bars: divisor and name."""
    return words.unit_of(cost, max((value for run in runs for value in _costs(run, cost, aim).values()), default=0.0))


def _costs(run: RunSummary, cost: str, aim: float) -> dict[str, float]:
    """By seed, what it cost, as far as the seed got there."""
    curves = run.best.curves.items()
    each = {seed: curve.final if cost == "end" else curve.stays_below(aim, cost) for seed, curve in curves}
    return {seed: value for seed, value in each.items() if math.isfinite(value)}


def _bar_text(cost: str, shown: Sequence[float], every: int, unit: str) -> str:
    if not shown:
        return "no finite end" if cost == "end" else "not reached"
    if len(shown) < every:
        return f"only {len(shown)} of {every} seeds"
    mean = words.with_deviation(sum(shown) / every, stdev(shown) if every > 1 else math.nan)[0]
    return f"{mean} {unit}".strip()


# ----------------------------------------------------------------------------------------------------------- curves


def curve_rows(summary: Summary, x: str, y: str) -> Rows:
    """Every run's mean line and band."""
    unit = axis(summary, x)[0]
    rows: Rows = []
    for run, line in summary.curves.items():
        for at, mean, low, high in zip(line.mean[x] / unit, line.mean[y], line.low[y], line.high[y], strict=True):
            if math.isfinite(at) and math.isfinite(mean):
                rows.append(_span(run, float(at), float(mean), float(low), float(high)))
    return rows


def axis(summary: Summary, x: str) -> tuple[float, str]:
    """Divisor and title of a horizontal axis: times and sizes in one unit that suits the largest."""
    every = [value for line in summary.curves.values() for value in line.mean[x] if math.isfinite(value)]
    unit, name = words.unit_of(x, max(every, default=0.0))
    return unit, BY_NAME[x].title + (f" ({name})" if name else "")


def prefers_log(rows: Rows) -> bool:
    """Whether a logarithmic axis shows more: every mean positive, over more than one decade."""
    means = [row["mean"] for row in rows]
    return bool(means) and min(means) > 0 and max(means) / min(means) > 10


def sweep_rows(summary: Summary, key: str) -> Rows:
    """The end of every run over the values of a swept key; with several keys, at the best of the others."""
    rows: Rows = []
    for run in summary.drawn:
        best: dict[float, tuple[float, float, float]] = {}
        for ended in run.points:  # the best one first
            value = number(dict(ended.point).get(key))
            finals = [curve.final for curve in ended.curves.values()]
            if math.isfinite(value) and value not in best and ended.sound and all(map(math.isfinite, finals)):
                best[value] = (ended.final.mean, min(finals), max(finals))
        rows += [_span(run.name, value, *span) for value, span in sorted(best.items())] if len(best) > 1 else []
    return rows


def _span(run: str, x: float, mean: float, low: float, high: float) -> dict[str, object]:
    return {"run": run, "x": x, "mean": mean, "low": low, "high": high}


# ------------------------------------------------------------------------------------------------- decisions over time


def averaging_rows(summary: Summary, name: str) -> Rows:
    """``period`` or ``spread`` of all averagings over cluster time, for the runs that take local steps."""
    unit = axis(summary, "seconds")[0]
    rows: Rows = []
    for run in summary.drawn:
        histories = [log.history for log in _logs(summary, run) if log.history]
        spans = over((history["seconds"] / unit, history[name]) for history in histories)
        rows += [_span(run.name, *span) for span in spans]
    return rows


def k_rows(summary: Summary) -> Rows:
    """K over cluster time, of the runs in which it changes."""
    return _changing(summary, lambda log: log.ks or _pairs(log, "k"))


def rate_rows(summary: Summary) -> Rows:
    """The learning rate over cluster time, of the runs in which it changes."""
    return _changing(summary, lambda log: _pairs(log, "lr"))


def _pairs(log: Log, name: str) -> list[tuple[float, float]]:
    return list(zip(log.numbers["seconds"].tolist(), log.numbers[name].tolist(), strict=True))


def _changing(summary: Summary, told: Callable[[Log], Sequence[tuple[float, float]]]) -> Rows:
    """Mean and range over seeds of a step function of time, at evenly spaced moments."""
    unit = axis(summary, "seconds")[0]
    rows: Rows = []
    for run in summary.drawn:
        steps = [
            [(at, value) for at, value in told(log) if math.isfinite(at) and math.isfinite(value)]
            for log in _logs(summary, run)
        ]
        if not steps or not all(steps) or all(len({value for _, value in one}) < 2 for one in steps):
            continue
        ends = [
            max(log.numbers["seconds"][-1], one[-1][0]) for log, one in zip(_logs(summary, run), steps, strict=True)
        ]
        moments = np.linspace(0.0, min(ends), MOMENTS)
        values = [
            np.array([value for _, value in one])[
                np.maximum(np.searchsorted([at for at, _ in one], moments, side="right") - 1, 0)
            ]
            for one in steps
        ]
        mean, low, high = spans_of(np.array(values))
        rows += [_span(run.name, *map(float, one)) for one in zip(moments / unit, mean, low, high, strict=True)]
    return rows


# ---------------------------------------------------------------------------------------------------------- workers


def _logs(summary: Summary, run: RunSummary) -> list[Log]:
    return logs_of(summary.folder, run.name, run.best.point)[0]


def staleness_rows(summary: Summary, run: RunSummary) -> Rows:
    """One run's histogram with its rules; nothing when nothing was ever stale."""
    counts: dict[int, float] = {}
    for log in _logs(summary, run):
        for stale, count in log.staleness.items():
            counts[stale] = counts.get(stale, 0.0) + count
    if not any(counts) or not math.isfinite(total := sum(counts.values())):
        return []
    mean = sum(stale * (count / total) for stale, count in counts.items())
    shares: dict[int, float] = {}
    for stale, count in sorted(counts.items()):
        place = min(stale, TAIL)
        shares[place] = shares.get(place, 0.0) + count / total
    rows: Rows = [{"staleness": stale, "share": share} for stale, share in shares.items()]
    rows.append({"rule": "measured mean", "at": mean})
    law = summary.folder.predicted.get(run.name, {}).get("staleness", math.nan)
    if math.isfinite(law):
        rows.append({"rule": "predicted mean", "at": law})
    return rows


def ledger_rows(summary: Summary, run: RunSummary) -> Rows:
    """What became of each worker's units, summed over seeds; nothing when all were used and none was stale."""
    last = [log.workers for log in _logs(summary, run) if log.workers]
    workers = max(map(len, last), default=0)
    counts = [_summed(one[worker] for one in last if worker < len(one)) for worker in range(workers)]
    lost = any(count[fate] for count in counts for fate in FATES if fate != "used")
    if not lost and not staleness_rows(summary, run):
        return []
    groups = min(workers, GROUPS)
    rows: Rows = []
    for group in range(groups):
        first, end = group * workers // groups, (group + 1) * workers // groups
        part = {fate: sum(count[fate] for count in counts[first:end]) / (end - first) for fate in FATES}
        rows += _fates(str(first), part)
    return rows


def label_rows(summary: Summary, run: RunSummary) -> Rows:
    """Visits to an average example of each label, by fate; nothing when all labels were visited alike."""
    logs = [log for log in _logs(summary, run) if log.labels]
    labels = list(dict.fromkeys(label for log in logs for label in log.labels))[:LABELS]
    rows: Rows = []
    for label in labels:
        found = [log.labels[label] for log in logs if label in log.labels]
        examples = sum(one.get("examples", math.nan) for one in found)
        if examples > 0:
            rows += _fates(label, {fate: count / examples for fate, count in _summed(found).items()})
    used = [row["units"] for row in rows if row["fate"] == "used"]
    alike = len(rows) == len(used) == len(labels) and max(used, default=0.0) <= 1.01 * min(used, default=0.0)
    return [] if alike else rows


def _summed(counts: Iterable[Counts]) -> dict[str, float]:
    every = list(counts)
    return {fate: sum(count for one in every if math.isfinite(count := one.get(fate, 0.0))) for fate in FATES}


def _fates(name: str, counts: Counts) -> Rows:
    places = {fate: place for place, fate in enumerate(FATES)}
    return [
        {"name": name, "fate": fate, "units": count, "place": places[fate]} for fate, count in counts.items() if count
    ]


def window_rows(summary: Summary, run: RunSummary, which: int) -> tuple[Rows, str]:
    """What each worker did in a recorded window of one seed, and the title of its axis."""
    windows = next((log.windows for log in _logs(summary, run) if log.windows), ())
    if len(windows) < (2 if which == 0 else 1):  # of a single window there is no first and last
        return [], ""
    intervals = {what: one for what, one in windows[which].items() if what in DOINGS}
    first = min((float(one[:, 1].min()) for one in intervals.values()), default=0.0)
    last = max((float(one[:, 2].max()) for one in intervals.values()), default=0.0)
    unit, name = words.unit_of("seconds", last - first)
    rows: Rows = [
        {
            "worker": "link" if worker == LINK else str(int(worker)),
            "what": what,
            "begin": (begin - first) / unit,
            "end": (end - first) / unit,
        }
        for what, one in intervals.items()
        for worker, begin, end in one.tolist()
        if worker < FOLLOWED
    ]
    return (rows if last > first else []), f"{name} after {words.amount('seconds', first)} of cluster time"


def swept_keys(summary: Summary) -> list[str]:
    """The keys of the sweep."""
    points: list[Point] = [ended.point for run in summary.runs for ended in run.points]
    return list(dict.fromkeys(key for point in points for key, _ in point))
