"""Download data sets: resumed where a connection was cut, checked before they are used, put in place in one step."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import ssl
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from hemiola.errors import InputError
from hemiola.files import replacing
from hemiola.lab.tasks.files import SETS, DataSet, Download, named_set

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with a file's name, the bytes that are there, and the bytes it will have (0 when not known)."""

ATTEMPTS = 5
_BLOCK = 1 << 16
_TIMEOUT = 30.0


@dataclass(frozen=True)
class SetRecord:
    """One data set, as ``hemiola data list`` shows it; ``size`` is the bytes its files take now."""

    name: str
    title: str
    present: bool
    missing: list[str]
    size: int


def list_sets(root: Path | None) -> list[SetRecord]:
    """Every data set and what of it lies in the folder."""
    records = []
    for data_set in SETS.values():
        missing = list(data_set.files) if root is None else data_set.missing(root)
        there = [] if root is None else [root / file for file in data_set.files if file not in missing]
        size = sum(path.stat().st_size for path in there)
        records.append(SetRecord(data_set.name, data_set.title, not missing, missing, size))
    return records


def fetch_set(name: str, root: Path, progress: Progress | None = None) -> list[Path]:
    """Download what is missing of a data set.

    Files that are there are left alone. A download is written next to its place as ``*.part`` and kept when it is
    cut, so that the next attempt, or the next call, goes on from there.

    Args:
        name: Of the data set.
        root: The data folder; made if it does not exist.
        progress: Told how far each download is.

    Returns:
        The files that were added.

    Raises:
        InputError: No such set, no official download, no server answered, wrong bytes, or no room on the disk.
    """
    data_set = named_set(name)
    missing = data_set.missing(root)
    if missing and not data_set.downloads:
        raise InputError(
            f"data set {name!r} has no official direct download: {data_set.by_hand}, and put them into {root} as "
            f"{', '.join(data_set.files)}"
        )
    added: list[Path] = []
    with _writing(root):
        for download in data_set.downloads:
            if download.path in missing or any(place in missing for _, place in download.members):
                added += _fetch(data_set, download, root, progress or _silent)
    return added


def _fetch(data_set: DataSet, download: Download, root: Path, progress: Progress) -> list[Path]:
    name = download.urls[0].rsplit("/", 1)[-1]
    goal = root / (download.path or f"{data_set.name}-{name}")
    goal.parent.mkdir(parents=True, exist_ok=True)
    part = goal.with_name(goal.name + ".part")
    reasons = []
    # A part from an earlier call may not be of this file; its address is then tried once more, from the beginning.
    again = download.urls[:1] if part.exists() else ()
    for url in again + download.urls:
        try:
            _download(url, part, lambda done, total: progress(name, done, total or download.size))
            _verify(part, download.checksum)
        except _Failed as failure:
            reasons.append(f"{url}: {failure}")
            continue
        if download.members:
            added = _unpack(part, download, root)
            part.unlink()
            return added
        os.replace(part, goal)
        return [goal]
    raise InputError(f"could not fetch data set {data_set.name!r}: {'; '.join(reasons)}")


# ------------------------------------------------------------------------------------------------------ one download


class _Failed(Exception):
    """This address did not give the file; the message says why."""


def _download(url: str, part: Path, progress: Callable[[int, int], None]) -> None:
    """Append to ``part`` until it is whole, starting again from where it is after every cut."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(min(0.1 * 4 ** (attempt - 1), 5.0))
        try:
            if _transfer(url, part, progress):
                return
            reason = "the connection was cut"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:
                return  # Nothing left to send: the part is whole, or not of this file; the checksum knows.
            reason = f"HTTP {error.code} {error.reason}"
            if error.code < 500 and error.code not in (408, 429):
                raise _Failed(reason) from error
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
    raise _Failed(f"{reason} (tried {ATTEMPTS} times)")


def _transfer(url: str, part: Path, progress: Callable[[int, int], None]) -> bool:
    """One request; whether the whole file is there after it."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "hemiola", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        resumed = answer.status == 206 and str(answer.headers.get("Content-Range", "")).startswith(f"bytes {have}-")
        if not resumed:  # The server ignores ranges and sends everything again.
            have = 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else 0
        with part.open("ab" if resumed else "wb") as file:
            progress(have, total)
            while block := answer.read(_BLOCK):
                file.write(block)
                have += len(block)
                progress(have, total)
    return have >= total


def _verify(part: Path, checksum: str) -> None:
    algorithm, _, wanted = checksum.partition(":")
    with part.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != wanted:
        size = part.stat().st_size
        part.unlink()  # Nothing to go on from: the next attempt starts afresh.
        raise _Failed(f"wrong bytes: {algorithm} of the {size} bytes is {found}, should be {wanted}; not kept")


# ---------------------------------------------------------------------------------------------------------- archives


def _unpack(archive: Path, download: Download, root: Path) -> list[Path]:
    """Copy the wanted members, and nothing else, to places this module chose: a member's own path is never used."""
    added = []
    if download.urls[0].endswith(".zip"):
        with zipfile.ZipFile(archive) as zipped:
            for member, place in download.members:
                with zipped.open(member) as source:
                    added.append(_put(source, root / place))
    else:
        with tarfile.open(archive) as tar:
            for member, place in download.members:
                inside = tar.extractfile(member)
                if inside is None:
                    raise InputError(f"{download.urls[0]}: {member} is not a file")
                with inside:
                    added.append(_put(inside, root / place))
    return added


def _put(source: IO[bytes], goal: Path) -> Path:
    goal.parent.mkdir(parents=True, exist_ok=True)
    with replacing(goal) as file:
        shutil.copyfileobj(source, file, _BLOCK)
    return goal


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """A full disk, or a folder that cannot be written, is one clear line; what was downloaded stays for next time."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write data to {error.filename or root}: {error.strerror or error}") from error


def _silent(name: str, done: int, total: int) -> None:
    """Progress nobody looks at."""
