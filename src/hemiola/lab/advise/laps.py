"""A lap: one candidate trains the task itself, under the virtual clock, with real gradients, until it has arrived."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from hemiola.lab.experiment import Experiment
from hemiola.lab.worker import one_thread
from hemiola.training import Training

SURE = 3  # evaluations in a row below the target; what comes after tells nothing about when it was reached
TESTED = 64  # test examples of an evaluation; a race is about the training loss

Clock = Literal["wall", "processor"]


@dataclass(frozen=True)
class Lap:
    """One training, asked for.

    Attributes:
        name, table, lr, seed: Who runs, at which rate.
        given: The rest of the experiment.
        unit, length: Where it ends: ``seconds`` of the cluster or ``epochs``, and how many.
        every: So many of these units between two evaluations.
        target: Where it may stop.
        allowed: Seconds of ``clock`` after which it is given up.
        clock: Of the wall or of the processor.
        data, base: Where data and relative paths are.
    """

    name: str
    table: Mapping[str, Any]
    lr: float
    seed: int
    given: Mapping[str, Any]
    unit: Literal["seconds", "epochs"]
    length: float
    every: float
    target: float
    allowed: float
    clock: Clock
    data: Path | None
    base: Path


class LapPoint(NamedTuple):
    """A moment of a lap: cluster seconds, epochs, megabytes that an average worker had sent."""

    seconds: float
    epochs: float
    megabytes: float


@dataclass(frozen=True)
class LapTrace:
    """What a lap saw: cluster seconds, epochs, megabytes and training loss at every evaluation.

    Attributes:
        lap: What was asked.
        points: Of each evaluation.
        losses: Of each evaluation.
        given_up: Whether it took longer than it was allowed to.
        processor: Seconds of computing.
        training: The part of them that grows with the lap's length.
    """

    lap: Lap
    points: list[LapPoint]
    losses: list[float]
    given_up: bool = False
    processor: float = 0.0
    training: float = 0.0

    @property
    def end(self) -> float:
        """Mean loss along the last tenth; infinite where it diverged."""
        last = self._last_tenth()
        return sum(last) / len(last) if last and all(map(math.isfinite, last)) else math.inf

    @property
    def settled(self) -> float:
        """Highest loss along the last tenth."""
        return max(self._last_tenth(), default=math.inf)

    def _last_tenth(self) -> list[float]:
        return self.losses[-max(1, len(self.losses) // 10) :]

    def arrival(self, target: float) -> LapPoint | None:
        """Where the loss comes to stay below the target, on a straight line between two evaluations."""
        first = len(self.losses)
        while first and self.losses[first - 1] <= target:
            first -= 1
        if first == len(self.losses):
            return None
        after = self.points[first]
        if first == 0 or not math.isfinite(self.losses[first - 1]):
            return after
        above, below = self.losses[first - 1] - target, target - self.losses[first]
        share = above / (above + below)
        return LapPoint(*(a + share * (b - a) for a, b in zip(self.points[first - 1], after, strict=True)))

    def seconds_to(self, target: float) -> float:
        """Cluster seconds to the target; infinite where it is not reached."""
        found = self.arrival(target)
        return math.inf if found is None else found.seconds


def run_lap(lap: Lap) -> LapTrace:
    """Train one candidate."""
    tick = time.monotonic if lap.clock == "wall" else time.process_time
    began, computing = tick(), time.process_time()
    given = {
        **lap.given,
        "stop": {lap.unit: lap.length},
        "evaluate": {"test_examples": TESTED, **lap.given.get("evaluate", {}), f"every_{lap.unit}": lap.every},
        "seeds": [lap.seed],
        **lap.table,
        "optimizer": {**lap.given.get("optimizer", {}), "lr": lap.lr},
    }
    (cell,) = Experiment(given, lap.base).cells

    def goes_on(training: Training) -> bool:
        return not _through(training, lap.target) and tick() - began < lap.allowed

    with one_thread(), torch.random.fork_rng(devices=[]):
        plan, make_cluster = cell.plan(lap.data)
        training = Training(plan, make_cluster)
        ready = time.process_time()
        try:
            training.run(goes_on)
        finally:
            training.close()
    records = training.records
    losses = [each["train_loss"] if each["train_loss"] is not None else math.inf for each in records]
    return LapTrace(
        lap,
        [LapPoint(each["seconds"], each["epochs"], each["bytes_per_worker"] / 1e6) for each in records],
        [loss if math.isfinite(loss) else math.inf for loss in losses],
        given_up=tick() - began >= lap.allowed and not _through(training, lap.target),
        processor=time.process_time() - computing,
        training=time.process_time() - ready,
    )


def _through(training: Training, target: float) -> bool:
    last = training.records[-SURE:]
    return len(last) == SURE and all((each["train_loss"] or math.inf) <= target for each in last)
