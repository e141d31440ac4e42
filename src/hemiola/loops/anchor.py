"""The averaged numbers of a model: where the last averaging left them (the anchor), and how an exchange moves them.

The anchor is the same on every rank, to the bit. Ranks send changes from it, because a change survives a narrow wire,
and because the spread, mean ||d_i||^2 - ||mean d||^2, loses nothing to cancellation when the d_i are small.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hemiola.contracts import State
from hemiola.errors import InputError
from hemiola.loops.layout import Layout, difference
from hemiola.loops.notes import LR, Kind, Note
from hemiola.loops.pending import Pending, Snapshot
from hemiola.peers import Attendance, everyone
from hemiola.wire.exchange import Exchange
from hemiola.wire.group_mean import GroupMean, Merged
from hemiola.wire.outer import Outer


class Anchored:
    """The layout of a model, its anchor, and the exchange that may be under way.

    Attributes:
        layout: The tensors.
        pending: The exchange under way.
    """

    def __init__(
        self,
        layout: Layout,
        exchange: Exchange,
        group: dist.ProcessGroup | None,
        attendance: Attendance | None,
        outer: Outer | None = None,
    ) -> None:
        self.layout = layout
        self.pending: Pending | None = None
        self._exchange = exchange
        self._group = group
        self._attendance = attendance
        self._outer = None if outer is None or outer.plain else outer
        self._mean: GroupMean | None = None
        # The mean of one: nothing moves, and no number is touched.
        self.alone = group is None and self._outer is None
        self.anchor, self.exact_anchor = (_NOTHING, _NOTHING) if self.alone else layout.gather()

    def send(self, note: Note, delay: int) -> None:
        """Begin an exchange whose result is applied after ``delay`` more steps."""
        self.layout.check_frozen()
        if self.alone:
            snapshot = Snapshot(_NOTHING, _NOTHING, note.steps, note.local)
            merged = Merged(_NOTHING, _NOTHING, 0.0, 0.0, np.array([note.row()]), 0, 0.0)
            self.pending = Pending(lambda: merged, snapshot, note.steps)
            return
        mean = self._ready()
        lossy, exact = self.layout.gather()
        change = lossy - self.anchor, difference(exact, self.exact_anchor)
        snapshot = Snapshot(lossy, exact, note.steps, note.local)
        self.pending = Pending(lambda: self._trade(mean, change, note), snapshot, note.steps + delay)

    def _trade(self, mean: GroupMean, change: tuple[Tensor, Tensor], note: Note) -> Merged:
        if self._attendance is None:
            return mean(*change, note.row())
        with self._attendance.exchange(f"the averaging at step {note.steps}"):
            return mean(*change, note.row(), remember=note.kind != Kind.PREVIEW)

    def apply(self, step: int) -> None:
        """Move anchor and weights by the result of the exchange, ``step`` being the steps taken by now."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        if not self.alone:
            snapshot = pending.snapshot
            self.anchor, self.exact_anchor = self._after(pending)
            if step == snapshot.step:
                self.layout.scatter(self.anchor, self.exact_anchor)
            else:
                lossy, exact = self.layout.gather()
                lossy += self.anchor - snapshot.lossy
                exact += difference(self.exact_anchor, snapshot.exact)
                self.layout.scatter(lossy, exact)
        if self._exchange.momentum == "reset":
            self.layout.reset_moments()

    def drift(self) -> Tensor:
        """How far this rank's parameters have moved since the last averaging."""
        counted = self.layout.counted
        return self.layout.gather()[0][:counted] - self.anchor[:counted]

    def preview(self, note: Note) -> tuple[Merged, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Exchange without a trace: what came, the mean of all ranks' numbers, and this rank's own."""
        mean = self._ready()
        own = ahead = self.layout.gather()
        anchors = self.anchor, self.exact_anchor
        if self.pending is not None:  # see the numbers as they will be when it is applied
            snapshot = self.pending.snapshot
            anchors = self._after(self.pending)
            ahead = own[0] + (anchors[0] - snapshot.lossy), own[1] + difference(anchors[1], snapshot.exact)
        change = ahead[0] - anchors[0], difference(ahead[1], anchors[1])
        merged = self._trade(mean, change, note)
        if self._group is None:
            return merged, ahead, own
        return merged, (anchors[0] + merged.change.to(anchors[0]), anchors[1] + merged.exact.to(anchors[1])), own

    def _after(self, pending: Pending) -> tuple[Tensor, Tensor]:
        """Both anchors once this exchange is applied."""
        merged = pending.result()
        one = self._group is None  # then not even a rounding moves what the outer optimizer does not see
        exact = pending.snapshot.exact if one else self.exact_anchor + merged.exact.to(self.exact_anchor)
        if self._outer is None:
            return self.anchor + merged.change.to(self.anchor), exact
        change = merged.change.to(self.anchor, copy=True)
        if pending.applied is None:  # asked once for every exchange: the outer optimizer remembers
            own = change[: self.layout.counted]
            rates = merged.notes[merged.notes[:, 0] > 0.0, LR]
            # Nobody added anything where all have left; momentum must not move the weights then.
            pending.applied = self._outer(own, float(rates.max())) if len(rates) else own.clone()
        change[: self.layout.counted] = pending.applied
        return self.anchor + change, exact

    def _ready(self) -> GroupMean:
        """The mean; built at the first exchange, when the optimizer has its state."""
        if self._mean is None:
            if self._exchange.momentum == "average" and not self.layout.moments:
                self._add_moments(self._agree(self.layout.own_moments()))
            self._mean = GroupMean(
                self._group,
                lossy=self.layout.lossy,
                exact=self.layout.exact,
                counted=self.layout.counted,
                codec=self._exchange.codec,
                feedback=self._exchange.feedback,
            )
        return self._mean

    def _add_moments(self, names: list[str]) -> None:
        self.layout.moments = names
        self.anchor = torch.nn.functional.pad(self.anchor, (0, self.layout.lossy - self.anchor.numel()))

    def _agree(self, mine: list[str]) -> list[str]:
        """A rank whose branch had no gradient yet may lack some of the optimizer's state; all lay out the union."""
        if self._group is None:
            return mine
        return sorted({name for names in everyone(mine, self._group) for name in names})

    def state_dict(self) -> State:
        pending = None
        if self.pending is not None:
            merged = self.pending.result()
            pending = {**asdict(merged), "notes": torch.from_numpy(merged.notes)}
            pending |= {"snapshot": asdict(self.pending.snapshot), "due": self.pending.due}
            if not self.alone:
                self._after(self.pending)
            pending["applied"] = self.pending.applied
        anchor, exact_anchor = self.layout.gather() if self.alone else (self.anchor, self.exact_anchor)
        return {
            "anchor": anchor,
            "exact_anchor": exact_anchor,
            "moments": list(self.layout.moments),
            "mean": None if self._mean is None else self._mean.state_dict(),
            "pending": pending,
            "outer": None if self._outer is None else self._outer.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self._add_moments(list(state["moments"]))
        sizes = state["anchor"].numel(), state["exact_anchor"].numel()
        if sizes != (self.layout.lossy, self.layout.exact):
            expected = self.layout.lossy, self.layout.exact
            raise InputError(f"this averager's state is of another model: {sizes} numbers, this one has {expected}")
        if (state["outer"] is None) != (self._outer is None):
            raise InputError("this averager's state was saved with another outer optimizer; give the same outer=...")
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
        if not self.alone:
            self.anchor = state["anchor"].to(self.anchor)
            self.exact_anchor = state["exact_anchor"].to(self.exact_anchor)
        if state["mean"] is not None and not self.alone:
            self._ready().load_state_dict(state["mean"])
        if state["pending"] is not None:
            merged = {**state["pending"], "notes": state["pending"]["notes"].numpy()}
            due, snapshot, applied = merged.pop("due"), Snapshot(**merged.pop("snapshot")), merged.pop("applied")
            self.pending = Pending(lambda: Merged(**merged), snapshot, due)
            self.pending.applied = applied


_NOTHING = torch.empty(0)
