"""What ordering costs in a training loop: an epoch of cifar10-lenet, batch 64, one process, against random order.

The loop, the model and the data are the same on both sides; only the sampler and its watch differ. Where CIFAR-10 is
not on this machine, random images of the same size take its place: a step takes as long whatever they show. Everything
runs on one thread and is measured in its CPU seconds, which other programs on the machine disturb less than wall time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from ratio import Ratio
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Dataset

from hemiola.loops.sampler import OrderedSampler
from hemiola.order import CDGraB

BATCH, BATCHES, ROUNDS = 64, 156, 5


class Images(Dataset[tuple[Tensor, Tensor]]):
    """CIFAR-10's first images, or random ones, in memory and read a batch at a time."""

    def __init__(self, count: int) -> None:
        file = Path(os.environ.get("HEMIOLA_DATA", "."), "cifar-10-batches-bin", "data_batch_1.bin")
        if file.exists():
            rows = np.fromfile(file, np.uint8, count * 3073).reshape(count, 3073)
        else:
            rows = np.random.default_rng(0).integers(0, 256, (count, 3073), np.uint8)
            rows[:, 0] %= 10
        self.x = torch.from_numpy(rows[:, 1:].reshape(count, 3, 32, 32) / 127.5 - 1).float()
        self.y = torch.from_numpy(rows[:, 0].astype(np.int64))

    def __len__(self) -> int:
        return len(self.y)


def lenet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


class Loop:
    """A plain training loop under one order; each call is the next two epochs (so that `reverse` shows its mean)."""

    def __init__(self, data: Images, sampler: OrderedSampler) -> None:
        self.data, self.sampler, self.model = data, sampler, lenet()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=5e-3, momentum=0.9, weight_decay=1e-2)
        self.batches = BatchSampler(sampler, BATCH, drop_last=False)

    def __call__(self) -> None:
        with self.sampler.watch(self.model):
            for _ in range(2):
                for numbers in self.batches:
                    x, y = self.data.x[numbers], self.data.y[numbers]
                    self.optimizer.zero_grad()
                    F.cross_entropy(self.model(x), y).backward()
                    self.optimizer.step()


def cpu_seconds(call: Loop) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def ratios() -> Iterator[Ratio]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = Images(BATCH * BATCHES)
    orders = {
        "ghost:4, an example a unit": (CDGraB(sketch="ghost:4"), "<= 1.20"),
        "ghost:4 with reverse": (CDGraB(sketch="ghost:4", reverse=True), "<= 1.10"),
        "a batch a unit, fold:1024": (CDGraB(unit=BATCH, sketch="fold:1024"), "<= 1.03"),
    }
    baseline = Loop(data, OrderedSampler(data, "rr"))
    loops = {name: Loop(data, OrderedSampler(data, policy)) for name, (policy, _) in orders.items()}
    for loop in (baseline, *loops.values()):
        loop()
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, loop in loops.items():
            before = cpu_seconds(baseline)
            mine = cpu_seconds(loop)
            found[name].append(2 * mine / (before + cpu_seconds(baseline)))
    for name, (_, bar) in orders.items():
        yield Ratio(f"epoch, {name}", median(found[name]), bar, "cifar10-lenet, batch 64, against random order")
    torch.set_num_threads(threads)
