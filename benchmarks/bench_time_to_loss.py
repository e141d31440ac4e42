"""How soon ghosts reach the training loss that random reshuffling ends with, in CPU seconds.

In one process: LeNet on the first 10,000 images of CIFAR-10, batch 16, learning rate .001, momentum .9, weight decay
.01 (the settings of GraB, arXiv 2205.10733); MiniLM fine-tuned on the first 512 sentences of CoLA, its last layer and
the head, batch 16, learning rate .01, 32 tokens. On 64 simulated workers: LeNet on all of CIFAR-10, one example of each
worker a step, learning rate .005 (CD-GraB, arXiv 2302.00845). The runs of all orders take turns epoch by epoch, from
the same weights, on one thread. The training loss is measured after each epoch and is not part of the time. EPOCHS,
SEEDS, ORDERS (some of the names below, separated by commas) and WORKLOADS (``lenet``, ``lenet-64``, ``minilm``) in the
environment change how long it takes.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench_sampler import Images, lenet
from ratio import Ratio, Skip
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.lab.tasks.load import load_task
from hemiola.loops.arguments import THIN
from hemiola.loops.sampler import OrderedSampler
from hemiola.order import ORDERS as POLICIES
from hemiola.training import Training
from hemiola.training.evaluation import Evaluator

BATCH = 16
RANDOM = "random reshuffling"
ORDERS: dict[str, dict[str, Any]] = {
    RANDOM: {"name": "rr"},
    "ghosts": {"name": "cd-grab", "sketch": THIN},
    "ghosts auto": {"name": "cd-grab", "sketch": THIN, "every": "auto"},
}


class Run(ABC):
    """A training run: CPU seconds and training loss after every epoch."""

    def __init__(self) -> None:
        self.seconds, self.losses = [0.0], [self.loss()]

    def epoch(self) -> None:
        start = time.process_time()
        self.train()
        self.seconds.append(self.seconds[-1] + time.process_time() - start)
        self.losses.append(self.loss())

    @abstractmethod
    def train(self) -> None:
        """One epoch."""

    @abstractmethod
    def loss(self) -> float:
        """Over the training set."""

    def epochs_to(self, loss: float) -> float:
        """Epochs until the loss is this low, by a straight line between two."""
        for after in range(1, len(self.losses)):
            if self.losses[after] <= loss:
                return after - (loss - self.losses[after]) / (self.losses[after - 1] - self.losses[after])
        return float("inf")

    def time_to(self, loss: float) -> float:
        """CPU seconds until the loss is this low."""
        return float(np.interp(self.epochs_to(loss), range(len(self.seconds)), self.seconds, right=float("inf")))


@dataclass(frozen=True)
class Workload:
    """What is trained in one process: a fresh model, how many examples, a batch by their numbers, the optimizer."""

    build: Callable[[], nn.Module]
    examples: int
    read: Callable[[np.ndarray], tuple[Tensor, Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


class OwnLoop(Run):
    """A loop in one process, with an `OrderedSampler`."""

    def __init__(self, work: Workload, order: dict[str, Any], seed: int) -> None:
        policy = POLICIES[order["name"]](**{key: value for key, value in order.items() if key != "name"})
        self.work, self.sampler, self.model = (
            work,
            OrderedSampler(range(work.examples), policy, seed=seed),
            work.build(),
        )
        torch.manual_seed(seed)
        for module in self.model.children():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.reset_parameters()
        self.optimizer = work.optimizer(self.model)
        super().__init__()
        self.model.train()
        self.sampler.attach(self.model)

    def train(self) -> None:
        for numbers in BatchSampler(self.sampler, BATCH, drop_last=False):
            x, y = self.work.read(np.array(numbers))
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    @torch.no_grad()
    def loss(self) -> float:
        total = 0.0
        for part in np.array_split(np.arange(self.work.examples), -(-self.work.examples // 256)):
            x, y = self.work.read(part)
            total += float(F.cross_entropy(self.model(x), y, reduction="sum"))
        return total / self.work.examples


class Simulated(Run):
    """A run of an experiment file on the simulated cluster."""

    def __init__(self, experiment: dict[str, Any], order: dict[str, Any], seed: int) -> None:
        (cell,) = Experiment({**experiment, "order": order, "seeds": [seed]}).cells
        plan, make_cluster = cell.plan(None)
        self.training, self.evaluator = Training(plan, make_cluster), Evaluator(plan.task, test_examples=1)
        super().__init__()

    def train(self) -> None:
        until = len(self.losses) - 1e-9
        self.training.run(lambda training: training.epochs < until)

    def loss(self) -> float:
        return self.evaluator.score(self.training.read(self.training.version)).train_loss


Start = Callable[[dict[str, Any], int], Run]
"""An order and a seed, to a run that has not begun."""


def has_cifar10() -> None:
    if not Path(os.environ.get("HEMIOLA_DATA", "."), "cifar-10-batches-bin").exists():
        raise Skip("CIFAR-10 is not in HEMIOLA_DATA")


def lenet_in_one_process() -> Start:
    has_cifar10()
    data = Images(10_000)

    def read(numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        return data.x[numbers], data.y[numbers]

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-2)

    return partial(OwnLoop, Workload(lenet, len(data), read, sgd))


def lenet_on_64_workers() -> Start:
    has_cifar10()
    experiment = {
        "task": "cifar10-lenet",
        "workers": 64,
        "batch": 1,
        "stop": {"epochs": 1000},
        "evaluate": {"every_epochs": 1000, "train_examples": 1, "test_examples": 1},
        "optimizer": {"name": "SGD", "lr": 5e-3, "momentum": 0.9, "weight_decay": 1e-2},
    }
    return partial(Simulated, experiment)


def cola_minilm() -> Start:
    try:
        task = load_task("glue-minilm", {"task": "cola", "trained": 1, "tokens": 32, "examples": 512})
    except InputError as reason:
        raise Skip(str(reason)) from None

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2, momentum=0.9)

    return partial(OwnLoop, Workload(task.model, len(task.train), task.train.batch, sgd))


WORKLOADS = {
    "lenet": (lenet_in_one_process, 20, "<= 0.75"),
    "lenet-64": (lenet_on_64_workers, 30, "<= 0.75"),
    "minilm": (cola_minilm, 12, ""),
}
"""What is trained, for how many epochs, and the bar that ghosts are held to."""


def ratios() -> Iterator[Ratio]:
    torch.set_num_threads(1)
    for name in os.environ.get("WORKLOADS", "lenet minilm").split():
        workload, epochs, bar = WORKLOADS[name]
        yield from ratios_of(name, workload(), int(os.environ.get("EPOCHS", epochs)), bar)


def ratios_of(name: str, start: Start, epochs: int, bar: str) -> Iterator[Ratio]:
    orders = os.environ.get("ORDERS", ",".join(list(ORDERS)[1:])).split(",")
    found: dict[str, list[float]] = {order: [] for order in orders}
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "0 1 2").split()]
    for seed in seeds:
        runs = {order: start(ORDERS[order], seed) for order in (RANDOM, *orders)}
        for _ in range(epochs):
            for run in runs.values():
                run.epoch()
        random = runs[RANDOM]
        for order, times in found.items():
            run, loss = runs[order], random.losses[-1]
            times.append(run.time_to(loss) / random.seconds[-1])
            note = (
                f"{run.epochs_to(loss):.1f} of {epochs} epochs to {loss:.4f}, which a random order touched first after "
                f"{random.epochs_to(loss):.1f}; ends at {run.losses[-1]:.4f}"
            )
            yield Ratio(f"{name}, {order}, seed {seed}", times[-1], "", note)
    for order, times in found.items():
        yield Ratio(f"{name}, {order}, median", median(times), bar, "CPU seconds over random reshuffling's")
