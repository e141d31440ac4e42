"""The papers' loops where every rank holds only a slice of each vector's coordinates.

Signs need inner products only, and those add up over the ranks. So for a block of vectors C and the sums S they are
balanced against, one exchange of C C^T and C S^T is enough: below a vector is its row of C C^T, a sum its column of
C S^T, and the loop of `cdgrab` or `grab` runs on them as it runs on arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hemiola.contracts import Total

BLOCK = 32  # the inner products of b vectors cost b^2 k: more than this is slower than the exchanges it saves

Item = tuple[Any, ...]


class Vector:
    """The ``index``-th vector of a block, known by its inner products with all of them."""

    def __init__(self, index: int, products: np.ndarray) -> None:
        self.index, self.products = index, products

    def __sub__(self, other: None) -> Vector:
        return self  # it is a difference already

    def dot(self, other: Vector) -> float:
        return float(self.products[other.index])


class Sum:
    """A sum, known by its inner products with the vectors of a block; ``signs`` says which of them were added to it."""

    def __init__(self, products: np.ndarray) -> None:
        self.products = products
        self.signs = np.zeros(len(products))

    def dot(self, c: Vector) -> float:
        return float(self.products[c.index])

    def __iadd__(self, c: Vector) -> Sum:
        self.products += c.products
        self.signs[c.index] = 1
        return self

    def __isub__(self, c: Vector) -> Sum:
        self.products -= c.products
        self.signs[c.index] = -1
        return self


def blocks(items: Sequence[Item], total: Total) -> Iterator[list[Item]]:
    """Cut items, whose last two members are this rank's slices of two rows, into blocks.

    In the items of a block a `Vector` stands for the difference of the rows, and while the caller is at it, a `Sum` for
    each sum of the items' passes; after that the true sums are moved. A vector that is not finite on some rank has
    products that are not finite on every rank.
    """
    for at in range(0, len(items), BLOCK):
        block = items[at : at + BLOCK]
        vectors = np.stack([first - second for *_, first, second in block])
        passes = {id(item[1]): item[1] for item in block}.values()
        sums = {id(s): s for this in passes for s in (this.s, this.own) if s is not None}
        products = total((vectors @ np.concatenate([vectors, *(s[None] for s in sums.values())]).T).astype(np.float64))
        gram, rest = products[:, : len(block)], products[:, len(block) :]
        known = {key: Sum(column.copy()) for key, column in zip(sums, rest.T, strict=True)}
        held = [(this, this.s, this.own) for this in passes]
        for this, s, own in held:
            this.s, this.own = known[id(s)], known.get(id(own))
        yield [(*facts, Vector(i, gram[i]), None) for i, (*facts, _, _) in enumerate(block)]
        for this, s, own in held:
            this.s, this.own = s, own
        for key, moved in known.items():
            used = np.flatnonzero(moved.signs)  # the others may not be finite
            sums[key] += moved.signs[used].astype(vectors.dtype) @ vectors[used]
