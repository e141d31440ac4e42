"""What the functions of claims find, and what of it they keep while they run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hemiola.files import write_whole
from hemiola.lab.pool import pool_of
from hemiola.lab.progress import Display
from hemiola.lab.reproduce.numbers import Measured

Rows = list[dict[str, Any]]


@dataclass
class Found:
    """What a function measured.

    Attributes:
        numbers: By name.
        rows: By the title of a panel: rows of ``line``, ``x``, ``mean``, ``low``, ``high``.
    """

    numbers: dict[str, Measured] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)


class Parts:
    """Results that are kept, by name, as JSON files of a folder.

    Args:
        folder: Which.
        jobs: Of `all`, side by side.
        display: Shows the progress of `all`; nothing by default.
    """

    def __init__(self, folder: Path, jobs: int = 1, display: Display | None = None) -> None:
        self.folder = folder
        self.jobs = jobs
        self._display = display or Display.silent()

    def once(self, name: str, compute: Callable[[], list[float]]) -> list[float]:
        """What is kept under this name, else what is computed now."""
        kept = self._kept(name)
        if kept is None:
            kept = compute()
            self._keep(name, kept)
        return kept

    def all(self, calls: Mapping[str, Callable[[], list[float]]]) -> dict[str, list[float]]:
        """The same for long computations, in processes of their own: they and their calls must be importable.

        Args:
            calls: By name; longest first ends soonest.
        """
        left = [partial(_named, name, compute) for name, compute in calls.items() if self._kept(name) is None]
        if left:
            with pool_of(min(self.jobs, len(left))) as pool, self._display as display:
                display.begin(len(calls), len(calls) - len(left))
                for name, values in pool.each(left):
                    self._keep(name, values)
                    display.counted(name)
        return {name: self.once(name, compute) for name, compute in calls.items()}

    def _kept(self, name: str) -> list[float] | None:
        try:
            kept = json.loads((self.folder / f"{name}.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(kept, list) or not all(isinstance(value, int | float) for value in kept):
            return None
        return [float(value) for value in kept]

    def _keep(self, name: str, values: list[float]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / f"{name}.json", json.dumps(values))


def _named(name: str, compute: Callable[[], list[float]]) -> tuple[str, list[float]]:
    return name, compute()


def row(line: str, x: float, values: Sequence[float]) -> dict[str, Any]:
    """A point of a line of a picture, with the spread of its values."""
    return {"line": line, "x": x, "mean": float(np.mean(values)), "low": min(values), "high": max(values)}
