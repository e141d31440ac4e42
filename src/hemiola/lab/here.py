"""Cells that cannot leave this process, because an object of theirs cannot be pickled."""

from __future__ import annotations

import pickle
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, cast

from hemiola.errors import InputError
from hemiola.lab.experiment import Cell
from hemiola.lab.named import live_objects
from hemiola.lab.progress import Display
from hemiola.lab.ranks import torch_factory
from hemiola.lab.store import Failure, Store
from hemiola.lab.worker import CellWatch, train_cell


def stay_here(cells: list[Cell]) -> list[Cell]:
    """The cells that cannot be given to another process; a warning says which objects are the reason.

    Raises:
        InputError: A cell must be trained in other processes and cannot be given to them.
    """
    staying: list[Cell] = []
    reasons: dict[str, str] = {}
    for cell in cells:
        kept = {key: why for key, live in live_objects(dict(cell.settings)).items() if (why := _kept_by(live))}
        if not kept:
            continue
        key, why = next(iter(kept.items()))
        if torch_factory(cell) is not None:
            raise InputError(
                f"{key}: {why}, and cluster 'torch' trains in processes of its own; give its path 'package.module:Name'"
            )
        staying.append(cell)
        reasons |= kept
    if reasons:
        said = "; ".join(f"{key}: {why}" for key, why in reasons.items())
        warnings.warn(f"{said}; runs that need it are trained in this process, one after the other", stacklevel=2)
    return staying


def _kept_by(live: Any) -> str | None:
    """Why an object cannot be sent to another process; None if it can."""
    name = type(live).__name__
    if type(live).__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        return f"{name} is defined in a session that no other process can import"
    try:
        pickle.dumps(live)
    except Exception as error:  # whatever it holds decides what is raised
        return f"{name} cannot be pickled ({' '.join(str(error).split())})"
    return None


class _Pipe:
    """Stands for the pipe to a parent: messages reach the display at once, and Ctrl-C asks to stop."""

    def __init__(self, cell: Cell, stop: threading.Event, display: Display):
        self.cell, self.stop, self.display = cell, stop, display

    def poll(self) -> bool:
        return self.stop.is_set()

    def recv(self) -> str:
        return "stop"

    def send(self, message: dict[str, Any]) -> None:
        self.display.heard(self.cell, message)


def run_here(
    cells: list[Cell], store: Store, data: Path | None, stop: threading.Event, display: Display
) -> list[Failure]:
    """Train cells in this process, one after the other, until told to stop; returns those that failed, and why."""
    failed: list[Failure] = []
    for cell in cells:
        if stop.is_set():
            break
        began, folder = time.monotonic(), store.cell_folder(cell)
        display.started(cell)
        ended: dict[str, Any]
        try:
            with folder.working():
                result = train_cell(cell, data, folder, CellWatch(cast(Any, _Pipe(cell, stop, display)), folder))
                if result is not None:
                    folder.save_result(result)
            ended = {"ended": "stopped" if result is None else result.row["status"]}
        except Exception as error:
            ended = folder.failed(error)
            failed.append(store.failure(cell, ended["error"]))
        display.ended(cell, ended, store.finished(cell), time.monotonic() - began)
    return failed
