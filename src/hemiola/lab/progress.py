"""Progress: a bar with loss and rate for every running cell on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hemiola.lab.experiment import Cell
from hemiola.lab.results import Result


class Display:
    """Shows how an experiment gets on.

    Args:
        console: Where; None shows nothing.
    """

    def __init__(self, console: Console | None):
        self.console = console
        self._bars: Progress | None = None
        self._rows: dict[int, TaskID] = {}
        self._rates: dict[int, tuple[float, int]] = {}
        self._shares: dict[int, float] = {}  # how much of each running cell is done
        self._total = self._done = 0
        if console is not None and console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=28),
                TextColumn("{task.percentage:>3.0f} %", markup=False),
                TextColumn("{task.fields[detail]}", markup=False),
                TimeRemainingColumn(compact=True),
                console=console,
                transient=True,
            )

    @classmethod
    def silent(cls) -> Display:
        """Shows nothing."""
        return cls(None)

    def __enter__(self) -> Display:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, total: int, done: int) -> None:
        """So many cells in all, so many of them finished before."""
        self._total, self._done = total, done
        if done:
            self._line(f"{done} of {total} parts were finished before")
        if self._bars is not None:
            self._rows[0] = self._bars.add_task("all", total=total, completed=done, detail="")

    def started(self, cell: Cell) -> None:
        """A cell begins."""
        if self._bars is not None:
            self._rows[id(cell)] = self._bars.add_task(_label(cell), total=1.0, detail="")

    def moved(self, cell: Cell, message: dict[str, Any]) -> None:
        """A cell tells where it is."""
        if self._bars is None:
            return
        now = time.monotonic()
        since, updates = self._rates.setdefault(id(cell), (now, message["updates"]))
        rate = (message["updates"] - updates) / (now - since) if now > since else 0.0
        detail = f"loss {message['loss']:.4g}  {rate:,.0f} updates/s" if rate else f"loss {message['loss']:.4g}"
        self._bars.update(self._rows[id(cell)], completed=message["progress"], detail=detail)
        self._shares[id(cell)] = message["progress"]
        self._count()

    def note(self, cell: Cell, text: str) -> None:
        """Something about a cell that the user should know."""
        self._line(f"{_label(cell)}: {text}")

    def ended(self, cell: Cell, how: dict[str, Any], result: Result | None, seconds: float) -> None:
        """A cell is finished, stopped or failed."""
        if self._bars is not None:
            self._bars.remove_task(self._rows.pop(id(cell)))
        self._shares.pop(id(cell), None)
        if result is not None:
            self._done += 1
        self._count()
        said = how["ended"]
        if said == "failed":
            said = f"FAILED: {how['error']}"
        elif said != "stopped" and result is not None:
            gap = result.row.get("train_gap")
            value = f"train gap {gap:.3g}" if gap is not None else f"train loss {result.row['train_loss']:.4g}"
            said = f"{said}, {value}, {seconds:.1f} s"
        else:
            said = "stopped; its state is saved"
        self._line(f"[{self._done}/{self._total}] {_label(cell)}: {said}")

    def _count(self) -> None:
        """What is done of everything: finished cells, and the part of each running one that is done."""
        if self._bars is not None:
            self._bars.update(self._rows[0], completed=self._done + sum(self._shares.values()))

    def _line(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _label(cell: Cell) -> str:
    point = "".join(f" {key.split('.')[-1]}={value}" for key, value in cell.point.items())
    return f"{cell.run}{point} seed {cell.seed}"
