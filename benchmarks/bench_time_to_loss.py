"""How soon ghosts reach the training loss that random reshuffling ends with: cifar10-lenet, one process, CPU seconds.

The two loops take turns epoch by epoch, from the same weights, on one thread: batch 16, learning rate .001, momentum
.9, weight decay .01 (the settings of GraB, arXiv 2205.10733, for LeNet). The training loss is measured after each epoch
and is not part of the time. The first 10,000 images; EPOCHS and SEEDS in the environment change how long it takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from bench_sampler import Images, lenet
from ratio import Ratio, Skip
from torch.utils.data import BatchSampler

from hemiola.loops.sampler import OrderedSampler

BATCH = 16


class Run:
    """A training run: CPU seconds and training loss after every epoch."""

    def __init__(self, data: Images, order: str, seed: int) -> None:
        self.data, self.sampler, self.model = data, OrderedSampler(data, order, seed=seed), lenet()
        torch.manual_seed(seed)
        for module in self.model:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-2)
        self.seconds, self.losses = [0.0], [self.loss()]
        self.sampler.attach(self.model)

    def epoch(self) -> None:
        start = time.process_time()
        for numbers in BatchSampler(self.sampler, BATCH, drop_last=False):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.data.x[numbers]), self.data.y[numbers]).backward()
            self.optimizer.step()
        self.seconds.append(self.seconds[-1] + time.process_time() - start)
        self.losses.append(self.loss())

    @torch.no_grad()
    def loss(self) -> float:
        parts = torch.arange(len(self.data)).split(1000)
        found = [float(F.cross_entropy(self.model(self.data.x[part]), self.data.y[part])) for part in parts]
        return sum(found) / len(found)

    def time_to(self, loss: float) -> float:
        """CPU seconds until the loss is this low, between epochs by a straight line."""
        for before, after in zip(range(len(self.losses)), range(1, len(self.losses)), strict=False):
            if self.losses[after] <= loss:
                share = (self.losses[before] - loss) / (self.losses[before] - self.losses[after])
                return self.seconds[before] + share * (self.seconds[after] - self.seconds[before])
        return float("inf")


def ratios() -> Iterator[Ratio]:
    if not Path(os.environ.get("HEMIOLA_DATA", "."), "cifar-10-batches-bin").exists():
        raise Skip("CIFAR-10 is not in HEMIOLA_DATA")
    torch.set_num_threads(1)
    data = Images(10_000)
    epochs, seeds = int(os.environ.get("EPOCHS", "20")), int(os.environ.get("SEEDS", "3"))
    found = []
    for seed in range(seeds):
        random, ghosts = Run(data, "rr", seed), Run(data, "cd-grab", seed)
        for _ in range(epochs):
            random.epoch()
            ghosts.epoch()
        found.append(ghosts.time_to(random.losses[-1]) / random.seconds[-1])
        note = f"to a loss of {random.losses[-1]:.4f} (ghosts end at {ghosts.losses[-1]:.4f}), {epochs} epochs"
        yield Ratio(f"seed {seed}", found[-1], "", note)
    yield Ratio("median", median(found), "<= 0.75", "CPU seconds of ghosts over those of random reshuffling")
