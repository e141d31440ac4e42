"""The herding bound of an epoch, measured while it runs.

How far does the sum of the gradients visited so far stray from its even share of the epoch's total? That is the
quantity orders are chosen to keep small: with x[j, i] the sketch of worker j's i-th used unit and mean[j] its mean,

    herding = max over steps t of || sum over j, and over i up to step t, of (x[j, i] - mean[j]) ||  /  rms ||x - mean||

The norm is the 2-norm, because folding keeps it; the division makes it a number of unit gradients, so that it can be
compared between epochs although gradients shrink. Step t of a worker is its t-th visit of the epoch, so where workers
drift apart the bound is about equal positions, not equal times. Rows are folded to at most `WIDTH` numbers first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hemiola.contracts import State
from hemiola.gradients.sketch import Exact, Fold
from hemiola.order.balance import Total

WIDTH = 128


@dataclass
class _Trace:
    """One epoch number: what was visited at each step, (steps, WIDTH) sums and (steps, workers) counts of units."""

    sums: np.ndarray
    units: np.ndarray
    totals: np.ndarray
    squares: float = 0.0


def _grouped(keys: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct keys, and the sum of each one's rows."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))
    return keys[starts], np.add.reduceat(rows[order], starts, axis=0)


class Monitor:
    """Collects rows and yields the herding bound of each finished epoch.

    Args:
        workers: How many.
        seed: Of the fold.
    """

    def __init__(self, workers: int, seed: int) -> None:
        self.herding: float | None = None
        self._workers, self._seed = workers, seed
        self._traces: dict[int, _Trace] = {}
        self._fold: Exact | Fold | None = None

    def add(self, epoch: int, rows: np.ndarray, workers: np.ndarray, steps: np.ndarray) -> None:
        """Note visited rows, each with its worker and the worker's step; non-finite rows are left out."""
        if self._fold is None or self._fold.dimension != rows.shape[1]:
            width = rows.shape[1]
            self._fold = Fold(WIDTH, width, self._seed) if width > WIDTH else Exact(width)
        folded = self._fold.apply(torch.from_numpy(rows)).numpy()
        squares = np.einsum("ij,ij->i", folded, folded)
        finite = np.isfinite(squares)
        if not finite.all():
            folded, squares, workers, steps = folded[finite], squares[finite], workers[finite], steps[finite]
        if not len(folded):
            return
        trace = self._trace(epoch, int(steps.max()) + 1, folded.shape[1])
        for into, keys in ((trace.sums, steps), (trace.totals, workers)):
            places, found = _grouped(keys, folded)
            into[places] += found
        np.add.at(trace.units, (steps, workers), 1)
        trace.squares += float(squares.sum(dtype=np.float64))

    def finish(self, epoch: int, total: Total | None = None) -> None:
        """The epoch is over: turn what was noted into ``herding``. Nothing happens for an epoch without rows."""
        trace = self._traces.pop(epoch, None)
        if trace is None:
            return
        counts = trace.units.sum(0)
        means = trace.totals / np.maximum(counts, 1)[:, None]
        prefixes = np.cumsum(trace.sums, 0) - np.cumsum(trace.units, 0) @ means
        # Squares add up over ranks that hold slices of the coordinates, norms do not.
        longest = np.einsum("ij,ij->i", prefixes, prefixes)
        centred = np.array([trace.squares - float((counts[:, None] * means * means).sum())])
        if total is not None:
            longest, centred = total(longest), total(centred)
        rms = np.sqrt(max(float(centred[0]), 0.0) / counts.sum())
        self.herding = float(np.sqrt(longest.max()) / rms) if rms > 0 else 0.0

    def _trace(self, epoch: int, steps: int, width: int) -> _Trace:
        trace = self._traces.get(epoch)
        if trace is None:
            zeros = (np.zeros((0, width)), np.zeros((0, self._workers)), np.zeros((self._workers, width)))
            trace = self._traces[epoch] = _Trace(*zeros)
        missing = steps - len(trace.sums)
        if missing > 0:
            # Doubling keeps the cost of growing linear.
            missing = max(missing, len(trace.sums))
            trace.sums = np.concatenate([trace.sums, np.zeros((missing, width))])
            trace.units = np.concatenate([trace.units, np.zeros((missing, self._workers))])
        return trace

    def state_dict(self) -> State:
        """Plain numbers and tensors."""
        traces = [
            {
                "epoch": epoch,
                "sums": torch.from_numpy(trace.sums.copy()),
                "units": torch.from_numpy(trace.units.copy()),
                "totals": torch.from_numpy(trace.totals.copy()),
                "squares": trace.squares,
            }
            for epoch, trace in self._traces.items()
        ]
        return {"herding": self.herding, "traces": traces}

    def load_state_dict(self, state: State) -> None:
        """Restore what ``state_dict`` returned."""
        self.herding = state["herding"]
        self._traces = {
            int(saved["epoch"]): _Trace(
                saved["sums"].numpy().copy(),
                saved["units"].numpy().copy(),
                saved["totals"].numpy().copy(),
                float(saved["squares"]),
            )
            for saved in state["traces"]
        }
