"""Handwritten digits, 8 x 8 pixels, from scikit-learn: 1,797 examples, the first 1,500 for training.

The test part of Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from hemiola.errors import InputError
from hemiola.lab.tasks.models import mlp
from hemiola.lab.tasks.readers import read_from_sklearn
from hemiola.lab.tasks.task import Noise, Task
from hemiola.streams import stream

TRAIN = 1500
CLASSES = 10
PIXEL_DEVIATION = 0.375


@cache
def _digits() -> tuple[Tensor, Tensor]:
    pixels, labels = read_from_sklearn("digits", "digits.csv.gz", header=0)
    return torch.from_numpy(pixels / 16.0).to(torch.float32), torch.from_numpy(labels).to(torch.int64)


def logistic(*, l2: float = 1e-3) -> Task:
    """Softmax regression on digits; convex while l2 > 0 (without it no minimum is attained: the data are separable)."""
    inputs, targets = _digits()
    return Task(
        name="digits-logistic",
        model=_linear,
        train=(inputs[:TRAIN], targets[:TRAIN]),
        test=(inputs[TRAIN:], targets[TRAIN:]),
        convex=l2 > 0,
        l2=l2,
        lr=0.2,
        batch=1,
    )


def _linear() -> nn.Module:
    return nn.Linear(64, CLASSES)


def perceptron(
    *,
    hidden: Sequence[int] = (32,),
    input_noise: float = 0.0,
    label_noise: float = 0.0,
    label_flip: float = 0.0,
    examples: int = TRAIN,
) -> Task:
    """A multi-layer perceptron on digits, with as much noise as wanted.

    Args:
        hidden: Widths of the hidden layers; none for softmax regression.
        input_noise: Standard deviation of Gaussian noise on the inputs, fresh at every visit, as a multiple of the
            inputs' own standard deviation (0.375; they lie in [0, 1]): 1 means as much noise as signal.
        label_noise: Share of labels redrawn uniformly among all classes, fresh at every visit.
        label_flip: Share of training labels redrawn uniformly among all classes once for all, the same in every run.
        examples: How many training examples, from the first.
    """
    if any(width < 1 for width in hidden):
        raise InputError(f"hidden must be widths of at least 1, got {list(hidden)}")
    if not 1 <= examples <= TRAIN:
        raise InputError(f"examples must be between 1 and {TRAIN}, got {examples}")
    inputs, targets = _digits()
    return Task(
        name="digits-mlp",
        model=partial(mlp, [64, *hidden, CLASSES]),
        train=(inputs[:examples], _flip(targets[:examples], label_flip)),
        test=(inputs[TRAIN:], targets[TRAIN:]),
        lr=0.3,
        batch=8,
        noise=_noise(input_noise, label_noise),
    )


def _flip(targets: Tensor, share: float) -> Tensor:
    _check_share("label_flip", share)
    # Drawn for all training examples, so that the label of an example does not depend on how many are used.
    draws = stream("digits label-flip")
    flipped = torch.from_numpy(draws.random(TRAIN) < share)[: len(targets)]
    redrawn = torch.from_numpy(draws.integers(0, CLASSES, TRAIN))[: len(targets)]
    return torch.where(flipped, redrawn, targets)


def _noise(input_noise: float, label_noise: float) -> Noise | None:
    _check_share("label_noise", label_noise)
    if not 0 <= input_noise < float("inf"):
        raise InputError(f"input_noise must be at least 0, got {input_noise}")
    if input_noise == 0 and label_noise == 0:
        return None
    return partial(_perturb, input_noise * PIXEL_DEVIATION, label_noise)


def _perturb(
    deviation: float, label_noise: float, inputs: Tensor, targets: Tensor, stream: torch.Generator
) -> tuple[Tensor, Tensor]:
    if deviation:
        inputs = inputs + deviation * torch.randn(inputs.shape, generator=stream)
    if label_noise:
        redrawn = torch.rand(targets.shape, generator=stream) < label_noise
        targets = torch.where(redrawn, torch.randint(CLASSES, targets.shape, generator=stream), targets)
    return inputs, targets


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise InputError(f"{name} must be between 0 and 1, got {share}")
