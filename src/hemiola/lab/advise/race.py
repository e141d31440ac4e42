"""The race: candidates train the task itself, under the virtual clock, with real gradients.

1. **The course.** The ordinary way at several learning rates, for a few epochs. Its best end is the target, unless one
   is given, and the cluster seconds it took are the course's length.
2. **Heats.** Every candidate at every rate over an eighth of the course; the two best rates go on, the one that ends at
   the edge of the grid is tried further out.
3. **The race.** Each candidate at its rates until it is below the target for good, or as long as ordinary training
   needed.
4. **The final.** The fastest few and the ordinary way with more seeds: how sure is the order at the finish?

Seeds share shards, delays and noise, so candidates are compared seed by seed. A step that diverges is out. What is
measured is the advice: there is no model of convergence in between that could be wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hemiola.errors import InputError
from hemiola.lab.advise.advice import CLEAR, Advice, Candidate
from hemiola.lab.advise.candidates import ORDINARY, candidates
from hemiola.lab.experiment import Experiment
from hemiola.lab.report.paired import Interval, interval
from hemiola.training import Training

RATES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the task's own
HEAT = 1 / 8  # of the course
EVALUATIONS = 60  # along the course
FINALISTS = 4
SEEDS = (0, 1, 2, 3, 4)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Lap:
    """One training on the course, asked for.

    Attributes:
        name, table, lr, seed: Who runs, at which rate.
        given: The rest of the experiment.
        seconds: Cluster seconds to run at most; None to run ``epochs``.
        epochs: See ``seconds``.
        target: Where it may stop.
        data, base: Where data and relative paths are.
    """

    name: str
    table: dict[str, Any]
    lr: float
    seed: int
    given: dict[str, Any]
    seconds: float | None
    epochs: float
    target: float
    data: Path | None
    base: Path


@dataclass(frozen=True)
class LapTrace:
    """What a lap saw: cluster seconds, epochs, bytes and training loss at every evaluation."""

    lap: Lap
    seconds: list[float]
    epochs: list[float]
    megabytes: list[float]
    losses: list[float]

    @property
    def end(self) -> float:
        """Mean loss along the last tenth; infinite where it diverged."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return fmean(last) if all(map(math.isfinite, last)) else math.inf

    def arrival(self, target: float) -> int | None:
        """The first evaluation from which on the loss stays below the target."""
        arrived = None
        for number, loss in enumerate(self.losses):
            if not loss <= target:
                arrived = None
            elif arrived is None:
                arrived = number
        return arrived


def run_lap(lap: Lap) -> LapTrace:
    """Train one candidate."""
    torch.set_num_threads(1)
    stop = {"epochs": lap.epochs} if lap.seconds is None else {"seconds": lap.seconds}
    length = next(iter(stop.values()))
    every = {"every_epochs" if lap.seconds is None else "every_seconds": length / EVALUATIONS}
    given = {
        **lap.given,
        "stop": stop,
        "evaluate": {**lap.given.get("evaluate", {}), **every},
        "seeds": [lap.seed],
        **lap.table,
        "optimizer": {**lap.given.get("optimizer", {}), "lr": lap.lr},
    }
    (cell,) = Experiment(given, lap.base).cells
    with torch.random.fork_rng(devices=[]):
        plan, make_cluster = cell.plan(lap.data)
        training = Training(plan, make_cluster)
        try:
            training.run(lambda each: not _through(each, lap.target))
        finally:
            training.close()
    records = training.records
    return LapTrace(
        lap,
        [each["seconds"] for each in records],
        [each["epochs"] for each in records],
        [each["bytes_per_worker"] / 1e6 for each in records],
        [each["train_loss"] if each["train_loss"] is not None else math.inf for each in records],
    )


def _through(training: Training, target: float) -> bool:
    """Below the target at the last three evaluations: what comes after tells nothing about when it was reached."""
    last = training.records[-3:]
    return len(last) == 3 and all(each["train_loss"] <= target for each in last)


def advise(
    task: str | dict[str, Any],
    workers: int = 8,
    delay: str = "constant(1)",
    link: Mapping[str, str] | None = None,
    *,
    batch: int | None = None,
    target: float | None = None,
    epochs: float = 10.0,
    minutes: float = 2.0,
    jobs: int = 2,
    given: Mapping[str, Any] | None = None,
    data: Path | None = None,
    base: Path | None = None,
    say: Say | None = None,
) -> Advice:
    """Race the candidates and say which to use.

    Args:
        task: As in an experiment file.
        workers: Of the cluster.
        delay: Seconds of a local step, as in an experiment file; a trace of a real run is best.
        link: ``bandwidth`` and ``latency``; None for a link that costs nothing.
        batch: Examples per worker per step; the task's by default.
        target: Training loss to race to; by default what ordinary training reaches in ``epochs``.
        epochs: Length of the ordinary run that sets the course.
        minutes: Wall time to spend; what is not run by then is left out, and said.
        jobs: Processes side by side.
        given: More keys of an experiment file, such as an optimizer's momentum.
        data: Folder of the data sets.
        base: Folder that relative paths start from.
        say: Called with a line of progress now and then.
    """
    return _Race(task, workers, delay, link, batch, target, epochs, minutes, jobs, given, data, base, say).run()


class _Race:
    def __init__(
        self,
        task: str | dict[str, Any],
        workers: int,
        delay: str,
        link: Mapping[str, str] | None,
        batch: int | None,
        target: float | None,
        epochs: float,
        minutes: float,
        jobs: int,
        given: Mapping[str, Any] | None,
        data: Path | None,
        base: Path | None,
        say: Say | None,
    ) -> None:
        if minutes <= 0:
            raise InputError(f"minutes must be above 0, got {minutes:g}")
        cluster: dict[str, Any] = {"name": "simulated", "delay": delay}
        self.assumed = []
        if link is None:
            self.assumed.append("messages cost nothing, because no link was given")
        else:
            cluster["link"] = dict(link)
        self.given: dict[str, Any] = {"task": task, "workers": workers, "cluster": cluster, **(given or {})}
        if batch is not None:
            self.given["batch"] = batch
        self.task, self.workers, self.delay, self.link = task, workers, delay, link
        self.target, self.epochs, self.minutes, self.jobs = target, epochs, minutes, jobs
        self.data, self.base, self.say = data, (base or Path()).absolute(), say or (lambda _: None)
        self.tables = candidates(workers)
        self.began = time.monotonic()
        Experiment({**self.given, "run": [{"name": name, **table} for name, table in self.tables.items()]}, self.base)

    def run(self) -> Advice:
        context = get_context("forkserver")
        context.set_forkserver_preload(["hemiola.lab.advise.race"])
        with ProcessPoolExecutor(self.jobs, mp_context=context) as pool:
            self.pool = pool
            course, target = self._course()
            rates = self._heats(course, target)
            finished = self._race(course, target, rates)
            return self._final(course, target, finished)

    # ---------------------------------------------------------------------------------------------------- the stages

    def _course(self) -> tuple[float, float]:
        """Length in cluster seconds, and the target."""
        base = self._own_rate()
        laps = [self._lap(ORDINARY, base * factor, 0, None, -math.inf) for factor in RATES]
        traces = [each for each in self._run(laps) if math.isfinite(each.end)]
        if not traces:
            raise InputError(
                f"ordinary training diverges at every learning rate from {base * RATES[0]:g} to {base * RATES[-1]:g}; "
                "give the task another lr"
            )
        best = min(traces, key=lambda each: each.end)
        if self.target is None:
            return best.seconds[-1], best.end * (1 + 1e-9)
        arrivals = [(each.seconds[at], each) for each in traces if (at := each.arrival(self.target)) is not None]
        if not arrivals:
            raise InputError(
                f"ordinary training does not reach a training loss of {self.target:g} in {self.epochs:g} epochs, it "
                f"comes to {best.end:.4g}: give a target above that, or more epochs"
            )
        return min(seconds for seconds, _ in arrivals), self.target

    def _heats(self, course: float, target: float) -> dict[str, list[float]]:
        """The two best rates of every candidate over the first part of the course."""
        base = self._own_rate()
        self.say(f"target: training loss {target:.4g}; ordinary training needs {course:.4g} cluster seconds")
        laps = [self._lap(name, base * factor, 0, HEAT * course, target) for name in self.tables for factor in RATES]
        ends: dict[str, dict[float, float]] = {name: {} for name in self.tables}
        for trace in self._run(laps):
            ends[trace.lap.name][trace.lap.lr] = trace.end
        found: dict[str, list[float]] = {}
        for name, results in ends.items():
            good = sorted((rate for rate in results if math.isfinite(results[rate])), key=lambda rate: results[rate])
            if good:
                found[name] = good[:2]
        return found

    def _race(self, course: float, target: float, rates: Mapping[str, list[float]]) -> dict[str, list[LapTrace]]:
        """Each candidate's laps over the whole course, the best first."""
        laps = [self._lap(name, rate, 0, 1.5 * course, target) for name in rates for rate in rates[name]]
        found: dict[str, list[LapTrace]] = {}
        for trace in self._run(laps):
            found.setdefault(trace.lap.name, []).append(trace)
        for traces in found.values():
            traces.sort(key=lambda each: _time_to(each, target))
        missing = [name for name in self.tables if name not in found]
        if missing:
            self.assumed.append(f"nothing of {', '.join(missing)}, for want of time or because they diverge")
        return found

    def _final(self, course: float, target: float, found: dict[str, list[LapTrace]]) -> Advice:
        ranked = sorted(found, key=lambda name: _time_to(found[name][0], target))
        finalists = list(dict.fromkeys([*ranked[:FINALISTS], ORDINARY]))
        laps = [
            self._lap(name, found[name][0].lap.lr, seed, 3 * course, target)
            for seed in SEEDS[1:]
            for name in finalists
            if name in found
        ]
        by_seed: dict[str, dict[int, LapTrace]] = {name: {0: traces[0]} for name, traces in found.items()}
        for trace in self._run(laps):
            by_seed[trace.lap.name][trace.lap.seed] = trace
        shared = set.intersection(*(set(by_seed[name]) for name in finalists))
        by_seed = {
            name: {seed: trace for seed, trace in traces.items() if name not in finalists or seed in shared}
            for name, traces in by_seed.items()
        }
        return self._advice(target, by_seed, finalists)

    def _advice(self, target: float, by_seed: dict[str, dict[int, LapTrace]], finalists: list[str]) -> Advice:
        times = {
            name: {seed: _time_to(trace, target) for seed, trace in traces.items()} for name, traces in by_seed.items()
        }
        every = sorted(
            (self._candidate(name, by_seed[name], times, target) for name in by_seed), key=lambda each: each.seconds
        )
        named = {each.name: each for each in every}
        ordinary = named[ORDINARY]
        best = next((each for each in every if each.name in finalists), ordinary)
        clear = best.speedup is not None and best.speedup.low > 1 and best.speedup.mean >= CLEAR
        if not clear:
            best = ordinary
        seeds = sorted(times[best.name])
        won = [all(times[best.name][s] <= times[name][s] for name in finalists) for s in seeds]
        ratios = [times[ORDINARY][s] / times[best.name][s] for s in seeds]
        link = "free" if self.link is None else ", ".join(f"{key} {value}" for key, value in self.link.items())
        name = self.task if isinstance(self.task, str) else str(self.task.get("name"))
        return Advice(
            task=name,
            workers=self.workers,
            delay=self.delay,
            link=link,
            target=target,
            best=best,
            ordinary=ordinary,
            candidates=every,
            sure=fmean(map(float, won)),
            worst=min(ratios),
            assumed=self.assumed,
            minutes=(time.monotonic() - self.began) / 60,
        )

    def _candidate(
        self, name: str, traces: dict[int, LapTrace], times: Mapping[str, Mapping[int, float]], target: float
    ) -> Candidate:
        arrivals = {seed: trace.arrival(target) for seed, trace in traces.items()}
        reached = all(at is not None for at in arrivals.values())
        at = {seed: number for seed, number in arrivals.items() if number is not None}
        ratios = [times[ORDINARY][seed] / times[name][seed] for seed in traces if seed in times[ORDINARY]]
        finite = [math.log(ratio) for ratio in ratios if 0 < ratio < math.inf]
        speedup = interval(finite) if reached and len(finite) == len(traces) >= 3 else None
        return Candidate(
            name=name,
            table=self.tables[name],
            lr=traces[0].lap.lr,
            seconds=fmean(times[name].values()) if reached else math.inf,
            epochs=fmean(traces[seed].epochs[number] for seed, number in at.items()) if reached else math.inf,
            megabytes=fmean(traces[seed].megabytes[number] for seed, number in at.items()) if reached else math.inf,
            speedup=None if speedup is None else _as_ratio(speedup),
            seeds=len(traces),
            loss=fmean(trace.end for trace in traces.values()),
        )

    # ------------------------------------------------------------------------------------------------------- running

    def _own_rate(self) -> float:
        optimizer = self.given.get("optimizer", {})
        if isinstance(optimizer, dict) and "lr" in optimizer:
            return float(optimizer["lr"])
        (cell,) = Experiment(self.given, self.base).cells
        return cell.task(self.data).lr

    def _lap(self, name: str, lr: float, seed: int, seconds: float | None, target: float) -> Lap:
        return Lap(name, self.tables[name], lr, seed, self.given, seconds, self.epochs, target, self.data, self.base)

    def _run(self, laps: list[Lap]) -> list[LapTrace]:
        """The laps' traces, in their order; what is not begun when the time is over is left out."""
        deadline = self.began + 60 * self.minutes
        pending = [(lap, self.pool.submit(run_lap, lap)) for lap in laps]
        found = []
        for lap, future in pending:
            if time.monotonic() > deadline and future.cancel():
                continue
            found.append(future.result())
            self.say(f"{lap.name} at lr {lap.lr:g}, seed {lap.seed}: loss {found[-1].end:.4g}")
        return found


def _as_ratio(logarithms: Interval) -> Interval:
    low, mean, high = (math.exp(each) for each in (logarithms.low, logarithms.mean, logarithms.high))
    return Interval(mean, low, high, tuple(math.exp(each) for each in logarithms.differences))


def _time_to(trace: LapTrace, target: float) -> float:
    at = trace.arrival(target)
    return math.inf if at is None else trace.seconds[at]
