"""Balancing, against direct loops that do nothing else, in CPU time.

`Direct` is CD-GraB against the same contract: lockstep only, every row comes once and in order, nothing is checked,
saved or watched. `published_loop` is the loop as the authors publish it, on whole gradients. Everything runs on one
thread: a second one helps the published loop, which streams through memory, and not the signs, which stay in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from ratio import Ratio

from hemiola.contracts import Order, Visit
from hemiola.gradients.sketch import Fold
from hemiola.order import CDGraB
from hemiola.order.herding import Monitor

WORKERS, UNITS, WIDTH = 4, 2000, 1024
DIMENSION = 62_006  # LeNet's
ROUNDS = 9


class Direct(Order):
    """CD-GraB as a loop."""

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        super().begin(sizes, seed, lockstep)
        self._orders = [np.random.default_rng([seed, j]).permutation(n) for j, n in enumerate(sizes)]
        self._epoch, self._s = 0, np.zeros(0, np.float32)
        self._restart()

    def _restart(self) -> None:
        self._s = np.zeros_like(self._s)
        self._next = [np.empty_like(order) for order in self._orders]
        self._t = [0] * len(self._orders)
        self._half: list[tuple[int, np.ndarray]] = [(0, self._s)] * len(self._orders)

    def sequence(self, worker: int, epoch: int) -> np.ndarray:
        if epoch > self._epoch:
            self._epoch, self._orders = epoch, self._next
            self._restart()
        return self._orders[worker]

    def observe(self, visits: Sequence[Visit]) -> None:
        for visit in visits:
            j, rows = visit.worker, visit.sketches.numpy()
            if not len(self._s):
                self._s = np.zeros(rows.shape[1], rows.dtype)
            s, following, n = self._s, self._next[j], len(self._orders[j])
            for unit, row in zip(visit.units.tolist(), rows, strict=True):
                t = self._t[j]
                self._t[j] = t + 1
                if t % 2 == 0:
                    self._half[j] = unit, row
                    continue
                first, g = self._half[j]
                c = g - row
                if s.dot(c) <= 0:
                    following[t // 2], following[n - 1 - t // 2] = first, unit
                    s += c
                else:
                    following[t // 2], following[n - 1 - t // 2] = unit, first
                    s -= c


def published_loop(rows: torch.Tensor) -> None:
    total = torch.zeros(rows.shape[2])
    for t in range(0, rows.shape[1], 2):
        for worker in rows:
            difference = worker[t] - worker[t + 1]
            if torch.inner(total, difference) <= 0:
                total.add_(difference)
            else:
                total.sub_(difference)


def epochs(order: Order, rows: torch.Tensor, batch: int) -> Callable[[], float]:
    """A call runs an epoch and returns the CPU seconds of ``observe`` and ``sequence``."""
    workers, units, _ = rows.shape
    order.begin([units] * workers, 0, True)
    numbers = iter(range(10**9))

    def run() -> float:
        epoch = next(numbers)
        orders = [order.sequence(j, epoch) for j in range(workers)]
        updates = [
            [Visit(j, epoch, orders[j][t : t + batch], rows[j, t : t + batch], 1) for j in range(workers)]
            for t in range(0, units, batch)
        ]
        began = time.process_time()
        for visits in updates:
            order.observe(visits)
        for j in range(workers):
            order.sequence(j, epoch + 1)
        return time.process_time() - began

    return run


def cpu(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def least(*calls: Callable[[], float]) -> list[float]:
    """The least seconds of each, taken in turns: what other programs add is never negative."""
    return [min(seconds) for seconds in zip(*([call() for call in calls] for _ in range(ROUNDS)), strict=True)]


def unwatched(order: CDGraB) -> CDGraB:
    """The same policy with a monitor that sees nothing."""

    class Blind(Monitor):
        def add(self, update: list[tuple[int, int, np.ndarray]], total: object) -> None:
            pass

    begin = order.begin

    def blind(sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        begin(sizes, seed, lockstep)
        order._monitor = Blind(sum(sizes), seed)

    order.begin = blind  # type: ignore[method-assign]
    return order


def ratios() -> Iterator[Ratio]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    sketches = torch.randn(WORKERS, UNITS, WIDTH, generator=generator)
    for batch in (2, 1, 16):
        direct, policy, blind = least(
            epochs(Direct(), sketches, batch),
            epochs(CDGraB(sketch=f"fold:{WIDTH}"), sketches, batch),
            epochs(unwatched(CDGraB(sketch=f"fold:{WIDTH}")), sketches, batch),
        )
        yield Ratio(
            f"batch {batch}: policy / direct loop",
            policy / direct,
            "<= 1.5" if batch == 2 else "",
            f"observe and sequence of cd-grab with its monitor, {WORKERS} workers x {UNITS:,} units x {WIDTH:,}",
        )
        yield Ratio(
            f"batch {batch}: monitor / signs", (policy - blind) / blind, "<= 1", "what the herding monitor adds"
        )
    for dimension, units in ((1000, 500), (DIMENSION, 64), (1_000_000, 8)):
        rows = torch.randn(WORKERS, units, dimension, generator=generator)
        policy, published = least(
            epochs(CDGraB(sketch="exact"), rows, 2), lambda rows=rows: cpu(lambda: published_loop(rows))
        )
        yield Ratio(
            f"exact, d = {dimension:,}: policy / published loop", policy / published, "<= 1", "monitor included"
        )
    gradients = torch.randn(1, 128, DIMENSION, generator=generator)
    fold = Fold(WIDTH, DIMENSION, seed=0)
    folded = fold.apply(gradients[0])[None]
    policy, folding, published = least(
        epochs(CDGraB(sketch=f"fold:{WIDTH}"), folded, 2),
        lambda: cpu(lambda: fold.apply(gradients[0])),
        lambda: cpu(lambda: published_loop(gradients)),
    )
    yield Ratio(f"fold:{WIDTH}: published loop / policy", published / policy, note="sketches come folded with reports")
    yield Ratio(f"fold:{WIDTH}: published loop / policy and folding", published / (policy + folding))
    yield Ratio(f"fold:{WIDTH}: bytes / whole gradients", folded.nbytes / gradients.nbytes, "<= 0.02")
    torch.set_num_threads(threads)
