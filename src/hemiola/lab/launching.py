"""One cell of a torch cluster on this machine: starts its ranks, passes messages on, and cleans up after them."""

from __future__ import annotations

import json
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hemiola.clusters.torch.launch import RanksFailed, launch
from hemiola.errors import FailedElsewhere
from hemiola.lab.cell_folder import CellFolder
from hemiola.lab.experiment import Cell
from hemiola.lab.output import Output
from hemiola.lab.ranks import Tell, torch_factory
from hemiola.lab.results import Result
from hemiola.lab.store import module_of

POLL_SECONDS = 0.1


def run_ranks(
    cell: Cell,
    folder: CellFolder,
    data: Path | None,
    tell: Tell,
    asked_to_stop: Callable[[], bool],
    said: Path | None = None,
) -> None:
    """Train a cell in processes of its own; they write the result, or a checkpoint if asked to stop, into its folder.

    Args:
        cell: What to train.
        folder: Of the cell.
        data: Folder of the data sets.
        tell: Takes progress, and notes for the user.
        asked_to_stop: Whether to stop; asked often, in a thread.
        said: The file that the ranks print to, whose lines become notes; None where they print to the terminal.

    Raises:
        FailedElsewhere: What a rank could not do.
        RanksFailed: Ranks died more often than ``max_restarts`` allows.
    """
    factory = torch_factory(cell)
    assert factory is not None
    cores = len(os.sched_getaffinity(0))
    if factory.workers > cores and factory.device == "cpu":
        tell(
            {"note": f"{factory.workers} workers share {cores} cores: steps take longer than on machines of their own"}
        )
    with tempfile.TemporaryDirectory(prefix="hemiola-") as name:
        rendezvous = Path(name)
        (rendezvous / "cell").write_bytes(pickle.dumps((cell, data, replace(folder, path=folder.path.absolute()))))
        with _messages(rendezvous, tell, asked_to_stop, said):
            try:
                launch("hemiola.lab.rank_process", [name], factory.workers, factory.max_restarts, rendezvous)
            except RanksFailed as failure:
                lost = [json.loads(path.read_text())["error"] for path in sorted(rendezvous.glob("lost-*.json"))]
                raise RanksFailed("; ".join([str(failure), *lost[:1]])) from None
        for path in sorted(rendezvous.glob("error-*.json")):
            error = json.loads(path.read_text())
            raise FailedElsewhere(error["error"], error["traceback"])


def launch_on(cell: Cell, folder: CellFolder, data: Path | None, pipe: Connection) -> None:
    """Entry point of a cell's process, like `hemiola.lab.worker.work_on`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides.
    turn = threading.Lock()

    def asked_to_stop() -> bool:
        try:
            return pipe.poll()
        except (OSError, EOFError):
            return True

    def tell(message: dict[str, Any]) -> None:
        with turn, suppress(OSError):
            pipe.send(message)

    ended: dict[str, Any]
    try:
        note, warn = (lambda text: tell({"note": text})), (lambda text: tell({"warning": text}))
        with folder.working(), Output(folder.path, note, warn) as output:
            run_ranks(cell, folder, data, tell, asked_to_stop, output.path)
        result = folder.result(lambda: module_of(cell, data))
        ended = {"ended": "stopped" if result is None else result.row["status"]}
    except Exception as error:
        ended = folder.failed(error)
    tell(ended)


def train_on_ranks(cell: Cell, data: Path | None, tell: Tell = lambda message: None) -> Result | None:
    """Train a cell in processes of its own and keep nothing but its result; ``tell`` hears how far it is."""
    with tempfile.TemporaryDirectory(prefix="hemiola-") as name:
        folder = CellFolder.of(cell, Path(name))
        run_ranks(cell, folder, data, tell, lambda: False)
        result = folder.result(lambda: module_of(cell, data))
        if result is None or result.trained is None:
            return None
        state = folder.weights()  # into memory: the folder goes
        return replace(result, trained=result.trained._replace(weights=lambda: state))


@contextmanager
def _messages(rendezvous: Path, tell: Tell, asked_to_stop: Callable[[], bool], said: Path | None) -> Iterator[None]:
    """Pass messages between the caller and the ranks while they run."""
    over = threading.Event()
    spoken = _Spoken(said, lambda text: tell({"warning": text}))

    def pass_on() -> None:
        last: dict[str, Any] = {"restarts": 0}
        note: dict[str, Any] | None = None
        while not over.wait(POLL_SECONDS):
            spoken.pass_on()
            if asked_to_stop():
                (rendezvous / "stop").touch()
            if (waiting := _read(rendezvous / "waiting.json")) and waiting != note:
                tell(waiting)
                note = waiting
            if (message := _read(rendezvous / "progress.json")) and message != last:
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
        spoken.pass_on()


def _read(path: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError):
        message: dict[str, Any] = json.loads(path.read_text())
        return message
    return None


class _Spoken:
    """Lines that ranks have printed; each once, because all of them say much the same."""

    def __init__(self, path: Path | None, note: Callable[[str], None]):
        self._path = path
        self._note = note
        self._at = 0
        self._seen: set[str] = set()

    def pass_on(self) -> None:
        """Note what was printed since the call before."""
        if self._path is None:
            return
        with open(self._path, "rb") as file:
            file.seek(self._at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole + newline)
        for line in whole.decode(errors="replace").splitlines():
            if line.strip() and line not in self._seen:
                self._seen.add(line)
                self._note(line.rstrip())
