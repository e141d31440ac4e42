"""Stints as long as each worker is fast, so that all arrive together (``balance = "speed"``).

DyLU (Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135): where the period says p
steps, worker i takes p_i = round(p v_i / v_max) of them, at least one, v being steps per second as measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from hemiola.contracts import Report, State
from hemiola.wire.exchange import as_long_as_fast

MEMORY = 10  # reports: enough to see through steps that straggle by chance, few enough to follow a machine that changes


class Speeds:
    """Measured seconds of a local step, by worker.

    Args:
        workers: How many there are.
    """

    def __init__(self, workers: int) -> None:
        self._seconds = [0.0] * workers  # a running mean
        self._seen = [0] * workers

    def note(self, reports: Sequence[Report]) -> None:
        """Take note of what the stints of an update took."""
        for report in reports:
            worker, seconds = report.stint.worker, report.compute / len(report.stint.batches)
            self._seen[worker] = min(self._seen[worker] + 1, MEMORY)
            self._seconds[worker] += (seconds - self._seconds[worker]) / self._seen[worker]

    def length(self, worker: int, steps: int) -> int:
        """The stint of a worker where the fastest one would take so many steps; also before anything is known of it."""
        known = [seconds for seconds in self._seconds if seconds > 0]
        return as_long_as_fast(steps, self._seconds[worker], min(known, default=0.0))

    def state_dict(self) -> State:
        return {"seconds": list(self._seconds), "seen": list(self._seen)}

    def load_state_dict(self, state: State) -> None:
        self._seconds, self._seen = list(state["seconds"]), list(state["seen"])
