"""A task as plain parts: a model, two data sets, a loss, a metric. Every reference task is one call of `Task`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset, default_collate

from hemiola.contracts import Examples
from hemiola.errors import InputError

PerChannel: TypeAlias = float | Sequence[float]
"""One number for all channels of a picture, or one each."""

PerExample: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets of B examples in, B numbers out."""

Noise: TypeAlias = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]
"""Inputs, targets and a random stream in, perturbed inputs and targets out."""

Data: TypeAlias = Examples | Dataset[Any] | tuple[Tensor, Tensor]


class Task:
    """A `hemiola.contracts.TaskLike` made of functions and tensors.

    Args:
        name: What the report calls it.
        model: Returns a freshly initialised model; torch's generator is seeded before every call. The model must
            treat the examples of a batch independently of each other (no BatchNorm).
        train: Training examples: a pair of tensors (inputs, targets), or any map-style ``torch.utils.data.Dataset``
            whose items are such pairs.
        test: Test examples, likewise.
        losses: Outputs and targets to one loss per example; cross-entropy of class scores unless given.
        scores: Outputs and targets to one score per example; 1 for a correct class and 0 for a wrong one unless given.
        metric: What the mean score is called.
        higher_is_better: Direction of the metric.
        summarise: Turns the mean score into the metric, e.g. ``math.exp`` for a perplexity.
        convex: Whether the objective, mean loss + (l2/2)||w||^2, has one minimum value that L-BFGS finds.
        l2: Strength of the quadratic term, over all parameters, biases too.
        lr: Sensible learning rate of plain SGD.
        batch: Sensible number of examples per worker per local step.
        noise: Perturbs training inputs and targets afresh at every visit; None for no noise.
    """

    def __init__(
        self,
        *,
        name: str,
        model: Callable[[], nn.Module],
        train: Data,
        test: Data,
        losses: PerExample | None = None,
        scores: PerExample | None = None,
        metric: str = "accuracy",
        higher_is_better: bool = True,
        summarise: Callable[[float], float] = float,
        convex: bool = False,
        l2: float = 0.0,
        lr: float = 0.1,
        batch: int = 16,
        noise: Noise | None = None,
    ) -> None:
        if not (math.isfinite(l2) and l2 >= 0):
            raise InputError(f"l2 must be at least 0, got {l2}")
        if not (math.isfinite(lr) and lr > 0):
            raise InputError(f"lr must be above 0, got {lr}")
        if batch < 1:
            raise InputError(f"batch must be at least 1, got {batch}")
        self.name = name
        self.model = model
        self.train = as_examples(train, "train")
        self.test = as_examples(test, "test")
        self.losses = losses or cross_entropy
        self.scores = scores or correct
        self.metric = metric
        self.higher_is_better = higher_is_better
        self.summarise = summarise
        self.convex = convex
        self.l2 = l2
        self.lr = lr
        self.batch = batch
        self.noise = noise

    @property
    def noisy(self) -> bool:
        """Whether ``perturb`` does anything."""
        return self.noise is not None

    def perturb(self, inputs: Tensor, targets: Tensor, stream: torch.Generator) -> tuple[Tensor, Tensor]:
        """Noise that is fresh at every visit."""
        return (inputs, targets) if self.noise is None else self.noise(inputs, targets, stream)

    def __repr__(self) -> str:
        return f"Task({self.name!r}, {len(self.train)} training examples, {len(self.test)} test examples)"


# ---------------------------------------------------------------------------------------------- losses and scores


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of class scores (B, classes), one number per example."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the highest class score is the target's, else 0."""
    return (outputs.argmax(dim=1) == targets).to(torch.float32)


def logistic_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """log(1 + exp(-+z)) of one score z (B, 1) for classes 1 and 0, one number per example."""
    return functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.to(outputs.dtype), reduction="none")


def correct_sign(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the score (B, 1) is positive for class 1 and not for class 0, else 0."""
    return ((outputs[:, 0] > 0) == (targets == 1)).to(torch.float32)


def logistic_task(name: str, train: Any, test: Any, features: int, l2: float, lr: float, batch: int) -> Task:
    """Logistic regression of two classes on ``features`` numbers; convex while l2 > 0."""
    return Task(
        name=name,
        model=partial(nn.Linear, features, 1),
        train=train,
        test=test,
        losses=logistic_loss,
        scores=correct_sign,
        convex=l2 > 0,
        l2=l2,
        lr=lr,
        batch=batch,
    )


# ------------------------------------------------------------------------------------------------------- examples


class TensorExamples:
    """Examples held as two tensors.

    Args:
        inputs: One row an example.
        targets: One row an example.
        scale: For images kept as bytes, which take a quarter of the memory and cost about a hundredth of a LeNet
            step: inputs are returned as float32 ``(x / 255 - centre) / scale``; one number for all channels or one
            each. None returns them as they are.
        centre: See ``scale``.
        groups: The group that each example came in, such as who wrote it; None for no groups.
        scores: A score of each example, such as how hard it is; None for no scores.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        scale: PerChannel | None = None,
        centre: PerChannel = 0.0,
        groups: np.ndarray | None = None,
        scores: np.ndarray | None = None,
    ) -> None:
        self.inputs = inputs
        self.targets = targets
        self._groups = groups
        self._scores = scores
        self._affine: tuple[Tensor, Tensor] | None = None
        if scale is not None:
            factor = 1.0 / torch.tensor(scale, dtype=torch.float64)
            offset = -torch.tensor(centre, dtype=torch.float64) * factor
            channels = (-1, *[1] * (inputs.dim() - 2))
            self._affine = (
                (factor / 255.0).to(torch.float32).reshape(channels),
                offset.to(torch.float32).reshape(channels),
            )

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these examples."""
        rows = torch.from_numpy(indices)
        inputs = self.inputs.index_select(0, rows)
        if self._affine is not None:
            factor, offset = self._affine
            inputs = inputs.to(torch.float32).mul_(factor).add_(offset)
        return inputs, self.targets.index_select(0, rows)

    def first(self, count: int) -> Self:
        """The first so many of them."""
        found = copy.copy(self)
        found.inputs, found.targets = self.inputs[:count], self.targets[:count]
        found._groups = None if self._groups is None else self._groups[:count]
        found._scores = None if self._scores is None else self._scores[:count]
        return found

    def labels(self) -> np.ndarray | None:
        """The targets where they are one whole number an example, else None."""
        return _classes(self.targets)

    def groups(self) -> np.ndarray | None:
        """The group of each example, None without groups."""
        return self._groups

    def scores(self) -> np.ndarray | None:
        """The score of each example."""
        return self._scores


def first(train: TensorExamples | tuple[Tensor, Tensor], examples: int) -> TensorExamples:
    """Only the first so many training examples; all for 0."""
    if examples < 0:
        raise InputError(f"examples must be at least 0, got {examples}")
    every = train if isinstance(train, TensorExamples) else TensorExamples(*train)
    return every.first(examples) if examples else every


class DatasetExamples:
    """Examples of a map-style ``Dataset`` of (input, target) pairs; ``default_collate`` stacks them."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these examples."""
        inputs, targets = default_collate([self.dataset[i] for i in indices.tolist()])
        return inputs, targets

    def labels(self) -> np.ndarray | None:
        """``dataset.targets`` where there is one (torchvision has it), else every item's target if it is a class."""
        known = getattr(self.dataset, "targets", None)
        if known is not None:
            return _classes(torch.as_tensor(known))
        if _classes(self.batch(np.arange(1))[1]) is None:
            return None
        return _classes(torch.as_tensor([int(self.dataset[i][1]) for i in range(len(self))]))


def as_examples(data: Data, what: str) -> Examples:
    """Wrap a pair of tensors or a map-style data set; raises `InputError` naming ``what`` if it is neither."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = (data.tensors[0], data.tensors[1])
    if isinstance(data, tuple):
        if len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
            raise InputError(f"{what} must be a pair of tensors (inputs, targets), got {_shape_of(data)}")
        inputs, targets = data
        if inputs.dim() == 0 or targets.dim() == 0 or len(inputs) != len(targets):
            raise InputError(
                f"{what} must have as many inputs as targets, got {tuple(inputs.shape)} and {tuple(targets.shape)}"
            )
        examples: Examples = TensorExamples(inputs, targets)
    elif isinstance(data, TensorExamples | DatasetExamples) or _has(data, "__len__", "batch", "labels"):
        examples = data  # type: ignore[assignment]
    elif _has(data, "__len__", "__getitem__"):
        examples = DatasetExamples(data)  # type: ignore[arg-type]
    else:
        raise InputError(
            f"{what} must be a pair of tensors or a data set with __len__ and __getitem__, got {_shape_of(data)}"
        )
    if len(examples) == 0:
        raise InputError(f"{what} must hold at least one example, got none")
    return examples


def _has(thing: object, *names: str) -> bool:
    return all(hasattr(type(thing), name) for name in names)


def _shape_of(thing: object) -> str:
    if isinstance(thing, tuple):
        return "(" + ", ".join(type(part).__name__ for part in thing) + ")"
    return type(thing).__name__


def _classes(targets: Tensor) -> np.ndarray | None:
    if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
        return None
    return targets.numpy()
