"""The folder of one cell: what it has reached, what it has left, and that both are its own.

    checkpoint.pt    while it runs: where to go on from
    weights.pt       when it is finished: a plain state_dict of the task's model
    result.json      when it is finished: its row, its evaluations, and the checksum of weights.pt
    error.txt        the whole traceback of what ended it, if something did
    output.txt       what it printed past Python, if it did

Checkpoint and result name the cell they belong to, by a digest of all that determines it, and carry a checksum: torch
does not check that of its archives. A file of another cell or a damaged one is never used. It is set aside, which means
renamed, and the cell is done again; whatever is good is kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from hemiola import __version__
from hemiola.contracts import State
from hemiola.errors import FailedElsewhere, InputError, told
from hemiola.files import (
    PART,
    Hashed,
    UnusableError,
    as_object,
    contents,
    replacing,
    sealed,
    set_aside,
    unsealed,
    write_whole,
)
from hemiola.lab.experiment import Cell, Settings
from hemiola.lab.results import Result, Trained

LOCK_SECONDS = 120.0

Say = Callable[[str], None]
"""Takes one line for the user."""


@dataclass(frozen=True)
class CellFolder:
    """Where one cell keeps its files; can be sent to other processes.

    Attributes:
        path: The folder; made by `working`.
        owner: Names the cell: its run, point of the sweep, seed, and the digest.
    """

    path: Path
    owner: dict[str, Any]

    @classmethod
    def of(cls, cell: Cell, path: Path) -> CellFolder:
        """The folder of this cell."""
        return cls(path, owner_of(cell))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Make the folder and have it to oneself, and forget why the cell failed before.

        A process whose parent was killed may be busy with its last checkpoint: it is waited for.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            folder = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be used: {error.strerror}") from None
        try:
            self._lock(folder)
            for left in (*self.path.glob(f"*{PART}"), self.path / "error.txt"):
                if left.is_file():
                    left.unlink()
            yield
        finally:
            os.close(folder)

    def _lock(self, folder: int) -> None:
        import fcntl

        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InputError(
                        f"{self.path}: another process has been working in it for {LOCK_SECONDS:.0f} s; end it first"
                    ) from None
                time.sleep(0.05)

    def tidy(self, say: Say) -> None:
        """Set aside what is not this cell's or is damaged; called by whoever has the experiment's folder to itself."""
        if self.path.exists() and not self.path.is_dir():
            self._aside(self.path, "is not a folder", say)
            return
        try:
            record = self._record()
        except UnusableError as why:
            self._aside(self.path / "result.json", str(why), say)
            return
        try:
            if record is not None:
                self._weights(record)
        except UnusableError as why:
            if (self.path / "weights.pt").exists():
                self._aside(self.path / "weights.pt", f"{why}; the result of this part stands", say)

    # -------------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self, state: State) -> None:
        """Keep where the cell is."""
        with replacing(self.path / "checkpoint.pt") as file:
            seal = {"cell": self.owner, "hemiola": __version__, "sha256": _save(state, file)}
            file.write(b"\n" + json.dumps(seal).encode())

    def load_checkpoint(self, say: Say) -> State | None:
        """Where to go on from; None if there is nothing, or nothing that can be used."""
        path = self.path / "checkpoint.pt"
        try:
            content = contents(path)
            if content is None:
                return None
            payload, _, seal = content.rpartition(b"\n")
            sealed = as_object(seal)
            if sealed.get("sha256") != hashlib.sha256(payload).hexdigest():
                raise UnusableError("is damaged: its checksum is wrong")
            self._check_owner(sealed)
        except UnusableError as why:
            self._aside(path, f"{why}; the part starts again", say)
            return None
        try:
            state: State = torch.load(io.BytesIO(payload), weights_only=True)
        except Exception as error:  # another torch wrote it; torch.load raises many kinds
            raise InputError(
                f"{path}: torch {torch.__version__} cannot read it ({type(error).__name__}); "
                "go on with the version that wrote it, or delete it to start this part again"
            ) from None
        return state

    # ------------------------------------------------------------------------------------------------------ results

    def save_result(self, result: Result) -> None:
        """Mark the cell as finished: first its weights, then its result."""
        assert result.trained is not None
        with replacing(self.path / "weights.pt") as file:
            checksum = _save(result.weights(), file)
        record = {
            "cell": self.owner,
            "hemiola": __version__,
            "row": result.row,
            "log": result.log,
            "weights": {**result.trained.kept, "sha256": checksum},
        }
        write_whole(self.path / "result.json", sealed(json.loads(json.dumps(record))))
        (self.path / "checkpoint.pt").unlink(missing_ok=True)

    def result(self, module: Callable[[], nn.Module]) -> Result | None:
        """The result of a cell that is finished; None while it is not.

        Args:
            module: Makes a module of the cell's task, when the model is asked for.
        """
        try:
            record = self._record()
        except UnusableError:
            return None
        if record is None:
            return None
        kept = {key: value for key, value in record["weights"].items() if key != "sha256"}
        return Result(record["row"], record["log"], Trained(self.weights, module, kept))

    def weights(self) -> dict[str, Tensor]:
        """The state_dict that the cell has left.

        Raises:
            InputError: there is none, or it is damaged.
        """
        try:
            record = self._record()
            if record is None:
                raise UnusableError("is not there: this part is not finished")
            content = self._weights(record)
        except UnusableError as why:
            raise InputError(
                f"{self.path / 'weights.pt'}: {why}; "
                "to train this part again, delete its result.json and call `hemiola resume` on the folder"
            ) from None
        state: dict[str, Tensor] = torch.load(io.BytesIO(content), weights_only=True)
        return state

    def _record(self) -> dict[str, Any] | None:
        content = contents(self.path / "result.json")
        if content is None:
            return None
        record = unsealed(content)
        self._check_owner(record)
        return record

    def _weights(self, record: dict[str, Any]) -> bytes:
        content = contents(self.path / "weights.pt")
        if content is None:
            raise UnusableError("is missing")
        if hashlib.sha256(content).hexdigest() != record["weights"]["sha256"]:
            raise UnusableError("is damaged: it is not what result.json says")
        return content

    # ------------------------------------------------------------------------------------------------------- errors

    def failed(self, error: BaseException) -> dict[str, Any]:
        """Keep the whole traceback of what ended the cell; returns the message that tells of it in one line."""
        trace = error.trace if isinstance(error, FailedElsewhere) and error.trace else None
        with suppress(InputError):
            write_whole(self.path / "error.txt", trace or "".join(traceback.format_exception(error)))
        return {"ended": "failed", "error": told(error)}

    def output(self) -> str:
        """What the cell's process printed past Python, as far as it was kept."""
        try:
            return (self.path / "output.txt").read_text(errors="replace")
        except OSError:
            return ""

    def error(self) -> str | None:
        """The traceback of the last failure."""
        try:
            return (self.path / "error.txt").read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def _check_owner(self, found: dict[str, Any]) -> None:
        owner = found.get("cell")
        if not isinstance(owner, dict) or owner.get("digest") != self.owner["digest"]:
            whose = (
                f"run {owner.get('run')!r}, seed {owner.get('seed')}" if isinstance(owner, dict) else "no known part"
            )
            same = isinstance(owner, dict) and all(owner.get(key) == self.owner[key] for key in ("run", "seed"))
            raise UnusableError(f"belongs to {whose}{' with other settings' if same else ''}")

    def _aside(self, path: Path, why: str, say: Say) -> None:
        say(f"{path}: {why}; kept as {set_aside(path).name}")


def owner_of(cell: Cell) -> dict[str, Any]:
    """Names a cell, and digests all that determines it.

    Settings at their defaults are left out: a setting that a later version adds does not make this another cell.
    """
    usual = Settings(task="").resolved()
    settings = {key: value for key, value in cell.settings.resolved().items() if value != usual[key]}
    whole = [cell.run, cell.point, cell.seed, settings]
    digest = hashlib.sha256(json.dumps(plain(whole), sort_keys=True).encode()).hexdigest()
    return {"run": cell.run, "sweep": plain(cell.point), "seed": cell.seed, "digest": digest}


def plain(value: Any) -> Any:
    """As JSON would give it back."""
    return json.loads(json.dumps(value, default=str))


def _save(state: Any, file: BinaryIO) -> str:
    """Write as torch does; returns the checksum of what was written."""
    hashed = Hashed(file)
    torch.save(state, hashed)  # type: ignore[arg-type]
    return hashed.hexdigest()
