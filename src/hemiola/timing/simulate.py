"""The simulated cluster without a model: when updates happen, how stale they are, who waits and what is wasted.

The events are those of the full simulation, draw by draw: worker j's i-th stint takes draw i of its delay stream. A
heap holds one entry per busy worker, keyed (time, sequence number of the stint's start), so that ties are decided by
rule. When a stint ends, its report is counted; if it is the K-th, the update happens first, and whoever starts after
that, the finisher included, reads the new version. Workers that start at the same moment do so in order of number.

`events` has the events one by one, `arrays` the same in bulk where nothing hangs on single events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hemiola.contracts import Pace
from hemiola.errors import InputError
from hemiola.timing import arrays, events
from hemiola.timing.delays import Delay, DelayStreams
from hemiola.timing.events import LoggedUpdate, TimedRun

BATCHES = 50  # the standard error comes from means over this many stretches of updates
MANY = 64  # from this many reports an update on, bulk beats a heap


@dataclass(frozen=True)
class TimingResult:
    """What a timing-only run showed.

    Attributes:
        updates: How many updates there were.
        seconds: Cluster time of the last of them.
        mean_update_seconds: Time per update.
        mean_reports: Reports merged in an update: K, or more where a deadline lets others in.
        standard_error: Of the mean update time, by batch means, because successive update times are not independent.
        mean_staleness: Over all merged reports.
        staleness: How many merged reports had staleness 0, 1, 2, ...
        fresh_fraction: Share of merged reports with staleness 0.
        idle_share: Share of all worker-seconds spent waiting for an update.
        wasted_share: Share of all worker-seconds spent on stints that were cancelled, dropped or came too late.
        completions: Stints that ended, merged or not.
        log: Every update, if asked for.
    """

    updates: int
    seconds: float
    mean_update_seconds: float
    mean_reports: float
    standard_error: float
    mean_staleness: float
    staleness: NDArray[np.int64]
    fresh_fraction: float
    idle_share: float
    wasted_share: float
    completions: int
    log: list[LoggedUpdate] | None = None


def simulate_timing(
    pace: Pace,
    workers: int,
    delay: Delay,
    updates: int,
    seed: int = 0,
    slow: Mapping[int, float] | None = None,
    log: bool = False,
    exchange: float = 0.0,
) -> TimingResult:
    """Play the updates of a run through, without gradients.

    Args:
        pace: Any pace whose K does not depend on losses; it is begun here.
        workers: How many there are.
        delay: Law of the time of a stint.
        updates: How many updates to play.
        seed: Names the delay streams.
        slow: Factor on the times of some workers.
        log: Whether to keep every update. Slower, because it goes event by event.
        exchange: Seconds of the ring exchange that makes an update of its reports. Everyone waits for it where the
            others are cancelled or all are waited for; else it passes behind their computation.
    """
    if workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    if updates < 1:
        raise InputError(f"updates must be at least 1, got {updates}")
    if pace.adapts:
        raise InputError("a timing-only run has no losses, so k cannot depend on them, as 'adasync' does")
    pace.begin(workers)
    streams = DelayStreams(delay, workers, seed, slow)
    race = _with_exchanges(pace, streams, updates, log, exchange) if exchange else _race(pace, streams, updates, log)
    worker_seconds = workers * race.times[-1]
    merged = race.staleness.sum()
    return TimingResult(
        updates=updates,
        seconds=float(race.times[-1]),
        mean_update_seconds=float(race.times[-1]) / updates,
        mean_reports=float(merged) / updates,
        standard_error=batch_means_error(np.diff(race.times, prepend=0.0)),
        mean_staleness=float(race.staleness @ np.arange(len(race.staleness)) / merged),
        staleness=race.staleness,
        fresh_fraction=float(race.staleness[0] / merged),
        idle_share=float(race.idle_seconds / worker_seconds),
        wasted_share=float(race.wasted_seconds / worker_seconds),
        completions=race.completions,
        log=race.log,
    )


def _with_exchanges(pace: Pace, streams: DelayStreams, updates: int, log: bool, exchange: float) -> TimedRun:
    if not (pace.cancels or pace.lockstep):
        return events.behind(pace, streams, updates, exchange, log)
    race = _race(pace, streams, updates, log)
    later = exchange * np.arange(1, updates + 1)
    for update, shift in zip(race.log or (), later.tolist(), strict=False):
        update.seconds += shift
    return replace(race, times=race.times + later)


def _race(pace: Pace, streams: DelayStreams, updates: int, log: bool) -> TimedRun:
    """Pick the fastest way that gives the same events."""
    plain = pace.fixed_k is not None and pace.late != "ignore" and (pace.cancels or pace.max_staleness is None)
    if log or not plain:
        return events.every_event(pace, streams, updates, log)
    k, race = pace.k(), None
    if pace.cancels:
        if pace.idles or k == 1:
            return arrays.k_sync(k, streams, updates)
        if streams.workers >= 8 * MANY:
            race = arrays.k_batch_sync(k, streams, updates)
        return race or events.k_batch_sync(k, streams, updates)
    if not pace.idles or k == 1:
        return arrays.k_batch_async(k, streams, updates) or events.every_event(pace, streams, updates)
    if k >= MANY:
        return arrays.k_async(k, streams, updates)
    return events.k_async(k, streams, updates)


def batch_means_error(intervals: NDArray[np.float64]) -> float:
    """Standard error of the mean of a correlated series: that of the means of long stretches, which are hardly so."""
    batches = min(BATCHES, len(intervals))
    if batches < 2:
        return float("nan")
    length = len(intervals) // batches
    means = intervals[len(intervals) - batches * length :].reshape(batches, length).mean(axis=1)
    return float(means.std(ddof=1) / np.sqrt(batches))
