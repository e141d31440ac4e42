"""Policies of your own: an order, a period and a pace, about ten lines each.

An experiment file in the same folder names them `order = "own_policy:LargestFirst"`, or `{ name = "own_policy:Patient",
patience = 3 }` with options; from Python an object does as well. `hemiola.testing` checks them.
"""

import numpy as np

import hemiola
from hemiola.streams import stream


class LargestFirst(hemiola.Order):
    """Visit first what had the largest gradient the last time; in epoch 0 any order."""

    sketch = "fold:16"
    saved = ("norms", "epochs", "orders")

    def begin(self, sizes, seed, lockstep):
        super().begin(sizes, seed, lockstep)
        self.norms = [stream("largest-first", seed, worker).random(size) for worker, size in enumerate(sizes)]
        self.epochs, self.orders = [-1] * len(sizes), [None] * len(sizes)

    def sequence(self, worker, epoch):
        if self.epochs[worker] < epoch:  # reports of the epoch before may still come: an order stays as it is
            self.epochs[worker], self.orders[worker] = epoch, np.argsort(-self.norms[worker])
        return self.orders[worker]

    def observe(self, visits):
        for visit in visits:
            self.norms[visit.worker][visit.units] = np.nan_to_num(visit.sketches.square().sum(1).numpy())


class Patient(hemiola.Period):
    """One local step more whenever the loss has not fallen for some averagings."""

    saved = ("p", "best", "waited")

    def __init__(self, *, patience: int = 5, most: int = 16):
        self.patience, self.most = patience, most
        self.p, self.best, self.waited = 1, float("inf"), 0

    def length(self, lr, progress):
        return self.p

    def averaged(self, seen):
        self.waited = 0 if seen.loss < self.best else self.waited + 1
        self.best = min(self.best, seen.loss)
        if self.waited >= self.patience:
            self.p, self.waited = min(self.p + 1, self.most), 0


class Growing(hemiola.Pace):
    """K-async whose K grows evenly from 1 to all workers over the run."""

    saved = ("progress",)
    progress = 0.0

    def k(self):
        return 1 + round(self.progress * (self.workers - 1))

    def updated(self, seen):
        self.progress = seen.progress


def main() -> None:
    common = {"task": "digits-logistic", "workers": 4, "batch": 5, "stop": {"epochs": 3}, "optimizer": {"lr": 0.1}}
    straggling = {"name": "simulated", "delay": "exponential(1.0)"}
    for policies in ({}, {"order": LargestFirst()}, {"period": Patient(patience=3)}, {"pace": Growing()}):
        (result,) = hemiola.train(**common, cluster=straggling, **policies)
        names = ", ".join(type(policy).__name__ for policy in policies.values()) or "the ordinary way"
        row = result.row
        print(f"{names:16}  loss {row['train_loss']:.4f}  {row['seconds']:5.0f} s  {row['averagings']} averagings")


if __name__ == "__main__":
    main()
