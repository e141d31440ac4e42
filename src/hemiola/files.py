"""Files that are whole or not there, that show when they are damaged, and that are set aside rather than lost."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hemiola.errors import InputError

PART = ".part"
"""How the name of a file that is being written ends; one that stays was left by a process that was killed."""


class UnusableError(Exception):
    """A file is there but cannot be used; the message says why."""


# ------------------------------------------------------------------------------------------------------------ writing


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its place only when it is complete and on disk.

    Raises:
        InputError: the disk is full or the file cannot be written; what was there before is still there.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")  # processes may write the same file of a cache
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        _forget(part)
        raise InputError(f"{path}: cannot be written: {error.strerror}; what was there before is kept") from None
    except BaseException:
        _forget(part)
        raise


def write_whole(path: Path, content: bytes | str) -> Path:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def set_aside(path: Path) -> Path:
    """Give a file, or a folder, that cannot be used another name, so that it is neither in the way nor lost.

    Raises:
        InputError: it cannot be renamed.
    """
    aside, number = path.with_name(f"{path.name}.set-aside"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.set-aside-{number}")
    try:
        path.rename(aside)
    except OSError as error:
        raise InputError(f"{path}: cannot be used, and cannot be renamed either: {error.strerror}") from None
    return aside


def _forget(part: Path) -> None:
    try:
        part.unlink(missing_ok=True)
    except OSError:
        return  # The error that led here says more.


class Hashed:
    """A file that is written from start to end, and the checksum of what was."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


# ------------------------------------------------------------------------------------------------------------ reading


def contents(path: Path) -> bytes | None:
    """What a file holds; None if there is none.

    Raises:
        UnusableError: it is a folder.
        InputError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except (IsADirectoryError, NotADirectoryError):
        raise UnusableError("is not a file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def sealed(record: dict[str, Any], indent: int | None = None) -> str:
    """A record of plain JSON values as text, with its checksum inside."""
    return json.dumps(record | {"sha256": _digest(record)}, indent=indent)


def unsealed(text: bytes) -> dict[str, Any]:
    """The record that `sealed` wrote; raises `UnusableError` if this is anything else."""
    record = as_object(text)
    try:
        sound = record.pop("sha256", None) == _digest(record)
    except RecursionError:
        sound = False
    if not sound:
        raise UnusableError("is damaged: its checksum is wrong")
    return record


def as_object(text: bytes) -> dict[str, Any]:
    """A JSON object; raises `UnusableError` if this is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UnusableError("is damaged") from None
    if not isinstance(value, dict):
        raise UnusableError("is damaged")
    return value


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()
