"""The timing-only simulation against a plain heap loop written the obvious way, on the same draws."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ratio import Ratio, compare, seconds

from hemiola.pace import PACES
from hemiola.timing.delays import DelayStreams, parse_delay
from hemiola.timing.simulate import simulate_timing

DELAY = parse_delay("shifted-exponential(1, 1)")


def plain(name: str, workers: int, k: int, updates: int) -> float:
    """What one would write first: a heap of (time, sequence, worker), one event after the other."""
    cancels, idles = PACES[name].cancels, PACES[name].idles
    streams = DelayStreams(DELAY, workers, 0)
    numbers, sequence, version, now = [0] * workers, 0, 0, 0.0
    read = [0] * workers
    heap: list[tuple[float, int, int]] = []

    def start(worker: int) -> None:
        nonlocal sequence
        heappush(heap, (now + streams.seconds(worker, numbers[worker]), sequence, worker))
        numbers[worker] += 1
        sequence += 1
        read[worker] = version

    for worker in range(workers):
        start(worker)
    staleness: dict[int, int] = {}
    waiting: list[int] = []
    reports = 0
    while version < updates:
        now, _, worker = heappop(heap)
        age = version - read[worker]
        staleness[age] = staleness.get(age, 0) + 1
        reports += 1
        waiting.append(worker)
        if reports == k:
            version, reports = version + 1, 0
            if cancels:
                waiting += [other for _, _, other in heap]
                heap.clear()
        elif idles:
            continue
        for free in sorted(waiting):
            start(free)
        waiting = []
    return now


def heap_of_k_sync(workers: int, k: int, updates: int) -> float:
    """K-sync on a heap and nothing else: the fewest steps a heap can take."""
    streams = DelayStreams(DELAY, workers, 0)
    now = 0.0
    for update in range(updates):
        heap = [(now + streams.seconds(worker, update), worker) for worker in range(workers)]
        heapify(heap)
        for _ in range(k):
            now, _ = heappop(heap)
    return now


def ratios() -> Iterator[Ratio]:
    for workers, k, updates, limit in ((8, 4, 10_000, 1.0), (10_000, 5_000, 15, 0.5)):
        for name in PACES:

            def fast(name: str = name, workers: int = workers, k: int = k, updates: int = updates) -> object:
                return simulate_timing(PACES[name](k=k), workers, DELAY, updates)

            def slow(name: str = name, workers: int = workers, k: int = k, updates: int = updates) -> object:
                return plain(name, workers, k, updates)

            assert fast().seconds == slow()  # type: ignore[attr-defined]
            value = compare(slow, fast, rounds=3)
            many = max(updates, 500_000 // k)
            rate = many * k / seconds(lambda fast=fast, many=many: fast(updates=many)) / 1e6
            yield Ratio(
                f"{name}, P = {workers}, K = {k}",
                value,
                "",
                f"times a plain heap loop; {rate:.2f} M completions/s (bar on an idle core: {limit} M/s)",
            )
    for workers, k, updates in ((8, 4, 10_000), (1_000, 500, 200)):
        value = compare(
            lambda workers=workers, k=k, updates=updates: heap_of_k_sync(workers, k, updates),
            lambda workers=workers, k=k, updates=updates: simulate_timing(
                PACES["k-sync"](k=k), workers, DELAY, updates
            ),
            rounds=3,
        )
        yield Ratio(f"K-sync in bulk, P = {workers}", value, ">= 10", "times K-sync on a heap")
    slowest = 0.0
    for name in PACES:
        took = seconds(lambda name=name: simulate_timing(PACES[name](k=5_000), 10_000, DELAY, 1_000))
        slowest = max(slowest, took)
    yield Ratio(
        "P = 10,000, 1000 updates of K = 5000",
        slowest / 15,
        "<= 1",
        f"of 15 s: the slowest variant took {slowest:.1f} s",
    )
