"""The periods that are told when to average: full, constant, decreasing, post-local, QSR.

They look at the learning rate and at how much of the run is over, never at what the averagings measured.
``measuring.py`` holds the periods that listen.
"""

from __future__ import annotations

from hemiola.contracts import Period
from hemiola.errors import InputError
from hemiola.options import whole, within


class Full(Period):
    """Exchange gradients at every step: ordinary synchronous SGD, p = 1 and one optimizer at the server."""

    kind = "full"
    local = False

    def length(self, lr: float, progress: float) -> int:
        return 1


class Constant(Period):
    """Average every ``p`` local steps (CPSGD, local SGD).

    Args:
        p: Local steps between two averagings.
    """

    kind = "constant"

    def __init__(self, *, p: int = 4) -> None:
        self.p = whole("p", p, 1)

    def length(self, lr: float, progress: float) -> int:
        return self.p


class Decreasing(Period):
    """``start`` local steps in the first half of the run, ``end`` in the second.

    The baseline the ADPSGD paper (arXiv 2007.06134) argues against: it takes long stints exactly while the learning
    rate, and with it the spread, is large.

    Args:
        start: Period of the first half.
        end: Period of the second half, at most ``start``.
    """

    kind = "decreasing"
    needs_progress = True

    def __init__(self, *, start: int = 16, end: int = 4) -> None:
        self.start = whole("start", start, 1)
        self.end = whole("end", end, 1)
        if end > start:
            raise InputError(f"end must be at most start = {start}, got {end}")

    def length(self, lr: float, progress: float) -> int:
        return self.start if progress < 0.5 else self.end


class PostLocal(Period):
    """Average every step up to ``switch``, then every ``p`` steps (post-local SGD, arXiv 1808.07217).

    Args:
        switch: Share of the run after which stints become longer; usually where the learning rate first drops.
        p: Period after the switch.
        base: Period before it; 1 in the paper.
    """

    kind = "post-local"
    needs_progress = True

    def __init__(self, *, switch: float = 0.5, p: int = 16, base: int = 1) -> None:
        self.switch = within("switch", switch, 0.0, 1.0)
        self.p = whole("p", p, 1)
        self.base = whole("base", base, 1)

    def length(self, lr: float, progress: float) -> int:
        return self.base if progress < self.switch else self.p


class QSR(Period):
    """Quadratic synchronisation rule, p = max(base, floor((alpha / lr)^2)) (arXiv 2310.14423, equation 2).

    The rule is meant for a learning rate that falls. During a warm-up the rate is small as well, and (alpha / lr)^2
    would ask for a stint longer than the run. As in the authors' code, p = ``base`` until the rate has peaked; they are
    told when the warm-up ends, here the rate has peaked once it is below the largest one seen. A plateau does not end a
    warm-up, which may rise by epochs, so under a rate that never falls this is ``constant`` with p = ``base``. Stints
    are never longer than what is left of the run: whoever asks knows that and cuts them.

    Args:
        base: Shortest period (the paper's H_base).
        alpha: Growth coefficient; (alpha / lr)^2 exceeds ``base`` once the learning rate is below alpha / sqrt(base).
    """

    kind = "qsr"
    version = 2
    saved = ("peak", "peak_at")

    def __init__(self, *, base: int = 4, alpha: float = 0.2) -> None:
        self.base = whole("base", base, 1)
        self.alpha = within("alpha", alpha, 0.0, float("inf"))
        self.peak = 0.0  # the largest learning rate seen,
        self.peak_at = 0.0  # and the progress at which it was last seen

    def length(self, lr: float, progress: float) -> int:
        if lr >= self.peak:
            self.peak, self.peak_at = lr, max(progress, self.peak_at)
            return self.base
        # A worker that is behind the others may still be in the warm-up that they have left.
        if progress < self.peak_at or lr <= 0.0:
            return self.base
        # rounded at 12 digits first: (0.2 / 0.1)^2 must be 4 although 0.2 / 0.1 need not be 2 in binary
        return max(self.base, int(round((self.alpha / lr) ** 2, 12)))
