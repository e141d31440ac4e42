"""The timing-only simulation event by event: the whole rule, and two variants stripped to the bone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, count

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hemiola.contracts import Arrivals, Pace
from hemiola.pace.race import COUNTS, LATE, Race
from hemiola.timing.delays import BLOCK, DelayStreams

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
class TimedRun:
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


def every_event(pace: Pace, streams: DelayStreams, updates: int, log: bool = False) -> TimedRun:
    """Any pace, event by event: a heap of ends drives the rule."""
    race, draw = Race(pace), draws(streams)
    heap: list[tuple[float, int, int]] = []
    now, sequence, completions = 0.0, 0, 0
    began, number = [0.0] * streams.workers, [-1] * streams.workers
    idle_seconds = wasted_seconds = 0.0
    times: list[float] = []
    staleness: list[int] = []
    present, history = LoggedUpdate(), []
    learns, waits = pace.fixed_k is None, []

    def start(worker: int) -> tuple[float, int, int]:
        nonlocal sequence
        race.start(worker)
        sequence += 1
        began[worker] = now
        number[worker] += 1
        return (now + draw[worker](), sequence, worker)

    free = list(range(streams.workers))
    while race.version < updates:
        for worker in sorted(free):
            heappush(heap, start(worker))
        free, opened = [], now
        while not race.complete:
            deadline = race.deadline
            if deadline is not None and opened + deadline < heap[0][0]:
                now = max(now, opened + deadline)
                race.expire()
                break
            now, _, worker = heap[0]
            completions += 1
            if learns:
                waits.append(now - began[worker])
            age = race.version - race.running[worker]
            fate = race.finish(worker)
            if fate is COUNTS:
                staleness.append(age)
                present.merged.append((worker, number[worker], age))
            else:
                wasted_seconds += now - began[worker]
                (present.late if fate is LATE else present.dropped).append((worker, number[worker]))
            if race.rests(fate):
                heappop(heap)
                free.append(worker)
                idle_seconds -= now
            else:
                heapreplace(heap, start(worker))
        idle_seconds += now * len(free)
        cancelled = race.close()
        if cancelled:
            wasted_seconds += sum(now - began[worker] for worker in cancelled)
            present.cancelled = [(worker, number[worker]) for worker in cancelled]
            free += cancelled
            heap.clear()
            waits += [math.inf] * len(cancelled)
        race.version += 1
        times.append(now)
        if log:
            present.seconds = now
            present.merged.sort()
            history.append(present)
        present = LoggedUpdate()
        if learns:
            pace.updated(Arrivals(now, race.version / updates, (), (), (), (), (), waits))
            waits = []
    timeline = TimedRun(np.array(times), counts(staleness), idle_seconds, wasted_seconds, completions)
    return replace(timeline, log=history) if log else timeline


def behind(pace: Pace, streams: DelayStreams, updates: int, exchange: float, log: bool = False) -> TimedRun:
    """Any pace whose others keep going, with reports that travel by exchanges of so many seconds behind them."""
    race, draw = Race(pace, behind=True), draws(streams)
    heap: list[tuple[float, int, int]] = []
    now, sequence, completions = 0.0, 0, 0
    began, number, read = ([0.0] * streams.workers, [-1] * streams.workers, [0] * streams.workers)
    idle_seconds = wasted_seconds = 0.0
    times: list[float] = []
    staleness: list[int] = []
    gathered: list[tuple[int, int, int]] = []  # worker, number of its stint, version it has read
    idle: set[int] = set(range(streams.workers))
    present, history = LoggedUpdate(), []
    learns, waits = pace.fixed_k is None, []

    def start(worker: int) -> None:
        nonlocal sequence
        race.start(worker)
        sequence += 1
        began[worker], read[worker] = now, race.version
        number[worker] += 1
        heappush(heap, (now + draw[worker](), sequence, worker))

    def next_end() -> None:
        nonlocal now, completions, wasted_seconds, idle_seconds
        now, _, worker = heappop(heap)
        completions += 1
        waits.append(now - began[worker])
        fate = race.finish(worker)
        if fate is COUNTS:
            gathered.append((worker, number[worker], read[worker]))
        else:
            wasted_seconds += now - began[worker]
            present.dropped.append((worker, number[worker]))
        if race.rests(fate):
            idle.add(worker)
            idle_seconds -= now
        else:
            start(worker)

    while race.version < updates:
        opened = now
        for worker in sorted(idle - race.held):
            idle.remove(worker)
            idle_seconds += now
            start(worker)
        while not race.complete:
            deadline = race.deadline
            if deadline is not None and opened + deadline < heap[0][0]:
                now = max(now, opened + deadline)
                race.expire()
            else:
                next_end()
        race.depart()
        under_way, gathered = gathered, []
        arrival = now + exchange
        while heap and heap[0][0] < arrival:
            next_end()
        now = arrival
        race.close()
        ages = [race.version - version for _, _, version in under_way]
        staleness += ages
        times.append(now)
        race.version += 1
        if log:
            present.seconds = now
            present.merged = sorted((who, stint, age) for (who, stint, _), age in zip(under_way, ages, strict=True))
            history.append(present)
        present = LoggedUpdate()
        if learns:
            pace.updated(Arrivals(now, race.version / updates, (), (), (), (), (), waits))
        waits = []
    idle_seconds += now * len(idle)
    timeline = TimedRun(np.array(times), counts(staleness), idle_seconds, wasted_seconds, completions)
    return replace(timeline, log=history) if log else timeline


def k_batch_sync(k: int, streams: DelayStreams, updates: int) -> TimedRun:
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
    return TimedRun(np.array(times), np.array([merged]), 0.0, len(draw) * now - useful, merged)


def k_async(k: int, streams: DelayStreams, updates: int) -> TimedRun:
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
    return TimedRun(np.array(times), counts(staleness), idle_seconds, 0.0, updates * k)
