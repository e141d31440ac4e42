"""What the advisor says: plain records, and the same in words."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from hemiola.lab.advise.candidates import ORDINARY, own_loop
from hemiola.lab.report.paired import Interval

CLEAR = 1.1  # an advantage below this is not worth another way of training


@dataclass(frozen=True)
class Candidate:
    """How one candidate did in the race, at its best learning rate.

    Attributes:
        name: See ``candidates.py``.
        table: Its ``[[run]]`` table.
        lr: The learning rate it did best with.
        seconds: Cluster seconds to the target, mean over the seeds; infinite where some seed did not reach it.
        epochs: Passes over the data until then.
        megabytes: Sent by an average worker until then.
        speedup: Ordinary seconds over these, paired by seed: mean and interval; None where it cannot be told.
        seeds: How many it ran with.
        loss: Where it stood when the race ended.
    """

    name: str
    table: dict[str, Any]
    lr: float
    seconds: float
    epochs: float
    megabytes: float
    speedup: Interval | None
    seeds: int
    loss: float


@dataclass(frozen=True)
class Advice:
    """What to use.

    Attributes:
        task, workers, delay, link: The question.
        target: The training loss that was raced to.
        best: The candidate to use: the ordinary way where nothing is clearly better.
        ordinary: The ordinary way.
        candidates: All, the fastest first.
        sure: Share of the seeds in which ``best`` was the fastest of those that ran to the end.
        worst: The smallest of its speed-ups over the seeds: what it costs if luck is against it.
        assumed: What was not given and had to be assumed, in words.
        minutes: How long the race took.
    """

    task: str
    workers: int
    delay: str
    link: str
    target: float
    best: Candidate
    ordinary: Candidate
    candidates: list[Candidate]
    sure: float
    worst: float
    assumed: list[str] = field(default_factory=list)
    minutes: float = 0.0

    @property
    def stay(self) -> bool:
        """Whether to stay with ordinary DistributedDataParallel."""
        return self.best.name == ORDINARY

    def lines(self) -> list[str]:
        """The advice in sentences."""
        found = [f"Assumed: {each}." for each in self.assumed]
        if self.stay:
            rivals = [each for each in self.candidates if each.name != ORDINARY and math.isfinite(each.seconds)]
            found.append(
                f"Stay with ordinary synchronous training (DistributedDataParallel), lr {self.ordinary.lr:g}: it "
                f"reaches a training loss of {self.target:.4g} in {self.ordinary.seconds:.4g} cluster seconds"
                + (f"; the next best, {rivals[0].name!r}, needs {rivals[0].seconds:.4g}." if rivals else ".")
            )
            return found
        best, speedup = self.best, self.best.speedup
        assert speedup is not None
        found.append(
            f"Use {best.name!r} with lr {best.lr:g}: a training loss of {self.target:.4g} after {best.seconds:.4g} "
            f"cluster seconds instead of {self.ordinary.seconds:.4g}, {speedup.mean:.3g} times sooner "
            f"({speedup.low:.3g} to {speedup.high:.3g}), with {best.megabytes:.3g} MB a worker instead of "
            f"{self.ordinary.megabytes:.3g}."
        )
        found.append(
            f"It was the fastest in {100 * self.sure:.0f} % of {best.seeds} seeds; in the worst of them it was "
            f"{self.worst:.3g} times as fast as ordinary training."
        )
        return found

    def code(self) -> list[str]:
        """The lines for one's own loop."""
        return own_loop(self.best.table, self.best.lr)

    def experiment(self) -> dict[str, Any]:
        """An experiment file's content that checks the advice: the best two and the ordinary way, five new seeds."""
        chosen = {each.name: each for each in [self.ordinary, self.best, *self.candidates[:2]]}
        return {
            "run": [{"name": each.name, "optimizer": {"lr": each.lr}, **each.table} for each in chosen.values()],
            "seeds": [100, 101, 102, 103, 104],
        }

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "stay": self.stay, "lines": self.lines(), "code": self.code()}
