"""What is found out once about a task and kept for later: the user's cache folder.

The cache saves time only: an unreadable file counts as absent, and a folder that cannot be written as empty.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from hemiola.errors import InputError
from hemiola.files import replacing


def cache_folder() -> Path:
    """HEMIOLA_CACHE if set, else the platform's folder for caches."""
    if given := os.environ.get("HEMIOLA_CACHE"):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "hemiola" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "hemiola"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hemiola"


def kept(path: Path, key: str) -> float | None:
    """The finite number that a file of the cache has under this key, if it has one."""
    try:
        value = json.loads(path.read_text())[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, float) and math.isfinite(value) else None


def keep(path: Path, record: dict[str, Any]) -> None:
    """Write a file of the cache, all or nothing; nothing where it cannot be written."""
    _write(path, lambda file: file.write(json.dumps(record).encode()))


def kept_array(path: Path, rows: int) -> np.ndarray | None:
    """The array of finite numbers with so many rows that a file of the cache holds, if it does."""
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if isinstance(found, np.ndarray) and len(found) == rows and np.isfinite(found).all() else None


def keep_array(path: Path, array: np.ndarray) -> None:
    """Write an array into the cache, all or nothing; nothing where it cannot be written."""
    _write(path, lambda file: np.save(file, array))


def _write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    with suppress(OSError, InputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            fill(file)
