"""How fast does the gradient vanish on objectives that are not convex? Its mean square over runs of T epochs against T.

Theorem 1 of CD-GraB (arXiv 2302.00845): with a constant rate chosen for the horizon, proportional to T^(-1/3), the mean
over the epochs of ||grad f||^2 is of order (m n T)^(-2/3). So there is a run for every T, at its own constant rate.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hemiola.contracts import TaskLike
from hemiola.flat import FlatModel
from hemiola.lab.experiment import Experiment
from hemiola.lab.reproduce.numbers import Measured, fit_slope
from hemiola.lab.reproduce.parts import Found, Parts, row
from hemiola.lab.worker import one_thread
from hemiola.training import Training

_CHUNK = 1000


def gradient_norms(
    parts: Parts,
    data: Path | None,
    *,
    tasks: dict[str, dict[str, Any]],
    orders: dict[str, dict[str, Any]],
    horizons: list[int],
    seeds: list[int],
) -> Found:
    """Slope of log mean ||grad f||^2 against log T.

    Args:
        parts: Keeps the runs that are done.
        data: The data folder.
        tasks: By title, what an experiment file says about a run, and ``rate``, that of the shortest horizon.
        orders: By name, the order.
        horizons: T, in epochs.
        seeds: Of the runs.
    """
    runs = {
        f"{title}-{name}-{horizon}-{seed}": partial(
            run_norms,
            {key: value for key, value in table.items() if key != "rate"} | {"order": order, "seeds": [seed]},
            horizon,
            table["rate"] * (horizon / horizons[0]) ** (-1 / 3),
            data,
        )
        for horizon in sorted(horizons, reverse=True)
        for title, table in tasks.items()
        for name, order in orders.items()
        for seed in seeds
    }
    norms = parts.all(runs)
    found = Found()
    for title in tasks:
        for name in orders:
            squares = np.array([[np.mean(norms[f"{title}-{name}-{t}-{seed}"]) for t in horizons] for seed in seeds])
            for column, horizon in enumerate(horizons):
                found.rows.setdefault(title, []).append(row(name, horizon, squares[:, column].tolist()))
            slopes = [fit_slope(horizons, values) for values in squares.tolist()]
            value = fit_slope(horizons, squares.mean(axis=0).tolist())
            found.numbers[f"{title}: slope of {name}"] = Measured.over_seeds(slopes, value)
        middle = float(np.exp(np.mean(np.log([point["mean"] for point in found.rows[title]]))))
        centre = float(np.exp(np.mean(np.log(horizons))))
        theory = [row("slope -2/3", t, [middle * (t / centre) ** (-2 / 3)]) for t in (horizons[0], horizons[-1])]
        found.rows[title] += theory
    return found


def run_norms(given: dict[str, Any], epochs: int, rate: float, data: Path | None) -> list[float]:
    """Train, and give ||grad f||^2 of the whole training set at the start of every epoch."""
    optimizer = {"name": "SGD", "lr": rate}
    length = {"stop": {"epochs": epochs}, "evaluate": {"every_epochs": epochs}}
    (cell,) = Experiment({**given, **length, "optimizer": optimizer}).cells
    plan, make_cluster = cell.plan(data)
    training = Training(plan, make_cluster)
    found: list[float] = []

    def note(training: Training) -> bool:
        if training.epochs >= len(found) - 1e-9 and training.status == "running":
            found.append(square_norm(plan.task, training.read(training.version)))
        return True

    with one_thread():
        found.append(square_norm(plan.task, training.read(0)))
        training.run(note)
    return found


def square_norm(task: TaskLike, weights: torch.Tensor) -> float:
    """||grad f||^2 of the objective over the whole training set at these weights."""
    flat = FlatModel(task.model())
    flat.load(weights)
    flat.gradient.zero_()
    count = len(task.train)
    for first in range(0, count, _CHUNK):
        inputs, targets = task.train.batch(np.arange(first, min(first + _CHUNK, count)))
        torch.autograd.backward(task.losses(flat.module(inputs), targets).sum() / count)
    gradient = flat.gradient + task.l2 * flat.weights[: flat.size]
    return float(gradient.double().square().sum())
