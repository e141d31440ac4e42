"""The torch cluster under a clocked period: a thread of every rank averages, and nobody waits.

As in `cluster.py` every rank runs the whole training loop and builds the same updates; only, ranks come to an update at
different moments. What all of them must know alike follows from averagings alone:

    who has which batches    Every rank deals everybody's, when it applies an averaging. A rank works through its stock
                             and tells how many it has done; the stock lasts for several averagings, so nobody waits.
    the time                 The latest of what ranks say they have spent.
    stop, checkpoint         Who wants one says so; then all ranks rest (`hemiola.wire.behind`), what is left of their
                             stocks goes back, and nothing is under way when the state is taken.

A rank computes at the newest weights that it has applied, plus ``mix`` times what it has found itself and is not in
them yet. One that meets something that is not finite takes back what it has found since the last snapshot.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hemiola.clusters.merging import together
from hemiola.clusters.step_times import MeasuredTimes
from hemiola.clusters.stints import Sketches, StintRunner
from hemiola.clusters.torch.cluster import KIND, VERSION, Wishes
from hemiola.clusters.torch.group import gather, share
from hemiola.clusters.torch.sketches import gather_sketches
from hemiola.contracts import FOLLOWED, Clock, Directions, Report, Span, State, Stint, Update, Work
from hemiola.errors import InputError
from hemiola.peers import Attendance, new_group
from hemiola.plan import Plan
from hemiola.state import own_state
from hemiola.timing.delays import DelayStreams
from hemiola.wire.behind import Behind, Came, Stance
from hemiola.wire.group_mean import GroupMean

FIRST = 1  # steps in an averaging, before anything is known of speeds; a slow rank must not hold many batches


@dataclass
class _Part:
    """What a rank has done since its last snapshot: the sum of its changes, and about them."""

    change: Tensor
    steps: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    read: int = 0  # the version that the first of the steps was computed at
    finite: bool = True
    rows: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Note:
    """What every rank tells every other beside its part; `GroupMean` reads the first number."""

    finite: float
    stance: float
    steps: float
    rows: float
    loss: float
    seconds: float
    read: float
    pace: float
    elapsed: float
    exchange: float
    stop: float
    checkpoint: float


@dataclass(frozen=True)
class _Arrival:
    """An averaging: the mean, all ranks' notes and rows of sketches, and what this rank had put in."""

    change: Tensor
    spread: float
    notes: list[_Note]
    rows: list[Tensor]
    bytes: int
    own: Tensor


class ClockedCollectiveCluster:
    """This process's part of a torch cluster whose averagings follow the clock.

    Args:
        plan: What is run.
        clock: Of its period: when averagings begin, and the mix.
        work: Gives out stints and holds the weights.
        runner: Computes them.
        delays: The least time of a local step; None for none.
        timeout: Seconds after which a rank that does not come to an averaging is given up.

    Attributes:
        wishes: What this rank asks for.
        granted: What some rank had asked for, once all ranks rest; the same on every rank.
        at_rest: Whether the state may be taken now.
    """

    def __init__(
        self,
        plan: Plan,
        clock: Clock,
        work: Work,
        runner: StintRunner,
        delays: DelayStreams | None,
        timeout: float,
    ) -> None:
        self.work = work
        self.runner = runner
        self.delays = delays
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        self.wishes, self.granted = Wishes(), Wishes()
        self.at_rest = True
        # A group of its own: averagings must not mix with what ranks exchange when they rest.
        self._group = new_group(timeout)
        self._attendance = Attendance(self._group)
        size = runner.flat.size
        self.mean = GroupMean(
            self._group,
            lossy=size,
            exact=runner.initial.numel() - size,
            codec=plan.exchange.codec,
            feedback=plan.exchange.feedback,
            seed=plan.seed,
        )
        # Running means of BatchNorm move towards what they see; gathered many times at one place they would overshoot.
        self._mix = torch.full_like(runner.initial, clock.mix)
        self._mix[size:] = 1.0
        self._stocks: list[deque[tuple[Stint, bool]]] = [deque() for _ in range(self.workers)]  # and: sketches wanted
        self._used = [deque([FIRST], maxlen=4) for _ in range(self.workers)]  # steps in their last averagings
        self._done = 0  # of its own stock, what this rank has computed already
        self._ahead = torch.zeros_like(runner.initial)  # what it has found and is not in the weights yet
        self._part = _Part(torch.zeros_like(runner.initial))
        self._arrived: deque[_Arrival] = deque()
        self._version = 0
        self._resting = False
        self._started = False
        self._seconds = 0.0
        self._elapsed = 0.0  # in training, by this rank's own clock, before it came back to it at `_back`
        self._back: float | None = None
        self._transfer = 0.0
        self._pace: deque[float] = deque(maxlen=16)
        self._drawn = 0
        self._measured = MeasuredTimes(self.workers)
        self._behind: Behind[tuple[_Part, _Note], _Arrival] = Behind(self._snapshot, self._average, clock.every)

    @property
    def now(self) -> float:
        """Seconds spent in training by the rank that has spent most; the same on every rank."""
        return self._seconds

    def live_versions(self) -> set[int]:
        """Steps always read the newest."""
        return set()

    def publish(self) -> None:
        """Every rank has computed the new weights itself."""
        self._version += 1

    def settle(self) -> None:
        """The run is over, on every rank: come to averagings until all have said so."""
        if self._started:
            self._behind.want(Stance.LEAVING)
            self._behind.go_on()
            self._behind.rest(Stance.LEAVING)
        self._attendance.close()

    def close(self) -> None:
        """Begin no more averagings; after `settle` there are none."""
        self._behind.stop()
        self._attendance.close()

    # --------------------------------------------------------------------------------------------------------- collect

    def collect(self) -> Update:
        """Compute on until an averaging has come in which somebody had something."""
        self._back = time.perf_counter()
        try:
            self._begin()
            while True:
                while self._arrived:
                    update = self._merge(self._arrived.popleft())
                    if update.reports or update.refused or self.at_rest:
                        return update
                if self._resting or self._done == len(self._stocks[self.rank]):
                    self._arrived.extend(self._behind.wait())
                else:
                    self._step(*self._stocks[self.rank][self._done])
                    self._arrived.extend(self._behind.arrived())
        finally:
            with self._behind.lock:
                self._elapsed, self._back = self._time(), None

    def _time(self) -> float:
        return self._elapsed + (0.0 if self._back is None else time.perf_counter() - self._back)

    def _begin(self) -> None:
        """Deal, and go on after a rest; the first time, agree on what ghosts are taken along, and start averaging."""
        if not self._started and (mine := self.work.directions) is not None:
            self.runner.adopt(Directions(mine.epoch, share(mine.found)))
        if self.at_rest:
            self._resting = False
        self._deal()
        if not self._started:
            self._started = True
            self._behind.start()
        elif self.at_rest:
            self._behind.go_on()
        self.at_rest = False

    def _deal(self) -> None:
        """Fill everybody's stock, in turn; not while all are about to give theirs back."""
        # One averaging is under way, one is being gathered for, and the next is dealt for when this one is applied.
        wanted = [
            0 if self._resting else 3 * max(used) + 1 - len(stock)
            for used, stock in zip(self._used, self._stocks, strict=True)
        ]
        for turn in range(max(wanted)):
            for worker, stock in enumerate(self._stocks):
                if turn < wanted[worker] and (stint := self.work.assign(worker)) is not None:
                    stock.append((stint, any(self.work.wants_sketches(stint))))
                    self._version = stint.version

    def _step(self, stint: Stint, wanted: bool) -> None:
        """One step of this rank, on the newest weights it has."""
        began = time.perf_counter()
        start = self.work.read(self._version) + self._mix * self._ahead
        rows, finished = self.runner.changes([start], [stint], [(wanted,)])
        if self.delays is not None:
            ends = began + self.delays.seconds(self.rank, self._drawn, 1)
            self._drawn += 1
            time.sleep(max(0.0, ends - time.perf_counter()))
        seconds = time.perf_counter() - began
        self._pace.append(seconds)
        self._done += 1
        with self._behind.lock:
            part = self._part
            part.read = part.read if part.steps else self._version
            part.steps += 1
            part.seconds += seconds
            part.rows += [sketch for sketch in finished.sketches[0] if sketch is not None]
            if finished.finite[0]:
                part.loss += finished.losses[0]
                part.change += rows[0]
                self._ahead += rows[0]
            else:
                self._ahead -= part.change
                part.change, part.finite = torch.zeros_like(part.change), False

    # ---------------------------------------------------------------------------------------------- the thread's side

    def _snapshot(self, stance: Stance) -> tuple[_Part, _Note]:
        part, self._part = self._part, _Part(torch.zeros_like(self._part.change))
        note = _Note(
            finite=float(part.finite),
            stance=stance,
            steps=part.steps,
            rows=sum(len(rows) for rows in part.rows),
            loss=part.loss / max(part.steps, 1),
            seconds=part.seconds,
            read=part.read,
            pace=float(np.median(self._pace)) if self._pace else 0.0,
            elapsed=self._time(),
            exchange=self._transfer,
            stop=self.wishes.stop,
            checkpoint=self.wishes.checkpoint,
        )
        return part, note

    def _average(self, sent: tuple[_Part, _Note]) -> Came[_Arrival]:
        part, note = sent
        size = self.runner.flat.size
        with self._attendance.exchange(f"averaging {self.mean.count + 1}"):
            began = time.perf_counter()
            merged = self.mean(part.change[:size], part.change[size:], [float(x) for x in vars(note).values()])
            notes = [_Note(*row) for row in merged.notes.tolist()]
            rows, sketch_bytes = gather_sketches(
                self.runner, part.rows, [int(other.rows) for other in notes], self._group
            )
            self._transfer = time.perf_counter() - began
        change = torch.cat([merged.change, merged.exact]).cpu().to(part.change.dtype)
        paces = [other.pace for other in notes if other.stance == Stance.COMPUTING and other.pace > 0.0]
        return Came(
            _Arrival(change, merged.spread, notes, rows, merged.bytes + sketch_bytes, part.change),
            frozenset(Stance(int(other.stance)) for other in notes),
            min(paces, default=0.0),
        )

    # ---------------------------------------------------------------------------------------------------------- merging

    def _merge(self, arrival: _Arrival) -> Update:
        """The update that this averaging makes; the same on every rank."""
        notes = arrival.notes
        self._ahead -= arrival.own
        self._done -= int(notes[self.rank].steps)
        self._pass_time(notes)
        reports, refused = [], []
        for worker, note in enumerate(notes):
            if not (steps := int(note.steps)):
                continue
            taken = [self._stocks[worker].popleft() for _ in range(steps)]
            stint = together([stint for stint, _ in taken])
            if not note.finite:
                refused.append(stint)
                continue
            staleness = self._version - int(note.read)
            sketches = _batch_by_batch(arrival.rows[worker], taken)
            reports.append(Report(stint, staleness, note.seconds, note.loss, sketches))
        if any(note.stop or note.checkpoint for note in notes) and not self._resting:
            self._resting = True
            self._behind.want(Stance.RESTING)
        self.granted = Wishes()
        if all(note.stance != Stance.COMPUTING for note in notes):
            self.at_rest = True
            self._give_back()
            self.granted = Wishes(any(note.stop for note in notes), any(note.checkpoint for note in notes))
        return Update(
            reports=reports,
            change=arrival.change if reports else None,
            seconds=self._seconds,
            spread=arrival.spread,
            refused=refused,
            bytes_per_worker=arrival.bytes,
            durations=[note.seconds / note.steps for note in notes if note.steps],
            spans=[
                Span(worker, "computes", max(0.0, self._seconds - note.seconds), self._seconds)
                for worker, note in enumerate(notes[:FOLLOWED])
                if note.steps
            ],
        )

    def _give_back(self) -> None:
        """Nobody computes: what is left of the stocks goes back to where it came from, and is dealt again later."""
        for stock in self._stocks:
            while stock:
                self.work.give_back(stock.pop()[0])

    def _pass_time(self, notes: list[_Note]) -> None:
        self._seconds = max(self._seconds, *(note.elapsed for note in notes))
        exchange = min(note.exchange for note in notes)
        if exchange:
            self._measured.exchange(exchange)
        for worker, note in enumerate(notes):
            if note.steps:
                self._used[worker].append(int(note.steps))
                self._measured.step(worker, note.seconds / note.steps)

    def telemetry(self) -> State:
        """Measured seconds of local steps, and of exchanges."""
        measured = self._measured.take()
        return measured if measured["step_seconds"] else {}

    # ----------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """All ranks must call this together, at rest. Whole on rank 0; elsewhere ``ranks`` is empty."""
        assert self.at_rest, "while ranks compute, what they have found is nowhere else"
        mine = {"runner": self.runner.state_dict(), "mean": self.mean.state_dict(), "drawn": self._drawn}
        return {
            "kind": KIND,
            "version": VERSION,
            "workers": self.workers,
            "seconds": self._seconds,
            "exchange_seconds": 0.0,
            "ranks": gather(mine) or [],
        }

    def load_state_dict(self, state: State) -> None:
        own_state(state, KIND, VERSION)
        if state["workers"] != self.workers:
            raise InputError(f"the saved cluster had {state['workers']} workers, this one has {self.workers}")
        mine = state["ranks"][self.rank]
        self._seconds = self._elapsed = state["seconds"]
        self._drawn = mine["drawn"]
        self.runner.load_state_dict(mine["runner"])
        if mine["mean"] is not None:
            self.mean.load_state_dict(mine["mean"])


def _batch_by_batch(rows: Tensor, taken: list[tuple[Stint, bool]]) -> Sketches:
    """A worker's rows, batch by batch."""
    counts = [len(stint.batches[0].units) if wanted else 0 for stint, wanted in taken]
    pieces = iter(torch.split_with_sizes(rows, [count for count in counts if count]))
    return tuple(next(pieces) if count else None for count in counts)
