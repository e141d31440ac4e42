"""One cell of a torch cluster on this machine: starts its ranks, passes messages on, and cleans up after them."""

from __future__ import annotations

import json
import os
import pickle
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hemiola.clusters.torch.launch import RanksFailed, launch
from hemiola.lab.experiment import Cell
from hemiola.lab.ranks import Tell, torch_factory
from hemiola.lab.results import Result

POLL_SECONDS = 0.1


class RankError(RuntimeError):
    """A rank gave up for a reason of its own, which starting it again would not cure."""

    def __init__(self, message: str, trace: str):
        super().__init__(message)
        self.trace = trace


def run_ranks(cell: Cell, folder: Path, data: Path | None, tell: Tell, asked_to_stop: Callable[[], bool]) -> None:
    """Train a cell in processes of its own; they write the result, or a checkpoint if asked to stop, into its folder.

    Args:
        cell: What to train.
        folder: Of the cell.
        data: Folder of the data sets.
        tell: Takes progress, and notes for the user.
        asked_to_stop: Whether to stop; looked at often, in a thread.

    Raises:
        RankError: What a rank could not do.
        RanksFailed: Ranks died more often than ``max_restarts`` allows.
    """
    factory = torch_factory(cell)
    assert factory is not None
    cores = len(os.sched_getaffinity(0))
    if factory.workers > cores and factory.device == "cpu":
        tell(
            {"note": f"{factory.workers} workers share {cores} cores: steps take longer than on machines of their own"}
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hemiola-") as name:
        meeting = Path(name)
        (meeting / "cell").write_bytes(pickle.dumps((cell, data, folder.absolute())))
        with _messages(meeting, tell, asked_to_stop):
            try:
                launch("hemiola.lab.rank_process", [name], factory.workers, factory.max_restarts, meeting)
            except RanksFailed as failure:
                lost = [json.loads(path.read_text())["error"] for path in sorted(meeting.glob("lost-*.json"))]
                raise RanksFailed("; ".join([str(failure), *lost[:1]])) from None
        for path in sorted(meeting.glob("error-*.json")):
            error = json.loads(path.read_text())
            raise RankError(error["error"], error["traceback"])


def launch_on(cell: Cell, folder: Path, data: Path | None, pipe: Connection) -> None:
    """Entry point of a cell's process, like `hemiola.lab.worker.work_on`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides.

    def asked_to_stop() -> bool:
        try:
            return pipe.poll()
        except (OSError, EOFError):
            return True

    def tell(message: dict[str, Any]) -> None:
        with suppress(OSError):
            pipe.send(message)

    ended: dict[str, Any]
    try:
        run_ranks(cell, folder, data, tell, asked_to_stop)
        result = result_in(folder)
        ended = {"ended": "stopped" if result is None else result.row["status"]}
    except RankError as error:
        ended = {"ended": "failed", "error": str(error), "traceback": error.trace}
    except Exception as error:
        ended = {"ended": "failed", "error": str(error), "traceback": traceback.format_exc()}
    tell(ended)


def train_on_ranks(cell: Cell, data: Path | None) -> Result | None:
    """Train a cell in processes of its own and keep nothing but its result."""
    with tempfile.TemporaryDirectory(prefix="hemiola-") as folder:
        run_ranks(cell, Path(folder), data, lambda message: None, lambda: False)
        return result_in(Path(folder))


def result_in(folder: Path) -> Result | None:
    """The result a cell has left in its folder."""
    with suppress(FileNotFoundError):
        saved = json.loads((folder / "result.json").read_text())
        return Result(saved["row"], saved["log"])
    return None


@contextmanager
def _messages(meeting: Path, tell: Tell, asked_to_stop: Callable[[], bool]) -> Iterator[None]:
    """Pass messages between the caller and the ranks while they run."""
    over = threading.Event()

    def pass_on() -> None:
        last: dict[str, Any] = {"restarts": 0}
        note: dict[str, Any] | None = None
        while not over.wait(POLL_SECONDS):
            if asked_to_stop():
                (meeting / "stop").touch()
            if (waiting := _read(meeting / "waiting.json")) and waiting != note:
                tell(waiting)
                note = waiting
            if (message := _read(meeting / "progress.json")) and message != last:
                if message["restarts"] > last["restarts"]:
                    tell(
                        {"note": f"a rank has died; all were started again and go on from update {message['updates']}"}
                    )
                tell(message)
                last = message

    thread = threading.Thread(target=pass_on, name="hemiola-messages", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _read(path: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError):
        message: dict[str, Any] = json.loads(path.read_text())
        return message
    return None
