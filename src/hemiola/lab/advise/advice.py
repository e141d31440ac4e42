"""What the advisor says: plain records, and the same in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from hemiola.lab.advise.candidates import ORDINARY, Table, own_loop
from hemiola.lab.advise.laps import LapTrace
from hemiola.lab.report.paired import FEWEST, Interval, interval

CLEAR = 1.1  # an advantage below this is not worth another way of training
NEW_SEEDS = [100, 101, 102, 103, 104]


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
        reached: How many of them reached the target.
        until: Cluster seconds after which a seed that had not reached it was given up; 0 where all reached it.
        loss: Where it stood when the race ended.
        rates: Seconds to the target at other learning rates that were tried, by rate; infinite where it is not reached.
    """

    name: str
    table: dict[str, Any]
    lr: float
    seconds: float
    epochs: float
    megabytes: float
    speedup: Interval | None
    seeds: int
    reached: int
    until: float
    loss: float
    rates: dict[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Advice:
    """What to use.

    Attributes:
        given: The question, as keys of an experiment file.
        target: The training loss that was raced to.
        best: The candidate to use: the ordinary way where nothing is clearly better.
        ordinary: The ordinary way.
        candidates: All that got as far as the race, the fastest first.
        sure: Share of the seeds in which ``best`` was the fastest of those that ran to the end.
        worst: The smallest of its speed-ups over the seeds: what it costs if luck is against it.
        assumed: What was not given and had to be assumed, in words.
        minutes: How long the race took.
    """

    given: dict[str, Any]
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
        return found + (self._stay() if self.stay else self._change())

    def _stay(self) -> list[str]:
        rivals = [each for each in self.candidates if each.name != ORDINARY and math.isfinite(each.seconds)]
        said = (
            f"Stay with ordinary synchronous training (DistributedDataParallel), lr {self.ordinary.lr:g}: it "
            + (
                f"reaches a training loss of {self.target:.4g} in {self.ordinary.seconds:.4g} cluster seconds"
                if math.isfinite(self.ordinary.seconds)
                else f"misses a training loss of {self.target:.4g} in some seeds, but nothing else is surely better"
            )
            + (f"; the next best, {rivals[0].name!r}, needs {rivals[0].seconds:.4g}." if rivals else ".")
        )
        if rivals and rivals[0].speedup is not None:
            gain = rivals[0].speedup
            said += f" That is {_times(gain)} as fast, which is not surely worth a change (at least {CLEAR:g})."
        return [said]

    def _change(self) -> list[str]:
        best, ordinary, speedup = self.best, self.ordinary, self.best.speedup
        assert speedup is not None
        arrived = math.isfinite(ordinary.seconds)
        found = [
            f"Use {best.name!r} with lr {best.lr:g}: a training loss of {self.target:.4g} after {best.seconds:.4g} "
            f"cluster seconds"
            + (f" instead of {ordinary.seconds:.4g}" if arrived else "")
            + f", {'' if arrived else 'at least '}{_times(speedup)} sooner; {best.epochs:.3g} epochs"
            + (f" instead of {ordinary.epochs:.3g}" if arrived else "")
            + f", {best.megabytes:.3g} MB sent by a worker"
            + (f" instead of {ordinary.megabytes:.3g}." if arrived else ".")
        ]
        if not arrived:
            found.append(
                f"Ordinary training (lr {ordinary.lr:g}) did not arrive within {ordinary.until:.4g} cluster seconds in "
                f"{ordinary.seeds - ordinary.reached} of {ordinary.seeds} seeds; that time counts for it there."
            )
        found.append(
            f"How sure: it was the fastest in {100 * self.sure:.0f} % of {best.seeds} seeds. If luck is against it: in "
            f"the worst of them it was {self.worst:.3g} times as fast as ordinary training."
        )
        return found + self._wrong_rate()

    def _wrong_rate(self) -> list[str]:
        near = [rate for rate in (self.best.lr / 2, 2 * self.best.lr) if rate in self.best.rates]
        said = [
            f"{self.best.rates[rate]:.4g} at lr {rate:g}"
            if math.isfinite(self.best.rates[rate])
            else f"too long at lr {rate:g}"
            for rate in near
        ]
        return [f"With another rate it needs, in seconds: {', '.join(said)}."] if said else []

    def code(self) -> list[str]:
        """The lines for one's own loop."""
        return own_loop(self.best.table, self.best.lr)

    def experiment(self) -> dict[str, Any]:
        """An experiment file's content that checks the advice: the best two and the ordinary way, five new seeds."""
        chosen = {each.name: each for each in [self.ordinary, self.best, *self.candidates[:2]]}
        length = self.ordinary.seconds if math.isfinite(self.ordinary.seconds) else self.ordinary.until
        return {
            "title": f"Does the advice hold? Training loss {self.target:.4g}",
            **self.given,
            "stop": {"seconds": float(f"{1.3 * length:.3g}")},
            "evaluate": {
                **self.given.get("evaluate", {}),
                "every_seconds": float(f"{min(self.best.seconds / 10, length / 50):.2g}"),
            },
            "run": [{"name": each.name, "optimizer": {"lr": each.lr}, **each.table} for each in chosen.values()],
            "seeds": NEW_SEEDS,
        }

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "stay": self.stay, "lines": self.lines(), "code": self.code()}


Laps = Mapping[int, LapTrace]  # by seed


def verdict(
    given: Mapping[str, Any],
    target: float,
    laps: Mapping[str, tuple[Table, Laps]],
    finalists: list[str],
    others: Mapping[tuple[str, float], float],
    assumed: list[str],
    minutes: float,
) -> Advice:
    """From what the race saw to what to use.

    Args:
        given: The question, as keys of an experiment file.
        target: What was raced to.
        laps: Of every candidate at its best rate: its table, and its traces.
        finalists: Those that ran with the same seeds, the ordinary way among them.
        others: Seconds to the target of every candidate at every rate that was tried.
        assumed: What had to be assumed.
        minutes: How long it took.
    """
    ordinary_laps = laps[ORDINARY][1]
    every = []
    for name, (table, traces) in laps.items():
        rates = {rate: seconds for (who, rate), seconds in others.items() if who == name}
        every.append(_candidate(name, table, traces, ordinary_laps, target, rates))
    every.sort(key=lambda each: each.seconds)
    ordinary = next(each for each in every if each.name == ORDINARY)
    best = next((each for each in every if each.name in finalists), ordinary)
    if best.speedup is None or not best.speedup.low > 1 or best.speedup.mean < CLEAR:
        best = ordinary
    times = {name: {seed: _censored(trace, target) for seed, trace in laps[name][1].items()} for name in finalists}
    seeds = sorted(times[best.name])
    won = [all(times[best.name][seed] <= times[name][seed] for name in finalists) for seed in seeds]
    return Advice(
        given=dict(given),
        target=target,
        best=best,
        ordinary=ordinary,
        candidates=every,
        sure=fmean(map(float, won)),
        worst=min(times[ORDINARY][seed] / times[best.name][seed] for seed in seeds),
        assumed=assumed,
        minutes=minutes,
    )


def _candidate(
    name: str, table: Table, traces: Laps, ordinary: Laps, target: float, rates: dict[float, float]
) -> Candidate:
    arrivals = [found for trace in traces.values() if (found := trace.arrival(target)) is not None]
    reached = len(arrivals) == len(traces)
    logs = [
        math.log(_censored(ordinary[seed], target) / _censored(trace, target))
        for seed, trace in traces.items()
        if seed in ordinary
    ]
    lr = next(iter(traces.values())).lap.lr
    return Candidate(
        name=name,
        table=table,
        lr=lr,
        seconds=fmean(each.seconds for each in arrivals) if reached else math.inf,
        epochs=fmean(each.epochs for each in arrivals) if reached else math.inf,
        megabytes=fmean(each.megabytes for each in arrivals) if reached else math.inf,
        speedup=_as_ratio(interval(logs)) if reached and len(logs) == len(traces) >= FEWEST else None,
        seeds=len(traces),
        reached=len(arrivals),
        until=0.0 if reached else max(trace.points[-1].seconds for trace in traces.values()),
        loss=fmean(trace.end for trace in traces.values()),
        rates={rate: seconds for rate, seconds in sorted(rates.items()) if rate != lr},
    )


def _censored(trace: LapTrace, target: float) -> float:
    """Seconds to the target; where it is not reached, the seconds that were not enough."""
    found = trace.arrival(target)
    return max((trace.points[-1] if found is None else found).seconds, 1e-12)


def _as_ratio(logarithms: Interval) -> Interval:
    low, mean, high = (math.exp(each) for each in (logarithms.low, logarithms.mean, logarithms.high))
    return Interval(mean, low, high, tuple(math.exp(each) for each in logarithms.differences))


def _times(ratio: Interval) -> str:
    return f"{ratio.mean:.3g} times ({ratio.low:.3g} to {ratio.high:.3g})"
