"""MNIST digits and Fashion-MNIST garments, 28 x 28 grey pixels, scaled to [-1, 1]."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch

from hemiola.errors import InputError
from hemiola.lab.tasks.files import require
from hemiola.lab.tasks.models import image_mlp, lenet
from hemiola.lab.tasks.readers import read_idx_pair
from hemiola.lab.tasks.task import Task, TensorExamples, first

FOLDERS = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}


@cache
def _images(name: str, root: Path) -> tuple[TensorExamples, TensorExamples]:
    folder = root / FOLDERS[name]
    return _examples(folder, "train"), _examples(folder, "t10k")


def _examples(folder: Path, part: str) -> TensorExamples:
    images, labels = read_idx_pair(folder, part)
    return TensorExamples(torch.from_numpy(images)[:, None], torch.from_numpy(labels), scale=0.5, centre=0.5)


def perceptron(*, hidden: Sequence[int] = (100,), examples: int = 0, data: Path | None = None) -> Task:
    """A multi-layer perceptron on MNIST with hidden layers of these widths.

    ``examples``: use only the first so many training pictures; 0 for all.
    """
    if any(width < 1 for width in hidden):
        raise InputError(f"hidden must be widths of at least 1, got {list(hidden)}")
    train, test = _images("mnist", require("mnist", data))
    model = partial(image_mlp, [28 * 28, *hidden, 10])
    return Task(name="mnist-mlp", model=model, train=first(train, examples), test=test, lr=0.05, batch=16)


def mnist_lenet(*, examples: int = 0, data: Path | None = None) -> Task:
    """LeNet on MNIST. ``examples``: use only the first so many training pictures; 0 for all."""
    train, test = _images("mnist", require("mnist", data))
    model = partial(lenet, 1, 256)
    return Task(name="mnist-lenet", model=model, train=first(train, examples), test=test, lr=0.05, batch=16)


def fashion_lenet(*, examples: int = 0, data: Path | None = None) -> Task:
    """LeNet on Fashion-MNIST. ``examples``: use only the first so many training pictures; 0 for all."""
    train, test = _images("fashion-mnist", require("fashion-mnist", data))
    model = partial(lenet, 1, 256)
    return Task(name="fashion-lenet", model=model, train=first(train, examples), test=test, lr=0.05, batch=16)
