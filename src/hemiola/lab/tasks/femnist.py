"""FEMNIST: handwritten digits and letters, 28 x 28 grey pixels, 62 classes, by who wrote them (LEAF, NIST).

``femnist/femnist-128.npz`` holds 128 writers one after the other: ``x`` (N, 784) bytes, ``y`` (N,) classes and
``writers`` (128,) how many of them each writer wrote, and the same with ``_test``. Writers differ in what and how much
they wrote, 70 to 336 drawings; they are the shards of ``[shards] split = "natural"``.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hemiola.errors import InputError
from hemiola.lab.tasks.files import require
from hemiola.lab.tasks.models import mlp
from hemiola.lab.tasks.readers import check_classes, read_npz
from hemiola.lab.tasks.task import Task, TensorExamples

CLASSES = 62


def convolutions(channels: int) -> nn.Sequential:
    """Two 5 x 5 convolutions and two linear layers, as LEAF's model but sized for a CPU."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *mlp([2 * channels * 16, 128, CLASSES]),
    )


@cache
def _drawings(root: Path) -> tuple[TensorExamples, TensorExamples]:
    path = root / "femnist/femnist-128.npz"
    return _examples(path, ""), _examples(path, "_test")


def _examples(path: Path, part: str) -> TensorExamples:
    pixels, labels, writers = read_npz(path, (f"x{part}", f"y{part}", f"writers{part}"))
    if pixels.shape != (len(labels), 784) or pixels.dtype != np.uint8 or writers.sum() != len(labels):
        raise InputError(
            f"cannot read {path}: {pixels.shape} pixels, {len(labels)} labels and {writers.sum()} drawings of all "
            "writers do not fit together"
        )
    check_classes(path, labels, CLASSES)
    return TensorExamples(
        torch.from_numpy(pixels).view(-1, 1, 28, 28),
        torch.from_numpy(labels.astype(np.int64)),
        scale=0.5,
        centre=0.5,
        groups=np.repeat(np.arange(len(writers)), writers),
    )


def cnn(*, channels: int = 16, data: Path | None = None) -> Task:
    """A small convolutional network on FEMNIST; ``channels`` of the first convolution, twice as many in the second."""
    if channels < 1:
        raise InputError(f"channels must be at least 1, got {channels}")
    train, test = _drawings(require("femnist", data))
    return Task(name="femnist-cnn", model=partial(convolutions, channels), train=train, test=test, lr=0.05, batch=16)
