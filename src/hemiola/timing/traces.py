"""Measured step times: reading them from files, and telling slow workers from straggling steps.

Both make some steps long, but they ask for opposite things. A step that straggles by chance is worth cancelling, or
worth not waiting for. A worker that is always slow is slow again after every cancellation, and its data is what the
others pay with. Only times that say whose they are can tell the two apart.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are first used: scipy.stats takes a second

from hemiola.errors import InputError

UNEQUAL = 1.25  # a worker whose median step differs from the others' by less than this factor is like them
CHANCE = 1e-3  # how likely a worker of the same law may look different


@dataclass(frozen=True)
class Trace:
    """Measured times of local steps.

    Attributes:
        seconds: One for each step.
        workers: Who took each step; None where the file does not say.
        exchange_seconds: Of exchanges, where the file has them.
        source: Where they come from, for messages.
    """

    seconds: tuple[float, ...]
    workers: tuple[int, ...] | None = None
    exchange_seconds: tuple[float, ...] = ()
    source: str = "memory"

    def factors(self) -> dict[int, float]:
        """By worker, how many times as long as the middle worker it takes; only those that differ throughout.

        A worker counts as different when its median is off by more than `UNEQUAL` and the rank test of Mann and
        Whitney gives it less than `CHANCE`, over all workers, of being like the others.
        """
        if self.workers is None:
            return {}
        times, owners = np.asarray(self.seconds), np.asarray(self.workers)
        medians = {int(worker): float(np.median(times[owners == worker])) for worker in np.unique(owners)}
        middle = float(np.median(list(medians.values())))
        found = {}
        for worker, median in medians.items() if len(medians) > 1 else ():
            mine = owners == worker
            p = scipy.stats.mannwhitneyu(times[mine], times[~mine]).pvalue
            if abs(math.log(median / middle)) > math.log(UNEQUAL) and p < CHANCE / len(medians):
                found[worker] = median / middle
        return found

    def by_worker(self) -> list[np.ndarray]:
        """Each worker's times in the order of the file, by worker number; none where the file does not say whose."""
        if self.workers is None:
            return []
        times, owners = np.asarray(self.seconds), np.asarray(self.workers)
        return [times[owners == worker] for worker in np.unique(owners)]

    def even(self) -> tuple[float, ...]:
        """The times as they would be, were the workers in `factors` like the others."""
        factors = self.factors()
        if self.workers is None or not factors:
            return self.seconds
        return tuple(time / factors.get(worker, 1.0) for time, worker in zip(self.seconds, self.workers, strict=True))


def read_trace(path: Path) -> Trace:
    """Read step times.

    The file holds one number per line; or comma-separated values with a header and a column ``step_seconds`` (any name
    will do when it is the only column), and perhaps ``worker``; or JSON lines with ``step_seconds``, a number with
    perhaps ``worker``, or a list of numbers with perhaps ``step_workers``, as the log of a real run has them.

    Raises:
        InputError: The file cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"the trace {path} is not a text file") from None
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise InputError(f"the trace {path} is empty; it needs at least one step time in seconds")
    read = _read_json if lines[0].startswith(("{", "[")) else _read_csv
    steps, owners, exchanges = read(path, lines)
    if not steps:
        raise InputError(f"the trace {path} has no step times")
    known = all(owner is not None for owner in owners)
    return Trace(
        seconds=tuple(_seconds(path, step) for step in steps),
        workers=tuple(_worker(path, owner) for owner in owners) if known else None,
        exchange_seconds=tuple(float(value) for value in exchanges if isinstance(value, int | float) and value >= 0),
        source=str(path),
    )


_Cells = tuple[list[Any], list[Any], list[Any]]  # step times, their workers (None where not told), exchange times


def _read_json(path: Path, lines: list[str]) -> _Cells:
    steps: list[Any] = []
    owners: list[Any] = []
    exchanges: list[Any] = []
    for line in lines:
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            raise InputError(f"a line of the trace {path} is not JSON: {line[:60]!r}") from None
        if not isinstance(record, dict):
            record = {"step_seconds": record}
        found, who = record.get("step_seconds"), record.get("step_workers")
        these = found if isinstance(found, list) else [] if found is None else [found]
        if isinstance(who, list) and len(who) != len(these):
            raise InputError(f"a line of the trace {path} has {len(these)} step_seconds, but {len(who)} step_workers")
        steps += these
        owners += who if isinstance(who, list) else [record.get("worker")] * len(these)
        measured = record.get("exchange_seconds")
        exchanges += measured if isinstance(measured, list) else []
    if not steps:
        raise InputError(f"no line of the trace {path} has 'step_seconds'")
    return steps, owners, exchanges


def _read_csv(path: Path, lines: list[str]) -> _Cells:
    rows = list(csv.reader(lines))
    header = [cell.strip() for cell in rows[0]]
    if _is_number(header[0]):
        if len(header) > 1:
            raise InputError(f"the trace {path} has {len(header)} columns and no header; name one 'step_seconds'")
        return [row[0] for row in rows], [None] * len(rows), []
    if len(header) > 1 and "step_seconds" not in header:
        raise InputError(f"the trace {path} has no column 'step_seconds', only {', '.join(header)}")
    column = header.index("step_seconds") if "step_seconds" in header else 0
    kept = [row for row in rows[1:] if len(row) > column and row[column].strip()]
    owner = header.index("worker") if "worker" in header else None
    told = [row[owner].strip() if owner is not None and len(row) > owner else None for row in kept]
    return [row[column] for row in kept], told, []


def _seconds(path: Path, cell: Any) -> float:
    try:
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"the trace {path} must hold step times in seconds, got {cell!r}") from None
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"the step times of the trace {path} must be finite and above 0, got {cell!r}")
    return value


def _worker(path: Path, cell: Any) -> int:
    try:
        return int(str(cell))
    except ValueError:
        raise InputError(f"the workers of the trace {path} must be whole numbers, got {cell!r}") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
