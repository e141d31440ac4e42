"""Breast tumours, malignant or benign, from scikit-learn: 569 examples of 30 measurements, the first 469 for training.

Wolberg, Mangasarian, Street, Street, "Breast Cancer Wisconsin (Diagnostic)", UCI Machine Learning Repository, 1993.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hemiola.lab.tasks.readers import read_from_sklearn
from hemiola.lab.tasks.task import Task, logistic_task

TRAIN = 469


@cache
def _tumours() -> tuple[Tensor, Tensor]:
    inputs, targets = read_from_sklearn("breast_cancer", "breast_cancer.csv", header=1)
    seen = inputs[:TRAIN]
    inputs = (inputs - seen.mean(axis=0)) / seen.std(axis=0)
    return torch.from_numpy(inputs).to(torch.float32), torch.from_numpy(targets).to(torch.int64)


def logistic(*, l2: float = 1e-3) -> Task:
    """Logistic regression on breast-cancer, inputs standardised by the training part; convex while l2 > 0."""
    inputs, targets = _tumours()
    return logistic_task(
        "breast-cancer-logistic",
        (inputs[:TRAIN], targets[:TRAIN]),
        (inputs[TRAIN:], targets[TRAIN:]),
        inputs.shape[1],
        l2,
        lr=0.1,
        batch=1,
    )
