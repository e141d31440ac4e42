"""Averagings that follow the clock instead of a count of steps, so that nobody waits for anybody.

Every worker computes on, step after step, on the weights it has; averagings run behind that, one after the other::

    every worker:  D = 0                                   what it has found since its last snapshot
        step ends:     D += its optimizer's step;          w += mix * that step
        mean arrives:  w += mean - mix * its own D in it   at the next end of a step
    averaging:     snapshot of D at every worker, D = 0;   mean = (1/P) sum of D, by an all-reduce

Contributions are sums: who is faster gives more, who is slow gives less. A contribution is at most one averaging and
one step old. Related: Anytime Minibatch (ICLR 2019), eager-SGD's partial collectives (arXiv 1908.04207).

Symbols: D ``contribution``, P = workers.
"""

from __future__ import annotations

from hemiola.contracts import Clock, Period
from hemiola.errors import InputError
from hemiola.options import SECONDS, quantity


class Clocked(Period):
    """Average by the clock.

    Args:
        every: The least time between the beginnings of two averagings, such as ``"50 ms"``; ``"0 s"`` for one right
            after the other.
        mix: How much of its own contribution a worker goes on with before it is averaged: 1 is local SGD without a
            barrier, 0 gathers gradients at weights that are at most one averaging old.
    """

    kind = "clocked"

    def __init__(self, *, every: str = "0 s", mix: float = 0.5) -> None:
        if not 0 <= mix <= 1:
            raise InputError(f"mix must be between 0 and 1, got {mix}")
        self.clock = Clock(quantity("every", every, SECONDS), float(mix))

    def length(self, lr: float, progress: float) -> int:
        return 1
