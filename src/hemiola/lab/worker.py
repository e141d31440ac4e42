"""One cell in a process of its own: trains, reports progress, keeps checkpoints, stops when told."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hemiola.errors import InputError
from hemiola.lab.experiment import Cell
from hemiola.lab.results import Result, result_of
from hemiola.lab.store import load_checkpoint, save_checkpoint, save_result
from hemiola.plan import ClusterFactory
from hemiola.training import Training

PROGRESS_SECONDS = 0.25


class _Watch:
    """Called after every update: sends progress, writes checkpoints, and says whether to go on.

    Attributes:
        stopped: Set from outside to end the run after the present update, with a checkpoint.
        every_seconds, every_updates: How often a checkpoint is written; whichever comes first.
    """

    def __init__(self, pipe: Connection, folder: Path):
        self.pipe = pipe
        self.folder = folder
        self.stopped = False
        self.every_seconds = ClusterFactory.checkpoint_every_seconds
        self.every_updates = ClusterFactory.checkpoint_every_updates
        self._next_message = 0.0
        self._saved_at = time.monotonic()
        self._saved_version: int | None = None

    def __call__(self, training: Training) -> bool:
        now = time.monotonic()
        if now >= self._next_message:
            self._next_message = now + PROGRESS_SECONDS
            self._tell(
                {"progress": training.progress, "updates": training.version, "loss": training.records[-1]["train_loss"]}
            )
        if self.stopped or self._due(now, training.version):
            save_checkpoint(self.folder, training.state_dict())
            self._saved_at, self._saved_version = time.monotonic(), training.version
        return not self.stopped

    def _due(self, now: float, version: int) -> bool:
        if self._saved_version is None:
            self._saved_version = version - 1
        if self.every_updates is not None and version - self._saved_version >= self.every_updates:
            return True
        return now >= self._saved_at + self.every_seconds

    def note(self, text: str) -> None:
        """Tell the user something."""
        self._tell({"note": text})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            if self.pipe.poll():
                self.pipe.recv()
                self.stopped = True
            self.pipe.send(message)
        except (OSError, EOFError):
            self.stopped = True  # The parent is gone: keep what there is.


class _Notes(logging.Handler):
    """Passes on what a cluster logs: workers that died, machines too small."""

    def __init__(self, watch: _Watch):
        super().__init__(logging.WARNING)
        self.watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        self.watch.note(record.getMessage())


def work_on(cell: Cell, folder: Path, data: Path | None, pipe: Connection) -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides.
    watch = _Watch(pipe, folder)
    signal.signal(signal.SIGTERM, lambda *_: setattr(watch, "stopped", True))
    logging.getLogger("hemiola").addHandler(_Notes(watch))
    try:
        result = train_cell(cell, data, folder, watch)
        if result is not None:
            save_result(folder, result)
        ended = {"ended": "stopped" if result is None else result.row["status"]}
    except InputError as error:
        ended = {"ended": "failed", "error": str(error)}
    except Exception as error:
        ended = {"ended": "failed", "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    with contextlib.suppress(OSError):  # The parent may be gone; everything worth keeping is on disk.
        pipe.send(ended)


def train_cell(cell: Cell, data: Path | None, folder: Path | None = None, watch: _Watch | None = None) -> Result | None:
    """Train one cell to its end; returns None when it was told to stop.

    One thread a cell: results must not depend on how many cells run side by side.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            plan, factory = cell.plan(data)
            if watch is not None:
                watch.every_seconds = factory.checkpoint_every_seconds
                watch.every_updates = factory.checkpoint_every_updates
            training = Training(plan, factory)
            try:
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    if (state := load_checkpoint(folder)) is not None:
                        training.load_state_dict(state)
                status = training.run(watch)
                return None if status == "running" else result_of(cell, training)
            finally:
                training.close()
    finally:
        torch.set_num_threads(threads)
