"""The race: candidates train the task itself, under the virtual clock, with real gradients.

1. **The course.** The ordinary way at several learning rates, the best two with a second seed. What it settles below
   is the target, unless one is given; the cluster seconds it took are the course's length.
2. **Heats.** Every candidate over an eighth of the course, from the ordinary rate up or down for as long as that helps.
   The best few go on, with and without an order, which pays late.
3. **The race.** Each of them at the rate that was best there, and at smaller ones for as long as that helps, until it
   is below the target for good or far behind; then the leaders with a second seed. The two seeds choose the rate.
4. **The final.** The fastest few and the ordinary way with more seeds: how sure is the order at the finish?

Seeds share shards, delays and noise, so candidates are compared seed by seed. A rate that diverges is out. What is
measured is the advice: there is no model of convergence in between that could be wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from hemiola.contracts import TaskLike
from hemiola.errors import InputError
from hemiola.lab.advise.advice import Advice, verdict
from hemiola.lab.advise.candidates import ADAPTIVE_RATES, ORDINARY, Table, candidates, without_order
from hemiola.lab.advise.laps import Clock, Lap, LapTrace, run_lap
from hemiola.lab.advise.measure import refuse_short_trace
from hemiola.lab.experiment import Experiment
from hemiola.lab.pool import pool_of
from hemiola.timing.delays import parse_delay

COURSES = 100  # what a race costs, in ordinary runs over the course
PROBE = 0.05  # of the course, to know what it costs
HEAT = 1 / 8  # of the course
EVALUATIONS = 60  # along the course
EXAMPLES = 4096  # training examples of an evaluation at most
TRIES = 4  # rates of a candidate in the heats
KEPT = 5  # candidates that the heats let through, beside those that add an order
BEHIND = 1.5  # who needs so many times as long as the last finalist is out
LEADERS = 8  # of the race, that run with a second seed
FINALISTS = 3
SEEDS = (0, 1, 2, 3, 4)
SHARES = {"course": 0.35, "heats": 0.55, "race": 0.8, "final": 1.0}  # of the minutes, by when a stage has to end
ADAM_RATE = 1e-3  # tasks name rates of SGD

Say = Callable[[str], None]
Arm = tuple[str, float]  # a candidate at a rate


@dataclass(frozen=True)
class Question:
    """What the advice is wanted for; see `advise`."""

    task: Any
    workers: int = 8
    delay: str = "constant(1)"
    link: Mapping[str, str] | None = None
    batch: int | None = None
    target: float | None = None
    epochs: float = 10.0
    given: Mapping[str, Any] = field(default_factory=dict)
    data: Path | None = None
    base: Path = field(default_factory=Path)

    @property
    def experiment(self) -> dict[str, Any]:
        """The keys of an experiment file that all candidates share."""
        cluster: dict[str, Any] = {"name": "simulated", "delay": self.delay}
        if self.link is not None:
            cluster["link"] = dict(self.link)
        found = {"task": self.task, "workers": self.workers, "cluster": cluster, **self.given}
        return found if self.batch is None else {**found, "batch": self.batch}

    @property
    def optimizer(self) -> dict[str, Any]:
        """The optimizer's table."""
        given = self.given.get("optimizer", {})
        return {"name": given} if isinstance(given, str) else dict(given)


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
    clock: Clock = "wall",
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
        minutes: Time to spend: the course is made shorter where it would not do, and what is not run by then is left
            out; both are said.
        jobs: Processes side by side.
        given: More keys of an experiment file, such as an optimizer's momentum.
        data: Folder of the data sets.
        base: Folder that relative paths start from.
        say: Called with a line of progress now and then.
        clock: What minutes are counted by: the wall, or the processor (of all processes, divided by ``jobs``) on a
            machine that is busy with other things.
    """
    if minutes <= 0:
        raise InputError(f"minutes must be above 0, got {minutes:g}")
    if epochs <= 0:
        raise InputError(f"epochs must be above 0, got {epochs:g}")
    folder = (base or Path()).absolute()
    law = parse_delay(delay, folder)
    refuse_short_trace(law)
    # A trace by its whole path: the experiment file that checks the advice may lie in another folder.
    question = Question(task, workers, law.law, link, batch, target, epochs, given or {}, data, folder)
    return CandidateRace(question, minutes, jobs, say or (lambda _: None), clock).run()


class CandidateRace:
    """One race.

    Attributes:
        assumed: What was not given, and what had to be left out, in words.
        tables: The candidates.
    """

    def __init__(self, question: Question, minutes: float, jobs: int, say: Say, clock: Clock) -> None:
        self.question, self.minutes, self.jobs, self.say, self.clock = question, minutes, jobs, say, clock
        self.began, self.computed = time.monotonic(), 0.0
        self.assumed: list[str] = []
        self.epochs, self.course, self.target = (
            question.epochs,
            math.inf,
            -math.inf,
        )  # until the first stages know better
        if question.link is None:
            self.assumed.append("messages cost nothing, because no link was given")
        self.given = question.experiment
        self.tables: dict[str, Table] = candidates(
            question.workers, link=question.link is not None, optimizer=str(question.optimizer.get("name", "SGD"))
        )
        Experiment(
            {**self.given, "run": [{"name": name, **table} for name, table in self.tables.items()]}, question.base
        )

    def run(self) -> Advice:
        """All stages."""
        (cell,) = Experiment(self.given, self.question.base).cells
        task = cell.task(self.question.data)
        self._evaluate_on_few(task)
        with pool_of(self.jobs) as self.pool:
            self.epochs = self._affordable(self._own_rate(task))
            rate = self._course(self._own_rate(task))
            heats = self._heats(rate)
            arms = self._race(heats)
            return self._final(arms)

    # ---------------------------------------------------------------------------------------------------- the stages

    def _affordable(self, rate: float) -> float:
        """Ordinary epochs of the course, as many as the minutes allow."""
        epochs = self.question.epochs
        probe = self._lap(ORDINARY, rate, 0, -math.inf, epochs=PROBE * epochs)
        self.say("ordinary training, at several learning rates")
        (trace,) = self._run([probe], "course")
        if self.question.target is not None:
            return epochs
        share = 60 * self.minutes * self.jobs / (COURSES * trace.training / PROBE)
        if share >= 1:
            return epochs
        shorter = float(f"{max(share * epochs, 1e-3):.2g}")
        self.assumed.append(
            f"a run of {shorter:g} epochs tells what one of {epochs:g} would, because that is what {self.minutes:g} "
            f"minutes allow; ask for {math.ceil(self.minutes / share)} minutes otherwise"
        )
        return shorter

    def _course(self, base: float) -> float:
        """Sets the target and the length in cluster seconds; returns the ordinary rate."""
        good = self._ordinary_rates(base)
        again = [self._lap(ORDINARY, trace.lap.lr, 1, -math.inf, epochs=self.epochs) for trace in good[:2]]
        by_rate = {trace.lap.lr: [trace] for trace in good[:2]}
        for trace in self._run(again, "course"):
            by_rate[trace.lap.lr].append(trace)
        learnt = [traces for traces in by_rate.values() if all(trace.settled < trace.losses[0] for trace in traces)]
        if not learnt:
            raise InputError(
                f"ordinary training of {self.epochs:g} epochs does not settle below the training loss it begins with, "
                f"{good[0].losses[0]:.4g}: give more minutes or more epochs"
            )
        best = min(learnt, key=lambda traces: fmean(trace.end for trace in traces))
        self._set_target(best, good)
        self.say(f"target: training loss {self.target:.4g}; ordinary training needs {self.course:.4g} cluster seconds")
        return best[0].lap.lr

    def _ordinary_rates(self, base: float) -> list[LapTrace]:
        """Ordinary laps at every rate that does not diverge, the best first."""
        found: dict[float, LapTrace] = {}
        ends: dict[float, float] = {}
        for rates in _climb(base, ends, 2 * TRIES):
            laps = [self._lap(ORDINARY, rate, 0, -math.inf, epochs=self.epochs) for rate in rates]
            traces = self._run(laps, "course")
            if len(traces) < len(laps) or any(trace.given_up for trace in traces):
                raise InputError(
                    f"{self.minutes:g} minutes are too short for ordinary training of {self.epochs:g} epochs at "
                    "several learning rates: give more minutes or fewer epochs"
                )
            found.update({trace.lap.lr: trace for trace in traces})
            ends.update({rate: trace.end for rate, trace in found.items()})
        good = [trace for trace in found.values() if math.isfinite(trace.end)]
        if not good:
            raise InputError(
                f"ordinary training diverges at every learning rate from {min(ends):g} to {max(ends):g}; "
                "give the optimizer another lr"
            )
        return sorted(good, key=lambda trace: trace.end)

    def _set_target(self, best: list[LapTrace], all_rates: list[LapTrace]) -> None:
        given = self.question.target
        if given is None:
            self.target, self.course = max(trace.settled for trace in best), best[0].points[-1].seconds
            return
        fastest = min(trace.seconds_to(given) for trace in [*best, *all_rates])
        if fastest == math.inf:
            raise InputError(
                f"ordinary training does not reach a training loss of {given:g} in {self.epochs:g} epochs, it "
                f"comes to {best[0].end:.4g}: give a target above that, or more epochs"
            )
        self.target, self.course = given, fastest

    def _heats(self, ordinary_rate: float) -> dict[str, float]:
        """The candidates that go on, each with its best rate over the first part of the course; the best first."""
        ends: dict[str, dict[float, float]] = {name: {} for name in self.tables}
        climbs = {name: _climb(ordinary_rate, ends[name], TRIES, both=False) for name in self.tables}
        while climbs:
            laps = []
            for name in list(climbs):
                tried = next(climbs[name], [])
                laps += [self._lap(name, rate, 0, self.target, seconds=HEAT * self.course) for rate in tried]
                if not tried:
                    del climbs[name]
            found = self._run(laps, "heats")
            for trace in found:
                ends[trace.lap.name][trace.lap.lr] = trace.end
            if len(found) < len(laps):
                break
        rates = {name: min(losses, key=losses.__getitem__) for name, losses in ends.items() if losses}
        best = {name: ends[name][rate] for name, rate in rates.items()}
        ranked = sorted((name for name in best if math.isfinite(best[name])), key=best.__getitem__)
        through = {ORDINARY, *list(dict.fromkeys(map(without_order, ranked)))[:KEPT]}
        self.say(
            f"after {HEAT * self.course:.4g} cluster seconds: "
            + ", ".join(f"{name!r} {best[name]:.4g}" for name in ranked[:KEPT])
        )
        missing = [name for name in self.tables if name not in ranked]
        if missing:
            self.assumed.append(
                f"nothing is gained by {', '.join(missing)}: they diverge, or there was no time for them"
            )
        return {ORDINARY: ordinary_rate} | {name: rates[name] for name in ranked if without_order(name) in through}

    def _race(self, heats: Mapping[str, float]) -> dict[Arm, dict[int, LapTrace]]:
        """Each candidate's laps to the target, by rate and seed."""
        found: dict[Arm, dict[int, LapTrace]] = {}

        def seconds(arm: Arm) -> float:
            return _score(found.get(arm, {}), self.target)

        def laps(arms: Iterable[Arm], seed: int) -> Iterator[Lap]:
            for name, rate in arms:
                finished = sorted({arm[0]: seconds(arm) for arm in sorted(found, key=seconds, reverse=True)}.values())
                last = finished[FINALISTS] if len(finished) > FINALISTS else math.inf
                limit = 1.5 * self.course if name == ORDINARY else min(1.5 * self.course, BEHIND * last)
                yield self._lap(name, rate, seed, self.target, seconds=limit)

        def note(trace: LapTrace) -> None:
            if not trace.given_up or trace.arrival(self.target):
                found.setdefault((trace.lap.name, trace.lap.lr), {})[trace.lap.seed] = trace

        self._run(laps(heats.items(), 0), "race", note)
        falling = {name: rate for name, rate in heats.items() if (name, rate) in found}
        while falling:  # a rate that is best at first is often too large later
            falling = {name: rate / 2 for name, rate in falling.items()}
            self._run(laps(falling.items(), 0), "race", note)
            falling = {
                name: rate for name, rate in falling.items() if seconds((name, rate)) < seconds((name, 2 * rate))
            }
        leaders = sorted((arm for arm in found if arm[0] != ORDINARY), key=seconds)[:LEADERS]
        ordinary = sorted((arm for arm in found if arm[0] == ORDINARY), key=seconds)[:2]
        self._run(laps([*ordinary, *leaders], 1), "race", note)
        return found

    def _final(self, found: dict[Arm, dict[int, LapTrace]]) -> Advice:
        def rank(arm: Arm) -> tuple[bool, float]:
            traces = found[arm]
            return 1 not in traces, _score(traces, self.target)

        best: dict[str, Arm] = {}
        for arm in sorted(found, key=rank):
            best.setdefault(arm[0], arm)
        if ORDINARY not in best:
            raise InputError(
                f"{self.minutes:g} minutes are too short to see ordinary training arrive: give more minutes or fewer "
                "epochs"
            )
        ranked = sorted(best, key=lambda name: rank(best[name]))
        finalists = list(dict.fromkeys([ORDINARY, *ranked[:FINALISTS]]))
        self.say("final: " + ", ".join(f"{name!r} at lr {best[name][1]:g}" for name in finalists))
        laps = []
        for seed in SEEDS[1:]:
            for name in finalists:
                if seed not in found[best[name]]:
                    expected = _score(found[best[name]], self.target)
                    laps.append(
                        self._lap(name, best[name][1], seed, self.target, seconds=3 * self.course, expected=expected)
                    )
        by_seed = {name: dict(found[arm]) for name, arm in best.items()}
        for trace in self._run(laps, "final"):
            if not trace.given_up:
                by_seed[trace.lap.name][trace.lap.seed] = trace
        shared = set.intersection(*(set(by_seed[name]) for name in finalists))
        for name in finalists:
            by_seed[name] = {seed: by_seed[name][seed] for seed in sorted(shared)}
        if len(shared) < len(SEEDS):
            self.assumed.append(f"{len(shared)} seeds are enough, because there was no time for {len(SEEDS)}")
        others = {arm: _score(traces, self.target) for arm, traces in found.items()}
        return verdict(
            self.given,
            self.target,
            {name: (self.tables[name], traces) for name, traces in by_seed.items() if traces},
            finalists,
            others,
            self.assumed,
            self.spent() / 60,
        )

    # ------------------------------------------------------------------------------------------------------- running

    def spent(self) -> float:
        """Seconds of the clock that counts."""
        return time.monotonic() - self.began if self.clock == "wall" else self.computed / self.jobs

    def _own_rate(self, task: TaskLike) -> float:
        table = self.question.optimizer
        if "lr" in table:
            return float(table["lr"])
        return ADAM_RATE if table.get("name") in ADAPTIVE_RATES else task.lr

    def _evaluate_on_few(self, task: TaskLike) -> None:
        if len(task.train) > EXAMPLES and "train_examples" not in self.given.get("evaluate", {}):
            self.given["evaluate"] = {**self.given.get("evaluate", {}), "train_examples": EXAMPLES}
            self.assumed.append(f"the loss on {EXAMPLES} of the {len(task.train)} training examples is that on all")

    def _lap(
        self,
        name: str,
        lr: float,
        seed: int,
        target: float,
        *,
        epochs: float | None = None,
        seconds: float = math.inf,
        expected: float = math.inf,
    ) -> Lap:
        """A lap over so many epochs or cluster seconds; ``expected`` is when it will probably arrive."""
        length = seconds if epochs is None else epochs
        course = min(self.course, seconds, 2 * expected) if epochs is None else self.epochs
        return Lap(
            name,
            self.tables[name],
            lr,
            seed,
            self.given,
            "seconds" if epochs is None else "epochs",
            length,
            course / EVALUATIONS,
            target,
            max(60 * self.minutes - self.spent(), 0.0),
            self.clock,
            self.question.data,
            self.question.base,
        )

    def _run(
        self, laps: Iterable[Lap], stage: str, note: Callable[[LapTrace], None] = lambda _: None
    ) -> list[LapTrace]:
        """The laps' traces; each is asked for when a process is free, and none once the stage's time is over."""
        found: list[LapTrace] = []
        for trace in self.pool.each(self._in_time(laps, stage)):
            self.computed += trace.processor
            found.append(trace)
            note(trace)
        return found

    def _in_time(self, laps: Iterable[Lap], stage: str) -> Iterator[Callable[[], LapTrace]]:
        coming = iter(laps)
        while self.spent() < 60 * self.minutes * SHARES[stage]:
            lap = next(coming, None)
            if lap is None:
                return
            yield partial(run_lap, lap)


def _score(traces: Mapping[int, LapTrace], target: float) -> float:
    """Mean cluster seconds to the target; infinite where a seed does not arrive."""
    return fmean(trace.seconds_to(target) for trace in traces.values()) if traces else math.inf


def _climb(base: float, losses: Mapping[float, float], tries: int, both: bool = True) -> Iterator[list[float]]:
    """Rates to try, a few at a time: from the base by factors of 2, up or down for as long as the loss falls.

    Args:
        base: Where to begin.
        losses: Of the rates that were tried; filled in between.
        tries: At most so many.
        both: Whether to try the rates on both sides at first, or only the smaller one.
    """
    tried = [base / 2, base, 2 * base] if both else [base / 2, base]
    yield tried
    while len(tried) < tries:
        best = min(tried, key=lambda rate: losses.get(rate, math.inf))
        if losses.get(best, math.inf) == math.inf:
            following = min(tried) / 8
        elif best == min(tried):
            following = best / 2
        elif best == max(tried):
            following = best * 2
        else:
            return
        tried = sorted([*tried, following])
        yield [following]
