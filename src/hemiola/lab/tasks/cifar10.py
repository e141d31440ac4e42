"""CIFAR-10 pictures, 32 x 32 pixels in three colours, standardised by colour."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import torch

from hemiola.lab.tasks.files import SETS, require
from hemiola.lab.tasks.models import lenet, vgg
from hemiola.lab.tasks.readers import read_cifar
from hemiola.lab.tasks.task import Task, TensorExamples, first

# Mean and standard deviation of the training pictures' red, green and blue, from 0 to 1.
MEANS = (0.4914, 0.4822, 0.4465)
DEVIATIONS = (0.2470, 0.2435, 0.2616)


@cache
def _pictures(root: Path) -> tuple[TensorExamples, TensorExamples]:
    *train, test = (root / file for file in SETS["cifar10"].files)
    return _examples(train), _examples([test])


def _examples(paths: list[Path]) -> TensorExamples:
    images, labels = read_cifar(paths)
    return TensorExamples(torch.from_numpy(images), torch.from_numpy(labels), scale=DEVIATIONS, centre=MEANS)


def cifar10_lenet(*, examples: int = 0, data: Path | None = None) -> Task:
    """LeNet on CIFAR-10: CD-GraB's model. ``examples``: use only the first so many training pictures; 0 for all."""
    train, test = _pictures(require("cifar10", data))
    model = partial(lenet, 3, 400)
    return Task(name="cifar10-lenet", model=model, train=first(train, examples), test=test, lr=0.05, batch=16)


def cifar10_vgg(*, examples: int = 0, data: Path | None = None) -> Task:
    """A small VGG with GroupNorm on CIFAR-10. ``examples``: use only the first so many training pictures; 0 for all."""
    train, test = _pictures(require("cifar10", data))
    return Task(name="cifar10-vgg", model=vgg, train=first(train, examples), test=test, lr=0.05, batch=32)
