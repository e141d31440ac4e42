"""How good are orders found on ghosts? The true herding bound, against balancing the whole gradients themselves."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hemiola.contracts import Visit
from hemiola.gradients.units import UnitGradients
from hemiola.order import CDGraB

WORKERS, UNITS, BATCH, EPOCHS, SETTLED, SEEDS = 16, 32, 64, 8, 4, 3


def digits() -> tuple[Tensor, Tensor, nn.Module]:
    x, y = load_digits(return_X_y=True)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 10)),
    )
    return torch.tensor(x / 8 - 1).float().view(-1, 1, 8, 8), torch.tensor(y), model


def cifar10() -> tuple[Tensor, Tensor, nn.Module]:
    file = Path(os.environ.get("HEMIOLA_DATA", "."), "cifar-10-batches-bin", "data_batch_1.bin")
    if not file.exists():
        pytest.skip("needs CIFAR-10 in HEMIOLA_DATA")
    rows = np.fromfile(file, np.uint8, WORKERS * UNITS * 3073).reshape(-1, 3073)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )
    x = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32) / 127.5 - 1).float()
    return x, torch.from_numpy(rows[:, 0].astype(np.int64)), model


def unit_rows(x: Tensor, y: Tensor, model: nn.Module, sketch: str) -> Tensor:
    """(workers, units, k), one example a unit."""
    gradients = UnitGradients(model, lambda out, y: F.cross_entropy(out, y, reduction="none"), sketch, seed=0)
    found = []
    for start in range(0, WORKERS * UNITS, BATCH):
        part = slice(start, start + BATCH)
        found.append(gradients.compute(x[part], y[part], torch.full((BATCH,), 1 / BATCH), torch.arange(BATCH))[1])
    gradients.close()
    return torch.cat(found).view(WORKERS, UNITS, -1)


def coordinates(rows: Tensor) -> Tensor:
    """The same vectors in an orthonormal basis of their span: the same inner products, fewer numbers."""
    centred = (rows - rows.mean(1, keepdim=True)).flatten(0, 1).double()
    energies, vectors = torch.linalg.eigh(centred @ centred.T)
    return (vectors * energies.clamp(min=0).sqrt()).view(WORKERS, UNITS, -1)


def bound(true: Tensor, rows: Tensor, seed: int) -> tuple[float, float]:
    """Balance ``rows`` for some epochs; the largest prefix of ``true`` at the start, and once orders have settled."""
    policy = CDGraB()
    policy.begin([UNITS] * WORKERS, seed, lockstep=True)
    bounds = []
    for epoch in range(EPOCHS):
        orders = [policy.sequence(worker, epoch) for worker in range(WORKERS)]
        visited = torch.stack([true[worker][torch.from_numpy(order)] for worker, order in enumerate(orders)])
        bounds.append(float(visited.sum(0).cumsum(0).norm(dim=1).max()))
        for at in range(0, UNITS, 2):
            for worker, order in enumerate(orders):
                units = order[at : at + 2]
                policy.observe([Visit(worker, epoch, units, rows[worker][torch.from_numpy(units)], 1)])
    return bounds[0], float(np.mean(bounds[SETTLED:]))


@pytest.mark.parametrize("task", [digits, pytest.param(cifar10, marks=pytest.mark.data)])
def test_orders_found_on_ghosts_are_nearly_as_good_as_exact_ones(task) -> None:
    x, y, model = task()
    true = coordinates(unit_rows(x, y, model, "exact"))
    exact = [bound(true, true, seed) for seed in range(SEEDS)]
    random, best = (float(np.mean(each)) for each in zip(*exact, strict=True))
    assert random > 2 * best  # so that there is something to lose
    for sketch, limit in (("ghost:2", 1.10), ("ghost:4", 1.07)):
        rows = unit_rows(x, y, model, sketch)
        found = float(np.mean([bound(true, rows, seed)[1] for seed in range(SEEDS)]))
        assert found <= limit * best, (sketch, found / best)
    rows = unit_rows(x, y, model, "ghost:4:thin")
    found = float(np.mean([bound(true, rows, seed)[1] for seed in range(SEEDS)]))
    assert (random - found) / (random - best) >= 0.85  # of what whole gradients gain
