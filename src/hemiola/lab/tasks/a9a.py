"""Adult census income as 123 binary features (LIBSVM's a9a): does a person earn more than 50,000 dollars a year?"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hemiola.lab.tasks.files import require
from hemiola.lab.tasks.readers import read_libsvm
from hemiola.lab.tasks.task import Task, first, logistic_task

FEATURES = 123


@cache
def _people(root: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return _part(root / "a9a/a9a"), _part(root / "a9a/a9a.t")


def _part(path: Path) -> tuple[Tensor, Tensor]:
    inputs, targets = read_libsvm(path, FEATURES)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def logistic(*, l2: float = 1e-4, examples: int = 0, data: Path | None = None) -> Task:
    """Logistic regression on a9a; convex while l2 > 0.

    ``examples``: use only the first so many training examples; 0 for all.
    """
    train, test = _people(require("a9a", data))
    return logistic_task("a9a-logistic", first(train, examples), test, FEATURES, l2, lr=0.1, batch=16)
