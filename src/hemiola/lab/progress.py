"""Progress: a bar with loss and rate for every running cell on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from hemiola.lab.experiment import Cell
from hemiola.lab.results import Result

log = logging.getLogger("hemiola")


@dataclass
class _Running:
    """A cell that runs: when it was first heard of and its updates then, the share of it that is done, and its bar."""

    since: float | None = None
    updates_then: int = 0
    share: float = 0.0
    row: TaskID | None = None


@dataclass
class Estimate:
    """How long everything takes, from all cells: those that ended and those that run.

    Attributes:
        total: Cells in all.
        done: Cells that are finished.
        began: When this process began.
        before: What was done before it did, in cells: finished ones, and the parts that others went on from.
    """

    total: int = 0
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    before: float = 0.0

    def left(self, running: float, now: float) -> float | None:
        """Seconds left, if the rest goes as fast as what was done here; ``running`` is the sum of parts under way."""
        made = self.done + running - self.before
        if made <= 0 or now <= self.began:
            return None
        return (now - self.began) / made * max(self.total - self.done - running, 0.0)


class Display:
    """Shows how an experiment gets on.

    Args:
        console: Where; None shows no progress, and logs what the user should know.
    """

    def __init__(self, console: Console | None):
        self.console = console
        self.estimate = Estimate()
        self._bars: Progress | None = None
        self._all: TaskID | None = None
        self._running: dict[int, _Running] = {}
        self._warned: set[str] = set()
        if console is not None and console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=28),
                TextColumn("{task.percentage:>3.0f} %", markup=False),
                TextColumn("{task.fields[detail]}", markup=False),
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
        self.estimate = Estimate(total, done, before=done)
        if done:
            self._line(f"{done} of {total} parts were finished before")
        if self._bars is not None:
            self._all = self._bars.add_task("all", total=total, completed=done, detail="")

    def started(self, cell: Cell) -> None:
        """A cell begins."""
        row = None if self._bars is None else self._bars.add_task(label(cell), total=1.0, detail="")
        self._running[id(cell)] = _Running(row=row)

    def heard(self, cell: Cell, message: dict[str, Any]) -> None:
        """A cell tells where it is, or has a note or a warning for the user."""
        if "note" in message:
            self.say(f"{label(cell)}: {message['note']}")
        elif "warning" in message:
            if message["warning"] not in self._warned:  # Cells that run alike warn alike.
                self._warned.add(message["warning"])
                self.say(f"{label(cell)}: {message['warning']}")
        else:
            self._moved(cell, message)

    def _moved(self, cell: Cell, message: dict[str, Any]) -> None:
        one, now = self._running[id(cell)], time.monotonic()
        if one.since is None:
            one.since, one.updates_then = now, message["updates"]
            self.estimate.before += message["from"]
        one.share = message["progress"]
        if self._bars is not None and one.row is not None:
            rate = (message["updates"] - one.updates_then) / (now - one.since) if now > one.since else 0.0
            detail = f"loss {message['loss']:.4g}" + (f"  {rate:,.0f} updates/s" if rate else "")
            self._bars.update(one.row, completed=one.share, detail=detail)
        self._count()

    def say(self, text: str) -> None:
        """Something that the user should know."""
        if self.console is None:
            log.warning("%s", text)
        self._line(text)

    def ended(self, cell: Cell, how: dict[str, Any], result: Result | None, seconds: float) -> None:
        """A cell is finished, stopped or failed."""
        one = self._running.pop(id(cell))
        if self._bars is not None and one.row is not None:
            self._bars.remove_task(one.row)
        if result is not None:
            self.estimate.done += 1
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
        self._count_line(f"{label(cell)}: {said}")

    def counted(self, part: str) -> None:
        """A part that is no cell is finished."""
        self.estimate.done += 1
        self._count()
        self._count_line(f"{part}: done")

    def _count_line(self, text: str) -> None:
        left = "" if self._bars is not None or not self._left() else f"; {self._left()}"
        self._line(f"[{self.estimate.done}/{self.estimate.total}] {text}{left}")

    def _count(self) -> None:
        """What is done of everything: finished cells, and the part of each running one that is done."""
        if self._bars is not None and self._all is not None:
            share = sum(one.share for one in self._running.values())
            self._bars.update(self._all, completed=self.estimate.done + share, detail=self._left())

    def _left(self) -> str:
        """How long it will still take, in words; empty where nothing is left or nothing can be said."""
        seconds = self.estimate.left(sum(one.share for one in self._running.values()), time.monotonic())
        return f"about {_rounded(seconds)} left" if seconds else ""

    def _line(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def label(cell: Cell) -> str:
    """A cell's name in lines of progress."""
    point = "".join(f" {key.split('.')[-1]}={value}" for key, value in cell.point.items())
    return f"{cell.run}{point} seed {cell.seed}"


def _rounded(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
