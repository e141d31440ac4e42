"""Which examples each worker holds: a shard of its own, or with one deck all of them.

Shards are disjoint and cover the training set. They differ by at most one in size, but for ``"natural"``, where a
worker holds whole groups of examples as they came.
"""

from __future__ import annotations

import numpy as np

from hemiola.contracts import Examples, Grouped
from hemiola.errors import InputError
from hemiola.streams import stream


def split_examples(examples: Examples, workers: int, split: str | dict[str, float], seed: int) -> list[np.ndarray]:
    """Deal the training set to the workers.

    Args:
        examples: The training set.
        workers: How many shards.
        split: ``"iid"``; ``"label-sorted"``, so that a worker sees few classes; or ``{"dirichlet": alpha}``, where each
            worker's mix of classes is drawn from a Dirichlet law (small alpha: few classes); or ``"natural"``, where
            the groups the task says its examples came in are dealt whole, as equal in number as they can be.
        seed: Of the run.
    """
    count = _enough(examples, workers)
    draws = stream("shards", seed)
    if split == "iid":
        return [np.sort(part) for part in np.array_split(draws.permutation(count), workers)]
    if split == "natural":
        return _natural(examples, workers, draws)
    labels = examples.labels()
    if labels is None:
        raise InputError(
            f"shards.split: {split!r} needs examples with one class each, and this task's have none; use 'iid'"
        )
    if split == "label-sorted":
        mixed = draws.permutation(count)
        return [np.sort(part) for part in np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], workers)]
    assert isinstance(split, dict)
    return _dirichlet(labels, workers, split["dirichlet"], draws)


def _natural(examples: Examples, workers: int, draws: np.random.Generator) -> list[np.ndarray]:
    groups = examples.groups() if isinstance(examples, Grouped) else None
    if groups is None:
        raise InputError(
            "shards.split: 'natural' needs examples that come in groups, and this task's do not; use 'iid'"
        )
    names = np.unique(groups)
    if workers > len(names):
        raise InputError(f"workers: {workers} workers cannot share {len(names)} groups of examples whole; use fewer")
    dealt = np.array_split(draws.permutation(names), workers)
    return [np.flatnonzero(np.isin(groups, some)) for some in dealt]


def whole_set(examples: Examples, workers: int) -> list[np.ndarray]:
    """For one deck: every worker may be given any example."""
    return [np.arange(_enough(examples, workers))] * workers


def _enough(examples: Examples, workers: int) -> int:
    """How many examples there are."""
    count = len(examples)
    if workers > count:
        raise InputError(f"workers: {workers} workers cannot share {count} training examples; at most {count}")
    return count


def _dirichlet(labels: np.ndarray, workers: int, alpha: float, draws: np.random.Generator) -> list[np.ndarray]:
    """Each worker in turn draws a mix of classes and takes its share of examples from what is left of each."""
    classes = np.unique(labels)
    pools = [list(draws.permutation(np.flatnonzero(labels == c))) for c in classes]
    sizes = [len(part) for part in np.array_split(np.arange(len(labels)), workers)]
    shards = []
    for size in sizes:
        mix = draws.dirichlet(np.full(len(classes), alpha))
        taken: list[int] = []
        while len(taken) < size:
            left = np.array([len(pool) for pool in pools], dtype=float)
            share = np.where(left > 0, mix, 0.0)
            if share.sum() == 0:
                share = left
            wanted = draws.multinomial(size - len(taken), share / share.sum())
            for pool, number in zip(pools, wanted, strict=True):
                number = min(int(number), len(pool))
                taken += pool[:number]
                del pool[:number]
        shards.append(np.sort(np.array(taken)))
    return shards
