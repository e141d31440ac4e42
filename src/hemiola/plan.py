"""What one run is: a task, three policies, and when it ends. Everything a cluster and the loop are built from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from hemiola.contracts import Cluster, Order, Pace, Period, TaskLike, Work
from hemiola.errors import InputError
from hemiola.optimizers import Optimizer
from hemiola.wire.exchange import Exchange
from hemiola.wire.outer import Outer

LONGEST = 1e12  # epochs, updates or seconds: beyond it fractions of a step are lost in the rounding


@dataclass(frozen=True)
class Amount:
    """A stretch of a run, in exactly one of three measures; ``seconds`` are cluster time."""

    epochs: float | None = None
    updates: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.epochs, self.updates, self.seconds) if value is not None]
        if len(given) != 1:
            raise InputError(f"give exactly one of epochs, updates and seconds, got {len(given)}")
        if not 0 < given[0] <= LONGEST:
            raise InputError(f"must be above 0 and at most {LONGEST:g}, got {given[0]}")

    def share(self, epochs: float, updates: int, seconds: float) -> float:
        """How often this amount fits into what has passed."""
        if self.epochs is not None:
            return epochs / self.epochs
        if self.updates is not None:
            return updates / self.updates
        assert self.seconds is not None
        return seconds / self.seconds


@dataclass(frozen=True)
class Plan:
    """Everything one run needs.

    Attributes:
        task: Model, data, loss.
        shards: Example indices of every worker; with ``deck``, of the whole training set for each of them.
        batch: Examples per worker per local step.
        seed: Names every random stream of the run.
        order, period, pace: The three policies.
        exchange: How changes travel.
        optimizer: The server's for full communication, every worker's own otherwise.
        stop: When the run ends.
        every: How often to evaluate.
        train_examples, test_examples: Evaluate on so many training and test examples; None for all.
        deck: Whether all workers take batches from one order over the whole training set, instead of each from its
            shard.
        keep: The weights the run leaves behind: the last, or the best of its evaluations by the task's metric.
        outer: What becomes of a merged change before it is applied; None for nothing.
    """

    task: TaskLike
    shards: Sequence[np.ndarray]
    batch: int
    seed: int
    order: Order
    period: Period
    pace: Pace
    exchange: Exchange
    optimizer: Optimizer
    stop: Amount
    every: Amount
    train_examples: int | None = None
    test_examples: int | None = None
    deck: bool = False
    keep: Literal["last", "best"] = "last"
    outer: Outer | None = None

    def __post_init__(self) -> None:
        if self.batch % self.order.unit:
            raise InputError(f"batch must be a multiple of order.unit = {self.order.unit}, got {self.batch}")
        smallest = min(len(shard) for shard in self.shards)
        if self.batch > smallest:
            raise InputError(f"batch: {self.batch} is larger than the smallest worker's shard of {smallest} examples")
        self.exchange.check(self.period.local)
        if self.outer is not None:
            self.outer.check(self.period)
        if self.pace.late == "cut" and self.period.local and self.exchange.weigh is None:
            # A report of a stint that was cut stands for less than the others.
            object.__setattr__(self, "exchange", replace(self.exchange, weigh="work"))

    @property
    def lockstep(self) -> bool:
        """Whether all workers go through their units side by side; known once ``pace.begin`` was called.

        Every update waits for exactly one report of every worker, and reports are equally long, or of one deck.
        """
        alike = self.deck or self.exchange.balance == "none"
        return self.pace.lockstep and self.period.clock is None and alike


def check_policies(period: Period, pace: Pace, exchange: Exchange) -> None:
    """Refuse what does not go together; after ``pace.begin``."""
    exchange.check(period.local)
    plain = exchange.overlap == 0 and exchange.balance == "none" and exchange.weigh is None
    if period.probes and not (pace.lockstep and plain):
        raise InputError(
            "a period that probes how far workers are apart needs all of them to meet after the same steps: leave the "
            "pace as it is by default, and overlap, balance and weigh out"
        )
    if exchange.overlap != 0 and not pace.lockstep:
        raise InputError(f"overlap = {exchange.overlap!r} needs a pace whose updates wait for every worker")
    if period.clock is None:
        return
    if not pace.lockstep:
        raise InputError("where averagings follow the clock nobody is waited for; leave the pace as it is by default")
    if exchange.overlap != 0:
        raise InputError(f"overlap = {exchange.overlap!r}: averagings that follow the clock always overlap; leave it 0")
    if exchange.balance != "none" or exchange.weigh is not None:
        raise InputError("by the clock every worker gives what it has found: leave balance and weigh out")
    if exchange.momentum != "local":
        raise InputError(f"momentum = {exchange.momentum!r} needs workers that meet; by the clock, leave it 'local'")


class ClusterFactory(Protocol):
    """Makes the cluster of a run; what ``[cluster]`` in an experiment file becomes.

    Subclass it for a cluster of one's own. Named by its path it is constructed with the experiment file's folder, the
    number of workers, and its options by keyword.

    Attributes:
        real: Whether seconds are measured: then a run wants the machine to itself.
        checkpoint_every_updates, checkpoint_every_seconds: How often a checkpoint is written; whichever comes first.
    """

    real: bool = False
    checkpoint_every_updates: int | None = None
    checkpoint_every_seconds: float = 20.0

    def check(self, period: Period, pace: Pace, exchange: Exchange) -> None:
        """Refuse policies that the cluster cannot run, by an `InputError`; called before anything is computed."""
        return

    @abstractmethod
    def __call__(self, plan: Plan, work: Work) -> Cluster:
        """Make the cluster around a plan and the training loop, which gives out the work."""
