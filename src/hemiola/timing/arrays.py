"""The timing-only simulation in bulk, for the variants and sizes where whole arrays of events can be handled at once.

Every function gives the numbers of `events.every_event`, bit for bit in the update times.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hemiola.timing.delays import BLOCK, DelayStreams
from hemiola.timing.events import TimedRun, counts

Floats = NDArray[np.float64]
CHUNK = 1 << 20  # draws held at a time by K-sync, at least
TILE = 1 << 17  # of which so many at a time are sorted, to stay in the cache
SPARE = 256  # see `_Ahead`


def k_sync(k: int, streams: DelayStreams, updates: int) -> TimedRun:
    """All restart at every update, so update n takes the K-th smallest of everybody's n-th draws."""
    waits, useful = [], 0.0
    step, tile = max(1, CHUNK // streams.workers // BLOCK) * BLOCK, max(1, TILE // streams.workers)
    for first in range(0, updates, step):
        matrix = streams.matrix(first, min(step, updates - first))
        for column in range(0, matrix.shape[1], tile):
            rounds = np.ascontiguousarray(matrix[:, column : column + tile].T)
            rounds.partition(k - 1, axis=1)
            waits.append(rounds[:, k - 1].copy())
            useful += rounds[:, :k].sum()
    wait = np.concatenate(waits)
    times, merged = np.cumsum(wait), updates * k
    busy = wait.sum()
    return TimedRun(times, np.array([merged]), k * busy - useful, (streams.workers - k) * busy, merged)


def k_batch_sync(k: int, streams: DelayStreams, updates: int) -> TimedRun | None:
    """Every round: as many draws of every worker as could matter, summed up; the K-th smallest sum is the update.

    None where two stints end at the moment of an update, or one worker ends more than `SPARE` in a round.
    """
    ahead = _Ahead(streams)
    now, useful, depth = 0.0, 0.0, 2
    times = np.empty(updates)
    for version in range(updates):
        while True:
            ends = ahead.peek(depth)
            ends[:, 0] += now
            np.cumsum(ends, axis=1, out=ends)
            end = np.partition(ends, k - 1, axis=None)[k - 1] if ends.size >= k else np.inf
            if end <= ends[:, -1].min():
                break
            depth *= 2
            if depth > SPARE:
                return None
        finished = (ends <= end).sum(axis=1)
        if finished.sum() > k:
            return None
        some = np.flatnonzero(finished)
        lasts = ends[some, finished[some] - 1]
        useful += float((lasts - now).sum())
        # Everybody began one stint more than it finished, except the last finisher, for whom the update came first.
        finished += 1
        finished[some[lasts == end]] -= 1
        ahead.skip(finished)
        now = times[version] = float(end)
        depth = max(2, int(finished.max()))
    merged = updates * k
    return TimedRun(times, np.array([merged]), 0.0, streams.workers * now - useful, merged)


def k_async(k: int, streams: DelayStreams, updates: int) -> TimedRun:
    """Nobody starts between two updates, so the K smallest of everybody's ends make the update."""
    ahead = _Ahead(streams)
    everybody = np.arange(streams.workers)
    ends = ahead.take(everybody)
    starts = everybody.copy()  # sequence numbers of the stints under way, which decide ties
    read = np.zeros(streams.workers, dtype=np.intp)
    idle_seconds, times, staleness = 0.0, np.empty(updates), np.zeros(1, dtype=np.int64)
    for version in range(updates):
        now = np.partition(ends, k - 1)[k - 1]
        free = np.flatnonzero(ends <= now)
        if len(free) > k:
            free = np.sort(free[np.lexsort((starts[free], ends[free]))[:k]])
        idle_seconds += float(k * now - ends[free].sum())
        staleness = _add(staleness, counts(version - read[free]))
        times[version] = now
        read[free] = version + 1
        starts[free] = (version + 1) * streams.workers + np.arange(k)
        ends[free] = now + ahead.take(free)
    return TimedRun(times, staleness, idle_seconds, 0.0, updates * k)


def k_batch_async(k: int, streams: DelayStreams, updates: int) -> TimedRun | None:
    """Nobody ever waits, so the ends are P renewal processes whatever K is; every K-th of them all is an update.

    With the ends numbered m = 0, 1, ..., number m meets version m // K, and its worker read version (m' + 1) // K,
    where m' is the number of that worker's end before. None where two stints end at the same moment.
    """
    wanted, workers = updates * k, streams.workers
    pace = streams.delay.mean * streams.factors
    stretch = float(min(BLOCK / 2, 10 + 1.2 * wanted * streams.delay.mean / (1 / streams.factors).sum() / pace.min()))
    stretch *= float(pace.min())
    horizon, seen = 0.0, 0
    last = np.zeros(workers)  # the latest known end of every worker
    blocks = [0] * workers
    before = np.full(workers, -1, dtype=np.intp)  # number of every worker's latest end
    ends, owners = [np.empty(0)], [np.empty(0, dtype=np.intp)]  # known, and not yet due
    times, staleness = [], np.zeros(1, dtype=np.int64)
    while seen < wanted:
        horizon += stretch
        for worker in np.flatnonzero(last < horizon).tolist():
            while last[worker] < horizon:
                fresh = streams.block(worker, blocks[worker])
                fresh[0] += last[worker]
                np.cumsum(fresh, out=fresh)
                blocks[worker] += 1
                last[worker] = fresh[-1]
                ends.append(fresh)
                owners.append(np.full(BLOCK, worker))
        known, owner = np.concatenate(ends), np.concatenate(owners)
        due = known < horizon
        order = np.argsort(known[due])
        moments, who = known[due][order], owner[due][order]
        if (moments[1:] == moments[:-1]).any():
            return None
        ends, owners = [known[~due]], [owner[~due]]
        number = seen + np.arange(len(who))
        earlier = _earlier(who, seen, before)[: wanted - seen]
        before[who] = number
        number = number[: wanted - seen]
        staleness = _add(staleness, counts(number // k - (earlier + 1) // k))
        times.append(moments[: len(number)][(number + 1) % k == 0])
        seen += len(number)
    return TimedRun(np.concatenate(times), staleness, 0.0, 0.0, wanted)


def _earlier(who: NDArray[np.intp], seen: int, before: NDArray[np.intp]) -> NDArray[np.intp]:
    """For every end, the number of the same worker's end before it."""
    by_worker = np.argsort(who, kind="stable")
    owner = who[by_worker]
    earlier = np.empty_like(who)
    same = owner[1:] == owner[:-1]
    earlier[by_worker[1:]] = np.where(same, seen + by_worker[:-1], before[owner[1:]])
    earlier[by_worker[:1]] = before[owner[:1]]
    return earlier


def _add(total: NDArray[np.int64], more: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(more) > len(total):
        total, more = more, total
    total[: len(more)] += more
    return total


class _Ahead:
    """The next draws of all workers as rows of one array, each worker at its own place in its stream.

    A row is `SPARE` columns and a block. When too little is left, the rest moves to the end of the spare columns and
    the next block takes its place.
    """

    def __init__(self, streams: DelayStreams) -> None:
        self._streams = streams
        self._rows = np.empty((streams.workers, SPARE + BLOCK))
        self._next = np.full(streams.workers, SPARE + BLOCK)  # the column of every worker's next draw
        self._blocks = [0] * streams.workers
        self._refill(1)

    def _refill(self, depth: int) -> None:
        for worker in np.flatnonzero(self._next + depth > SPARE + BLOCK).tolist():
            row, rest = self._rows[worker], SPARE + BLOCK - self._next[worker]
            row[SPARE - rest : SPARE] = row[SPARE + BLOCK - rest :].copy()
            row[SPARE:] = self._streams.block(worker, self._blocks[worker])
            self._blocks[worker] += 1
            self._next[worker] = SPARE - rest

    def peek(self, depth: int) -> Floats:
        """The next ``depth`` draws of every worker, a row each; they stay."""
        self._refill(depth)
        return np.take_along_axis(self._rows, self._next[:, None] + np.arange(depth), axis=1)

    def skip(self, steps: NDArray[np.intp]) -> None:
        self._next += steps

    def take(self, some: NDArray[np.intp]) -> Floats:
        """The next draw of some workers."""
        self._refill(1)
        values = self._rows[some, self._next[some]]
        self._next[some] += 1
        return np.asarray(values)
