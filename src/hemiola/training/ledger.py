"""What happened to every unit: used, cancelled, dropped as stale, refused as not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from hemiola.contracts import State, Stint, Update

FATES = ("used", "cancelled", "dropped", "refused")


class Ledger:
    """Counts of every unit's fates, of staleness, and of time.

    Args:
        sizes: Units of every worker, or of the one deck that all take from.
        workers: How many there are.

    Attributes:
        counts: For each fate and worker (or deck), how often each unit met it.
        staleness: How many merged reports had each staleness.
        idle_seconds, wasted_seconds: Worker-seconds.
    """

    def __init__(self, sizes: Sequence[int], workers: int):
        self._one_deck = len(sizes) < workers
        self.counts = {fate: [np.zeros(size, dtype=np.int32) for size in sizes] for fate in FATES}
        self.totals = {fate: [0] * workers for fate in FATES}
        self.staleness: Counter[int] = Counter()
        self.updates = 0
        self.idle_seconds = 0.0
        self.wasted_seconds = 0.0

    def record(self, update: Update) -> None:
        """Take note of an update."""
        self.updates += 1
        self.idle_seconds += update.idle_seconds
        self.wasted_seconds += update.wasted_seconds
        self.staleness.update(report.staleness for report in update.reports)
        self._note("used", [report.stint for report in update.reports])
        self._note("cancelled", update.cancelled)
        self._note("dropped", update.dropped)
        self._note("refused", update.refused)

    def _note(self, fate: str, stints: Sequence[Stint]) -> None:
        for stint in stints:
            holder = 0 if self._one_deck else stint.worker
            for batch in stint.batches:
                self.counts[fate][holder][batch.units] += 1
                self.totals[fate][stint.worker] += len(batch.units)

    @property
    def visited(self) -> int:
        """Units that will not come again in their epoch."""
        return sum(sum(self.totals[fate]) for fate in ("used", "dropped", "refused"))

    def total(self, fate: str) -> int:
        """Units of all workers that met this fate."""
        return sum(self.totals[fate])

    @property
    def mean_staleness(self) -> float | None:
        reports = sum(self.staleness.values())
        return sum(s * n for s, n in self.staleness.items()) / reports if reports else None

    @property
    def max_staleness(self) -> int | None:
        return max(self.staleness) if self.staleness else None

    def per_worker(self) -> list[dict[str, int]]:
        """The fates of each worker's units, for the log."""
        return [{fate: self.totals[fate][worker] for fate in FATES} for worker in range(len(self.totals["used"]))]

    def per_label(self, labels: Sequence[np.ndarray], unit: int) -> dict[str, dict[str, int]]:
        """Of each label, its examples and how often they met each fate.

        Args:
            labels: Of every worker's examples (or the deck's), in the order of the shard.
            unit: Examples per unit.
        """
        every = np.concatenate(labels)
        classes, of = np.unique(every, return_inverse=True)
        found: dict[str, dict[str, int]] = {str(label): {} for label in classes.tolist()}
        for fate in ("examples", *FATES):
            times = (
                np.ones(len(every))
                if fate == "examples"
                else np.concatenate(
                    [np.repeat(part, unit)[: len(mine)] for part, mine in zip(self.counts[fate], labels, strict=True)]
                )
            )
            for row, count in zip(found.values(), np.bincount(of, times), strict=True):
                row[fate] = int(count)
        return found

    def state_dict(self) -> State:
        return {
            "counts": {fate: [torch.from_numpy(part.copy()) for part in parts] for fate, parts in self.counts.items()},
            "totals": {fate: list(parts) for fate, parts in self.totals.items()},
            "staleness": dict(self.staleness),
            "updates": self.updates,
            "idle_seconds": self.idle_seconds,
            "wasted_seconds": self.wasted_seconds,
        }

    def load_state_dict(self, state: State) -> None:
        self.counts = {fate: [part.numpy().copy() for part in parts] for fate, parts in state["counts"].items()}
        self.totals = {fate: list(parts) for fate, parts in state["totals"].items()}
        self.staleness = Counter(state["staleness"])
        self.updates = state["updates"]
        self.idle_seconds, self.wasted_seconds = state["idle_seconds"], state["wasted_seconds"]
