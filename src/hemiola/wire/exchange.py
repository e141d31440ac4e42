"""How an averaging travels, whatever the period: wire, error feedback, momentum, overlap, what each report counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hemiola.errors import InputError
from hemiola.options import one_of, whole
from hemiola.wire.codec import WIRES, Codec, quantiser

Weigh = Literal["reports", "work", "workers"]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The options every period has beside its own.

    Attributes:
        wire: Number format of the changes on the wire. Changes travel, never weights: rounding a weight to bf16
            can lose the whole change since the last averaging.
        error_feedback: Add what the wire rounded away to the next message. No effect on the fp32 wire.
        momentum: What happens to the optimizer's state at an averaging: stays ``"local"``, is ``"average"``d like the
            weights, or ``"reset"``.
        overlap: Local steps taken while the averaging is under way: a number, or ``"auto"`` for as many as the transfer
            lasts. Every delayed step costs some loss.
        balance: ``"speed"`` makes the stints of slower workers shorter, so that all arrive together.
        weigh: What a report counts in an update: as every other (``"reports"``), by its examples (``"work"``), or so
            that every worker in the update counts alike, however often it reports (``"workers"``). By default by its
            examples where stints differ by speed, else as every other.
        quantise: Bits of QSGD's stochastic rounding of gradients (arXiv 1610.02132); only for full communication.
    """

    wire: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    error_feedback: bool = True
    momentum: Literal["local", "average", "reset"] = "local"
    overlap: int | Literal["auto"] = 0
    balance: Literal["none", "speed"] = "none"
    weigh: Weigh | None = None
    quantise: Literal[4, 8] | None = None

    def __post_init__(self) -> None:
        one_of("wire", self.wire, list(WIRES))
        one_of("momentum", self.momentum, ["local", "average", "reset"])
        one_of("balance", self.balance, ["none", "speed"])
        if self.weigh is not None:
            one_of("weigh", self.weigh, ["reports", "work", "workers"])
        if isinstance(self.overlap, str):
            one_of("overlap, unless a number of steps,", self.overlap, ["auto"])
        else:
            whole("overlap", self.overlap, 0)
        if self.quantise is not None:
            quantiser(self.quantise)
            if self.wire != "fp32":
                raise InputError(f"quantise = {self.quantise} sets the wire; leave wire at 'fp32', got {self.wire!r}")

    def check(self, local: bool) -> None:
        """Refuse options that make no sense for a period with this ``Period.local``."""
        if local and self.quantise is not None:
            raise InputError(
                f"quantise = {self.quantise} rounds gradients and needs full communication; use wire = 'int8' instead"
            )
        if not local and self.balance != "none":
            raise InputError(
                f"balance = {self.balance!r} makes stints longer or shorter; full communication has steps only"
            )
        if not local and (self.momentum != "local" or self.overlap != 0):
            option = "momentum" if self.momentum != "local" else "overlap"
            raise InputError(f"{option} = {getattr(self, option)!r} needs local steps; full communication has none")

    @property
    def weighs(self) -> Weigh:
        """What a report counts by."""
        return self.weigh or ("work" if self.balance == "speed" else "reports")

    @property
    def codec(self) -> Codec:
        """What turns a change (or, with ``quantise``, a gradient) into bytes."""
        return WIRES[self.wire] if self.quantise is None else quantiser(self.quantise)

    @property
    def feedback(self) -> bool:
        """Whether a residual is kept: not where nothing is rounded, nor where the rounding is unbiased by design."""
        return self.error_feedback and self.quantise is None and self.wire != "fp32"


def as_long_as_fast(steps: int, mine: float, fastest: float) -> int:
    """Steps of a worker whose steps take ``mine`` seconds, in the time the fastest takes ``steps``.

    Times of 0 are not known yet.
    """
    return max(1, math.floor(steps * fastest / mine + 0.5)) if mine > 0 and fastest > 0 else steps
