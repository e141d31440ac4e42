"""The folder of an experiment: what is finished, what is half done, and who is working in it.

    DIR/experiment.json     what runs here; another experiment is refused
    DIR/cells/NAME/         of each cell: checkpoint.pt while it runs, then result.json
    DIR/results.csv, log.jsonl, report.html

Every file is written beside its place and moved there, so a reader or a crash never sees half of one.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hemiola import __version__
from hemiola.errors import InputError
from hemiola.lab.experiment import Cell, Experiment
from hemiola.lab.predicted import predicted
from hemiola.lab.results import Result, csv_text, jsonl_text


class Store:
    """One experiment's folder.

    Args:
        folder: DIR; made when it is missing.
        experiment: What runs there.
    """

    def __init__(self, folder: Path, experiment: Experiment):
        self.folder = folder
        self.experiment = experiment
        self._lock: BinaryIO | None = None
        self._names = _cell_names(experiment.cells)

    def open(self, task: dict[str, Any], resume: bool, data: Path | None = None, jobs: int | None = None) -> None:
        """Take the folder for this experiment.

        Args:
            task: Facts about the task, for the report.
            resume: Go on with what the folder holds.
            data: Folder of the data sets, for `reopen`.
            jobs: Cells side by side, for `reopen`.

        Raises:
            InputError: another process works in it, it holds another experiment, or results and no ``resume``.
        """
        try:
            (self.folder / "cells").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be made a folder: {error.strerror}") from None
        self._take_lock()
        try:
            self._claim(task, resume, _Started.here(self.experiment, data, jobs))
        except BaseException:
            self.close()
            raise

    def _claim(self, task: dict[str, Any], resume: bool, started: _Started) -> None:
        """Write what runs here, unless something else does or did."""
        known = self._known()
        mine = json.loads(json.dumps(self.experiment.given))
        if known is not None:
            if known.get("given") != mine:
                different = sorted(
                    k
                    for k in mine.keys() | known.get("given", {}).keys()
                    if mine.get(k) != known.get("given", {}).get(k)
                )
                raise InputError(
                    f"{self.folder}: holds another experiment (different: {', '.join(different)}); choose another --out"
                )
            if not resume and any((self.folder / "cells").iterdir()):
                raise InputError(
                    f"{self.folder}: already holds this experiment; add --resume to go on, or choose another --out"
                )
        facts = {
            "hemiola": __version__,
            "given": mine,
            "experiment": self.experiment.resolved(),
            "task": task,
            "predicted": predicted(self.experiment),
            "started": vars(started),
        }
        self.write("experiment.json", json.dumps(facts, indent=1, default=str) + "\n")

    def close(self) -> None:
        """Let others work in the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ------------------------------------------------------------------------------------------------------- cells

    def cell_folder(self, cell: Cell) -> Path:
        """Where a cell keeps its files."""
        return self.folder / "cells" / self._names[id(cell)]

    def finished(self, cell: Cell) -> Result | None:
        """The result of a cell that is done."""
        try:
            saved = json.loads((self.cell_folder(cell) / "result.json").read_text())
            return Result(saved["row"], saved["log"])
        except (FileNotFoundError, ValueError, KeyError):
            return None

    def assemble(self) -> int:
        """Write results.csv and log.jsonl from the finished cells; returns how many there are."""
        results = [result for cell in self.experiment.cells if (result := self.finished(cell)) is not None]
        self.write("results.csv", csv_text((result.row for result in results), list(self.experiment.sweep)))
        self.write("log.jsonl", jsonl_text(line for result in results for line in result.log))
        return len(results)

    # ------------------------------------------------------------------------------------------------------- files

    def write(self, name: str, text: str) -> None:
        """Write a text file of the folder, all or nothing."""
        with replacing(self.folder / name) as file:
            file.write(text.encode())

    def _known(self) -> dict[str, Any] | None:
        path = self.folder / "experiment.json"
        try:
            known = json.loads(path.read_text())
        except FileNotFoundError:
            others = [entry.name for entry in self.folder.iterdir() if entry.name not in ("cells", ".lock")]
            if others:
                raise InputError(
                    f"{self.folder}: holds other files ({', '.join(sorted(others)[:3])}); choose an empty --out"
                ) from None
            return None
        except (OSError, ValueError):
            raise InputError(f"{path}: is not hemiola's; choose another --out") from None
        if not isinstance(known, dict):
            raise InputError(f"{path}: is not hemiola's; choose another --out")
        return known

    def _take_lock(self) -> None:
        import fcntl

        lock = open(self.folder / ".lock", "ab")  # noqa: SIM115 - held as long as this process works here
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise InputError(
                    f"{self.folder}: another hemiola run is working in it; wait for it or choose another --out"
                ) from None
            raise
        self._lock = lock


@dataclass(frozen=True)
class _Started:
    """With what a run was started, as experiment.json keeps it; every path is absolute.

    Attributes:
        base: Folder that relative paths in the experiment start from.
        directory: The current one, from which own tasks are imported.
        data: Folder of the data sets; None leaves it to HEMIOLA_DATA.
        jobs: Cells side by side; None for as many as there are cores.
    """

    base: str
    directory: str
    data: str | None
    jobs: int | None

    @classmethod
    def here(cls, experiment: Experiment, data: Path | None, jobs: int | None) -> _Started:
        return cls(
            str(experiment.base.absolute()), str(Path.cwd()), None if data is None else str(data.absolute()), jobs
        )


@dataclass(frozen=True)
class SavedRun:
    """An experiment read back from its folder, with what it was started with."""

    experiment: Experiment
    data: Path | None
    jobs: int | None
    directory: Path


def reopen(folder: Path) -> SavedRun:
    """What runs, or ran, in a folder: everything needed to go on with it.

    Raises:
        InputError: the folder holds no experiment, or its experiment.json is damaged.
    """
    path = folder / "experiment.json"
    try:
        known = json.loads(path.read_text())
        started = _Started(**known["started"])
        experiment = Experiment(known["given"], Path(started.base))
        data = None if started.data is None else Path(started.data)
        return SavedRun(experiment, data, started.jobs, Path(started.directory))
    except FileNotFoundError:
        raise InputError(f"{folder}: holds no experiment (there is no experiment.json)") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path}: is damaged; run the experiment's file again with --resume") from None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its place only when it is complete and on disk.

    Raises:
        InputError: the disk is full or the file cannot be written; what was there before is still there.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(
            f"{path}: cannot be written: {error.strerror}; finished parts are kept, --resume goes on from them"
        ) from None


def save_result(folder: Path, result: Result) -> None:
    """Mark a cell as finished."""
    with replacing(folder / "result.json") as file:
        file.write(json.dumps({"row": result.row, "log": result.log}).encode())
    (folder / "checkpoint.pt").unlink(missing_ok=True)


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Keep a cell's state."""
    with replacing(folder / "checkpoint.pt") as file:
        torch.save(state, file)


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The state to go on from, if there is one."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # torch.load raises many kinds for a damaged file
        raise InputError(f"{path}: is damaged ({type(error).__name__}); delete it to start this part again") from None
    return state


def _cell_names(cells: list[Cell]) -> dict[int, str]:
    """A folder name for every cell that says what it is."""
    names, points = {}, list({json.dumps(cell.point, default=str): None for cell in cells})
    runs = list(dict.fromkeys(cell.run for cell in cells))
    for cell in cells:
        slug = re.sub(r"[^a-z0-9]+", "-", cell.run.lower()).strip("-")[:40]
        name = f"{runs.index(cell.run):02d}-{slug}"
        if cell.point:
            name += f"-point{points.index(json.dumps(cell.point, default=str))}"
        names[id(cell)] = f"{name}-seed{cell.seed}"
    return names
