"""The herding bound: how far does the sum of the gradients visited so far stray from its even share of the total?

That is the quantity orders are chosen to keep small. With x[1], x[2], ... the rows of an epoch in the order in which
they were used, and their mean x,

    herding = max over t of || sum over i <= t of (x[i] - x) ||  /  rms ||x[i] - x||

The norm is the 2-norm, because folding keeps it; the division makes it a number of unit gradients, so that it can be
compared between epochs although gradients shrink. `Monitor` measures it while an epoch runs, and beside it what a
random order of the same rows would have given. `simulate_herding` runs an order on vectors that never change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from hemiola.contracts import Order, State, Total, Visit
from hemiola.streams import stream

WATCHED = 32  # numbers of a row that are watched, about
BLOCK = 64  # steps whose sums are found together
BLOCKS = 8  # such blocks that wait and are then taken in together: fewer calls cost less
AT_HAND = 1 << 16  # numbers of rows that are left where they are, so that many are copied in one call
POINTS = 4096  # of an epoch at which the sum so far is known, at most
SAMPLE = 512  # rows of an epoch that the bound of a random order is found from
LOWER = np.tri(BLOCK, dtype=np.float32)

Seen = tuple[int, int, np.ndarray]
"""A visit as the monitor sees it: epoch, worker, rows."""

Shape = tuple[tuple[int, ...], tuple[int, ...]]
"""The workers of an update's visits in one epoch, and how many rows each has."""

Group = tuple[list[Shape], np.ndarray]
"""What is kept of some updates: their shapes, and the watched numbers of all their rows."""


class EpochTrace:
    """The sum so far at points of an epoch, and a sample of its rows.

    A step is one unit of every worker that reported in an update: they are used at the same time.

    Args:
        picks: Which rows, counted as they come, are the sample; sorted.
    """

    def __init__(self, picks: np.ndarray) -> None:
        self.picks = picks
        self.rows = self.used = 0  # that were taken in, and those of them that are finite
        self.reached = np.zeros(1)  # their sum
        self.stride = 1  # steps from one point to the next
        self.points: list[np.ndarray] = []
        self.counts: list[np.ndarray] = []  # rows in the sum at each point
        self.sample: list[np.ndarray] = []

    def take_in(self, groups: list[Group]) -> None:
        """Move on to where the rows of these updates lead; one that is not finite counts as zero."""
        rows = np.concatenate([watched for _, watched in groups])
        finite = np.ones(len(rows), bool)
        with np.errstate(invalid="ignore", over="ignore"):  # where rows are not finite, their sum has nothing to say
            total = rows.sum()
        if not math.isfinite(total):
            finite = np.isfinite(rows).all(1)
            rows[~finite] = 0
        first, last = np.searchsorted(self.picks, (self.rows, self.rows + len(rows)))
        self.sample.append(rows[self.picks[first:last] - self.rows])
        self._move(*_steps(rows, finite, [shape for shapes, _ in groups for shape in shapes]))
        self.rows += len(rows)

    def _move(self, sums: np.ndarray, counts: np.ndarray) -> None:
        for points in prefix_sums(sums, self.reached):
            counted = self.used + np.cumsum(counts[: len(points)])
            self.reached, self.used, counts = points[-1], int(counted[-1]), counts[len(points) :]
            self.points.append(points[:: -self.stride][::-1])
            self.counts.append(counted[:: -self.stride][::-1])
        if sum(map(len, self.counts)) > POINTS:
            self.stride *= 2
            self.points, self.counts = ([each[1::2] for each in some] for some in (self.points, self.counts))

    def state_dict(self) -> State:
        """Plain numbers and tensors."""
        return {
            **{name: [_tensor(each) for each in getattr(self, name)] for name in ("points", "counts", "sample")},
            **{name: getattr(self, name) for name in ("rows", "used", "stride")},
            "reached": _tensor(self.reached),
        }

    @classmethod
    def from_state(cls, state: State, picks: np.ndarray) -> EpochTrace:
        """The trace that ``state_dict`` described."""
        trace = cls(picks)
        for name in ("points", "counts", "sample"):
            setattr(trace, name, [_array(each) for each in state[name]])
        for name in ("rows", "used", "stride"):
            setattr(trace, name, state[name])
        trace.reached = _array(state["reached"])
        return trace


def _steps(rows: np.ndarray, finite: np.ndarray, shapes: list[Shape]) -> tuple[np.ndarray, np.ndarray]:
    """The sum of the rows of each step of updates with these shapes, and how many they are."""
    width, (workers, lengths) = rows.shape[1], shapes[0]
    if shapes.count(shapes[0]) == len(shapes) and len({*workers}) == len(workers) * len({*lengths}):
        shape = len(shapes), len(workers), lengths[0]  # one visit as long of every worker in every update
        return rows.reshape(*shape, width).sum(1).reshape(-1, width), finite.reshape(shape).sum(1).ravel()
    steps, first = [], 0
    for workers, lengths in shapes:
        reached: dict[int, int] = {}
        for worker, length in zip(workers, lengths, strict=True):
            start = reached.get(worker, first)
            reached[worker] = start + length
            steps.append(np.arange(start, start + length))
        first = max(reached.values())
    member = np.zeros((first, len(rows)), rows.dtype)
    member[np.concatenate(steps), np.arange(len(rows))] = 1
    return member @ rows, (member @ finite).astype(np.int64)


def prefix_sums(rows: np.ndarray, start: np.ndarray) -> Iterator[np.ndarray]:
    """The sums of the first 1, 2, 3, ... rows, on top of ``start``; some of them at a time."""
    for at in range(0, len(rows), BLOCK):
        some = rows[at : at + BLOCK]
        sums = LOWER[: len(some), : len(some)].astype(some.dtype, copy=False) @ some + start
        start = sums[-1]
        yield sums


class Monitor:
    """Watches the rows of every epoch, and says what the herding bound of the last finished one was.

    Args:
        units: Of all workers together.
        seed: Of what is drawn at random.
    """

    def __init__(self, units: int, seed: int) -> None:
        self._units, self._seed = units, seed
        self._traces: dict[int, EpochTrace] = {}
        self._fresh: list[np.ndarray] = []  # rows that were not copied yet, all of one epoch,
        self._fresh_epoch = -1  # this one,
        self._shapes: list[Shape] = []  # and the shapes of their updates
        self._waiting: dict[int, list[Group]] = {}  # by epoch, what was not taken in yet: many at a time cost less
        self._held, self._room = 0, 0  # rows of both, and how many may be held
        self._found: dict[str, float] = {}
        self._newest = -1  # epoch that it is of

    def add(self, update: list[Seen], total: Total | None) -> None:
        """Take note of an update's visits. An epoch that is complete is finished."""
        if not update:
            return
        epochs, workers, found = zip(*update, strict=True)
        if epochs.count(epochs[0]) == len(epochs):
            self._keep(epochs[0], workers, found)
        else:
            for epoch in dict.fromkeys(epochs):
                _, workers, found = zip(*[seen for seen in update if seen[0] == epoch], strict=True)
                self._keep(epoch, workers, found)
        if self._held >= self._room:
            self._take_in(total)

    def _keep(self, epoch: int, workers: tuple[int, ...], found: tuple[np.ndarray, ...]) -> None:
        if epoch != self._fresh_epoch or len(self._fresh) * found[0].size > AT_HAND:
            self._copy()
            self._fresh_epoch = epoch
        lengths = tuple(map(len, found))
        self._fresh += found
        self._shapes.append((workers, lengths))
        self._held += sum(lengths)

    def _copy(self) -> None:
        """Keep copies of the watched numbers, so that whole rows neither stay in memory nor get into checkpoints."""
        if not self._fresh:
            return
        every = self._fresh[0].shape[1] // WATCHED | 1  # odd, because layers often have a power of two of inputs
        group = self._shapes, np.concatenate([rows[:, ::every] for rows in self._fresh])
        self._waiting.setdefault(self._fresh_epoch, []).append(group)
        self._fresh, self._shapes = [], []

    def _take_in(self, total: Total | None) -> None:
        self._copy()
        waiting, self._waiting, self._held = self._waiting, {}, 0
        for epoch, groups in waiting.items():
            if epoch not in self._traces:
                self._traces[epoch] = EpochTrace(self._picks(epoch))
            trace = self._traces[epoch]
            trace.take_in(groups)
            if trace.rows >= self._units:
                self.finish(epoch, total)
        left = min((self._units - trace.rows for trace in self._traces.values()), default=self._units)
        newest_workers, _ = groups[-1][0][-1]
        self._room = min(left, BLOCKS * BLOCK * len(newest_workers))

    def finish(self, epoch: int, total: Total | None) -> None:
        """No more rows of this epoch will come. ``total`` adds up over ranks that hold slices of the rows."""
        if self._held:
            self._take_in(total)
        trace = self._traces.pop(epoch, None)
        if trace is None:
            return
        mean = trace.reached / max(trace.used, 1)
        strayed = (points - counts[:, None] * mean for points, counts in zip(trace.points, trace.counts, strict=True))
        sample = np.concatenate(trace.sample).astype(np.float64)
        shuffled = (sample - sample.mean(0))[stream("shuffle", self._seed, epoch).permutation(len(sample))]
        # Squares add up over ranks that hold slices of the coordinates, norms do not.
        squares = [squared(strayed), squared(prefix_sums(shuffled, np.zeros(1))), squared([sample - mean])]
        longest, random, spread = squares if total is None else map(total, squares)
        variance, self._newest = float(spread.mean()), epoch
        if variance <= 0:
            self._found = {"herding": 0.0}
            return
        bound, chance = float(longest.max()), float(random.max()) * trace.rows / len(sample)
        self._found = {"herding": math.sqrt(bound / variance)}
        if chance > 0:
            self._found["herding_ratio"] = math.sqrt(bound / chance)

    def telemetry(self) -> State:
        """``herding`` of the last finished epoch, and its ratio to what a random order of the same rows gives.

        The latter is found from a sample, where there are many rows: it grows like the root of their number.
        """
        return dict(self._found)

    @property
    def newest(self) -> tuple[int, float | None]:
        """The epoch that was finished last, and its bound; -1 and None before the first."""
        return self._newest, self._found.get("herding")

    def _picks(self, epoch: int) -> np.ndarray:
        picks = stream("sample", self._seed, epoch).choice(self._units, min(SAMPLE, self._units), replace=False)
        return np.sort(picks)

    def state_dict(self) -> State:
        """Plain numbers and tensors."""
        self._copy()
        return {
            "found": dict(self._found),
            "newest": self._newest,
            "traces": {epoch: trace.state_dict() for epoch, trace in self._traces.items()},
            "waiting": {
                epoch: [(shapes, _tensor(watched)) for shapes, watched in groups]
                for epoch, groups in self._waiting.items()
            },
            "room": self._room,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore what ``state_dict`` returned."""
        self._found, self._newest = dict(state["found"]), state["newest"]
        self._traces = {
            epoch: EpochTrace.from_state(saved, self._picks(epoch)) for epoch, saved in state["traces"].items()
        }
        self._waiting = {
            epoch: [
                ([(tuple(workers), tuple(lengths)) for workers, lengths in shapes], _array(watched))
                for shapes, watched in groups
            ]
            for epoch, groups in state["waiting"].items()
        }
        self._held = sum(len(watched) for groups in self._waiting.values() for _, watched in groups)
        self._room = state["room"]


def squared(blocks: Iterable[np.ndarray]) -> np.ndarray:
    """The squared norms of rows that come in blocks."""
    return np.concatenate([np.einsum("ij,ij->i", block, block) for block in blocks])


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().copy()


def simulate_herding(policy: Order, m: int, n: int, d: int, rounds: int, seed: int) -> list[float]:
    """Run an order in lockstep over vectors that never change, the setting of the papers' figures.

    It needs no training and tells the orders apart at once: coordinated balance is flat in the number of workers,
    independent balance grows like its root.

    Args:
        policy: A new one.
        m: Workers.
        n: Units per worker: Gaussian directions of norm 1, centred per worker.
        d: Dimension.
        rounds: Epochs after the first one.
        seed: Of the vectors and the order.

    Returns:
        For the first order and after each round, the largest absolute coordinate of any prefix sum of the workers' sum.
    """
    vectors = stream("herding", seed).standard_normal((m, n, d))
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    vectors -= vectors.mean(1, keepdims=True)

    policy.begin([n] * m, seed, lockstep=True)
    bounds = []
    for epoch in range(rounds + 1):
        orders = [policy.sequence(worker, epoch) for worker in range(m)]
        visited = np.stack([vectors[worker][order] for worker, order in enumerate(orders)])
        bounds.append(float(np.abs(np.cumsum(visited.sum(0), 0)).max()))
        if policy.wants(0, epoch):
            rows = torch.from_numpy(visited)
            policy.observe([Visit(worker, epoch, order, rows[worker], 1) for worker, order in enumerate(orders)])
    return bounds
