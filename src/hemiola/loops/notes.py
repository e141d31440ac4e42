"""What every rank tells every other with each exchange, and what can be read from all notes together."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields
from enum import IntEnum

import numpy as np

from hemiola.errors import InputError


class Kind(IntEnum):
    """Why a rank comes to an exchange."""

    AVERAGE = 0  # its stint is over
    PREVIEW = 1  # it wants to see averaged weights, without a trace
    LEAVING = 2  # its loop is over; this is its last contribution
    LEFT = 3  # its loop is over and counted; it comes so that the collectives of the others match


@dataclass(frozen=True)
class Note:
    """One rank's note.

    Attributes:
        weight: What its change counts, 1 for a whole stint; `GroupMean` reads it, and sets it to 0 for a change that is
            not finite.
        kind: Why it comes.
        steps: Optimizer steps it has taken.
        local: Of these, since its last averaging.
        lr: Learning rate of the last one.
        loss: Mean training loss of the stint; NaN if it was not told.
        transfer: Seconds of its last exchange.
        pace: Seconds of a local step.
    """

    weight: float
    kind: Kind
    steps: int
    local: int
    lr: float
    loss: float
    transfer: float
    pace: float

    def row(self) -> list[float]:
        return [float(value) for value in astuple(self)]


LR = [field.name for field in fields(Note)].index("lr")  # its place in a row


class Notes:
    """The notes of all ranks, one row each; the same on every rank, so that decisions are too."""

    def __init__(self, rows: np.ndarray) -> None:
        self.all = [Note(row[0], Kind(int(row[1])), int(row[2]), int(row[3]), *map(float, row[4:8])) for row in rows]
        #: Ranks that took local steps since the last averaging.
        self.came = [note for note in self.all if note.kind != Kind.LEFT and note.local > 0]
        #: Those whose change was finite.
        self.counted = [note for note in self.came if note.weight > 0.0]

    @property
    def preview(self) -> bool:
        """Whether this exchange only showed averaged weights; all ranks must agree on that."""
        kinds = {note.kind for note in self.all} - {Kind.LEFT}
        if Kind.PREVIEW in kinds and len(kinds) > 1:
            raise RuntimeError("some ranks evaluate averaged weights while others average; do both at the same step")
        return Kind.PREVIEW in kinds

    @property
    def everyone_leaves(self) -> bool:
        return all(note.kind in (Kind.LEAVING, Kind.LEFT) for note in self.all)

    @property
    def lr(self) -> float:
        """The ranks' learning rate, which must agree unless they are at different steps of a schedule."""
        rates = [note.lr for note in self.came]
        if len({note.steps for note in self.came}) == 1 and len(set(rates)) > 1:
            listed = ", ".join(f"{rate:g}" for rate in rates)
            raise InputError(f"learning rates differ between ranks at step {self.came[0].steps}: {listed}")
        return max(rates)

    @property
    def loss(self) -> float:
        known = [note.loss for note in self.counted if math.isfinite(note.loss)]
        return math.fsum(known) / len(known) if known else math.nan

    @property
    def fastest(self) -> float:
        """Seconds of a local step of the fastest rank; 0 if nobody knows its own."""
        return min((note.pace for note in self.came if note.pace > 0.0), default=0.0)

    def delay(self, worth_waiting: float) -> int:
        """Local steps that fit into a transfer, less the share of a step that is ``worth_waiting``."""
        # The last rank to come waits for nobody, so the shortest time is that of the transfer itself.
        transfer = min(note.transfer for note in self.came)
        pace = math.fsum(note.pace for note in self.came) / len(self.came)
        return max(0, math.ceil(transfer / pace - worth_waiting)) if pace > 0.0 else 0
