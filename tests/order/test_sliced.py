"""Every rank holds a slice of the coordinates and adds up inner products: the orders are those of whole rows."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from hemiola.contracts import Visit
from hemiola.order import ORDERS

SIZES, RANKS, WIDTH = [41, 40, 12], 3, 12


class Together:
    """Adds up arrays over threads that all call it."""

    def __init__(self):
        self.barrier, self.parts = threading.Barrier(RANKS, timeout=60), {}

    def total(self, products):
        self.parts[threading.get_ident()] = products
        self.barrier.wait()
        found = np.sum(list(self.parts.values()), 0)
        self.barrier.wait()
        return found


def run(name, lockstep, part, total, **options):
    order = ORDERS[name](sketch="exact", **options)
    order.total = total
    order.begin(SIZES, 0, lockstep)
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((size, WIDTH)) for size in SIZES]
    rows[1][7, 3] = np.nan  # in one rank's slice only, skipped by all
    runs = []
    for epoch in range(3):
        runs.append([order.sequence(worker, epoch).tolist() for worker in range(len(SIZES))])
        for t in range(0, max(SIZES), 5):
            visits = [(worker, np.array(units[t : t + 5])) for worker, units in enumerate(runs[-1]) if t < len(units)]
            if not lockstep:
                visits = visits[: 1 + t % 2]  # the others fall behind
            order.observe([Visit(w, epoch, units, torch.from_numpy(rows[w][units][:, part]), 1) for w, units in visits])
    return runs, order.telemetry()


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("options", [{}, {"signs": "probabilistic"}])
@pytest.mark.parametrize("name", ["cd-grab", "id-pair-grab", "id-grab"])
def test_slices_give_the_orders_of_whole_rows(name, options, lockstep):
    whole, told = run(name, lockstep, slice(None), None, **options)
    together = Together()
    with ThreadPoolExecutor(RANKS) as pool:
        parts = [slice(4 * rank, 4 * rank + 4) for rank in range(RANKS)]
        ranks = list(pool.map(lambda part: run(name, lockstep, part, together.total, **options), parts))
    assert [orders for orders, _ in ranks] == [whole] * RANKS
    for _, each in ranks:
        assert each["skipped"] == told["skipped"] > 0
        if lockstep:
            assert each["herding"] == pytest.approx(told["herding"], rel=0.2)  # the bad row counts on two ranks
