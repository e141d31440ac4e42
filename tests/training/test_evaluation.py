"""Evaluations on all examples or on the first so many, by hand."""

import numpy as np
import pytest
import torch

from hemiola.lab.tasks import load_task
from hemiola.training.evaluation import Evaluator


def test_a_part_of_the_examples_is_the_first_so_many():
    task = load_task("digits-logistic", None)
    torch.manual_seed(0)
    weights = torch.randn(650)
    matrix, bias = weights[:640].view(10, 64).double(), weights[640:].double()
    few = Evaluator(task, train_examples=7, test_examples=5).score(weights)
    pixels, labels = task.test.batch(np.arange(5))
    losses = torch.nn.functional.cross_entropy(pixels.double() @ matrix.T + bias, labels, reduction="none")
    assert few.test_loss == pytest.approx(float(losses.mean()))
    assert few.test_metric in (0, 0.2, 0.4, 0.6, 0.8, 1.0)
    everything = Evaluator(task).score(weights)
    assert Evaluator(task, train_examples=10**9, test_examples=10**9).score(weights) == everything
    assert everything.train_loss != few.train_loss
    assert everything.test_loss != few.test_loss
