"""What every benchmark yields: a ratio against a baseline measured in the same run, beside the bar it is held to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


class Skip(Exception):
    """This benchmark cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Ratio:
    """One measured ratio; ``bar`` reads like ``"<= 1.25"`` or ``">= 20"``, or is empty when there is none."""

    name: str
    value: float
    bar: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        if not self.bar:
            return None
        sign, limit = self.bar.split()
        return self.value <= float(limit) if sign == "<=" else self.value >= float(limit)


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    call()
    return clock() - start


def compare(
    call: Callable[[], object],
    baseline: Callable[[], object],
    rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Time of ``call`` over time of ``baseline``: the median over rounds of both, so that noise hits both."""
    call()
    baseline()
    return median(seconds(call, clock) / seconds(baseline, clock) for _ in range(rounds))
