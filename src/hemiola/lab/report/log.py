"""The evaluations of every cell, from the lines of log.jsonl; and plain values of any file, read without trust.

A log may have 100 MB: of every line only the numbers stay, as columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hemiola.lab.results import SCHEMA

# The numbers of one evaluation: those of the line itself, and those its policies tell.
_OWN = ("lr", *(column.name for column in SCHEMA if column.title and not column.logged))
_TOLD = {"order": ("herding", "herding_ratio", "skipped"), "pace": ("k", "idle_share", "wasted_share")}
NUMBERS = (*_OWN, *(name for names in _TOLD.values() for name in names))
# What is known of every averaging.
HISTORY = ("step", "period", "spread", "seconds")

# A point of the sweep: (key, value as text) pairs in the order of the keys; empty without a sweep.
Point = tuple[tuple[str, str], ...]
Key = tuple[str, Point, str]  # run, point, seed: one cell
Counts = Mapping[str, float]


@dataclass(frozen=True)
class Log:
    """The evaluations of one cell, in the order they were made.

    Attributes:
        numbers: By name, one for every evaluation.
        history: By name, one for every averaging; see `HISTORY`.
        staleness: How many reports of each staleness were merged, in all.
        workers: Units used, cancelled, dropped and refused of each worker, in all.
        labels: The same by label of the examples, where the log has it.
        windows: Short stretches of the run, by what workers did: (worker, begin, end) in seconds.
        ks: (seconds, K) whenever K changed.
    """

    numbers: Mapping[str, np.ndarray]
    history: Mapping[str, np.ndarray] = field(default_factory=dict)
    staleness: Mapping[int, float] = field(default_factory=dict)
    workers: tuple[Counts, ...] = ()
    labels: Mapping[str, Counts] = field(default_factory=dict)
    windows: tuple[Mapping[str, np.ndarray], ...] = ()
    ks: tuple[tuple[float, float], ...] = ()

    def __len__(self) -> int:
        return len(self.numbers["epochs"])


def number(value: object) -> float:
    """A float, NaN for whatever is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except ValueError:
        return math.nan
    except OverflowError:
        return math.inf


def table(value: object) -> dict[str, Any]:
    """A mapping with text keys, empty for whatever is not one."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def tables(value: object) -> list[dict[str, Any]]:
    """A list of mappings, empty for whatever is not one."""
    return [table(item) for item in value] if isinstance(value, list) else []


def point_of(sweep: Mapping[str, object]) -> Point:
    """A point of the sweep in the one form in which the log and results.csv agree: 0.10 and "1e-1" are both 0.1."""
    return tuple((key, plain(sweep[key])) for key in sorted(sweep)) if sweep else ()


def plain(value: object) -> str:
    """A seed, or a value of the sweep, as text that is the same wherever it was read."""
    if isinstance(value, int):
        return str(value)  # a seed may have more digits than a float; results.csv has True and False
    if isinstance(value, str) and value.isdecimal():
        return value
    if math.isfinite(as_number := number(value)):
        return f"{as_number:.12g}"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def column(values: Sequence[object]) -> np.ndarray:
    """Numbers as an array; the usual kinds at once, others one by one."""
    if {type(value) for value in values} <= {float, int, type(None)}:
        try:
            return np.array(values, dtype=float)  # None becomes NaN
        except OverflowError:
            pass
    return np.array([number(value) for value in values], dtype=float)


def logs_of_cells(lines: Iterable[Mapping[str, Any]]) -> dict[Key, Log]:
    """The lines of log.jsonl, each with a run, cell by cell."""
    found: dict[Key, _Evaluations] = {}
    for fields in lines:
        key = (str(fields["run"]), point_of(table(fields.get("sweep"))), plain(fields.get("seed", "")))
        if key not in found:
            found[key] = _Evaluations()
        found[key].add(fields)
    return {key: evaluations.log() for key, evaluations in found.items()}


class _Evaluations:
    """Gathers the lines of one cell."""

    def __init__(self) -> None:
        self._lines: dict[float, tuple[list[Any], list[list[Any]]]] = {}
        self._windows: dict[float, Mapping[str, np.ndarray]] = {}
        self._ks: dict[float, list[tuple[float, float]]] = {}
        self._last: Mapping[str, Any] = {}

    def add(self, fields: Mapping[str, Any]) -> None:
        policies: dict[str, dict[str, Any]] = {
            name: told if isinstance(told := fields.get(name), dict) else {} for name in ("order", "period", "pace")
        }
        values = [fields.get(name) for name in _OWN]
        values += [policies[policy].get(name) for policy, names in _TOLD.items() for name in names]
        history = policies["period"].get("history")
        averaged = [
            [one.get(name) for name in HISTORY]
            for one in (history if isinstance(history, list) else ())
            if isinstance(one, dict)
        ]
        # A resumed run may evaluate again what it had evaluated before it was stopped: the later line counts.
        when = number(fields.get("updates"))
        when = when if math.isfinite(when) else -1.0 - len(self._lines)
        self._lines[when] = (values, averaged)
        if window := _window(fields.get("timeline")):
            self._windows[when] = window
        if isinstance(changes := policies["pace"].get("changes"), list):
            self._ks[when] = [(number(one[0]), number(one[1])) for one in changes if _pair(one)]
        self._last = fields

    def log(self) -> Log:
        lines = list(self._lines.values())
        averaged = [one for _, history in lines for one in history]
        pace = table(self._last.get("pace"))
        counts = {number(key): number(count) for key, count in table(pace.get("staleness")).items()}
        return Log(
            numbers=dict(zip(NUMBERS, map(column, zip(*(values for values, _ in lines), strict=True)), strict=True)),
            history=dict(zip(HISTORY, map(column, zip(*averaged, strict=True)), strict=True)) if averaged else {},
            staleness={
                int(key): count for key, count in counts.items() if 0 <= key < math.inf and 0 < count < math.inf
            },
            workers=tuple(map(_counts, tables(self._last.get("workers")))),
            labels={label: _counts(table(one)) for label, one in table(self._last.get("labels")).items()},
            windows=tuple(self._windows.values()),
            ks=tuple(one for changes in self._ks.values() for one in changes),
        )


def _counts(one: Mapping[str, object]) -> Counts:
    return {key: number(count) for key, count in one.items()}


def _pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2


def _window(value: object) -> Mapping[str, np.ndarray]:
    """The intervals of a time line that have a worker, a begin and an end."""
    made = {}
    for what, intervals in table(value).items():
        whole = [one for one in (intervals if isinstance(intervals, list) else ()) if isinstance(one, list)]
        whole = [one for one in whole if len(one) == 3 and all(math.isfinite(number(part)) for part in one)]
        if whole:
            made[what] = np.array([[number(part) for part in one] for one in whole])
    return made
