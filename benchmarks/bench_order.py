"""Balancing, against the loop as it is published.

The published loop takes every pair's difference, its inner product with the sum, and the update of the sum on tensors
as long as the model. All sizes here are LeNet's (62,006 numbers), and everything runs on one thread: a second one helps
the published loop, which streams through memory, and not the signs, which stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from ratio import Ratio, compare

from hemiola.contracts import Visit
from hemiola.gradients.sketch import Fold
from hemiola.order import CDGraB
from hemiola.order.balance import Sums, balance

DIMENSION, WIDTH, PAIRS = 62_006, 1024, 64


def published_loop(gradients: torch.Tensor) -> None:
    total = torch.zeros(gradients.shape[1])
    for t in range(0, len(gradients), 2):
        difference = gradients[t] - gradients[t + 1]
        if torch.dot(total, difference) <= 0:
            total.add_(difference)
        else:
            total.sub_(difference)


def signs(rows: np.ndarray) -> None:
    pairs = len(rows) // 2
    sums = Sums(np.zeros(rows.shape[1], rows.dtype))
    balance(sums, rows[0::2] - rows[1::2], np.zeros(pairs, int), np.zeros(pairs))


def ratios() -> Iterator[Ratio]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gradients = torch.randn(2 * PAIRS, DIMENSION, generator=torch.Generator().manual_seed(0))
    fold = Fold(WIDTH, DIMENSION, seed=0)
    sketches = fold.apply(gradients)
    rows, whole = sketches.numpy(), gradients.numpy()

    order = CDGraB(sketch=f"fold:{WIDTH}")
    order.begin([2 * PAIRS], seed=0, lockstep=True)
    epoch = iter(range(10**9))

    def policy() -> None:
        now = next(epoch)
        order.observe([Visit(0, now, order.sequence(0, now), sketches, local_steps=1)])

    def naive() -> None:
        published_loop(gradients)

    yield Ratio(
        f"fold:{WIDTH}, speed of balancing a pair",
        compare(naive, lambda: signs(rows)),
        ">= 20",
        f"published loop on {DIMENSION:,} numbers / signs from sketches, which arrive folded with the reports",
    )
    yield Ratio(
        f"fold:{WIDTH}, speed of the whole policy",
        compare(naive, policy),
        note="published loop / observe and sequence of cd-grab with books, orders and the herding monitor",
    )
    yield Ratio(
        f"fold:{WIDTH}, speed with the folding",
        compare(naive, lambda: signs(fold.apply(gradients).numpy())),
        note="published loop / folding two gradients, which workers do side by side, and balancing the pair",
    )
    yield Ratio(
        "exact, speed of balancing a pair",
        compare(naive, lambda: signs(whole)),
        note="published loop / the same signs from whole gradients",
    )
    yield Ratio(
        f"fold:{WIDTH}, bytes exchanged",
        sketches.nbytes / gradients.nbytes,
        "<= 0.02",
        "sketches / gathering every gradient",
    )
    torch.set_num_threads(threads)
