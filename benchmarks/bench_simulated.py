"""What simulating a cluster costs beside the gradient work itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from ratio import Ratio, Skip, compare

from hemiola.lab.experiment import Experiment
from hemiola.training import Training

UPDATES = 60


def ratios() -> Iterator[Ratio]:
    torch.set_num_threads(1)
    yield against_bare_loop("digits-mlp", None)
    data = os.environ.get("HEMIOLA_DATA")
    if not data:
        raise Skip("cifar10-lenet and mnist-lenet need HEMIOLA_DATA")
    yield against_bare_loop("cifar10-lenet", Path(data))
    yield thousand_workers(Path(data))


def against_bare_loop(task_name: str, data: Path | None) -> Ratio:
    """8 synchronous workers, batch 8 each, against one process with batch 64 and the same number of steps."""
    settings = {
        "task": task_name,
        "workers": 8,
        "batch": 8,
        "stop": {"updates": 10**9},
        "evaluate": {"every_updates": 10**9},
    }
    plan, make_cluster = Experiment(settings).cells[0].plan(data)
    training = Training(plan, make_cluster)
    training.records.append({})  # no evaluation: only training is compared

    def simulated() -> None:
        goal = training.version + UPDATES
        training.run(lambda run: run.version < goal)

    task = plan.task
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    order = np.random.default_rng(0).permutation(len(task.train))

    def bare() -> None:
        for step in range(UPDATES):
            at = (step * 64) % (len(order) - 64)
            inputs, targets = task.train.batch(order[at : at + 64])
            optimizer.zero_grad()
            task.losses(model(inputs), targets).mean().backward()
            optimizer.step()

    bar = "<= 1.25" if task_name == "cifar10-lenet" else ""
    return Ratio(f"8 workers on {task_name}", compare(simulated, bare), bar, "simulated cluster / bare PyTorch loop")


def thousand_workers(data: Path) -> Ratio:
    """The most versions of the weights alive at a time, beside a copy for every worker."""
    settings = {
        "task": "mnist-lenet",
        "workers": 1000,
        "batch": 1,
        "stop": {"updates": 40},
        "evaluate": {"every_updates": 40},
        "pace": {"name": "k-async", "k": 100},
        "cluster": {"name": "simulated", "delay": "exponential(1)"},
    }
    training = Training(*Experiment(settings).cells[0].plan(data))
    training.records.append({})
    alive = []
    training.run(lambda run: alive.append(len(run.versions)) or True)
    note = "weights held / a copy for every worker, k-async with K = 100"
    return Ratio("1000 workers on mnist-lenet, memory", max(alive) / training.workers, note=note)
