"""What a cell's process prints: lines for the user rather than noise in the display of progress."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

Note = Callable[[str], None]


class Output:
    """While it is open, nothing that this process prints reaches the terminal.

    Lines that Python prints, and its warnings, become notes. What C code prints, and processes that are started from
    here, goes to ``output.txt``, which is removed when nothing did.

    Args:
        folder: Of the cell.
        note: Takes a line that was printed.
        warn: Takes a warning, as one line.
    """

    def __init__(self, folder: Path, note: Note, warn: Note):
        self.path = folder / "output.txt"
        self._note = note
        self._warn = warn

    def __enter__(self) -> Output:
        self._streams, self._shown = (sys.stdout, sys.stderr), warnings.showwarning
        for stream in self._streams:
            stream.flush()
        self._places = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
        with open(self.path, "wb") as file:
            for descriptor in self._places:
                os.dup2(file.fileno(), descriptor)
        sys.stdout, sys.stderr = _Lines(1, self._note), _Lines(2, self._note)
        warnings.showwarning = self._show_warning
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Lines):
                stream.end()
        (sys.stdout, sys.stderr), warnings.showwarning = self._streams, self._shown
        for descriptor, place in self._places.items():
            os.dup2(place, descriptor)
            os.close(place)
        if self.path.stat().st_size == 0:
            self.path.unlink()

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        self._warn(in_one_line(message, category, filename, lineno).rstrip())


class _Lines(io.TextIOBase):
    """A stream whose lines become notes."""

    encoding: Any = "utf-8"

    def __init__(self, descriptor: int, note: Note):
        self._descriptor = descriptor
        self._note = note
        self._begun = ""

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self._note(line.rstrip())
        return len(text)

    def end(self) -> None:
        """Pass on what came without a newline."""
        if self._begun:
            self.write("\n")


def in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as one line; may stand in for `warnings.formatwarning`."""
    return f"{category.__name__}: {' '.join(str(message).split())} ({Path(filename).name}:{lineno})\n"
