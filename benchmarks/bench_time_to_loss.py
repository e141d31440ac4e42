"""How soon ghosts reach the training loss that random reshuffling ends with: one process, CPU seconds.

LeNet on the first 10,000 images of CIFAR-10: batch 16, learning rate .001, momentum .9, weight decay .01 (the settings
of GraB, arXiv 2205.10733). MiniLM fine-tuned on the first 512 sentences of CoLA: its last layer and the head, batch 16,
learning rate .01, 32 tokens. The loops of all orders take turns epoch by epoch, from the same weights, on one thread.
The training loss is measured after each epoch and is not part of the time. EPOCHS, SEEDS and WORKLOADS (``lenet``,
``minilm``) in the environment change how long it takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from bench_sampler import Images, lenet
from ratio import Ratio, Skip
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from hemiola.contracts import Order
from hemiola.errors import InputError
from hemiola.lab.tasks.load import load_task
from hemiola.loops.arguments import THIN
from hemiola.loops.sampler import OrderedSampler
from hemiola.order import CDGraB, RandomReshuffling

BATCH = 16
ORDERS: dict[str, Callable[[], Order]] = {
    "random reshuffling": RandomReshuffling,
    "ghosts": lambda: CDGraB(sketch=THIN),
    "ghosts, every = auto": lambda: CDGraB(sketch=THIN, every="auto"),
}


@dataclass(frozen=True)
class Workload:
    """What is trained: a fresh model, how many examples, a batch by their numbers, the optimizer, and for how long."""

    build: Callable[[], nn.Module]
    examples: int
    read: Callable[[np.ndarray], tuple[Tensor, Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    epochs: int
    bar: str = ""


def cifar10_lenet() -> Workload:
    if not Path(os.environ.get("HEMIOLA_DATA", "."), "cifar-10-batches-bin").exists():
        raise Skip("CIFAR-10 is not in HEMIOLA_DATA")
    data = Images(10_000)

    def read(numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        return data.x[numbers], data.y[numbers]

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-2)

    return Workload(lenet, len(data), read, sgd, 20, "<= 0.75")


def cola_minilm() -> Workload:
    try:
        task = load_task("glue-minilm", {"task": "cola", "trained": 1, "tokens": 32, "examples": 512})
    except InputError as reason:
        raise Skip(str(reason)) from None

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2, momentum=0.9)

    return Workload(task.model, len(task.train), task.train.batch, sgd, 12)


WORKLOADS = {"lenet": cifar10_lenet, "minilm": cola_minilm}


class Run:
    """A training run: CPU seconds and training loss after every epoch."""

    def __init__(self, work: Workload, order: Order, seed: int) -> None:
        self.work, self.sampler, self.model = work, OrderedSampler(range(work.examples), order, seed=seed), work.build()
        torch.manual_seed(seed)
        for module in self.model.children():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.reset_parameters()
        self.optimizer = work.optimizer(self.model)
        self.seconds, self.losses = [0.0], [self.loss()]
        self.model.train()
        self.sampler.attach(self.model)

    def epoch(self) -> None:
        start = time.process_time()
        for numbers in BatchSampler(self.sampler, BATCH, drop_last=False):
            x, y = self.work.read(np.array(numbers))
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        self.seconds.append(self.seconds[-1] + time.process_time() - start)
        self.losses.append(self.loss())

    @torch.no_grad()
    def loss(self) -> float:
        total = 0.0
        for part in np.array_split(np.arange(self.work.examples), -(-self.work.examples // 256)):
            x, y = self.work.read(part)
            total += float(F.cross_entropy(self.model(x), y, reduction="sum"))
        return total / self.work.examples

    def epochs_to(self, loss: float) -> float:
        """Epochs until the loss is this low, by a straight line between two."""
        for after in range(1, len(self.losses)):
            if self.losses[after] <= loss:
                return after - (loss - self.losses[after]) / (self.losses[after - 1] - self.losses[after])
        return float("inf")

    def time_to(self, loss: float) -> float:
        """CPU seconds until the loss is this low."""
        return float(np.interp(self.epochs_to(loss), range(len(self.seconds)), self.seconds, right=float("inf")))


def ratios() -> Iterator[Ratio]:
    torch.set_num_threads(1)
    for name in os.environ.get("WORKLOADS", "lenet minilm").split():
        yield from ratios_of(name, WORKLOADS[name]())


def ratios_of(name: str, work: Workload) -> Iterator[Ratio]:
    epochs, seeds = int(os.environ.get("EPOCHS", work.epochs)), int(os.environ.get("SEEDS", "3"))
    found: dict[str, list[float]] = {order: [] for order in ORDERS if order != "random reshuffling"}
    for seed in range(seeds):
        runs = {order: Run(work, make(), seed) for order, make in ORDERS.items()}
        for _ in range(epochs):
            for run in runs.values():
                run.epoch()
        random = runs["random reshuffling"]
        for order, times in found.items():
            run, loss = runs[order], random.losses[-1]
            times.append(run.time_to(loss) / random.seconds[-1])
            measured = run.sampler.telemetry().get("measured_epochs", epochs)
            note = f"{run.epochs_to(loss):.1f} of {epochs} epochs to {loss:.4f}, {measured} of them with sketches"
            yield Ratio(f"{name}, {order}, seed {seed}", times[-1], "", note)
    for order, times in found.items():
        yield Ratio(f"{name}, {order}, median", median(times), work.bar, "CPU seconds over random reshuffling's")
