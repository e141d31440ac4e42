"""Your own task: which of three wines is it?

Any function that returns a `Task` is a task. An experiment file in the same folder names it `task = "own_task:wine"`,
or `task = { name = "own_task:wine", hidden = 8 }`: the function's keyword arguments are the task's options.
"""

import torch
from sklearn.datasets import load_wine

from hemiola.lab.tasks import Task


def wine(hidden: int = 16) -> Task:
    inputs, targets = load_wine(return_X_y=True)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    x = torch.tensor((inputs - inputs.mean(axis=0)) / inputs.std(axis=0), dtype=torch.float32)[order]
    y = torch.tensor(targets)[order]
    return Task(
        name="wine",
        model=lambda: torch.nn.Sequential(torch.nn.Linear(13, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 3)),
        train=(x[:128], y[:128]),
        test=(x[128:], y[128:]),
        lr=0.1,
        batch=4,
    )


if __name__ == "__main__":
    print(wine())
