"""Short stretches of a run for the report's time line: its first updates, and its last.

A whole run would be too long to draw and too large to keep. Two windows tell the most: how it begins, and how it ends,
when an adaptive policy has changed its mind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hemiola.contracts import FOLLOWED, Span, State

SPANS = 10  # of each worker in a window, and the rest of the last update

Window = dict[str, list[list[float]]]  # by what was done: worker, begin, end


class Windows:
    """Keeps the spans of the first and of the last updates.

    Args:
        workers: How many there are.
    """

    def __init__(self, workers: int):
        self._most = SPANS * min(workers, FOLLOWED)
        self._first: list[Span] | None = []  # None once it was handed out
        self._last: deque[list[Span]] = deque()
        self._count = 0

    def note(self, spans: list[Span]) -> None:
        """Take note of an update's spans."""
        if self._first is not None and len(self._first) < self._most:
            self._first += spans
            return
        self._last.append(spans)
        self._count += len(spans)
        while self._count - len(self._last[0]) >= self._most:
            self._count -= len(self._last.popleft())

    def take(self, ended: bool) -> Window:
        """A window for the line of the log that is written now: the first once it is whole, the last at the end."""
        if ended and self._last:
            return _plain(span for spans in self._last for span in spans)
        if self._first and (ended or len(self._first) >= self._most):
            spans, self._first = self._first, None
            return _plain(spans)
        return {}

    def state_dict(self) -> State:
        return {
            "first": None if self._first is None else list(map(tuple, self._first)),
            "last": [list(map(tuple, spans)) for spans in self._last],
        }

    def load_state_dict(self, state: State) -> None:
        self._first = None if state["first"] is None else [Span(*span) for span in state["first"]]
        self._last = deque([Span(*span) for span in spans] for spans in state["last"])
        self._count = sum(map(len, self._last))


def _plain(spans: Iterable[Span]) -> Window:
    made: Window = {}
    for span in spans:
        made.setdefault(span.what, []).append([span.worker, float(f"{span.begin:.7g}"), float(f"{span.end:.7g}")])
    return made
