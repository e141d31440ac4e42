"""Measured times for the log: few enough to write down, and no worker left out.

A log is a trace for ``hemiola predict``, which must tell a worker that is always slow from one that straggles now and
then. So every step time is written with its worker, and each worker's times are thinned by themselves: every n-th of
all times would be the same worker again and again where workers report in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LIMIT = 1000  # times of one kind in one line of the log


@dataclass
class Sample:
    """At most ``limit`` of many measured times, evenly spread."""

    limit: int = LIMIT
    values: list[float] = field(default_factory=list)
    stride: int = 1
    seen: int = 0

    def add(self, seconds: float) -> None:
        """Take note of one time."""
        if self.seen % self.stride == 0:
            self.values.append(float(f"{seconds:.4g}"))
        self.seen += 1
        if len(self.values) > self.limit:
            self.values, self.stride = self.values[::2], self.stride * 2


class MeasuredTimes:
    """Seconds of local steps and of exchanges since they were last taken.

    Args:
        workers: How many there are.
    """

    def __init__(self, workers: int):
        self.workers = workers
        self._clear()

    def _clear(self) -> None:
        self._steps = [Sample(max(1, LIMIT // self.workers)) for _ in range(self.workers)]
        self._exchanges = Sample()

    def step(self, worker: int, seconds: float) -> None:
        """A worker took so long for a local step."""
        self._steps[worker].add(seconds)

    def exchange(self, seconds: float) -> None:
        """An exchange took so long once the last worker had come."""
        self._exchanges.add(seconds)

    def take(self) -> dict[str, list[float] | list[int]]:
        """Hand out what was measured, and begin anew: ``step_workers[i]`` took ``step_seconds[i]``."""
        steps, exchanges = self._steps, self._exchanges.values
        self._clear()
        return {
            "step_seconds": [seconds for sample in steps for seconds in sample.values],
            "step_workers": [worker for worker, sample in enumerate(steps) for _ in sample.values],
            "exchange_seconds": exchanges,
        }
