"""M4 weekly series: predict the next 6 weeks from the last 20.

Each of the 359 series is shifted and scaled by the mean and standard deviation of its own training part. Training
examples are windows of 26 weeks that start every `stride` weeks; the test example of a series is its last 20 training
weeks and the first 6 weeks of its test part, which no training window sees.

``setting = "cd-grab"`` is the preparation and the model of CD-GraB's authors (github.com/GarlGuo/CD-GraB): windows
start every three weeks, the last one of a series is left out, a tenth of all is not trained on; and the perceptron
predicts one week, its prediction is put behind the weeks it has seen, and so on for six weeks.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from hemiola.errors import InputError
from hemiola.lab.tasks.files import require
from hemiola.lab.tasks.models import mlp
from hemiola.lab.tasks.readers import read_series
from hemiola.lab.tasks.task import Task, first

SEEN, AHEAD = 20, 6


class Rolled(nn.Module):
    """One week ahead at a time: each prediction becomes the last of the weeks that the next one is made from."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.step = mlp([SEEN, hidden, hidden, 1])

    def forward(self, weeks: Tensor) -> Tensor:
        """(B, 20) weeks to the next (B, 6)."""
        for _ in range(AHEAD):
            weeks = torch.cat([weeks, self.step(weeks[:, -SEEN:])], dim=1)
        return weeks[:, -AHEAD:]


@cache
def _windows(root: Path, stride: int, as_authors: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
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
        windows = np.lib.stride_tricks.sliding_window_view(series, SEEN + AHEAD)
        windows = windows[: len(windows) - as_authors : stride]
        train.append((windows - mean) / deviation)
        test.append((np.concatenate([series[-SEEN:], future[name][:AHEAD]]) - mean) / deviation)
    together = np.concatenate(train)
    if as_authors:  # Their very draw, so that the same windows are left out.
        together = together[_shuffled(len(together))[: int(0.9 * len(together))]]
    return _split(together), _split(np.stack(test))


def _shuffled(count: int) -> np.ndarray:
    order = np.arange(count)
    np.random.RandomState(0).shuffle(order)
    return order


def _split(windows: np.ndarray) -> tuple[Tensor, Tensor]:
    tensor = torch.from_numpy(windows.astype(np.float32))
    return tensor[:, :SEEN].contiguous(), tensor[:, SEEN:].contiguous()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error over the weeks of each example."""
    return (outputs - targets).square().mean(dim=1)


def perceptron(
    *, stride: int = 6, setting: Literal["ours", "cd-grab"] = "ours", examples: int = 0, data: Path | None = None
) -> Task:
    """A perceptron on M4 weekly. ``stride``: weeks between the starts of two windows in our own ``setting``.

    ``examples``: use only the first so many training windows; 0 for all.
    """
    if stride < 1:
        raise InputError(f"stride must be at least 1, got {stride}")
    as_authors = setting == "cd-grab"
    train, test = _windows(require("m4-weekly", data), 3 if as_authors else stride, as_authors)
    return Task(
        name="m4-mlp",
        model=partial(Rolled, 64) if as_authors else partial(mlp, [SEEN, 64, 64, AHEAD]),
        train=first(train, examples),
        test=test,
        losses=squared_error,
        scores=squared_error,
        metric="squared error",
        higher_is_better=False,
        lr=0.03,
        batch=16,
    )
