"""Where claims are run, and how far each of them is.

DIR/NAME/claim.json     which claim this is the folder of; another is refused
DIR/NAME/numbers.json   its numbers, once it has run to its end
DIR/NAME/picture.svg, page.html
DIR/runs/FILE/          the folder of an experiment, which several claims may share
DIR/quick/              the same for the quick versions
"""

from __future__ import annotations

import fcntl
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hemiola.errors import InputError
from hemiola.files import write_whole
from hemiola.lab.reproduce.numbers import Measured
from hemiola.lab.reproduce.table import PublishedClaim

State = Literal["not run", "running", "stopped", "reproduced", "not reproduced"]


@dataclass(frozen=True)
class Finding:
    """A claim that has run to its end.

    Attributes:
        numbers: By name.
        reproduced: Whether every check held.
        words: The verdict.
        minutes: How long it took, all sessions together.
        version: Of hemiola.
        definition: `PublishedClaim.definition` of what was run.
    """

    numbers: dict[str, Measured]
    reproduced: bool
    words: str
    minutes: float
    version: str
    definition: str

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is not finite as text."""
        numbers = {
            name: {key: value if math.isfinite(value) else str(value) for key, value in asdict(one).items()}
            for name, one in self.numbers.items()
        }
        return {**asdict(self), "numbers": numbers}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Finding:
        """Read back."""
        numbers = {
            name: Measured(float(one["value"]), float(one["deviation"]), int(one["seeds"]))
            for name, one in saved["numbers"].items()
        }
        return cls(**{**saved, "numbers": numbers})


class ClaimFolder:
    """The folder of one claim in one version.

    Args:
        out: DIR.
        claim: Which.
        quick: Which version.
    """

    def __init__(self, out: Path, claim: PublishedClaim, quick: bool) -> None:
        self.root = out / "quick" if quick else out
        self.path = self.root / claim.name
        self.claim, self.quick = claim, quick

    def run_folder(self, file: str) -> Path:
        """Where an experiment of this version runs."""
        return self.root / "runs" / file

    @property
    def state(self) -> State:
        """How far it is."""
        if self._owner() is None:
            return "not run"
        if self._locked():
            return "running"
        outcome = self.outcome()
        if outcome is None:
            return "stopped"
        return "reproduced" if outcome.reproduced else "not reproduced"

    def outcome(self) -> Finding | None:
        """What came out, if it has run to its end."""
        try:
            return Finding.from_json(json.loads((self.path / "numbers.json").read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{self.path / 'numbers.json'}: is damaged; delete it and go on with --resume") from None

    @contextmanager
    def opened(self, resume: bool) -> Iterator[None]:
        """Take the folder for this claim.

        Raises:
            InputError: It is the folder of another claim, somebody works in it, or it holds results and no ``resume``.
        """
        above = _owner_of(self.root) or _owner_of(self.root.parent if self.quick else self.root)
        if above is not None:
            raise InputError(f"{self.root}: is the folder of the claim {above!r}; choose another --out")
        owner = self._owner()
        if owner not in (None, self.claim.name):
            raise InputError(f"{self.path}: is the folder of another claim, {owner!r}; choose another --out")
        if owner is not None and not resume:
            raise InputError(f"{self.path}: already holds this claim; add --resume to go on, or choose another --out")
        if owner is None and self.path.is_dir() and any(self.path.iterdir()):
            raise InputError(f"{self.path}: holds other files; choose another --out")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be made a folder: {error.strerror}") from None
        with open(self.path / ".lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{self.path}: another hemiola reproduce is working in it") from None
            self.write("claim.json", json.dumps({"claim": self.claim.name, "quick": self.quick}) + "\n")
            yield

    def save(self, outcome: Finding) -> None:
        """The claim has run to its end."""
        self.write("numbers.json", json.dumps(outcome.as_json(), indent=1) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a text file, all or nothing."""
        write_whole(self.path / name, text)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time spent inside to what this part of the claim has taken so far, also when it is interrupted."""
        began = time.monotonic()
        try:
            yield
        finally:
            path = self.root / "runs" / f"{part}.seconds"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, f"{self.seconds(part) + time.monotonic() - began:.1f}\n")

    def seconds(self, part: str) -> float:
        """What a part has taken, all sessions together."""
        try:
            return float((self.root / "runs" / f"{part}.seconds").read_text())
        except (OSError, ValueError):
            return 0.0

    def _owner(self) -> str | None:
        return _owner_of(self.path)

    def _locked(self) -> bool:
        try:
            with open(self.path / ".lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False


def _owner_of(path: Path) -> str | None:
    """Which claim a folder belongs to; None if it is no claim's."""
    try:
        return str(json.loads((path / "claim.json").read_text())["claim"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path / 'claim.json'}: is damaged; choose another --out") from None
