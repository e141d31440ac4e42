"""A results folder as records: ``experiment.json``, ``results.csv`` and ``log.jsonl``.

A folder may belong to a run that is still going on, and a diverged run leaves NaN and infinity behind; so a number
that is missing or is not a number becomes NaN here, once, and everything later only asks whether it is finite. What
cannot be read at all is an `InputError` that names the file.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hemiola.errors import InputError

# The columns of results.csv that every experiment has; any other column is a swept key.
COLUMNS = (
    "run",
    "seed",
    "workers",
    "updates",
    "epochs",
    "seconds",
    "train_loss",
    "train_gap",
    "test_loss",
    "test_metric",
    "bytes_per_worker",
    "averagings",
    "mean_period",
    "weighted_spread",
    "mean_staleness",
    "max_staleness",
    "mean_update_seconds",
    "units_cancelled",
    "units_dropped",
    "wall_seconds",
    "status",
)

# A point of the sweep: (key, value as text) pairs in the order of the keys; empty without a sweep.
Point = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Row:
    """One line of results.csv: how one run, at one point of the sweep and one seed, ended."""

    run: str
    point: Point
    seed: str
    status: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Averaged:
    """One averaging, from ``period.history`` of the log."""

    step: float
    period: float
    spread: float
    lr: float


@dataclass(frozen=True)
class Evaluation:
    """One line of log.jsonl.

    Attributes:
        run, point, seed: Which run this is part of.
        numbers: The line's numbers by name, with ``herding`` and ``skipped`` of the order and ``k``, ``idle_share`` and
            ``wasted_share`` of the pace among them.
        history: The averagings since the evaluation before.
        staleness: How many reports of each staleness were merged since the start.
        workers: Units used, cancelled, dropped and refused of each worker since the start.
    """

    run: str
    point: Point
    seed: str
    numbers: Mapping[str, float]
    history: tuple[Averaged, ...] = ()
    staleness: Mapping[int, float] = field(default_factory=dict)
    workers: tuple[Mapping[str, float], ...] = ()


@dataclass(frozen=True)
class Folder:
    """Everything the report is made from.

    Attributes:
        version: Of the hemiola that wrote the folder.
        experiment: The resolved experiment, plain.
        task: Name, metric, higher_is_better, convex, examples, parameters.
        predicted: By run, ``update_seconds`` and ``staleness`` as theory has them.
        rows: Finished parts.
        log: Evaluations by (run, point, seed), in the order they were made.
    """

    path: Path
    version: str
    experiment: Mapping[str, Any]
    task: Mapping[str, Any]
    predicted: Mapping[str, Mapping[str, float]]
    rows: tuple[Row, ...]
    log: Mapping[tuple[str, Point, str], tuple[Evaluation, ...]]

    @property
    def runs(self) -> list[str]:
        """Names in the order of the experiment file."""
        named = [str(run.get("name", "")) for run in tables(self.experiment.get("run"))]
        seen = [row.run for row in self.rows] + [run for run, _, _ in self.log]
        return list(dict.fromkeys([*(name for name in named if name), *seen]))

    def settings(self, run: str) -> Mapping[str, Any]:
        """The run's own table of the experiment, over the experiment's defaults."""
        own = next((table for table in tables(self.experiment.get("run")) if str(table.get("name")) == run), {})
        return {**self.experiment, **own}

    @property
    def shared(self) -> dict[str, Any]:
        """The settings that are the same in every run, without the list of runs and without what was left open."""
        every = [self.settings(run) for run in self.runs] or [self.experiment]
        return {
            key: value
            for key, value in every[0].items()
            if key not in ("run", "name")
            and value not in (None, {}, [])
            and all(one.get(key) == value for one in every)
        }


def read_folder(path: Path) -> Folder:
    """Read a results folder.

    Args:
        path: The folder ``hemiola run --out`` wrote.

    Returns:
        Its contents.

    Raises:
        InputError: The folder, or something in it, cannot be read.
    """
    if not path.is_dir():
        raise InputError(f"{path} is not a folder; give the folder that `hemiola run --out` wrote")
    return folder_of(read_about(path), _csv(path / "results.csv"), _jsonl(path / "log.jsonl"), path)


def read_about(path: Path) -> dict[str, Any]:
    """What a folder's experiment.json holds."""
    return _json(path / "experiment.json", _text(path / "experiment.json"))


def folder_of(
    about: Mapping[str, Any],
    rows: Iterable[Mapping[str, object]],
    log: Iterable[Mapping[str, Any]],
    path: Path = Path(),
) -> Folder:
    """The same from what the three files hold.

    Args:
        about: experiment.json.
        rows: The rows of results.csv, by column; each has a run and a status.
        log: The lines of log.jsonl; each has a run.
        path: Where they came from.
    """
    predicted = {
        run: {key: number(value) for key, value in table(law).items()}
        for run, law in table(about.get("predicted")).items()
    }
    return Folder(
        path=path,
        version=str(about.get("hemiola", "")),
        experiment=table(about.get("experiment")),
        task=table(about.get("task")),
        predicted=predicted,
        rows=tuple(map(_row, rows)),
        log=_log(log),
    )


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp's files are private; a report is as public as any other file
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    return path


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
    return tuple((key, _plain(sweep[key])) for key in sorted(sweep))


def _plain(value: object) -> str:
    if isinstance(value, int):
        return str(value)  # a seed may have more digits than a float; results.csv has True and False
    if isinstance(value, str) and value.isdecimal():
        return value
    if math.isfinite(as_number := number(value)):
        return f"{as_number:.12g}"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} is missing; give a folder that `hemiola run --out` wrote") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def _json(where: Path | str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{where} must hold a JSON object, got {type(value).__name__}")
    return value


def _csv(path: Path) -> Iterator[dict[str, str]]:
    if not path.exists():  # nothing has finished yet
        return
    try:
        lines = list(csv.DictReader(io.StringIO(_text(path), newline=""), restkey="", restval=""))
    except csv.Error as error:
        raise InputError(f"{path} is not CSV: {error}") from None
    for at, line in enumerate(lines, start=2):
        if not line.get("run") or not line.get("status"):
            raise InputError(f"{path} line {at} has no run or no status; the columns are {' '.join(COLUMNS)}")
        yield line


def _row(line: Mapping[str, object]) -> Row:
    return Row(
        run=str(line["run"]),
        point=point_of({key: value for key, value in line.items() if key and key not in COLUMNS}),
        seed=_plain(line.get("seed", "")),
        status=str(line["status"]),
        numbers={key: number(line.get(key)) for key in COLUMNS},
    )


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    lines = _text(path).split("\n")
    unfinished = lines.pop()  # what follows the last newline is a line that is being written
    if unfinished.strip() and _complete(unfinished):
        lines.append(unfinished)
    for at, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        fields = _json(f"{path} line {at}", line)
        if "run" not in fields:
            raise InputError(f"{path} line {at} has no run")
        yield fields


def _log(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[str, Point, str], tuple[Evaluation, ...]]:
    found: dict[tuple[str, Point, str], dict[float, Evaluation]] = {}
    for at, fields in enumerate(lines):
        seen = _evaluation(fields)
        # A resumed run may evaluate again what it had evaluated before it was stopped: the later line counts.
        when = seen.numbers["updates"] if math.isfinite(seen.numbers["updates"]) else -1 - at
        found.setdefault((seen.run, seen.point, seen.seed), {})[when] = seen
    return {key: tuple(lines.values()) for key, lines in found.items()}


def _complete(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _evaluation(fields: Mapping[str, Any]) -> Evaluation:
    order, period, pace = table(fields.get("order")), table(fields.get("period")), table(fields.get("pace"))
    numbers = {key: number(fields.get(key)) for key in COLUMNS}
    numbers |= {key: number(order.get(key)) for key in ("herding", "skipped")}
    numbers |= {key: number(pace.get(key)) for key in ("k", "idle_share", "wasted_share")}
    history = (
        Averaged(*(number(one.get(key)) for key in ("step", "period", "spread", "lr")))
        for one in tables(period.get("history"))
    )
    counts = {number(key): number(count) for key, count in table(pace.get("staleness")).items()}
    return Evaluation(
        run=str(fields["run"]),
        point=point_of(table(fields.get("sweep"))),
        seed=_plain(fields.get("seed", "")),
        numbers=numbers,
        history=tuple(history),
        staleness={int(key): count for key, count in counts.items() if 0 <= key < math.inf and 0 < count < math.inf},
        workers=tuple({key: number(count) for key, count in one.items()} for one in tables(fields.get("workers"))),
    )
