"""What ordering costs in a training loop: an epoch of cifar10-lenet, batch 64, one process.

First against random order: the loop, the model and the data are the same on both sides, only the sampler and its watch
differ. Then a tracked DataLoader against the same loop with the loader as it was. Where CIFAR-10 is not on this
machine, random images of the same size take its place: a step takes as long whatever they show. Everything runs on one
thread and is measured in its CPU seconds, which other programs on the machine disturb less than wall time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from ratio import Ratio
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset

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

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.x[number], self.y[number]


def own_collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A collate function whose batches have to be compared with their items."""
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def lenet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


class Loop:
    """A plain training loop under one order; each call is the next two epochs (so that `reverse` shows its mean).

    Args:
        sampler: Of ``data``.
        loader: Batches as they come to the loop; by default, read from memory without a DataLoader.
    """

    def __init__(self, data: Images, sampler: OrderedSampler, loader: Iterable[tuple[Tensor, Tensor]] | None = None):
        self.sampler, self.model = sampler, lenet()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=5e-3, momentum=0.9, weight_decay=1e-2)
        self.loader = Batches(data, sampler) if loader is None else loader

    def __call__(self) -> None:
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[None]:
        """Stop after every step."""
        with self.sampler.watch(self.model):
            for _ in range(2):
                for x, y in self.loader:
                    self.optimizer.zero_grad()
                    F.cross_entropy(self.model(x), y).backward()
                    self.optimizer.step()
                    yield


class Batches:
    """Batches of images that are in memory."""

    def __init__(self, data: Images, sampler: OrderedSampler) -> None:
        self.data, self.batches = data, BatchSampler(sampler, BATCH, drop_last=False)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for numbers in self.batches:
            yield self.data.x[numbers], self.data.y[numbers]


def cpu_seconds(call: Loop) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def ratio(loop: Loop, baseline: Loop) -> float:
    """Median over rounds in which the baseline runs before and after, so that a drift of the machine cancels."""
    baseline()
    loop()
    found = []
    for _ in range(ROUNDS):
        before = cpu_seconds(baseline)
        mine = cpu_seconds(loop)
        found.append(2 * mine / (before + cpu_seconds(baseline)))
    return median(found)


def ratio_of_steps(loop: Loop, baseline: Loop) -> float:
    """Of median CPU seconds of a step, batch included, where the two take turns: for differences of a percent."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        turns = loop.steps(), baseline.steps()
        for _ in range(2 * BATCHES):
            for steps, times in zip(turns, found, strict=True):
                start = time.process_time()
                next(steps)
                times.append(time.process_time() - start)
        for steps in turns:
            next(steps, None)
    return median(found[0]) / median(found[1])


def ratios() -> Iterator[Ratio]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = Images(BATCH * BATCHES)
    orders = {
        "ghost:4, an example a unit": (CDGraB(sketch="ghost:4"), "<= 1.20"),
        "ghost:4 with reverse": (CDGraB(sketch="ghost:4", reverse=True), "<= 1.10"),
        "a batch a unit, fold:1024": (CDGraB(unit=BATCH, sketch="fold:1024"), "<= 1.03"),
    }
    random = Loop(data, OrderedSampler(data, "rr"))
    for name, (policy, bar) in orders.items():
        found = ratio(Loop(data, OrderedSampler(data, policy)), random)
        yield Ratio(f"epoch, {name}", found, bar, "cifar10-lenet, batch 64, against random order")
    for name, collate in (("", None), (" and a collate_fn of one's own", own_collate)):
        loops = []
        for tracked in (True, False):
            sampler = OrderedSampler(data)
            loader = DataLoader(data, BATCH, sampler=sampler, collate_fn=collate)
            loops.append(Loop(data, sampler, sampler.track(loader) if tracked else loader))
        yield Ratio(f"step, tracked loader{name}", ratio_of_steps(*loops), "<= 1.02", "against untracked")
    torch.set_num_threads(threads)
