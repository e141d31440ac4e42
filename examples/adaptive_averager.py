"""Adaptive averaging in a PyTorch loop of your own: the loop does not change.

In one process:            python examples/adaptive_averager.py
On two (or more) workers:  torchrun --nproc-per-node 2 examples/adaptive_averager.py

Every worker trains on its own share of scikit-learn's digits. The learning rate drops twice; after each drop the
workers drift apart more slowly, the averager measures that, and the period grows. (One process alone has nothing to
measure, so there the period stays as it is.)
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import hemiola


def main() -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    digits = load_digits()
    inputs, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, test = slice(0, 1500), slice(1500, None)
    shard = torch.arange(1500)[rank::world]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    steps = 800
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps // 2, 3 * steps // 4])
    averager = hemiola.Averager(model, optimizer, period=hemiola.Adaptive(start=4), wire="int8", steps=steps)

    batches = torch.Generator().manual_seed(rank)
    with averager:
        for step in range(steps):
            chosen = shard[torch.randint(len(shard), (16,), generator=batches)]
            loss = nn.functional.cross_entropy(model(inputs[train][chosen]), targets[train][chosen])
            optimizer.zero_grad()
            loss.backward()
            averager.observe(loss.item())  # optional: lets the first, short stints notice if longer ones do harm
            optimizer.step()
            schedule.step()
            if step == steps // 2:
                with averager.averaged():  # consistent weights in the middle of a stint
                    halfway = accuracy(model, inputs[test], targets[test])

    if rank == 0:
        history = averager.history
        print(f"{world} worker(s), {steps} steps, {len(history)} averagings, {averager.bytes_sent / 1e6:.2f} MB each")
        for record in history[:: max(1, len(history) // 8)]:
            print(f"  step {record.step:4d}  lr {record.lr:.4f}  period {record.period:3d}  spread {record.spread:.2e}")
        print(f"test accuracy: {halfway:.3f} halfway, {accuracy(model, inputs[test], targets[test]):.3f} at the end")
    if dist.is_initialized():
        dist.destroy_process_group()


def accuracy(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(inputs).argmax(1) == targets).float().mean().item()


if __name__ == "__main__":
    main()
