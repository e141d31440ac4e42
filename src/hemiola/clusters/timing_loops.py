"""The timing-only simulation event by event: the whole rule in `every_event`, and two variants stripped to the bone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, count

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hemiola.contracts import Arrivals
from hemiola.pace import Quorum
from hemiola.pace.delays import BLOCK, DelayStreams

PIECE = 128  # draws turned into Python floats at a time: a whole block of 10,000 workers would take 300 MB


@dataclass
class LoggedUpdate:
    """One update.

    Attributes:
        seconds: Cluster time.
        merged: (worker, number of its stint, staleness) of every merged report, by worker, then by age.
        cancelled: (worker, number) of the stints this update stopped.
        dropped: (worker, number) of the stints refused as too stale since the update before.
        late: (worker, number) of the stints that ended since the update before, but were no longer wanted.
    """

    seconds: float = 0.0
    merged: list[tuple[int, int, int]] = field(default_factory=list)
    cancelled: list[tuple[int, int]] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    late: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Race:
    """The raw outcome of a run.

    Attributes:
        times: Cluster time of every update.
        staleness: How many merged reports had staleness 0, 1, 2, ...
        idle_seconds: Worker-seconds between finishing and the update.
        wasted_seconds: Worker-seconds of stints that were cancelled, dropped or late.
        completions: Stints that ended.
        log: Every update, if asked for.
    """

    times: NDArray[np.float64]
    staleness: NDArray[np.int64]
    idle_seconds: float
    wasted_seconds: float
    completions: int
    log: list[LoggedUpdate] | None = None


def draws(streams: DelayStreams) -> list[Callable[[], float]]:
    """For every worker a call that gives its next draw."""

    def pieces(worker: int) -> Iterator[list[float]]:
        for block in count():
            values = streams.block(worker, block)
            for first in range(0, BLOCK, PIECE):
                yield values[first : first + PIECE].tolist()

    return [chain.from_iterable(pieces(worker)).__next__ for worker in range(streams.workers)]


def counts(staleness: ArrayLike) -> NDArray[np.int64]:
    """How often 0, 1, 2, ... occur."""
    return np.bincount(np.asarray(staleness, dtype=np.intp), minlength=1)


def every_event(pace: Quorum, streams: DelayStreams, updates: int, log: bool = False) -> Race:
    """Any pace: K on a schedule, late reports ignored, stale ones dropped."""
    workers, draw = streams.workers, draws(streams)
    cancels, idles, ignores = pace.cancels, pace.idles, pace.late == "ignore"
    oldest = float("inf") if pace.max_staleness is None else pace.max_staleness
    k = pace.k()
    heap = [(draw[worker](), worker, worker) for worker in range(workers)]
    heapify(heap)
    sequence, version, completions, reports = workers, 0, 0, 0
    read, began, number = [0] * workers, [0.0] * workers, [0] * workers
    idle: list[tuple[float, int]] = []  # (end of its stint, worker)
    idle_seconds = wasted_seconds = 0.0
    times: list[float] = []
    staleness: list[int] = []
    present, history = LoggedUpdate(), []

    def start(worker: int, now: float) -> tuple[float, int, int]:
        nonlocal sequence
        sequence += 1
        read[worker], began[worker] = version, now
        number[worker] += 1
        return (now + draw[worker](), sequence, worker)

    while version < updates:
        now, _, worker = heap[0]
        completions += 1
        age = version - read[worker]
        late = cancels and age > 0
        if late or age > oldest:
            wasted_seconds += now - began[worker]
            (present.late if late else present.dropped).append((worker, number[worker]))
            heapreplace(heap, start(worker, now))
            continue
        reports += 1
        staleness.append(age)
        present.merged.append((worker, number[worker], age))
        if reports < k:
            if idles:
                heappop(heap)
                idle.append((now, worker))
            else:
                heapreplace(heap, start(worker, now))
            continue
        # The K-th report: the update comes first, then whoever is free starts on the new version.
        version, reports = version + 1, 0
        heappop(heap)
        idle_seconds += sum(now - end for end, _ in idle)
        free = {worker, *(waiting for _, waiting in idle)}
        idle.clear()
        if cancels and not ignores:
            busy = [other for _, _, other in heap]
            wasted_seconds += sum(now - began[other] for other in busy)
            present.cancelled = sorted((other, number[other]) for other in busy)
            free.update(busy)
            heap.clear()
        for waiting in sorted(free):
            heappush(heap, start(waiting, now))
        times.append(now)
        if log:
            present.seconds = now
            present.merged.sort()
            history.append(present)
        present = LoggedUpdate()
        if pace.fixed_k is None:
            pace.updated(Arrivals(now, version / updates, (), (), (), (), ()))
            k = pace.k()
    return Race(np.array(times), counts(staleness), idle_seconds, wasted_seconds, completions, history if log else None)


def k_batch_sync(k: int, streams: DelayStreams, updates: int) -> Race:
    """Everybody restarts at every update, so every round is a small race of its own and nothing is stale."""
    draw = draws(streams)
    numbered = list(enumerate(draw))
    now = useful = 0.0
    times: list[float] = []
    for _ in range(updates):
        heap = [(now + next_draw(), worker, worker, now) for worker, next_draw in numbered]
        heapify(heap)
        for sequence in range(len(draw), len(draw) + k - 1):
            end, _, worker, began = heap[0]
            useful += end - began
            heapreplace(heap, (end + draw[worker](), sequence, worker, end))
        now, _, _, began = heap[0]
        useful += now - began
        times.append(now)
    merged = updates * k
    return Race(np.array(times), np.array([merged]), 0.0, len(draw) * now - useful, merged)


def k_async(k: int, streams: DelayStreams, updates: int) -> Race:
    """Finishers wait and start together at the update; nobody else is touched."""
    draw = draws(streams)
    heap = [(next_draw(), worker, worker) for worker, next_draw in enumerate(draw)]
    heapify(heap)
    sequence, read, idle_seconds = len(draw), [0] * len(draw), 0.0
    times: list[float] = []
    staleness: list[int] = []
    for version in range(updates):
        free, ended = [], 0.0
        for _ in range(k):
            now, _, worker = heappop(heap)
            free.append(worker)
            staleness.append(version - read[worker])
            ended += now
        idle_seconds += k * now - ended
        times.append(now)
        free.sort()
        for worker in free:
            read[worker] = version + 1
            heappush(heap, (now + draw[worker](), sequence, worker))
            sequence += 1
    return Race(np.array(times), counts(staleness), idle_seconds, 0.0, updates * k)
