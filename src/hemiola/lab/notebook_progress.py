"""Progress in a notebook: one line for everything and one for each running cell, rewritten in place."""

from __future__ import annotations

import sys
import time
from html import escape
from types import TracebackType
from typing import Any

from hemiola.lab.experiment import Cell
from hemiola.lab.progress import Display, label
from hemiola.lab.results import Result

SECONDS = 0.2  # between two changes of what is shown


def progress_here() -> Display:
    """What shows progress for a caller who did not ask for any: in a notebook this, elsewhere nothing."""
    return NotebookDisplay() if in_notebook() else Display.silent()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookDisplay(Display):
    """Shows how an experiment gets on, below the cell of the notebook that started it."""

    def __init__(self) -> None:
        super().__init__(None)
        self._details: dict[int, tuple[str, float, str]] = {}  # label, share done, loss
        self._said: list[str] = []
        self._shown: Any = None  # IPython's handle of what is displayed
        self._next = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._details.clear()
        self._show(at_once=True)

    def begin(self, total: int, done: int) -> None:
        super().begin(total, done)
        self._show(at_once=True)

    def started(self, cell: Cell) -> None:
        super().started(cell)
        self._details[id(cell)] = (label(cell), 0.0, "")
        self._show()

    def heard(self, cell: Cell, message: dict[str, Any]) -> None:
        super().heard(cell, message)
        if "progress" in message:
            self._details[id(cell)] = (label(cell), message["progress"], f"loss {message['loss']:.4g}")
            self._show()

    def ended(self, cell: Cell, how: dict[str, Any], result: Result | None, seconds: float) -> None:
        self._details.pop(id(cell), None)
        super().ended(cell, how, result, seconds)
        if result is None and how["ended"] == "failed":
            self.say(f"{label(cell)}: FAILED: {how['error']}")
        self._show()

    def say(self, text: str) -> None:
        self._said.append(text)
        self._show(at_once=True)

    def _show(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if not at_once and now < self._next:
            return
        self._next = now + SECONDS
        shown = {"text/plain": "\n".join(self._lines()), "text/html": self._html()}
        if self._shown is None:
            from IPython.display import display

            self._shown = display(shown, raw=True, display_id=True)
        else:
            self._shown.update(shown, raw=True)

    def _summary(self) -> str:
        left = f", {self._left()}" if self._details and self._left() else ""
        return f"{self.estimate.done} of {self.estimate.total} runs finished{left}"

    def _lines(self) -> list[str]:
        running = [f"{name}  {100 * share:.0f} %  {loss}" for name, share, loss in self._details.values()]
        return [self._summary(), *running, *self._said]

    def _html(self) -> str:
        made = self.estimate.done + sum(share for _, share, _ in self._details.values())
        rows = [(self._summary(), made / max(self.estimate.total, 1), ""), *self._details.values()]
        bars = "".join(
            f'<tr><td style="text-align:left">{escape(name)}</td><td><progress value="{share:.3f}" max="1">'
            f'</progress></td><td style="text-align:left">{escape(loss)}</td></tr>'
            for name, share, loss in rows
        )
        notes = "".join(f"<div>{escape(text)}</div>" for text in self._said)
        return f"<table>{bars}</table>{notes}"
