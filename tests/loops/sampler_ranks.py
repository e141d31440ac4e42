"""Run as a rank by ``test_sampler_real.py``: trains on every rank and writes down what the sampler handed out.

The same model, data and scenarios are imported by the test, which works out in one process what every rank should see.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hemiola.loops.averager import Averager
from hemiola.loops.sampler import OrderedSampler
from hemiola.period import Clocked

EXAMPLES, CLASSES, RATE = 75, 3, 0.2

# loop, sketch, unit, batch, epochs, and after how many batches epoch 1 is left
SCENARIOS = {
    "plain-exact": ("plain", "exact", 1, 5, 4, None),
    "plain-fold": ("plain", "fold:16", 1, 5, 3, None),
    "ddp-exact": ("ddp", "exact", 3, 3, 4, None),
    "ddp-ghost": ("ddp", "ghost:4", 1, 4, 3, None),
    "plain-ghost-break": ("plain", "ghost:4", 1, 4, 4, 3),
    "ddp-fold-accumulate": ("ddp-accumulate", "fold:1024", 3, 3, 3, None),
    "tracked-skip-exact": ("tracked-skip", "exact", 1, 4, 4, None),
    "tracked-skip-fold": ("tracked-skip", "fold:16", 3, 5, 4, None),
    "losses": ("losses", None, 1, 5, 3, None),  # the order "scored"
}

# After so many batches of epoch 1 everything is saved, thrown away, built anew and goes on.
RESUMED = {"plain-exact": 2, "plain-fold": 3, "ddp-exact": 1, "ddp-ghost": 3, "losses": 2}


def make_data() -> TensorDataset:
    random = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(EXAMPLES, 6, generator=random, dtype=torch.float64),
        torch.randint(0, CLASSES, (EXAMPLES,), generator=random),
    )


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def train(name: str, resume_after: int | None = None) -> dict[str, list[list[int]]]:
    """One rank's run: the examples of every epoch, and every rank's orders as this rank knows them."""
    _, _, _, _, epochs, leave = SCENARIOS[name]
    seen: list[list[int]] = [[] for _ in range(epochs)]
    orders: list[list[int]] = []
    saved = io.BytesIO()
    first = Parts(name)
    with first.sampler.watch(first.trained):
        for epoch in range(epochs):
            for step in first.epoch(seen[epoch]):
                if epoch == 1 and step + 1 == resume_after:
                    torch.save((first.model.state_dict(), first.sampler.state_dict()), saved)
                if epoch == 1 and step + 1 in (leave, resume_after):
                    break
            if saved.tell():
                break
            orders.append([int(u) for order in first.sampler._orders for u in order])
    if saved.tell():
        saved.seek(0)
        second = Parts(name)
        weights, place = torch.load(saved, weights_only=True)
        second.model.load_state_dict(weights)
        second.sampler.load_state_dict(place)
        with second.sampler.watch(second.trained):
            for epoch in range(1, epochs):
                for _ in second.epoch(seen[epoch]):
                    pass
                orders.append([int(u) for order in second.sampler._orders for u in order])
    return {"seen": seen, "orders": orders}


class Parts:
    """A model, an optimizer and a loader as a user's script makes them."""

    def __init__(self, name: str) -> None:
        self.loop, sketch, unit, batch, _, _ = SCENARIOS[name]
        data, self.model = make_data(), make_model()
        self.trained = DistributedDataParallel(self.model) if self.loop.startswith("ddp") else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        order = "scored" if self.loop == "losses" else "cd-grab"
        self.sampler = OrderedSampler(data, order=order, unit=unit, sketch=sketch, seed=3)
        numbered = list(zip(range(EXAMPLES), *data.tensors, strict=True))
        self.loader = DataLoader(numbered, batch_size=batch, sampler=self.sampler)
        if self.loop == "tracked-skip":
            self.sampler.track(self.loader)

    def epoch(self, seen: list[int]) -> Iterator[int]:
        """Train on a pass over the loader; gives the number of each step when it is done."""
        for step, (numbers, x, y) in enumerate(self.loader):
            if self.loop == "losses":
                self.optimizer.zero_grad()
                losses = F.cross_entropy(self.model(x), y, reduction="none")
                self.sampler.tell_losses(losses)
                losses.mean().backward()
                self.optimizer.step()
            else:
                backward(self.loop, self.trained, x, y, self.optimizer, step)
            seen += numbers.tolist()
            yield step


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
    loss = F.cross_entropy(model(x), y)
    if loop != "tracked-skip" or step != 1 + dist.get_rank():  # every rank leaves out another batch
        loss.backward()
    if loop in ("plain", "tracked-skip"):
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    optimizer.step()


def deck() -> dict[str, list]:
    """One deck, clocked averaging, a slow rank: stopped in epoch 1, resumed, and what one rank alone would go on with.

    The loader's workers read ahead; what they hold when the state is saved comes again.
    """
    data, slow = make_data(), dist.get_rank() == dist.get_world_size() - 1
    numbered = list(zip(range(EXAMPLES), *data.tensors, strict=True))
    seen: dict[str, list] = {"first": [], "before": [], "after": [], "last": [], "orders": []}

    def parts(model: nn.Module):
        sampler = OrderedSampler(data, order="cd-grab", sketch="fold:16", seed=3, deal="deck")
        loader = DataLoader(numbered, batch_size=3, sampler=sampler, num_workers=1, multiprocessing_context="fork")
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        return sampler, sampler.track(loader), optimizer, Averager(model, optimizer, period=Clocked(), wire="int8")

    def visit(loader: DataLoader, model: nn.Module, optimizer: torch.optim.Optimizer, into: str) -> Iterator[int]:
        for step, (numbers, x, y) in enumerate(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            seen[into] += numbers.tolist()
            time.sleep(0.05 if slow else 0.001)
            yield step

    model = make_model()
    sampler, loader, optimizer, averager = parts(model)
    with averager, sampler.watch(model):
        list(visit(loader, model, optimizer, "first"))
        for step in visit(loader, model, optimizer, "before"):
            if step == 0:
                with averager.averaged():
                    state = sampler.state_dict()
                break
    seen["orders"].append(sampler._orders[0].tolist())
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, state)
    model = make_model()
    sampler, loader, optimizer, averager = parts(model)
    sampler.load_state_dict(everyones[0])  # any rank's will do
    with averager, sampler.watch(model):
        list(visit(loader, model, optimizer, "after"))
        list(visit(loader, model, optimizer, "last"))
    seen["orders"].append(sampler._orders[0].tolist())
    alone = OrderedSampler(data, "cd-grab", None, 1, 0, seed=3, sketch="fold:16", deal="deck")
    alone.load_state_dict(state)
    return seen | {"alone": list(alone)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: train(name) for name in SCENARIOS}
    found |= {f"{name}-resumed": train(name, after) for name, after in RESUMED.items()}
    found["deck"] = deck()
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
