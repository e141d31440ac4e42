"""What the tests of the pool call in its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def wait_for(path: Path, number: int) -> int:
    """Answer once the file is there."""
    while not path.exists():
        time.sleep(0.01)
    return number


def stick(process: Path, never: Path) -> None:
    """Say which process this is, and stay."""
    process.write_text(str(os.getpid()))
    wait_for(never, 0)


def after(process: Path, call: Callable[[], object]) -> None:
    """Call once the other one sticks."""
    wait_for(process, 0)
    call()


def noted(where: Path, number: int) -> list[float]:
    """A number as a part of a claim; the process that gives it is noted in a file."""
    with where.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return [float(number)]
