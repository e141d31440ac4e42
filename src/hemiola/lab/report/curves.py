"""Curves over seeds: a mean line and a band from the lowest to the highest seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hemiola.lab.report.log import NUMBERS, Log, Point
from hemiola.lab.report.read import Folder

# A long log is thinned to at most this many stretches, and from each stretch the points with the lowest and the highest
# value of every measure are kept, as are the first and the last point. A stretch is a few pixels wide, so the drawn
# line keeps its envelope and its ends.
STRETCHES = 60


@dataclass(frozen=True)
class Curve:
    """One run at one point of the sweep, over its seeds.

    Attributes:
        mean, low, high: By number, one value for every evaluation; NaN unless every seed has a finite one.
        seeds: How many seeds it is made of.
    """

    mean: Mapping[str, np.ndarray]
    low: Mapping[str, np.ndarray]
    high: Mapping[str, np.ndarray]
    seeds: int

    def __len__(self) -> int:
        return len(next(iter(self.mean.values()), ()))

    def at(self, places: Sequence[int]) -> Curve:
        """Some of its evaluations."""
        mean, low, high = (
            {name: one[places] for name, one in which.items()} for which in (self.mean, self.low, self.high)
        )
        return Curve(mean, low, high, self.seeds)

    def has(self, measure: str) -> bool:
        """Whether there is at least one finite number."""
        return bool(np.isfinite(self.mean[measure]).any())


def logs_of(folder: Folder, run: str, point: Point) -> tuple[list[Log], bool]:
    """The logs a run's curve is made of, one per seed, and whether they are finished.

    Seeds that diverged would pull the mean to infinity, and seeds still running would shift it as they join; so
    finished seeds count if there are any, then running ones, and diverged ones only if there is nothing else.
    """
    by_status: dict[str, list[Log]] = defaultdict(list)
    for seed, status in folder.seeds(run, point).items():
        if (log := folder.log.get((run, point, seed))) is not None:
            by_status[status].append(log)
    for kind in ("done", "running", "diverged", "failed"):
        if by_status[kind]:
            return by_status[kind], kind == "done"
    return [], False


def curve(folder: Folder, run: str, point: Point) -> Curve:
    """Average the seeds of a run, evaluation by evaluation.

    The i-th evaluations of all seeds make one point, placed at the mean of their epochs, seconds and bytes, as far as
    every seed has one. Where finished seeds differ in the number of evaluations, their last ones still make the last
    point, so that the curve ends where the table says.
    """
    logs, finished = logs_of(folder, run, point)
    if not logs:
        return Curve({}, {}, {}, 0)
    places = np.tile(np.arange(min(map(len, logs))), (len(logs), 1))
    if finished:
        places[:, -1] = [len(log) - 1 for log in logs]
    spans = {
        name: spans_of(np.array([log.numbers[name][at] for log, at in zip(logs, places, strict=True)]))
        for name in NUMBERS
    }
    mean, low, high = ({name: span[which] for name, span in spans.items()} for which in range(3))
    return Curve(mean, low, high, len(logs))


def spans_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, lowest and highest over the first axis; NaN unless all are finite."""
    finite = np.isfinite(values).all(axis=0)
    values = np.where(finite, values, 0.0)
    low, high = values.min(axis=0), values.max(axis=0)
    # A mean of huge floats may overflow, and one of equal floats may round past its own ends.
    mean = np.clip((values / len(values)).sum(axis=0), low, high)
    mean, low, high = (np.where(finite, one, np.nan) for one in (mean, low, high))
    return mean, low, high


def thin(line: Curve, measures: Iterable[str], stretches: int = STRETCHES) -> Curve:
    """Keep of a long curve what can be seen: see `STRETCHES`."""
    count = len(line)
    if count <= 2 * stretches:
        return line
    kept = {0, count - 1}
    edges = [stretch * count // stretches for stretch in range(stretches + 1)]
    for measure in measures:
        values = line.mean[measure]
        for first, end in pairwise(edges):
            finite = first + np.flatnonzero(np.isfinite(values[first:end]))
            if len(finite):
                kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
    return line.at(sorted(kept))


def over(
    seeds: Iterable[tuple[np.ndarray, np.ndarray]], stretches: int = 3 * STRETCHES
) -> list[tuple[float, float, float, float]]:
    """What happened at different places at different seeds, such as averagings: (place, mean, lowest, highest).

    There is no common moment, so stretches of equal length take its place, each with all that happened within it.

    Args:
        seeds: For every seed, places and values.
        stretches: How many, at most.
    """
    pairs = [np.stack([places, values]) for places, values in seeds]
    if not pairs:
        return []
    places, values = np.concatenate(pairs, axis=1)
    finite = np.isfinite(places) & np.isfinite(values)
    places, values = places[finite], values[finite]
    if not len(places):
        return []
    width = (places.max() / stretches - places.min() / stretches) or 1.0
    inside = np.minimum((places - places.min()) / width, stretches).astype(int)
    order = np.argsort(inside, kind="stable")
    starts = np.flatnonzero(np.diff(inside[order], prepend=-1))
    counts = np.diff(np.append(starts, len(order)))
    # Divided before they are added up: the largest floats overflow else.
    sizes = np.repeat(counts, counts)
    where = np.add.reduceat(places[order] / sizes, starts)
    low, high = (one.reduceat(values[order], starts) for one in (np.minimum, np.maximum))
    mean = np.clip(np.add.reduceat(values[order] / sizes, starts), low, high)
    return list(zip(where.tolist(), mean.tolist(), low.tolist(), high.tolist(), strict=True))
