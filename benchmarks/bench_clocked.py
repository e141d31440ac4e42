"""Nobody waits, for real: four gloo ranks on a link of 100 Mbit/s each, straggling, in wall seconds to the same loss.

``python benchmarks/run.py clocked`` (what ``bench_link.py`` needs). Every step takes at least 30 ms and an exponential
draw with a mean of 30 ms more; ranks sleep for what computing leaves of it (those of DDP for all of it, in the forward
pass, which adds the few milliseconds of computing to each of their steps). The task is scikit-learn's digits, an MLP
with two hidden layers of WIDTH (from the environment; 768 makes 648,202 parameters, whose all-reduce in float32 takes
as long as five steps; 512 makes 301,066, two and a half steps), batches of 8, plain SGD. Compared:
DistributedDataParallel with a DistributedSampler, and ``Averager(period=Clocked(), wire="int8")`` with
``OrderedSampler(deal="deck", order="rr")``, each at the rate of the same grid at which it gets there first. The
training loss is measured after every epoch, and its time counts.

And throughput: what the clocked ranks train on in 15 seconds, alike and with one of them five times as slow.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench_link import measure
from ratio import Ratio

RANKS, BATCH, TARGET, EPOCHS = 4, 8, 0.05, 30
RATES = (0.4, 0.8)
WIDTH = int(os.environ.get("WIDTH", "768"))
SHORTEST, MEAN_MORE = 0.03, 0.03


def ratios() -> Iterator[Ratio]:
    found = measure(__file__, RANKS)
    ddp, clocked = found["ddp"], found["clocked"]
    note = f"wall seconds to a training loss of {TARGET}: {ddp['seconds']:.1f} and {clocked['seconds']:.1f}"
    yield Ratio("sooner than DDP", ddp["seconds"] / clocked["seconds"], ">= 3", note)
    epochs = f"{ddp['epochs']:.0f} epochs at rate {ddp['rate']} and {clocked['epochs']:.0f} at {clocked['rate']}"
    yield Ratio("epochs over DDP's", clocked["epochs"] / ddp["epochs"], "", epochs)
    alike, slow = found["throughput"]["alike"], found["throughput"]["slow"]
    yield Ratio("throughput with a rank 5x slower", slow / alike, ">= 0.65", f"{slow:.0f} of {alike:.0f} examples/s")


def rank_main(out: Path) -> None:  # noqa: C901 - the branches of the functions inside it are counted as its own
    """Every run, one after the other; rank 0 writes what it measured."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from hemiola.loops.averager import Averager
    from hemiola.loops.sampler import OrderedSampler
    from hemiola.period import Clocked

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    inputs, targets = (torch.from_numpy(part[:1500].copy()) for part in load_digits(return_X_y=True))
    inputs = inputs.float() / 16
    data = TensorDataset(inputs, targets)

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(model(inputs), targets).item()

    def visit(
        model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, delays: np.random.Generator, slow: float
    ) -> Iterator[int]:
        """One pass; gives the number of examples of each batch when its step is over."""
        for x, y in loader:
            ends = time.perf_counter() + slow * (SHORTEST + delays.exponential(MEAN_MORE))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            time.sleep(max(0.0, ends - time.perf_counter()))  # before the gradients of all ranks are waited for
            optimizer.step()
            yield len(x)

    def to_the_target(epoch: Callable[[], object], value: Callable[[], float]) -> dict[str, float]:
        dist.barrier()
        began = time.perf_counter()
        for number in range(1, EPOCHS + 1):
            epoch()
            if value() <= TARGET:
                return {"epochs": number, "seconds": time.perf_counter() - began}
        return {"epochs": EPOCHS, "seconds": float("inf")}

    def ddp(rate: float) -> dict[str, float]:
        model = DistributedDataParallel(fresh())
        sampler = DistributedSampler(data, seed=0)
        loader = DataLoader(data, BATCH, sampler=sampler)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        delays = np.random.default_rng([1, rank])
        # The delay belongs to the computation, so it comes before the backward pass, whose hooks exchange gradients.
        model.module.register_forward_hook(
            lambda *_: time.sleep(SHORTEST + delays.exponential(MEAN_MORE)) if model.training else None
        )

        def epoch() -> None:
            sampler.set_epoch(sampler.epoch + 1)
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

        def value() -> float:
            model.eval()
            measured = loss(model.module)
            model.train()
            return measured

        return to_the_target(epoch, value)

    def clocked(rate: float) -> dict[str, float]:
        model, delays = fresh(), np.random.default_rng([1, rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        loader = DataLoader(data, BATCH, sampler=OrderedSampler(data, "rr", deal="deck"))
        averager = Averager(model, optimizer, period=Clocked(mix=0.5), wire="int8", timeout=600)

        def value() -> float:
            with averager.averaged():
                return loss(model)

        with averager:
            return to_the_target(lambda: list(visit(model, optimizer, loader, delays, 1.0)), value)

    def throughput(slow: float) -> float:
        """Examples of all ranks a second."""
        model, delays = fresh(), np.random.default_rng([2, rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, BATCH, sampler=OrderedSampler(data, "rr", deal="deck"))
        trained = torch.zeros(1)
        with Averager(model, optimizer, period=Clocked(mix=0.5), wire="int8", timeout=600):
            dist.barrier()
            ends = time.perf_counter() + 15.0
            while time.perf_counter() < ends:
                for count in visit(model, optimizer, loader, delays, slow if rank == RANKS - 1 else 1.0):
                    trained += count
                    if time.perf_counter() >= ends:
                        break
        dist.all_reduce(trained)
        return trained.item() / 15.0

    best = {
        name: min(({"rate": rate, **run(rate)} for rate in RATES), key=lambda one: one["seconds"])
        for name, run in (("clocked", clocked), ("ddp", ddp))
    }
    best["throughput"] = {"alike": throughput(1.0), "slow": throughput(5.0)}
    if rank == 0:
        out.write_text(json.dumps(best))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=Path)
    rank_main(parser.parse_args().rank)
