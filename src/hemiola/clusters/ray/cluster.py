"""The Ray cluster: every worker an actor, `ray.wait` for K of them, real time.

`Race` decides, as in the simulator, whose report counts, who starts again, and who is cancelled or no longer listened
to. What differs is where events come from, and that workers may die: then their units go back, K is clipped to the
living, and `Roster` starts them again. A worker that is told to leave in time reports what it has done first.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hemiola.clusters.merging import all_finite, cut, fresh_like, shares, spread_of, weighted_sum
from hemiola.clusters.ray.engine import Engine
from hemiola.clusters.ray.roster import Event, Roster, Slot
from hemiola.clusters.ray.worker import FEW_BYTES, Assignment, Momentum, Outcome, Setup, as_tensor
from hemiola.clusters.sender import Sender
from hemiola.clusters.step_times import MeasuredTimes
from hemiola.contracts import FOLLOWED, Pace, Report, Span, State, Stint, Update, Work
from hemiola.gradients.sketch import unpacked
from hemiola.pace.race import COUNTS, CUT, LATE, Race
from hemiola.state import own_state
from hemiola.timing.delays import DelayStreams

KIND, VERSION = "hemiola-ray", 2


class _Arrival(NamedTuple):
    """A report that counts: what was asked, what came of it, and the seconds between."""

    stint: Stint
    outcome: Outcome
    seconds: float


@dataclass
class _Round:
    """What led to one update; see `hemiola.contracts.Update` for the fields that it shares."""

    arrived: list[_Arrival] = field(default_factory=list)
    cancelled: list[Stint] = field(default_factory=list)
    dropped: list[Stint] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    censored: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    idle_seconds: float = 0.0
    wasted_seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)


class RayCluster:
    """P workers, each a Ray actor.

    Args:
        work: Gives out stints and holds the versions of the weights.
        engine: The connection to Ray; closed with the cluster.
        roster: The workers, ready.
        setup: What they know of the run.
        pace: Whom an update waits for.
        delays: The least time of every local step, slept away; None for none.
    """

    def __init__(
        self, work: Work, engine: Engine, roster: Roster, setup: Setup, pace: Pace, delays: DelayStreams | None
    ) -> None:
        self.work = work
        self.engine = engine
        self.roster = roster
        self.setup = setup
        self.pace = pace
        self.delays = delays
        self.workers = len(setup.shards)
        self.race = Race(pace)
        self._draws = [0] * self.workers
        self._seconds_before = 0.0  # cluster time before this process
        self._began: float | None = None
        self._weights: tuple[int, Any] | None = None  # a version, and it or its reference
        self._measured = MeasuredTimes(self.workers)
        self._last_arrival = 0.0
        self._cut: set[int] = set()  # workers whose stints the update has cut, and who have not reported yet
        self._closing = False  # whether nobody starts any more before the update is made
        self._sum: Tensor | None = None  # the last update's change; new memory for each would cost a pass over it
        self._sender = Sender(setup.exchange, work.read(0).numel(), setup.seed)

    @property
    def now(self) -> float:
        """Seconds since the first stint was given out, in this process and the ones before it."""
        return self._seconds_before + (0.0 if self._began is None else time.monotonic() - self._began)

    def live_versions(self) -> set[int]:
        """Versions that stints under way have read."""
        return {slot.stint.version for slot in self.roster.slots if slot.stint is not None}

    # --------------------------------------------------------------------------------------------------- one update

    def collect(self) -> Update:
        """Give every free worker a stint, wait for K reports, merge them."""
        if self._began is None:
            self._began = time.monotonic()
        this, opened = _Round(), self.now
        for slot in self.roster.slots:
            if slot.free:
                this.idle_seconds += self.now - slot.free_since
                self._start(slot)
            if slot.free:
                self.roster.stop(slot)
        while not self._enough(this):
            wanted = self.pace.k() - len(this.arrived) if self.pace.idles else 1
            deadline = self.race.deadline
            left = math.inf if deadline is None else opened + deadline - self.now
            if left <= 0:
                self.race.expire()
                continue
            for event in self.roster.wait(max(wanted, 1), left):
                self._take(event, this)
        self._stop(self.race.close(), this)
        return self._merge(this)

    def publish(self) -> None:
        """Workers that start from now on read the next version."""
        self.race.version += 1
        self._measured.exchange(self.now - self._last_arrival)

    def _enough(self, this: _Round) -> bool:
        """Whether an update can be made: K reports, or as many as the living can give."""
        if self.race.complete:
            return True
        if any(slot.busy for slot in self.roster.slots):
            return False
        if this.arrived:
            return True
        if any(slot.reference is not None for slot in self.roster.slots):
            return False  # Someone is starting, or may yet wake up.
        dead = [slot.worker for slot in self.roster.slots if slot.actor is None]
        raise RuntimeError(
            f"the run cannot go on: workers {dead} died more than max_restarts = {self.roster.max_restarts} times, "
            "and the others have no work left"
        )

    def _start(self, slot: Slot) -> None:
        stint = None if self._closing else self.work.assign(slot.worker)
        if stint is None:
            return
        sleeps: tuple[float, ...] = ()
        if self.delays is not None:
            first = self._draws[slot.worker]
            sleeps = tuple(self.delays.seconds(slot.worker, first + i) for i in range(len(stint.batches)))
            self._draws[slot.worker] += len(stint.batches)
        self.race.start(slot.worker)
        assignment = Assignment(stint, self.work.wants_sketches(stint), sleeps, slot.counted)
        self.roster.send(slot, assignment, self._published(), self.work.directions)

    def _published(self) -> Any:
        """The weights of the present version as workers get them: once in the object store, unless they are few."""
        if self._weights is None or self._weights[0] != self.race.version:
            weights = self.work.read(self.race.version).numpy()
            few = weights.nbytes <= FEW_BYTES
            self._weights = (self.race.version, weights.tobytes() if few else self.engine.ray.put(weights))
        return self._weights[1]

    def _take(self, event: Event, this: _Round) -> None:
        """Take note of what happened to a worker."""
        slot = event.slot
        if event.kind == "finished":
            assert event.outcome is not None
            self._finished(slot, event.outcome, this)
        elif event.kind == "ready":
            slot.free_since = self.now
            if not (self.pace.idles and any(arrival.stint.worker == slot.worker for arrival in this.arrived)):
                self._start(slot)
        elif not slot.hung:
            self._lose(slot, this)
            slot.hung = event.kind == "hung"
        if event.kind == "died":
            slot.stint, slot.hung = None, False

    def _finished(self, slot: Slot, outcome: Outcome, this: _Round) -> None:
        if not outcome.steps and not slot.hung:  # It was told to leave before it had done anything.
            self._lose(slot, this)
        stint, slot.stint = slot.stint, None
        assert stint is not None
        slot.free_since = self._last_arrival = self.now
        this.sent_bytes += outcome.report_bytes
        if outcome.steps:
            this.durations.append(outcome.seconds / outcome.steps)
            self._measured.step(stint.worker, this.durations[-1])
        if slot.hung:
            # It was given up long ago, and its units with it.
            this.wasted_seconds += outcome.seconds
            self._start(slot)
        elif outcome.steps:
            self._reported(slot, self._as_done(stint, outcome.steps, this), outcome, this)
        if outcome.leaves is not None:
            self.roster.replace(slot, outcome.leaves)

    def _as_done(self, stint: Stint, steps: int, this: _Round) -> Stint:
        """A stint as far as it was done; the rest of it comes again."""
        done, rest = cut(stint, steps)
        if rest.batches:
            this.cancelled.append(rest)
            self.work.give_back(rest)
        return done

    def _reported(self, slot: Slot, stint: Stint, outcome: Outcome, this: _Round) -> None:
        """The report of a worker that was waited for."""
        fate = CUT if slot.worker in self._cut else self.race.finish(slot.worker)
        self._cut.discard(slot.worker)
        what = "computes" if fate in (COUNTS, CUT) else "late" if fate is LATE else "dropped"
        this.spans += self._spans(slot, what, outcome.seconds)
        this.waits.append(math.inf if fate is CUT else time.monotonic() - slot.started)
        if fate in (COUNTS, CUT):
            this.idle_seconds += max(time.monotonic() - slot.started - outcome.seconds, 0.0)
            this.arrived.append(_Arrival(stint, outcome, time.monotonic() - slot.started))
            # Also when it is refused: then the worker has forgotten its optimizer's memory.
            slot.counted, slot.momentum = stint.number, None
        else:
            this.wasted_seconds += outcome.seconds
            (this.cancelled if fate is LATE else this.dropped).append(stint)
            if fate is LATE:
                self.work.give_back(stint)
        if not self.race.rests(fate) and outcome.leaves is None:
            self._start(slot)

    def _lose(self, slot: Slot, this: _Round) -> None:
        """The stint of this worker will not be used; its units come again."""
        if slot.stint is None:
            return
        self.race.lose(slot.worker)
        self._cut.discard(slot.worker)
        ran = time.monotonic() - slot.started
        this.wasted_seconds += ran
        this.spans += self._spans(slot, "cancelled", ran)
        this.cancelled.append(slot.stint)
        self.work.give_back(slot.stint)

    def _spans(self, slot: Slot, what: str, seconds: float) -> list[Span]:
        """What a worker did since its stint was sent: so many seconds of it, and messages in the rest."""
        if slot.worker >= FOLLOWED:
            return []
        end = self.now
        began = end - (time.monotonic() - slot.started)
        done = min(began + seconds, end)
        return [Span(slot.worker, what, began, done), Span(slot.worker, "sends", done, end)]

    def _stop(self, workers: list[int], this: _Round) -> None:
        """The update does not wait for these: it cancels them, or takes what they have done."""
        slots = [self.roster.slots[worker] for worker in workers]
        done = self.roster.cut(slots) if self.pace.late == "cut" else [0] * len(slots)
        for slot, steps in zip(slots, done, strict=True):
            if self.race.stopped(steps) is CUT:
                self._cut.add(slot.worker)
            else:
                self._cancel(slot, this)
        self._closing = True
        while self._cut:
            for event in self.roster.wait(len(self._cut)):
                self._take(event, this)
        self._closing = False

    def _cancel(self, slot: Slot, this: _Round) -> None:
        assert slot.stint is not None
        this.waits.append(math.inf)
        this.censored.append((time.monotonic() - slot.started) / len(slot.stint.batches))
        self._lose(slot, this)
        self.roster.abandon(slot)
        slot.free_since = self.now

    # -------------------------------------------------------------------------------------------------------- merge

    def _merge(self, this: _Round) -> Update:
        """The weighted mean of the changes that are finite."""
        arrived = sorted(this.arrived, key=lambda arrival: (arrival.stint.worker, arrival.stint.number))
        good = [arrival for arrival in arrived if arrival.outcome.payload is not None]
        rows = [self._row(arrival.outcome) for arrival in good]
        change = self._mean(rows, good)
        if change is not None and not all_finite(change):
            # A worker does not send what is not finite; but not every worker can be believed, and sums can overflow.
            finite = [all_finite(row) for row in rows]
            good = [arrival for arrival, fine in zip(good, finite, strict=True) if fine]
            rows = [row for row, fine in zip(rows, finite, strict=True) if fine]
            change = self._mean(rows, good)
        if self.setup.local:
            self._combine_momentum(good)
        merged = {(arrival.stint.worker, arrival.stint.number) for arrival in good}
        return Update(
            reports=[
                Report(
                    stint=a.stint,
                    staleness=self.race.version - a.stint.version,
                    seconds=a.seconds,
                    loss=a.outcome.loss,
                    sketches=_sketches(a.outcome, self.setup.tells_losses),
                    compute=a.outcome.seconds,
                )
                for a in good
            ],
            change=change,
            seconds=self.now,
            spread=spread_of(rows) if self.setup.local and rows else 0.0,
            cancelled=this.cancelled,
            dropped=this.dropped,
            refused=[a.stint for a in arrived if (a.stint.worker, a.stint.number) not in merged],
            bytes_per_worker=this.sent_bytes / self.workers,
            idle_seconds=this.idle_seconds,
            wasted_seconds=this.wasted_seconds,
            durations=this.durations,
            censored=this.censored,
            waits=this.waits,
            spans=this.spans,
        )

    def _row(self, outcome: Outcome) -> Tensor:
        assert outcome.payload is not None
        return self._sender.unpack(as_tensor(outcome.payload))

    def _mean(self, rows: list[Tensor], good: list[_Arrival]) -> Tensor | None:
        if not rows:
            return None
        factors = shares(
            self.work,
            self.pace,
            self.race.version,
            [arrival.stint for arrival in good],
            self.setup.exchange.weighs,
        )
        if self._sum is None:
            self._sum = fresh_like(rows[0])
        return weighted_sum(rows, factors, self._sum)

    def _combine_momentum(self, good: list[_Arrival]) -> None:
        """Tell the merged workers, with their next stint, what became of their optimizers' memories."""
        rule = self.setup.exchange.momentum
        if rule == "local" or not good:
            return
        vectors = None
        if rule == "average":
            sent = [arrival.outcome.momentum or {} for arrival in good]
            vectors = {name: np.mean([each[name] for each in sent if name in each], axis=0) for name in sent[0]}
        momentum = self.engine.ray.put(Momentum(vectors))
        for arrival in good:
            self.roster.slots[arrival.stint.worker].momentum = momentum

    # ---------------------------------------------------------------------------------------------- log, state, end

    def telemetry(self) -> State:
        """Measured step and exchange times since the call before, and who is there."""
        slots = self.roster.slots
        return {
            **self._measured.take(),
            "alive": sum(slot.actor is not None for slot in slots),
            "deaths": sum(slot.deaths for slot in slots),
            "hangs": self.roster.hangs,
        }

    def state_dict(self) -> State:
        """The clock, what the workers remember, and the stints under way: whoever resumes gives those back."""
        keeps_memory = self.setup.local or self.setup.exchange.feedback
        ray = self.engine.ray
        return {
            "kind": KIND,
            "version": VERSION,
            "now": self.now,
            "updates": self.race.version,
            "draws": list(self._draws),
            "under_way": [slot.stint.as_state() for slot in self.roster.slots if slot.busy and slot.stint is not None],
            "memories": self.roster.memories() if keeps_memory else {},
            "momentum": {
                slot.worker: _as_tensors(ray.get(slot.momentum).vectors)
                for slot in self.roster.slots
                if slot.momentum is not None
            },
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a saved state: stints that were under way are given back first."""
        own_state(state, KIND, VERSION)
        self._seconds_before, self._began = float(state["now"]), None
        self.race.version, self._draws = int(state["updates"]), list(state["draws"])
        for saved in state["under_way"]:
            self.work.give_back(Stint.from_state(saved))
        self.roster.begin(state["memories"])
        for worker, vectors in state["momentum"].items():
            arrays = None if vectors is None else {name: vector.numpy() for name, vector in vectors.items()}
            self.roster.slots[worker].momentum = self.engine.ray.put(Momentum(arrays))
        for slot in self.roster.slots:
            slot.free_since = self.now

    def close(self) -> None:
        """End the workers, and Ray if it was started here."""
        self.roster.close()
        self._weights = None
        self.engine.close()


def _sketches(outcome: Outcome, losses: bool) -> tuple[Tensor | None, ...]:
    """The rows of each batch."""
    return tuple(None if rows is None else unpacked(as_tensor(rows), losses) for rows in outcome.sketches)


def _as_tensors(vectors: dict[str, np.ndarray] | None) -> dict[str, Tensor] | None:
    return None if vectors is None else {name: torch.from_numpy(vector.copy()) for name, vector in vectors.items()}
