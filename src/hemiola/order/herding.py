"""A herding simulation: how short do the orders keep prefix sums when the vectors never change?

The vectors stand for gradients at fixed weights. It is the setting of the papers' figures, needs no training, and tells
the orders apart at once: coordinated balance is flat in the number of workers, independent balance grows like its root.
"""

from __future__ import annotations

import numpy as np
import torch

from hemiola.contracts import Visit
from hemiola.errors import InputError, nearest
from hemiola.order import ORDERS
from hemiola.streams import stream


def simulate_herding(order: str, m: int, n: int, d: int, rounds: int, seed: int, **options: object) -> list[float]:
    """Run an order over fixed random vectors in lockstep.

    Args:
        order: A name in `ORDERS`.
        m: Workers.
        n: Units per worker: Gaussian directions of norm 1, centred per worker.
        d: Dimension.
        rounds: Epochs after the first one.
        seed: Of the vectors and the order.
        options: Of the order.

    Returns:
        For the first order and after each round, the largest absolute coordinate of any prefix sum of the workers' sum.
    """
    if order not in ORDERS:
        raise InputError(f"order must be one of {', '.join(ORDERS)}, got {order!r}{nearest(order, list(ORDERS))}")
    vectors = stream("herding", seed).standard_normal((m, n, d))
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    vectors -= vectors.mean(1, keepdims=True)

    policy = ORDERS[order](**options)
    policy.begin([n] * m, seed, lockstep=True)
    bounds = []
    for epoch in range(rounds + 1):
        sequences = [policy.sequence(worker, epoch) for worker in range(m)]
        visited = np.stack([vectors[worker][sequence] for worker, sequence in enumerate(sequences)])
        bounds.append(float(np.abs(np.cumsum(visited.sum(0), 0)).max()))
        if policy.wants(0, epoch):
            # A pair at a time gives the signs of a unit at a time; workers that balance alone may take all at once.
            batch = 2 if policy.shares else n
            rows = [torch.split(torch.from_numpy(of_worker), batch) for of_worker in visited]
            for step in range(len(rows[0])):
                for worker, sequence in enumerate(sequences):
                    units = sequence[batch * step : batch * (step + 1)]
                    policy.observe([Visit(worker, epoch, units, rows[worker][step], local_steps=1)])
    return bounds
