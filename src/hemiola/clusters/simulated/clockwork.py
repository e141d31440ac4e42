"""The virtual clock: which worker finishes when, and which reports make the next update.

Events are kept in a heap keyed by (time, sequence), so ties are decided by rule and a run is the same every time.
Nothing here knows about gradients; `simulated.py` computes them afterwards, for the stints that count.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from hemiola.clusters.merging import cut
from hemiola.clusters.simulated.machines import Machines
from hemiola.contracts import FOLLOWED, LINK, Pace, Span, State, Stint, Work
from hemiola.pace.race import COUNTS, CUT, LATE, Race
from hemiola.timing.link import ServerLink


@dataclass
class Running:
    """A stint under way.

    Attributes:
        stint: What the worker does.
        asked: When it asked for the weights.
        started: When it had read them.
        compute: Seconds its local steps take.
        computed: When the last of them ends.
        due: When the next thing happens to it: its computation ends, or its report arrives.
        sequence: Decides between events at the same time.
        sending: The report is on the link.
        doing: What the worker does until ``computed``: (what, begin, end).
    """

    stint: Stint
    asked: float
    started: float
    compute: float
    computed: float
    due: float
    sequence: int
    sending: bool = False
    doing: tuple[tuple[str, float, float], ...] = ()

    def as_state(self) -> State:
        """Plain values, for a state."""
        return vars(self) | {"stint": self.stint.as_state()}

    @classmethod
    def from_state(cls, state: State) -> Running:
        """The reverse of `as_state`."""
        return cls(**{**state, "stint": Stint.from_state(state["stint"])})

    def spans(self, end: float, instead: str | None = None) -> list[Span]:
        """What the worker did until its stint was over at ``end``; ``instead`` of computing, where it was in vain."""
        worker = self.stint.worker
        if worker >= FOLLOWED:
            return []
        told = [*self.doing, ("sends", self.computed, end)]
        return [
            Span(worker, instead if instead and what == "computes" else what, begin, min(until, end))
            for what, begin, until in told
            if begin < min(until, end)
        ]


@dataclass
class Round:
    """What led to one update.

    Attributes:
        arrived: The stints that count, in order of arrival, each with the time its report arrived.
        cancelled: Stints that this update ended for nothing, with how long each had run.
        rests: What is left of the stints that this update cut.
        late: Stints that finished too late and were not listened to.
        dropped: Stints refused as too stale.
        durations: Compute seconds per local step of every stint that ended.
        idle_seconds, wasted_seconds, waits, spans: See `hemiola.contracts.Update`.
    """

    arrived: list[tuple[Running, float]] = field(default_factory=list)
    cancelled: list[tuple[Stint, float]] = field(default_factory=list)
    rests: list[Stint] = field(default_factory=list)
    late: list[Stint] = field(default_factory=list)
    dropped: list[Stint] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    idle_seconds: float = 0.0
    wasted_seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


class Clockwork:
    """Workers, their delays, and the server's link.

    Args:
        work: Gives out stints.
        pace: Decides whom an update waits for.
        machines: Where everyone waits for an exchange, as with updates that wait for everyone, the time on their link
            is added by `cluster.py`.
        message: Bytes of the weights, and of one report without its sketches.

    Attributes:
        now: The time.
        race: Whose reports count.
        lag: Overlap: local steps every worker takes before it needs the newest weights.
        gathered: Reports that have come and wait for an exchange behind the computation, with when they came.
    """

    def __init__(self, work: Work, pace: Pace, machines: Machines, message: float):
        self.work = work
        delays, link = machines.delays, machines.link
        rings = pace.lockstep or link.reports == "ring"
        behind = rings and not (pace.lockstep or pace.cancels) and link.ring_seconds(message, delays.workers) > 0
        self.race = Race(pace, behind)
        self.link = link
        self.delays = delays
        self.message = message
        self.charge = machines.charge
        self.server = None if link.free or rings else ServerLink(link)
        self.now = 0.0
        self.lag = 0
        self.running: dict[int, Running] = {}
        self.gathered: list[tuple[Running, float]] = []
        self.free_since = [0.0] * delays.workers
        self._draws = [0] * delays.workers
        self._ended = [0.0] * delays.workers
        self._sequence = 0
        self._heap: list[tuple[float, int, int]] = []

    def next_round(self) -> Round:
        """Start every free worker and run the clock until the next update."""
        this, opened = Round(), self.now
        for worker in self._in_turn():
            if worker not in self.running and worker not in self.race.held:
                this.idle_seconds += self.now - self.free_since[worker]
                self.free_since[worker] = self.now
                self._start(worker)
        self._run_until_complete(opened, this)
        if self.race.behind:
            self._exchange(this)
        self._stop(self.race.close(), this)
        return this

    def _run_until_complete(self, opened: float, this: Round) -> None:
        """Go on until the update, or the next exchange, has its reports; ``opened`` is when the one before was made."""
        while self.running and not self.race.complete:
            deadline = self.race.deadline
            if deadline is not None and opened + deadline < self._heap[0][0]:
                self.now = max(self.now, opened + deadline)
                self.race.expire()
            elif (running := self._next_event()) is not None:
                self._arrived(running, this)

    def _exchange(self, this: Round) -> None:
        """The reports so far pass by a ring all-reduce, and their sketches by an all-gather; the others go on."""
        self.race.depart()
        this.arrived, self.gathered = self.gathered, []
        workers, began = self.delays.workers, self.now
        arrival = began + self.link.ring_seconds(self.message, workers)
        arrival += self.link.gather_seconds(self.most_sketch_bytes(this), workers)
        this.spans.append(Span(LINK, "exchanges", began, arrival))
        while self._heap and self._heap[0][0] < arrival:  # Whoever ends as it arrives starts with the new weights.
            if (running := self._next_event()) is not None:
                self._arrived(running, this)
        self.now = arrival

    def _arrived(self, running: Running, this: Round) -> None:
        """The report of a stint is there."""
        worker = running.stint.worker
        self.free_since[worker] = self.now
        this.durations.append(running.compute / len(running.stint.batches))
        this.waits.append(self.now - running.asked)
        fate = self.race.finish(worker)
        this.spans += running.spans(self.now, None if fate is COUNTS else "late" if fate is LATE else "dropped")
        if fate is COUNTS:
            (self.gathered if self.race.behind else this.arrived).append((running, self.now))
        else:
            this.wasted_seconds += running.compute
            (this.late if fate is LATE else this.dropped).append(running.stint)
            if fate is LATE:
                self.work.give_back(running.stint)
        if not self.race.rests(fate):
            self._start(worker)

    def _in_turn(self) -> list[int]:
        """The workers, beginning with another one at every update.

        Who starts first gets the weights first over the server's link, and of reports that come at the same time its is
        the first: were it always the same worker, its examples would be visited more often than the others'.
        """
        first = self.race.version % self.delays.workers
        return [*range(first, self.delays.workers), *range(first)]

    def advance(self, seconds: float) -> None:
        """Let time pass for everyone, for an exchange that all take part in; it does not count as idling."""
        self.now += seconds
        self.free_since = [since + seconds for since in self.free_since]

    def _next_event(self) -> Running | None:
        """Go on to what happens next; the stint whose report has arrived, unless it was something else."""
        self.now, _, worker = heapq.heappop(self._heap)
        running = self.running[worker]
        if self.server is None or running.sending:
            return self.running.pop(worker)
        running.sending = True
        running.due = self.server.upload(self.now, self.message + self.sketch_bytes(running.stint), worker)
        self._push(running)
        return None

    def _start(self, worker: int) -> None:
        stint = self.work.assign(worker)
        if stint is None:
            return
        draw, wanted = self._draws[worker], self.work.wants_sketches(stint)
        self._draws[worker] += len(wanted)
        compute = self._compute(worker, draw, wanted)
        if self.lag:
            # It went straight on when its last stint ended, and waits for the weights only where it needs them.
            begin, ahead = self._ended[worker], min(self.lag, len(wanted))
            paused = begin + self._compute(worker, draw, wanted[:ahead])
            resumed = max(paused, self.now)
            computed = resumed + self._compute(worker, draw + ahead, wanted[ahead:])
            doing = (("computes", begin, paused), ("computes", resumed, computed))
        else:
            begin = self.now if self.server is None else self.server.download(self.now, self.message, worker)
            computed = begin + compute
            doing = (("receives", self.now, begin), ("computes", begin, computed))
        self._ended[worker] = computed
        self.race.start(worker)
        self._push(Running(stint, self.now, begin, compute, computed, computed, 0, doing=doing))

    def _compute(self, worker: int, draw: int, wanted: Sequence[bool]) -> float:
        """Seconds of local steps, of which the wanted ones make sketches."""
        seconds = self.delays.seconds(worker, draw, len(wanted))
        extra = self.charge.step_factor - 1
        if not extra or not any(wanted):
            return seconds
        if all(wanted):
            return seconds + extra * seconds
        return seconds + extra * sum(self.delays.seconds(worker, draw + i) for i, want in enumerate(wanted) if want)

    def sketch_bytes(self, stint: Stint) -> int:
        """Bytes of the sketches that a stint's report carries."""
        return self.charge.message_bytes(stint, self.work.wants_sketches(stint)) if self.charge.row_bytes else 0

    def most_sketch_bytes(self, this: Round) -> int:
        """Bytes of each worker's part of an all-gather: as on the torch cluster, all send as much as the longest."""
        return max((self.sketch_bytes(running.stint) for running, _ in this.arrived), default=0)

    def _push(self, running: Running) -> None:
        self._sequence += 1
        running.sequence = self._sequence
        self.running[running.stint.worker] = running
        heapq.heappush(self._heap, (running.due, running.sequence, running.stint.worker))

    def _stop(self, workers: list[int], this: Round) -> None:
        """The update does not wait for these, which are all that run."""
        if not workers:
            return
        stopped = [self.running[worker] for worker in workers]
        self.running.clear()
        self._heap.clear()
        done = [self._steps_done(running) for running in stopped]
        fates = [self.race.stopped(steps) for steps in done]
        if self.server is not None and CUT in fates:
            self.server.clear_down(self.now)  # Whoever is sending has done all of its steps, so it is heard.
        elif self.server is not None:
            self.server.clear(self.now)
        this.waits += [math.inf] * len(stopped)
        arrivals = []
        for running, steps, fate in zip(stopped, done, fates, strict=True):
            if fate is CUT:
                arrivals.append(self._cut(running, steps, this))
            else:
                self._cancel(running, this)
        self.now = max(self.now, *arrivals) if arrivals else self.now

    def _cancel(self, running: Running, this: Round) -> None:
        ran = max(self.now - running.started, 0.0)
        this.cancelled.append((running.stint, ran))
        this.wasted_seconds += ran
        this.spans += running.spans(self.now, "cancelled")
        self.work.give_back(running.stint)
        self.free_since[running.stint.worker] = self.now

    def _cut(self, running: Running, steps: int, this: Round) -> float:
        """The worker reports the steps it has done; when that has arrived."""
        worker = running.stint.worker
        done, rest = cut(running.stint, steps)
        whole = self._compute(worker, self._first_draw(running), self.work.wants_sketches(done))
        ended = running.started + whole
        if self.server is None:
            arrived = self.now
        elif running.sending:
            arrived = running.due
        else:
            arrived = self.server.upload(self.now, self.message + self.sketch_bytes(done), worker)
        if rest.batches:
            this.rests.append(rest)
            this.wasted_seconds += self.now - ended
            self.work.give_back(rest)
            receiving = [told for told in running.doing if told[0] != "computes"]
            doing = (*receiving, ("computes", running.started, ended), ("cut", ended, self.now))
            running = replace(running, stint=done, compute=whole, computed=self.now, doing=doing)
        this.spans += running.spans(arrived)
        this.durations.append(whole / steps)
        this.arrived.append((running, arrived))
        self.free_since[worker] = arrived
        return arrived

    def _first_draw(self, running: Running) -> int:
        """Where the draws of a stint under way begin."""
        return self._draws[running.stint.worker] - len(running.stint.batches)

    def _steps_done(self, running: Running) -> int:
        """How many whole steps of a stint under way have ended by now."""
        if running.computed <= self.now:
            return len(running.stint.batches)
        worker, draw, wanted = running.stint.worker, self._first_draw(running), self.work.wants_sketches(running.stint)
        prefixes = (self._compute(worker, draw, wanted[:steps]) for steps in range(1, len(wanted)))
        return sum(1 for seconds in takewhile(lambda seconds: running.started + seconds <= self.now, prefixes))

    def state_dict(self) -> State:
        return {
            "now": self.now,
            "race": self.race.state_dict(),
            "free_since": list(self.free_since),
            "draws": list(self._draws),
            "sequence": self._sequence,
            "lag": self.lag,
            "ended": list(self._ended),
            "server": None if self.server is None else [self.server.down_free, self.server.up_free],
            "running": [running.as_state() for running in self.running.values()],
            "gathered": [[running.as_state(), came] for running, came in self.gathered],
        }

    def load_state_dict(self, state: State) -> None:
        self.now = state["now"]
        self.race.load_state_dict(state["race"])
        self.free_since, self._draws = list(state["free_since"]), list(state["draws"])
        self.lag, self._ended = state["lag"], list(state["ended"])
        if self.server is not None:
            self.server.down_free, self.server.up_free = state["server"]
        self.running, self._heap = {}, []
        for saved in state["running"]:
            running = Running.from_state(saved)
            self.running[running.stint.worker] = running
            heapq.heappush(self._heap, (running.due, running.sequence, running.stint.worker))
        self._sequence = state["sequence"]
        self.gathered = [(Running.from_state(saved), came) for saved, came in state["gathered"]]
