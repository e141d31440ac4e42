"""A task that trains in milliseconds, for tests of everything around training."""

import multiprocessing
import time
import warnings
from pathlib import Path

import torch
from torch import nn

import hemiola


class Net(nn.Module):
    """Everything a state_dict can hold: trained, frozen and tied parameters, floating and whole-number buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 4)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.second(torch.relu(self.first(self.norm(self.frozen(x))))))


def make(
    examples: int = 24, test: int = 10, warn: bool = False, fail_at: int = 0, say: str = "", gate: str = ""
) -> hemiola.Task:
    """Two classes split by the sign of a sum.

    Args:
        examples: For training.
        test: For testing.
        warn: In a cell's process, warn at every step.
        fail_at: Raise after so many steps.
        say: In a cell's process, print this.
        gate: In a cell's process, stop at a step in the middle until this file exists, and say so by ``gate.reached``;
            once it has waited, take longer than it takes the cell to notice that it is to stop.
    """
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(examples + test, 3, generator=stream)
    y = (x.sum(1) > 0).long()
    calls, waited = [0], [False]

    def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        in_a_cell = multiprocessing.parent_process() is not None
        if fail_at and calls[0] > fail_at:
            raise RuntimeError("this task has had enough")
        if warn and in_a_cell:
            warnings.warn("this task warns", stacklevel=1)
        if say and in_a_cell and calls[0] == 3:
            print(say)
        if gate and in_a_cell and calls[0] == 20:
            while not Path(gate).exists():
                waited[0] = True
                Path(gate + ".reached").touch()
                time.sleep(0.01)
        if waited[0]:
            time.sleep(0.02)
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    return hemiola.Task(
        name="tiny", model=Net, train=(x[:examples], y[:examples]), test=(x[examples:], y[examples:]), losses=losses
    )
