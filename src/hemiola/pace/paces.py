"""The K-* family as one policy: how many reports an update waits for, and what happens to everybody else.

Dutta, Joshi, Ghosh, Dube, Nagpurkar (AISTATS 2018, arXiv 1803.01113) and Dutta, Wang, Joshi (JSAIT 2021, arXiv
2003.10579). With P workers, an update averages the first K reports; two yes-or-no fields make the four variants:

    |                                                | others are cancelled | others keep going |
    |------------------------------------------------|----------------------|-------------------|
    | a finisher idles (K distinct workers count)    | `KSync`              | `KAsync`          |
    | a finisher takes another batch (K stints count)| `KBatchSync`         | `KBatchAsync`     |

Further fields hold later methods: ``KBatchSync(late="ignore")`` is Rennala SGD (arXiv 2305.12387), ``KBatchAsync(k=1,
max_staleness=R - 1)`` is Ringmaster ASGD without stops (arXiv 2501.16168).
Symbols: K ``k``, P ``workers``, tau = staleness, eta_j / eta = ``weight``.

A deadline beside K: with ``grace`` = c, an update that has its K reports stays open until median + c * MAD of the times
that reports took, those of the stints it stopped being infinite. MAD is the median distance from the median, so half of
all reports come within it, and at c = 3 only outliers do not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from hemiola.contracts import Arrivals, Pace, State
from hemiola.errors import InputError
from hemiola.options import one_of
from hemiola.pace.adasync import AdaSync, Guard
from hemiola.state import own_state

VERSION = 1
LEAST_WAITS, WAITS_OF_EACH = 32, 4  # times of reports a deadline is learnt from: so many, and so many of each worker


class Quorum(Pace):
    """A pace that waits for K reports; the four variants are its subclasses and differ in two fields only.

    Args:
        k: How many reports an update waits for: a number; ``"adasync"``; or a schedule of (progress, K) pairs, such as
            ``[[0.0, 2], [0.5, 4]]`` for 4 from the middle of the run on. By default as many as there are workers.
        start: AdaSync's first K.
        window: AdaSync reconsiders K once in this many mean step times.
        guard: AdaSync's guards: all of them, none of them (the paper's exact rule), or some by name; see `AdaSync`.
        max_staleness: Reports older than this are dropped.
        grace: Gives those a chance that are hardly later than the K-th: an update that has its K reports stays open
            until median + grace * MAD of the times that reports took, or until all have come. The first one waits for
            all, to learn these times. Only where a finisher idles.
        late: Whether the workers an update did not wait for are stopped at once (``"cancel"``), are stopped and count
            for the steps they have done (``"cut"``), or finish and are then not listened to (``"ignore"``). Only where
            the others do not keep going.
        stale_rate: Weight of a report that is tau updates old and was computed at squared distance d from the present
            weights: 1 (``"constant"``), min(1, c / d) (``"distance"``: AISTATS 2018, eta_j = min(C / d, eta_max) with
            C = c * eta_max), min(1, c / (tau + 1)) (``"delay"``).
        stale_constant: The c of ``stale_rate``.
    """

    def __init__(
        self,
        *,
        k: int | Literal["adasync"] | Sequence[Sequence[float]] | None = None,
        start: int = 1,
        window: float = 20.0,
        guard: bool | Sequence[Guard] = True,
        max_staleness: int | None = None,
        grace: float | None = None,
        late: Literal["cancel", "cut", "ignore"] = "cancel",
        stale_rate: Literal["constant", "distance", "delay"] = "constant",
        stale_constant: float = 1.0,
    ) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise InputError(f"max_staleness must be at least 0, got {max_staleness}")
        one_of("late", late, ["cancel", "cut", "ignore"])
        if late != "cancel" and not self.cancels:
            raise InputError(f"late = {late!r} has no meaning in {self.kind}, where the others keep going")
        one_of("stale_rate", stale_rate, ["constant", "distance", "delay"])
        if not stale_constant > 0:
            raise InputError(f"stale_constant must be above 0, got {stale_constant}")
        if grace is not None and not self.idles:
            raise InputError(f"grace = {grace} has no meaning in {self.kind}: who goes on at once is never waited for")
        if grace is not None and not (math.isfinite(grace) and grace > 0):
            raise InputError(f"grace must be above 0, got {grace}")
        self.late: str = late
        self._grace = grace
        self._waits: deque[float] = deque()
        self._deadline: float | None = None
        self.max_staleness = max_staleness
        self.needs_distance = stale_rate == "distance"
        self._stale_rate = stale_rate
        self._stale_constant = stale_constant
        self._adasync = AdaSync(start=start, window=window, guard=guard) if k == "adasync" else None
        self._schedule = _schedule(k)
        self._progress = 0.0
        self._workers = 0

    def begin(self, workers: int) -> None:
        self._workers = workers
        self._progress = 0.0
        self._remember_waits([])
        if self._adasync is not None:
            self._adasync.begin(workers, counts_workers=self.idles)
            return
        for _, k in self._schedule or ():
            if self.idles and k > workers:
                raise InputError(f"k must be between 1 and the number of workers, {workers}, in {self.kind}, got {k}")

    def k(self) -> int:
        if self._adasync is not None:
            return self._adasync.k
        if self._schedule is None:
            return self._workers
        return [k for progress, k in self._schedule if progress <= self._progress][-1]

    def deadline(self) -> float | None:
        return self._deadline

    def _remember_waits(self, waits: Sequence[float]) -> None:
        """Learn the deadline from these times, and no others."""
        if self._grace is None:
            return
        self._waits = deque(waits, maxlen=max(LEAST_WAITS, WAITS_OF_EACH * self._workers))
        self._deadline = math.inf
        if self._waits:
            seen = np.asarray(self._waits)
            median = float(np.median(seen))
            if math.isfinite(median):  # else more than half were stopped: wait for all, to learn again
                self._deadline = median + self._grace * float(np.median(np.abs(seen - median)))

    @property
    def adapts(self) -> bool:
        """Whether K depends on losses."""
        return self._adasync is not None

    @property
    def fixed_k(self) -> int | None:
        """The K of the whole run, where it does not change and nobody is waited for beside."""
        if self._adasync is not None or (self._schedule is not None and len(self._schedule) > 1):
            return None
        return None if self._grace is not None and self.k() < self._workers else self.k()

    @property
    def lockstep(self) -> bool:
        """Every K is the number of workers, and one worker cannot count twice."""
        if self._adasync is not None or not self.idles:
            return False
        return self._schedule is None or all(k == self._workers for _, k in self._schedule)

    def weight(self, staleness: int, distance: float) -> float:
        if self._stale_rate == "delay":
            return min(1.0, self._stale_constant / (staleness + 1))
        if self._stale_rate == "distance" and distance > 0:
            return min(1.0, self._stale_constant / distance)
        return 1.0

    def updated(self, seen: Arrivals) -> None:
        self._progress = seen.progress
        if self._adasync is not None:
            self._adasync.updated(seen)
        if self._grace is not None:
            self._remember_waits([*self._waits, *seen.waits])

    def telemetry(self) -> State:
        """``k``, under AdaSync what it was decided from, and the deadline where there is one."""
        told = {"k": self.k(), **(self._adasync.telemetry() if self._adasync is not None else {})}
        if self._deadline is not None and math.isfinite(self._deadline):
            told["deadline"] = self._deadline
        return told

    def state_dict(self) -> State:
        state: State = {"kind": self.kind, "version": VERSION, "workers": self._workers, "progress": self._progress}
        if self._adasync is not None:
            state["adasync"] = self._adasync.state_dict()
        if self._grace is not None:
            state["waits"] = list(self._waits)
        return state

    def load_state_dict(self, state: State) -> None:
        own_state(state, self.kind, VERSION)
        if state["workers"] != self._workers:
            raise InputError(f"the saved pace had {state['workers']} workers, this run has {self._workers}")
        if ("adasync" in state) != (self._adasync is not None):
            raise InputError("one of the saved pace and this one has k = 'adasync', the other has not")
        if ("waits" in state) != (self._grace is not None):
            raise InputError("one of the saved pace and this one has a grace, the other has not")
        self._progress = float(state["progress"])
        self._remember_waits(state.get("waits", []))
        if self._adasync is not None:
            self._adasync.load_state_dict(state["adasync"])


class KSync(Quorum):
    """The first K distinct workers count; the others are cancelled and all restart. K = P: synchronous SGD."""

    kind = "k-sync"
    cancels = True
    idles = True


class KBatchSync(Quorum):
    """The first K batches count, all taken at the same weights; the rest are cancelled and all restart."""

    kind = "k-batch-sync"
    cancels = True
    idles = False


class KAsync(Quorum):
    """The first K distinct workers count and read the new weights; the others keep going on their old ones."""

    kind = "k-async"
    cancels = False
    idles = True


class KBatchAsync(Quorum):
    """The first K batches count; finishers go on at once with the current weights. K = 1: asynchronous SGD."""

    kind = "k-batch-async"
    cancels = False
    idles = False


def _schedule(k: int | str | Sequence[Sequence[float]] | None) -> list[tuple[float, int]] | None:
    """The (progress, K) pairs of a fixed K or a schedule; None where K is the number of workers, or AdaSync's."""
    if k is None or k == "adasync":
        return None
    if isinstance(k, str):
        raise InputError(f"k must be a number, 'adasync' or a schedule of (progress, K) pairs, got {k!r}")
    pairs = [(0.0, float(k))] if isinstance(k, int) else [_pair(entry) for entry in k]
    if not pairs or pairs[0][0] != 0:
        raise InputError(f"a schedule of k must start at progress 0, as in [[0.0, 2], [0.5, 4]], got {k!r}")
    starts = [progress for progress, _ in pairs]
    if any(later <= earlier for earlier, later in pairwise(starts)) or not starts[-1] <= 1:
        raise InputError(f"the progress values of a schedule of k must increase and lie in [0, 1], got {starts}")
    for _, value in pairs:
        if value < 1 or value != int(value):
            raise InputError(f"k must be a whole number of at least 1, got {value:g}")
    return [(progress, int(value)) for progress, value in pairs]


def _pair(entry: Sequence[float]) -> tuple[float, float]:
    try:
        progress, k = entry
        return float(progress), float(k)
    except (TypeError, ValueError):
        raise InputError(f"a schedule of k is a list of (progress, K) pairs, got the entry {entry!r}") from None
