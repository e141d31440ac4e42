"""The rule of pace, once: who counts, who idles, who is cancelled or cut, too late or too stale.

A race is run between two updates. It knows no clock and no thread; whoever has one (the simulated cluster, Ray, the
timing-only simulation) tells it what happened, one event at a time, and does what it says::

    every worker that is free and has work:    race.start(worker)
    a worker finishes:                         fate = race.finish(worker)
        unless race.rests(fate):                   race.start(worker), at once
        when race.complete:                        merge the reports whose fate was COUNTS, then
                                                   for worker in race.close(): race.stopped(steps it has done)
                                                   race.version += 1; start over
    it has its K reports, and waits for more:  race.deadline says until when
        that has passed:                           race.expire()

Where reports travel by an exchange behind the computation (``behind``), nobody waits for it but those whose reports are
in it, and what comes meanwhile is in the next one::

    a worker finishes:                         as above; but
        when race.complete:                        race.depart(): the reports so far are under way
    the exchange has arrived:                  merge them, then race.close(); race.version += 1; start over,
                                                   but without those in race.held

Symbols: K is ``pace.k()``; the two columns of the table in `hemiola.pace.paces` are ``pace.cancels``, its two rows
``pace.idles``.
"""

from __future__ import annotations

from enum import Enum

from hemiola.contracts import Pace, State


class Fate(Enum):
    """What becomes of a stint."""

    COUNTS = "counts"  # its report is merged
    LATE = "late"  # an update has passed it by: its units come again
    STALE = "stale"  # older than the pace's ``max_staleness``: its units count as visited
    CUT = "cut"  # an update has ended it early and takes what is done; the units of the other steps come again
    CANCELLED = "cancelled"  # an update has ended it early for nothing: its units come again


COUNTS, LATE, STALE, CUT, CANCELLED = Fate.COUNTS, Fate.LATE, Fate.STALE, Fate.CUT, Fate.CANCELLED


class Race:
    """Who runs, on which version of the weights, and how many reports count so far.

    Attributes:
        version: The newest weights; whoever starts reads them.
        running: The version that each worker under way has read.
        counted: Reports that the next update has; with an exchange under way, the one after it.
        held: Idle workers whose reports are among these, and not under way yet.

    Args:
        pace: The policy.
        behind: Whether reports travel by exchanges behind the computation. Only where the others keep going.
    """

    def __init__(self, pace: Pace, behind: bool = False) -> None:
        self.pace = pace
        self.behind = behind
        self.version = 0
        self.running: dict[int, int] = {}
        self.counted = 0
        self.held: set[int] = set()
        self._under_way = False  # an exchange
        self._expired = False
        self._late: set[int] = set()  # workers under way whose reports nobody waits for any more
        self._oldest = float("inf") if pace.max_staleness is None else pace.max_staleness
        self._idles = pace.idles

    def start(self, worker: int) -> None:
        """A worker reads the newest weights and starts a stint."""
        self.running[worker] = self.version

    def finish(self, worker: int) -> Fate:
        """A worker's report is there."""
        read = self.running.pop(worker)
        if worker in self._late:
            self._late.remove(worker)
            return LATE
        if self.version + self._under_way - read > self._oldest:
            return STALE
        self.counted += 1
        if self.behind and self._idles:
            self.held.add(worker)
        return COUNTS

    def rests(self, fate: Fate) -> bool:
        """Whether a worker that has just finished with this fate waits for the update before it starts again."""
        return fate is CUT or (fate is COUNTS and (self._idles or (self.complete and not self.behind)))

    @property
    def complete(self) -> bool:
        """Whether the update has its K reports and does not wait for more."""
        return self.counted >= self.pace.k() and not self._under_way and self.deadline is None

    @property
    def deadline(self) -> float | None:
        """Where the update has its K reports and waits for more: until so many seconds after the update before."""
        if self._expired or self._under_way or self.counted < self.pace.k() or self.running.keys() <= self._late:
            return None
        return self.pace.deadline()

    def expire(self) -> None:
        """The deadline has passed."""
        self._expired = True

    def lose(self, worker: int) -> None:
        """A worker died, or nobody waits for it any more: its stint is void."""
        self.running.pop(worker, None)
        self._late.discard(worker)

    def close(self) -> list[int]:
        """The update is made: the workers whose stints it ends, by number. Call before the version goes up."""
        if not self.behind:
            self.counted = 0
        self._expired = self._under_way = False
        if not self.pace.cancels:
            return []
        if self.pace.late == "ignore":
            self._late.update(self.running)
            return []
        ended = sorted(self.running)
        self.running.clear()
        return ended

    def depart(self) -> None:
        """With ``behind``: the reports so far are under way to the update that ``close`` will make."""
        self.counted = 0
        self.held.clear()
        self._under_way = True

    def stopped(self, steps: int) -> Fate:
        """What becomes of a stint that the update has ended after so many whole steps."""
        return CUT if self.pace.late == "cut" and steps > 0 else CANCELLED

    def state_dict(self) -> State:
        """Between two updates."""
        return {
            "version": self.version,
            "running": dict(self.running),
            "late": sorted(self._late),
            "counted": self.counted,
            "held": sorted(self.held),
        }

    def load_state_dict(self, state: State) -> None:
        self.version, self.running, self._late = state["version"], dict(state["running"]), set(state["late"])
        self.counted, self.held = state["counted"], set(state["held"])
