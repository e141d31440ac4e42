"""How good are these weights: training objective and gap, test loss and metric."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hemiola.contracts import Examples, TaskLike
from hemiola.flat import FlatModel
from hemiola.streams import torch_stream
from hemiola.training.optimum import optimum

_CHUNK = 1000  # examples whose noise is drawn together
_AT_ONCE = 250  # of these pass the model together: what lies between its layers should stay in the processor's cache


@dataclass(frozen=True)
class Score:
    """One evaluation; ``train_gap`` is None unless the task is convex."""

    train_loss: float
    train_gap: float | None
    test_loss: float
    test_metric: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.train_loss)


class Evaluator:
    """Evaluates weights on the training and the test set.

    Convex tasks are evaluated in float64, because their gaps shrink below what float32 resolves. Noise that is fresh at
    every visit is drawn here from one fixed stream, so all runs and all moments are measured on the same draws.

    Args:
        task: What to evaluate on.
        train_examples: Evaluate on the first so many training examples only; None for all.
        test_examples: The same for the test examples.
    """

    def __init__(self, task: TaskLike, train_examples: int | None = None, test_examples: int | None = None):
        self.task = task
        self.train_examples = min(train_examples or len(task.train), len(task.train))
        self.test_examples = min(test_examples or len(task.test), len(task.test))
        self.optimum = optimum(task) if task.convex else None
        module: nn.Module = copy.deepcopy(task.model())
        self.flat = FlatModel(module.double() if task.convex else module)

    def score(self, weights: Tensor) -> Score:
        """Evaluate at these weights (parameters, then buffers)."""
        self.flat.load(weights)
        self.flat.module.eval()
        with torch.no_grad():
            loss, _ = self._means(self.task.train, self.train_examples, noisy=self.task.noisy)
            parameters = self.flat.weights[: self.flat.size]
            loss += self.task.l2 / 2 * float(parameters.double().square().sum())
            test_loss, test_score = self._means(self.task.test, self.test_examples, noisy=False)
        gap = None if self.optimum is None else loss - self.optimum
        metric = self.task.summarise(test_score) if math.isfinite(test_loss) else math.nan
        return Score(loss, gap, test_loss, metric)

    def _means(self, examples: Examples, count: int, noisy: bool) -> tuple[float, float]:
        loss = score = 0.0
        for first in range(0, count, _CHUNK):
            inputs, targets = examples.batch(np.arange(first, min(first + _CHUNK, count)))
            if noisy:
                inputs, targets = self.task.perturb(inputs, targets, torch_stream("evaluation", first))
            if inputs.is_floating_point():
                inputs = inputs.to(self.flat.weights.dtype)
            losses, scores = [], []
            for some, their in zip(torch.split(inputs, _AT_ONCE), torch.split(targets, _AT_ONCE), strict=True):
                outputs = self.flat.module(some)
                losses.append(self.task.losses(outputs, their))
                scores.append(self.task.scores(outputs, their))
            loss += float(torch.cat(losses).double().sum())
            score += float(torch.cat(scores).double().sum())
        return loss / count, score / count
