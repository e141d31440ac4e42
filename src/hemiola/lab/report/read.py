"""A results folder as records: ``experiment.json``, ``results.csv`` and ``log.jsonl``.

A folder may belong to a run that is still going on, and a diverged run leaves NaN and infinity behind; so a number
that is missing or is not a number becomes NaN here, once, and everything later only asks whether it is finite. What
cannot be read at all is an `InputError` that names the file.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hemiola.errors import InputError
from hemiola.lab.report.log import Key, Log, Point, logs_of_cells, number, plain, point_of, table, tables
from hemiola.lab.results import COLUMNS


@dataclass(frozen=True)
class Row:
    """One line of results.csv: how one cell (a run, at one point of the sweep, with one seed) ended."""

    run: str
    point: Point
    seed: str
    status: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Folder:
    """Everything the report is made from; of several folders, what they hold together.

    Attributes:
        paths: Where it came from.
        version: Of the hemiola that wrote the folder.
        given: The experiment as it was written, plain; empty where that is not known.
        experiment: The same with every default filled in.
        task: Name, metric, higher_is_better, convex, examples, parameters.
        machine: On what it ran.
        predicted: By run, ``update_seconds`` and ``staleness`` as theory has them.
        rows: Finished cells.
        log: Evaluations by cell.
    """

    paths: tuple[Path, ...]
    version: str
    given: Mapping[str, Any]
    experiment: Mapping[str, Any]
    task: Mapping[str, Any]
    machine: Mapping[str, Any]
    predicted: Mapping[str, Mapping[str, float]]
    rows: tuple[Row, ...]
    log: Mapping[Key, Log]

    @cached_property
    def ended(self) -> dict[Key, Row]:
        """The rows by cell."""
        return {(row.run, row.point, row.seed): row for row in self.rows}

    @cached_property
    def _cells(self) -> dict[str, dict[Point, dict[str, str]]]:
        found: dict[str, dict[Point, dict[str, str]]] = {}
        for run, point, seed in dict.fromkeys((*self.ended, *self.log)):
            row = self.ended.get((run, point, seed))
            found.setdefault(run, {}).setdefault(point, {})[seed] = "running" if row is None else row.status
        return found

    def points(self, run: str) -> list[Point]:
        """The points of the sweep at which a run has finished or begun."""
        return list(self._cells.get(run, {}))

    def seeds(self, run: str, point: Point) -> dict[str, str]:
        """By seed, the status of a run at a point: done, diverged, failed or running."""
        return self._cells.get(run, {}).get(point, {})

    @cached_property
    def runs(self) -> list[str]:
        """Names in the order of the experiment file."""
        named = [str(run.get("name", "")) for run in tables(self.experiment.get("run"))]
        seen = [row.run for row in self.rows] + [run for run, _, _ in self.log]
        return list(dict.fromkeys([*(name for name in named if name), *seen]))

    def settings(self, run: str) -> Mapping[str, Any]:
        """The run's own table of the experiment, over the experiment's defaults."""
        return {**self.experiment, **self._own.get(run, {})}

    @cached_property
    def _own(self) -> dict[str, dict[str, Any]]:
        return {str(table.get("name")): table for table in reversed(tables(self.experiment.get("run")))}

    @cached_property
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


# --------------------------------------------------------------------------------------------------------- folders


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
        paths=(path,),
        version=str(about.get("hemiola", "")),
        given=table(about.get("given")),
        experiment=table(about.get("experiment")),
        task=table(about.get("task")),
        machine=table(about.get("machine")),
        predicted=predicted,
        rows=tuple(map(_row, rows)),
        log=logs_of_cells(log),
    )


def together(folders: Sequence[Folder]) -> Folder:
    """Several folders as one, every run named after its folder where two would be called the same."""
    if len(folders) == 1:
        return folders[0]
    renamed = _told_apart(folders)
    return Folder(
        paths=tuple(path for folder in folders for path in folder.paths),
        version=", ".join(dict.fromkeys(folder.version for folder in folders)),
        given={},
        experiment={"run": [run for folder in renamed for run in tables(folder.experiment.get("run"))]},
        task=_common_task([folder.task for folder in folders]),
        machine={},
        predicted={run: law for folder in renamed for run, law in folder.predicted.items()},
        rows=tuple(row for folder in renamed for row in folder.rows),
        log={key: log for folder in renamed for key, log in folder.log.items()},
    )


def _told_apart(folders: Sequence[Folder]) -> list[Folder]:
    """The folders with every run named after its folder where two would be called the same."""
    every = [run for folder in folders for run in folder.runs]
    labels = _labels([path for folder in folders for path in folder.paths[:1]])
    return [
        _renamed(folder, {run: f"{run} · {label}" if every.count(run) > 1 else run for run in folder.runs})
        for folder, label in zip(folders, labels, strict=True)
    ]


def _common_task(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several tasks agree on, under all their names."""
    shared = {key: value for key, value in tasks[0].items() if all(task.get(key) == value for task in tasks)}
    names = dict.fromkeys(str(task.get("name", "")) for task in tasks)
    return shared | {"name": " and ".join(filter(None, names))}


def _labels(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise InputError(f"{paths[0]} is given twice")


def _renamed(folder: Folder, names: Mapping[str, str]) -> Folder:
    """The same folder under other names; what its file says for all runs is said of each."""
    runs = []
    for run in folder.runs:
        settings = {key: value for key, value in folder.settings(run).items() if key not in ("run", "title")}
        runs.append(settings | {"name": names[run]})
    return replace(
        folder,
        experiment={"run": runs},
        predicted={names[run]: law for run, law in folder.predicted.items() if run in names},
        rows=tuple(replace(row, run=names[row.run]) for row in folder.rows),
        log={(names[run], point, seed): log for (run, point, seed), log in folder.log.items()},
    )


# ---------------------------------------------------------------------------------------------------------- files


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} is missing; give a folder that `hemiola run --out` wrote") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def _json(where: Path | str, text: str | bytes) -> dict[str, Any]:
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
        seed=plain(line.get("seed", "")),
        status=str(line["status"]),
        numbers={key: number(line.get(key)) for key in COLUMNS},
    )


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            for at, line in enumerate(file, start=1):
                if not line.strip() or (not line.endswith(b"\n") and not _complete(line)):
                    continue  # what follows the last newline may be a line that is being written
                fields = _json(f"{path} line {at}", line)
                if "run" not in fields:
                    raise InputError(f"{path} line {at} has no run")
                yield fields
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def _complete(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
