"""Signs that keep a running sum of vectors short: the heart of GraB and CD-GraB.

GraB: Lu, Guo, De Sa, NeurIPS 2022 (arXiv 2205.10733), algorithm 4. CD-GraB: Cooper et al., NeurIPS 2023 (arXiv
2302.00845), algorithm 2. For every vector c in turn, with s the sum so far::

    if <s, c> <= 0:  sign = +1;  s += c          # the same as ||s + c|| <= ||s - c||; a tie is +1
    else:            sign = -1;  s -= c

Probabilistic signs (the self-balancing walk of Alweiss, Liu, Sawhney, STOC 2021) are +1 with probability
1/2 - <s, c> / (2 c0). With a coin u uniform in [0, 1) that is ``<s, c> <= c0 (1 - 2u)``: the same loop with a threshold
in place of 0. c0 is `WALK_SCALE` times the running mean of ||c||^2, so that it follows the scale of the data.

`walk` is that loop. `walk_products` is the same loop on inner products, C S^T and C C^T of a block: it can weigh
several sums against each other, and runs where every rank holds a slice of the coordinates. On one CPU core `walk` is
the faster of the two: its sum stays in the cache, while C C^T costs b times as many operations
(benchmarks/bench_order.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

WALK_SCALE = 1.0  # smaller is closer to deterministic; 30 leaves prefix sums four times as long (herding simulation)
PRODUCT_BLOCK = 32  # the inner products of b vectors cost b^2 k: more than this is slower than it saves

Total = Callable[[np.ndarray], np.ndarray]


@dataclass
class Sums:
    """The running sums of one epoch number.

    Attributes:
        shared: Sum over all workers; None where workers balance alone.
        own: Sum of each worker, kept from the first vector that leans on it.
        squares: Sum of ||c||^2 over the vectors so far, the scale of probabilistic signs; 0 for others.
        count: How many vectors that was.
    """

    shared: np.ndarray | None
    own: dict[int, np.ndarray] = field(default_factory=dict)
    squares: float = 0.0
    count: int = 0


def balance(
    sums: Sums,
    vectors: np.ndarray,
    workers: np.ndarray,
    leans: np.ndarray,
    coins: np.ndarray | None = None,
    total: Total | None = None,
) -> np.ndarray:
    """Sign the rows of ``vectors`` one after the other and move the sums.

    Args:
        sums: Changed in place.
        vectors: (b, k), finite or not.
        workers: Whose vector each row is.
        leans: For each row, how far its sign leans from the shared sum (0) to its worker's own (1): it is decided by
            ``<(1 - lean) shared + lean own, c>``.
        coins: One number in [0, 1) per row for probabilistic signs; None for deterministic ones.
        total: Adds up inner products over ranks, where each holds some of the coordinates; None where rows are whole.

    Returns:
        One int8 per row: +1, -1, or 0 for a row that was skipped because it, or its squared norm, was not finite.
    """
    signs = np.zeros(len(vectors), np.int8)
    finite: np.ndarray | slice = slice(None)
    thresholds = np.zeros(len(vectors))
    # Squared norms row by row cost three times their sum, which mostly says that all of them are finite.
    if coins is not None or total is not None or not math.isfinite(np.vdot(vectors, vectors)):
        squares = np.einsum("ij,ij->i", vectors, vectors).astype(np.float64)
        squares = squares if total is None else total(squares)
        finite = np.isfinite(squares)
        vectors, workers, leans, thresholds = vectors[finite], workers[finite], leans[finite], thresholds[finite]
        if coins is not None:
            thresholds = _walk_thresholds(sums, squares[finite], coins[finite])
    if len(vectors) == 0:
        return signs

    width = vectors.shape[1]
    keeps_own = sums.shared is None or bool(sums.own) or bool(leans.any())
    if keeps_own:
        for worker in np.unique(workers).tolist():
            sums.own.setdefault(worker, np.zeros(width, vectors.dtype))

    if total is None and sums.shared is None:
        chosen = np.empty(len(vectors), np.int8)
        for worker in np.unique(workers).tolist():
            mine = workers == worker
            chosen[mine] = walk(sums.own[worker], vectors[mine], thresholds[mine])
    elif total is None and sums.shared is not None and not leans.any():
        chosen = walk(sums.shared, vectors, thresholds)
        if keeps_own:
            _add_own(sums, chosen, vectors, workers)
    else:
        parts = []
        for start in range(0, len(vectors), PRODUCT_BLOCK):
            rows = slice(start, start + PRODUCT_BLOCK)
            parts.append(_walk_block(sums, vectors[rows], workers[rows], leans[rows], thresholds[rows], total))
        chosen = np.concatenate(parts)
    signs[finite] = chosen
    return signs


def _walk_thresholds(sums: Sums, squares: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """What probabilistic signs compare inner products with, in place of 0."""
    means = (sums.squares + np.cumsum(squares)) / (sums.count + np.arange(1, len(squares) + 1))
    sums.squares += float(squares.sum())
    sums.count += len(squares)
    return np.asarray(WALK_SCALE * means * (1 - 2 * coins))


def walk(total: np.ndarray, vectors: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Sign finite ``vectors`` against one sum, which is changed in place."""
    signs = []
    for vector, threshold in zip(vectors, thresholds.tolist(), strict=True):
        if total.dot(vector) <= threshold:
            signs.append(1)
            total += vector
        else:
            signs.append(-1)
            total -= vector
    return np.array(signs, np.int8)


def walk_products(values: np.ndarray, moves: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Sign vectors known by their inner products only.

    Args:
        values: (b,) inner product of each vector with its sum before the block; changed in place.
        moves: (b, b), row i: what adding vector i does to the values of the others.
        thresholds: (b,) a vector is added where its value is at most this.
    """
    signs = np.empty(len(values), np.int8)
    for i, (row, threshold) in enumerate(zip(moves, thresholds.tolist(), strict=True)):
        if values[i] <= threshold:
            signs[i] = 1
            values += row
        else:
            signs[i] = -1
            values -= row
    return signs


def _walk_block(
    sums: Sums,
    vectors: np.ndarray,
    workers: np.ndarray,
    leans: np.ndarray,
    thresholds: np.ndarray,
    total: Total | None,
) -> np.ndarray:
    names, owner = np.unique(workers, return_inverse=True)
    b = len(vectors)
    against = [vectors]
    against += [] if sums.shared is None else [sums.shared[None]]
    against += [sums.own[name][None] for name in names.tolist()] if sums.own else []
    products = (vectors @ np.concatenate(against).T).astype(np.float64)
    if total is not None:
        products = total(products)
    values = np.zeros(b)
    gram, rest = products[:, :b], products[:, b:]
    if sums.shared is not None:
        values += (1 - leans) * rest[:, 0]
        rest = rest[:, 1:]
    if sums.own:
        values += leans * rest[np.arange(b), owner]
    moves = gram * ((1 - leans) * (sums.shared is not None) + leans * (owner[:, None] == owner))
    signs = walk_products(values, moves, thresholds)
    if sums.shared is not None:
        sums.shared += signs.astype(vectors.dtype) @ vectors
    if sums.own:
        _add_own(sums, signs, vectors, workers)
    return signs


def _add_own(sums: Sums, signs: np.ndarray, vectors: np.ndarray, workers: np.ndarray) -> None:
    for worker in np.unique(workers).tolist():
        mine = workers == worker
        sums.own[worker] += signs[mine].astype(vectors.dtype) @ vectors[mine]
