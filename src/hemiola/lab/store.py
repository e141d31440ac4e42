"""The folder of an experiment: what is finished, what is half done, and who is working in it.

    DIR/experiment.json     what runs here; another experiment is refused
    DIR/cells/NAME/         of each cell; see `hemiola.lab.cell_folder`
    DIR/results.csv, log.jsonl, report.html

Every file is written beside its place and moved there, so a reader or a crash never sees half of one. Should
experiment.json be lost or damaged, the cells still know whose they are.
"""

from __future__ import annotations

import errno
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from hemiola import __version__
from hemiola.errors import InputError
from hemiola.files import PART, UnusableError, contents, sealed, set_aside, unsealed, write_whole
from hemiola.lab.cell_folder import CellFolder, Say, plain
from hemiola.lab.experiment import Cell, Experiment
from hemiola.lab.machine import machine
from hemiola.lab.predicted import predicted
from hemiola.lab.results import Result, csv_text, jsonl_text

_ASSEMBLED = ("results.csv", "log.jsonl", "report.html")
"""Files of the folder that are made from its cells, and made again whenever the experiment goes on."""


@dataclass(frozen=True)
class Failure:
    """A cell that failed: why in one line, the whole traceback if there is one, and the file that keeps it."""

    cell: Cell
    why: str
    trace: str | None
    kept: Path


class Store:
    """One experiment's folder.

    Args:
        folder: DIR; made when it is missing.
        experiment: What runs there.
        data: Folder of the data sets.
    """

    def __init__(self, folder: Path, experiment: Experiment, data: Path | None = None):
        self.folder = folder
        self.experiment = experiment
        self.data = data
        self._lock: BinaryIO | None = None
        names = _cell_names(experiment.cells)
        self._folders = {id(cell): CellFolder.of(cell, folder / "cells" / names[id(cell)]) for cell in experiment.cells}

    def open(self, task: dict[str, Any], resume: bool, jobs: int | None = None, say: Say = lambda line: None) -> None:
        """Take the folder for this experiment; what in it cannot be used is set aside.

        Args:
            task: Facts about the task, for the report.
            resume: Go on with what the folder holds.
            jobs: Cells side by side, for `reopen`.
            say: Told what was set aside.

        Raises:
            InputError: another process works in it, it holds another experiment, or results and no ``resume``.
        """
        cells = self.folder / "cells"
        try:
            cells.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            place = cells if self.folder.is_dir() else self.folder
            raise InputError(f"{place}: cannot be made a folder: {error.strerror}") from None
        self._take_lock()
        try:
            self._check(resume, say)
            for left in self.folder.glob(f"*{PART}"):
                left.unlink(missing_ok=True)  # Half of a file, from a process that was killed.
            for cell in self.experiment.cells:
                self.cell_folder(cell).tidy(say)
            self._write_facts(task, _Started.here(self.experiment, self.data, jobs))
        except BaseException:
            self.close()
            raise

    def _check(self, resume: bool, say: Say) -> None:
        """Refuse the folder unless it is empty, or holds this experiment and is to go on."""
        path = self.folder / "experiment.json"
        begun = any((self.folder / "cells").iterdir())
        advice = "add --resume to go on, or choose another --out"
        try:
            known = self._given(path)
        except UnusableError:
            if not begun:
                raise InputError(f"{path}: is not hemiola's; choose another --out") from None
            if not resume:
                raise InputError(f"{path}: is damaged; {advice}") from None
            say(f"{path}: is damaged; kept as {set_aside(path).name}, and parts are known by what they hold")
            return
        if known is None:
            ours = ("cells", ".lock", *(_ASSEMBLED if begun else ()))
            others = [
                one.name for one in self.folder.iterdir() if one.name not in ours and ".set-aside" not in one.name
            ]
            if others:
                raise InputError(
                    f"{self.folder}: holds other files ({', '.join(sorted(others)[:3])}); choose an empty --out"
                )
            if begun and not resume:
                raise InputError(f"{self.folder}: holds parts of an experiment, but no experiment.json; {advice}")
            return
        mine = plain(self.experiment.given)
        if known != mine:
            different = sorted(key for key in mine.keys() | known.keys() if mine.get(key) != known.get(key))
            raise InputError(
                f"{self.folder}: holds another experiment (different: {', '.join(different)}); choose another --out"
            )
        if begun and not resume:
            raise InputError(f"{self.folder}: already holds this experiment; {advice}")

    @staticmethod
    def _given(path: Path) -> dict[str, Any] | None:
        """The experiment that experiment.json says runs here."""
        if (content := contents(path)) is None:
            return None
        given = unsealed(content).get("given")
        if not isinstance(given, dict):
            raise UnusableError("is damaged")
        return given

    def _write_facts(self, task: dict[str, Any], started: _Started) -> None:
        facts = {
            "hemiola": __version__,
            "given": self.experiment.given,
            "experiment": self.experiment.resolved(),
            "task": task,
            "predicted": predicted(self.experiment),
            "machine": machine(),
            "started": vars(started),
        }
        self.write("experiment.json", sealed(plain(facts), indent=1) + "\n")

    def close(self) -> None:
        """Let others work in the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ------------------------------------------------------------------------------------------------------- cells

    def cell_folder(self, cell: Cell) -> CellFolder:
        """Where a cell keeps its files."""
        return self._folders[id(cell)]

    def finished(self, cell: Cell) -> Result | None:
        """The result of a cell that is done."""
        return self.cell_folder(cell).result(lambda: module_of(cell, self.data))

    def failure(self, cell: Cell, why: str) -> Failure:
        """What is known of a cell that failed."""
        folder = self.cell_folder(cell)
        return Failure(cell, why, folder.error(), folder.path / "error.txt")

    def assemble(self) -> int:
        """Write results.csv and log.jsonl from the finished cells; returns how many there are."""
        results = [result for cell in self.experiment.cells if (result := self.finished(cell)) is not None]
        self.write("results.csv", csv_text((result.row for result in results), list(self.experiment.sweep)))
        self.write("log.jsonl", jsonl_text(line for result in results for line in result.log))
        return len(results)

    def write(self, name: str, text: str) -> None:
        """Write a text file of the folder, all or nothing."""
        write_whole(self.folder / name, text)

    def _take_lock(self) -> None:
        import fcntl

        path = self.folder / ".lock"
        try:
            lock = open(path, "ab")  # noqa: SIM115 - held as long as this process works here
        except OSError as error:
            raise InputError(f"{path}: cannot be opened: {error.strerror}; move it away") from None
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


def module_of(cell: Cell, data: Path | None) -> nn.Module:
    """A fresh module of the cell's task."""
    with torch.random.fork_rng(devices=[]):
        return cell.task(data).model()


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
        content = contents(path) if folder.is_dir() else None
        if content is None:
            raise InputError(f"{folder}: holds no experiment (there is no experiment.json)")
        known = unsealed(content)
        given, started = known["given"], _Started(**known["started"])
    except (UnusableError, KeyError, TypeError):
        raise InputError(f"{path}: is damaged; run the experiment's file again with --resume") from None
    try:
        experiment = Experiment(given, Path(started.base))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    data = None if started.data is None else Path(started.data)
    return SavedRun(experiment, data, started.jobs, Path(started.directory))


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
