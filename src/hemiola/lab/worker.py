"""One cell in a process of its own: trains, reports progress, keeps checkpoints, stops when told."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hemiola.contracts import State
from hemiola.errors import InputError, told
from hemiola.lab.cell_folder import CellFolder
from hemiola.lab.experiment import Cell
from hemiola.lab.models import trained_by
from hemiola.lab.output import Output
from hemiola.lab.results import Result, result_of
from hemiola.lab.upkeep import Cadence
from hemiola.training import Training

PROGRESS_SECONDS = 0.25


class CellWatch:
    """Called after every update: sends progress, writes checkpoints, and says whether to go on.

    Args:
        pipe: To the process that supervises the cells; anything it sends means stop.
        folder: Of the cell.

    Attributes:
        stopped: Set from outside to end the run after the present update, with a checkpoint.
        cadence: How often a checkpoint is written.
        start: Share of the run that was over when this process took it on.
    """

    def __init__(self, pipe: Connection, folder: CellFolder):
        self.pipe = pipe
        self.folder = folder
        self.stopped = False
        self.cadence = Cadence(float("inf"), None)  # until the cell is known
        self.start = 0.0
        self._next_message = 0.0
        self._turn = threading.Lock()  # of the pipe: any thread of a task may print

    def __call__(self, training: Training) -> bool:
        now = time.monotonic()
        if now >= self._next_message:
            self._next_message = now + PROGRESS_SECONDS
            self.tell(progress_of(training, self.start))
        if self.stopped or self.cadence.by_updates(training.version) or self.cadence.by_time():
            self.folder.save_checkpoint(training.state_dict())
            self.cadence.saved(training.version)
        return not self.stopped

    def note(self, text: str) -> None:
        """Tell the user something."""
        self.tell({"note": text})

    def warn(self, text: str) -> None:
        """Tell the user something that other cells may tell as well."""
        self.tell({"warning": text})

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message, and see whether to stop."""
        with self._turn:
            try:
                if self.pipe.poll():
                    self.pipe.recv()
                    self.stopped = True
                self.pipe.send(message)
            except (OSError, EOFError):
                self.stopped = True  # The parent is gone: keep what there is.


class _Notes(logging.Handler):
    """Passes on what a cluster logs: workers that died, machines too small."""

    def __init__(self, watch: CellWatch):
        super().__init__(logging.WARNING)
        self.watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        self.watch.note(record.getMessage())


def work_on(cell: Cell, folder: CellFolder, data: Path | None, pipe: Connection) -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides.
    watch = CellWatch(pipe, folder)
    signal.signal(signal.SIGTERM, lambda *_: setattr(watch, "stopped", True))
    logger = logging.getLogger("hemiola")
    logger.addHandler(_Notes(watch))
    logger.propagate = False
    ended: dict[str, Any]
    try:
        with folder.working():
            with Output(folder.path, watch.note, watch.warn):
                result = train_cell(cell, data, folder, watch)
            if result is not None:
                folder.save_result(result)
        ended = {"ended": "stopped" if result is None else result.row["status"]}
    except Exception as error:
        ended = folder.failed(error)
    with contextlib.suppress(OSError):  # The parent may be gone; everything worth keeping is on disk.
        pipe.send(ended)


def train_cell(
    cell: Cell,
    data: Path | None,
    folder: CellFolder | None = None,
    watch: CellWatch | Callable[[Training], bool] | None = None,
) -> Result | None:
    """Train one cell to its end; returns None when it was told to stop."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        plan, make_cluster = cell.plan(data)
        training = Training(plan, make_cluster)
        try:
            if folder is not None and isinstance(watch, CellWatch):
                if (state := folder.load_checkpoint(watch.note)) is not None:
                    go_on(training, state)
                watch.cadence = Cadence.of(make_cluster, training.version)
                watch.start = training.progress
            status = training.run(watch)
            return None if status == "running" else result_of(cell, training, trained_by(cell, data, training))
        finally:
            training.close()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread a cell: results must not depend on how many cells run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def go_on(training: Training, state: State) -> None:
    """Load what a checkpoint held."""
    try:
        training.load_state_dict(state)
    except Exception as error:
        raise InputError(
            f"this part cannot go on from its checkpoint.pt: {told(error)}; delete that file to start the part again"
        ) from error


def progress_of(training: Training, start: float) -> dict[str, Any]:
    """How far it is, for whoever shows progress, and how far it was when it was taken on."""
    loss = training.records[-1]["train_loss"]
    return {"progress": training.progress, "from": start, "updates": training.version, "loss": loss}
