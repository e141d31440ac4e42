"""From K reports to one change, the same arithmetic wherever the reports come from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hemiola.contracts import Pace, Stint, Work
from hemiola.wire.exchange import Weigh


def shares(work: Work, pace: Pace, version: int, stints: Sequence[Stint], weigh: Weigh) -> list[float]:
    """What each stint's change is multiplied with: the pace's weight, times what it counts, over how many there are."""
    factors = []
    for stint, counts in zip(stints, relative_weights(stints, weigh), strict=True):
        distance = 0.0
        if pace.needs_distance:
            distance = float((work.read(version) - work.read(stint.version)).square().sum())
        factors.append(pace.weight(version - stint.version, distance) * counts / len(stints))
    return factors


def relative_weights(stints: Sequence[Stint], weigh: Weigh) -> list[float]:
    """What each stint counts, 1 on average."""
    if weigh == "work":
        work = [units_of(stint) for stint in stints]
        return [units * len(stints) / sum(work) for units in work]
    if weigh == "workers":
        often = Counter(stint.worker for stint in stints)
        return [len(stints) / (len(often) * often[stint.worker]) for stint in stints]
    return [1.0] * len(stints)


def units_of(stint: Stint) -> int:
    """How many units a stint visits."""
    return sum(len(batch.units) for batch in stint.batches)


def weighted_sum(rows: Sequence[Tensor], factors: Sequence[float], out: Tensor | None = None) -> Tensor:
    """The factors times the rows, added up. Rows are read once, in place; they may lie in shared memory."""
    total = torch.mul(rows[0], factors[0], out=fresh_like(rows[0]) if out is None else out)
    for row, factor in zip(rows[1:], factors[1:], strict=True):
        total.add_(row, alpha=factor)
    return total


def fresh_like(vector: Tensor) -> Tensor:
    """Memory for a vector of this shape and type, by way of NumPy.

    NumPy asks the system for large pages, torch does not: a first pass over new memory takes a quarter of the time.
    """
    if vector.dtype == torch.bfloat16:
        return torch.empty_like(vector)
    return torch.from_numpy(np.empty(vector.shape, dtype=str(vector.dtype).removeprefix("torch.")))


def spread_of(rows: Sequence[Tensor]) -> float:
    """(1/K) sum ||w_i - mean w||^2; the changes serve as well as the weights, where all started from the same."""
    mean = weighted_sum(rows, [1 / len(rows)] * len(rows))
    return sum(float((row - mean).square().sum()) for row in rows) / len(rows)


def spread_of_stacked(rows: Tensor) -> float:
    """The same of rows that lie in one tensor."""
    return float((rows - rows.mean(0)).square().sum() / len(rows))


def all_finite(vector: Tensor) -> bool:
    """Whether every number is finite. A finite sum says so in one pass; only a sum that is not needs a second look."""
    return math.isfinite(vector.sum().item()) or bool(torch.isfinite(vector).all())


def cut(stint: Stint, steps: int) -> tuple[Stint, Stint]:
    """A stint as its first so many steps, and what is left of it."""
    first = replace(stint, batches=stint.batches[:steps], rates=stint.rates[:steps])
    return first, replace(stint, batches=stint.batches[steps:], rates=stint.rates[steps:])


def together(stints: Sequence[Stint]) -> Stint:
    """A worker's stints in one averaging as one stint, which began with the first of them."""
    return replace(
        stints[0],
        batches=tuple(batch for stint in stints for batch in stint.batches),
        rates=tuple(rate for stint in stints for rate in stint.rates),
    )
