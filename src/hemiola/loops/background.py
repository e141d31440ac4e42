"""Averagings that follow the clock, behind a loop of one's own: nobody waits for anybody.

Every rank computes on. A thread beside it runs averagings one after the other (`hemiola.wire.behind`).
`hemiola.period.clocked` has the rule; here, with S the weights all ranks share::

    after an optimizer step s:   D += s;  weights = before + mix * s
                                 for every averaging that has come back:  S += mean;  weights += mean - mix * own part
    thread, for ever:            part, D = D, 0;  mean = (1/P) sum of parts

so that at any time weights = S + mix * (what this rank has found and is not in S yet). Buffers go along with mix = 1:
running means move towards what they see, and gathered several times at one place they would overshoot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hemiola.contracts import Clock, State
from hemiola.errors import InputError
from hemiola.loops.layout import Layout, difference
from hemiola.loops.notes import Kind, Note, Notes
from hemiola.peers import Attendance
from hemiola.wire.behind import Behind, Came, Stance
from hemiola.wire.exchange import Exchange
from hemiola.wire.group_mean import GroupMean, Merged

Numbers = tuple[Tensor, Tensor]  # the lossy and the exact vector of `Layout`

KINDS = {Stance.COMPUTING: Kind.AVERAGE, Stance.RESTING: Kind.PREVIEW, Stance.LEAVING: Kind.LEAVING}
STANCES = {kind: stance for stance, kind in KINDS.items()}


@dataclass(frozen=True)
class Arrival:
    """An averaging that has come back.

    Attributes:
        merged: What came.
        part: What this rank had put in.
        notes: Of all ranks.
        counted: Whether this rank's part was finite and counts.
    """

    merged: Merged
    part: Numbers
    notes: Notes
    counted: bool


class BackgroundAveraging:
    """What the loop's side does with the averagings of its thread.

    Args:
        layout: The tensors.
        exchange: How they travel.
        clock: When averagings begin, and the mix.
        group: The ranks; no other collective may use it meanwhile.
        attendance: Of the group.
    """

    def __init__(
        self, layout: Layout, exchange: Exchange, clock: Clock, group: dist.ProcessGroup, attendance: Attendance
    ) -> None:
        self.layout = layout
        self._clock = clock
        self._attendance = attendance
        self._rank = dist.get_rank(group)
        self._mean = GroupMean(
            group, lossy=layout.lossy, exact=layout.exact, codec=exchange.codec, feedback=exchange.feedback
        )
        self._shared = layout.gather()  # S, as far as it is applied here
        self._stored = layout.gather()  # what the model holds
        self._found = self._zeros()  # D
        self._note = Note(1.0, Kind.AVERAGE, 0, 0, 0.0, float("nan"), 0.0, 0.0)
        self._behind: Behind[tuple[Numbers, Note], Arrival] = Behind(self._snapshot, self._average, clock.every)
        self.start, self.stop, self.go_on = self._behind.start, self._behind.stop, self._behind.go_on

    # ------------------------------------------------------------------------------------------------- the loop's side

    def stepped(self, note: Note) -> list[Arrival]:
        """After an optimizer step: keep it, mix it in, and apply what has come back."""
        step, before = self._take(note)
        arrived = self._behind.arrived()
        mix = self._clock.mix
        weights = (before[0] + mix * step[0], before[1] + step[1])
        if arrived:
            self.layout.check_frozen()
            weights = self._apply(arrived, weights)
        if arrived or mix != 1.0:
            self._store(weights)
        else:
            self._stored = weights
        return arrived

    def rest(self, kind: Kind) -> list[Arrival]:
        """Wait until all ranks want to rest (or to leave), and take the weights that they share then."""
        self._take()
        arrived = self._behind.rest(STANCES[kind])
        self._apply(arrived, self._stored)
        self.take_shared()
        return arrived

    def take_shared(self) -> None:
        """Give the model the weights of the last averaging that came back, which other ranks hold, too."""
        self._store((self._shared[0].clone(), self._shared[1].clone()))

    def _take(self, note: Note | None = None) -> tuple[Numbers, Numbers]:
        """Add what the model has changed by to D; return that and what was before."""
        now, before = self.layout.gather(), self._stored
        step = now[0] - before[0], difference(now[1], before[1])
        with self._behind.lock:
            self._found[0].add_(step[0])
            self._found[1].add_(step[1])
            if note is not None:
                self._note = replace(note, local=self._note.local + note.local)
        self._stored = now
        return step, before

    def _apply(self, arrived: list[Arrival], weights: Numbers) -> Numbers:
        """Move S, and the weights with it; a rank whose part was not finite begins again from S."""
        lost = False
        for arrival in arrived:
            merged, (part, exact_part) = arrival.merged, arrival.part
            mean, exact_mean = merged.change.to(part), merged.exact.to(exact_part)
            self._shared = self._shared[0] + mean, self._shared[1] + exact_mean
            weights = weights[0] + (mean - self._clock.mix * part), weights[1] + (exact_mean - exact_part)
            lost = lost or not arrival.counted
        if lost:
            with self._behind.lock:
                self._found = self._zeros()
            weights = self._shared[0].clone(), self._shared[1].clone()
        return weights

    def _store(self, weights: Numbers) -> None:
        self.layout.scatter(*weights)
        # What the model holds may be rounded: bf16 parameters, whole-number counters.
        self._stored = self.layout.gather()

    def _zeros(self) -> Numbers:
        return torch.zeros_like(self._shared[0]), torch.zeros_like(self._shared[1])

    # ------------------------------------------------------------------------------------------------ the thread's side

    def _snapshot(self, stance: Stance) -> tuple[Numbers, Note]:
        part, self._found = self._found, self._zeros()
        note, self._note = replace(self._note, kind=KINDS[stance]), replace(self._note, local=0)
        return part, note

    def _average(self, sent: tuple[Numbers, Note]) -> Came[Arrival]:
        part, note = sent
        with self._attendance.exchange(f"averaging {self._mean.count + 1}"):
            merged = self._mean(*part, note.row())
        notes = Notes(merged.notes)
        paces = [other.pace for other in notes.all if other.kind == Kind.AVERAGE and other.pace > 0.0]
        return Came(
            Arrival(merged, part, notes, notes.all[self._rank].weight > 0.0),
            frozenset(STANCES[other.kind] for other in notes.all),
            min(paces, default=0.0),
        )

    # ----------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """Of this rank; the ranks must be at rest, so that all save the same S."""
        if not self._behind.at_rest:
            raise InputError("under a period that follows the clock, save the state inside `with averager.averaged():`")
        return {"anchor": self._shared[0], "exact_anchor": self._shared[1], "mean": self._mean.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Before `start`."""
        sizes = state["anchor"].numel(), state["exact_anchor"].numel()
        if sizes != (self.layout.lossy, self.layout.exact):
            expected = self.layout.lossy, self.layout.exact
            raise InputError(f"this averager's state is of another model: {sizes} numbers, this one has {expected}")
        self._shared = state["anchor"].to(self._shared[0]), state["exact_anchor"].to(self._shared[1])
        self._mean.load_state_dict(state["mean"])
        self.take_shared()
