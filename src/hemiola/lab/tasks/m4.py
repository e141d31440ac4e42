"""M4 weekly series: predict the next 6 weeks from the last 20.

Each of the 359 series is shifted and scaled by the mean and standard deviation of its own training part. Training
examples are windows of 26 weeks that start every `stride` weeks; the test example of a series is its last 20 training
weeks and the first 6 weeks of its test part, which no training window sees. This preparation is our own
choice, not taken from CD-GraB, so its losses are not comparable.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hemiola.errors import InputError
from hemiola.lab.tasks.files import require
from hemiola.lab.tasks.models import mlp
from hemiola.lab.tasks.readers import read_series
from hemiola.lab.tasks.task import Task

SEEN, AHEAD = 20, 6


@cache
def _windows(root: Path, stride: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    train_path, test_path = root / "m4-weekly/Weekly-train.csv", root / "m4-weekly/Weekly-test.csv"
    past, future = read_series(train_path), read_series(test_path)
    train, test = [], []
    for name, series in past.items():
        if len(series) < SEEN + AHEAD:
            raise InputError(
                f"cannot read {train_path}: series {name} has {len(series)} weeks, fewer than {SEEN + AHEAD}"
            )
        if len(future.get(name, ())) < AHEAD:
            raise InputError(f"cannot read {test_path}: series {name} should have at least {AHEAD} weeks")
        mean, deviation = series.mean(), max(series.std(), 1e-8)
        windows = np.lib.stride_tricks.sliding_window_view(series, SEEN + AHEAD)[::stride]
        train.append((windows - mean) / deviation)
        test.append((np.concatenate([series[-SEEN:], future[name][:AHEAD]]) - mean) / deviation)
    return _split(np.concatenate(train)), _split(np.stack(test))


def _split(windows: np.ndarray) -> tuple[Tensor, Tensor]:
    tensor = torch.from_numpy(windows.astype(np.float32))
    return tensor[:, :SEEN].contiguous(), tensor[:, SEEN:].contiguous()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error over the weeks of each example."""
    return (outputs - targets).square().mean(dim=1)


def perceptron(*, stride: int = 6, data: Path | None = None) -> Task:
    """A perceptron 20-64-64-6 on M4 weekly: CD-GraB's model. ``stride``: weeks between the starts of two windows."""
    if stride < 1:
        raise InputError(f"stride must be at least 1, got {stride}")
    train, test = _windows(require("m4-weekly", data), stride)
    return Task(
        name="m4-mlp",
        model=partial(mlp, [SEEN, 64, 64, AHEAD]),
        train=train,
        test=test,
        losses=squared_error,
        scores=squared_error,
        metric="squared error",
        higher_is_better=False,
        lr=0.03,
        batch=16,
    )
