"""Run by torchrun from ``test_sampler_real.py``: trains on every rank and writes down what the sampler handed out.

The same model, data and scenarios are imported by the test, which works out in one process what every rank should see.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hemiola.order.sampler import OrderedSampler

EXAMPLES, CLASSES, RATE = 75, 3, 0.2

# loop, sketch, unit, batch, epochs, and after how many batches epoch 1 is left
SCENARIOS = {
    "plain-exact": ("plain", "exact", 1, 5, 4, None),
    "plain-fold": ("plain", "fold:16", 1, 5, 3, None),
    "ddp-exact": ("ddp", "exact", 3, 3, 4, None),
    "ddp-ghost": ("ddp", "ghost:4", 1, 4, 3, None),
    "plain-ghost-break": ("plain", "ghost:4", 1, 4, 4, 3),
    "ddp-fold-accumulate": ("ddp-accumulate", "fold:1024", 3, 3, 3, None),
}


def make_data() -> TensorDataset:
    random = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(EXAMPLES, 6, generator=random, dtype=torch.float64),
        torch.randint(0, CLASSES, (EXAMPLES,), generator=random),
    )


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def train(name: str) -> dict[str, list[list[int]]]:
    """One rank's run: the examples of every epoch, and every rank's orders as this rank knows them."""
    loop, sketch, unit, batch, epochs, leave = SCENARIOS[name]
    data, model = make_data(), make_model()
    trained = DistributedDataParallel(model) if loop.startswith("ddp") else model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    sampler = OrderedSampler(data, order="cd-grab", unit=unit, sketch=sketch, seed=3)
    loader = DataLoader(list(zip(range(EXAMPLES), *data.tensors, strict=True)), batch_size=batch, sampler=sampler)
    seen: list[list[int]] = []
    orders: list[list[int]] = []
    with sampler.watch(trained):
        for epoch in range(epochs):
            seen.append([])
            for step, (numbers, x, y) in enumerate(loader):
                if epoch == 1 and step == leave:
                    break
                seen[-1] += numbers.tolist()
                backward(loop, trained, x, y, optimizer, step)
            orders.append([int(u) for order in sampler._orders for u in order])
    return {"seen": seen, "orders": orders}


def backward(loop: str, model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, step: int) -> None:
    if loop == "ddp-accumulate":
        if step % 2 == 0:
            optimizer.zero_grad()
            with model.no_sync():
                F.cross_entropy(model(x), y).backward()
            return
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if loop == "plain":
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: train(name) for name in SCENARIOS}
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
