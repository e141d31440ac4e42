"""The periods that listen: adaptive (ADPSGD) and budget.

Both calibrate on the first part of the run, while the period stands still, and then follow the measured spread. What
they see comes from the averaging itself, so every rank sees the same numbers and picks the same period.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Literal

from hemiola.contracts import Averaging, Period, State
from hemiola.errors import InputError
from hemiola.options import one_of, whole, within
from hemiola.period.ramp import Ramp
from hemiola.state import own_state

VERSION = 2  # of the states of both

# A run of unknown length (progress stays 0) calibrates on this many averagings instead of a share of the run.
CALIBRATION_AVERAGINGS = 50

# S grows between p (independent noise) and p^2 (momentum), and the target band is 1.3 / 0.7 = 1.86 wide. A factor whose
# square is below that cannot jump across the band and oscillate: 1.25^2 = 1.56.
FACTOR = 1.25


# The robust calibration starts over when the learning rate rises by more than this factor: a warm-up is under way.
RISING = 1.1


class _Calibration:
    """A constant measured while the period stands still: the mean of all samples, or robustly.

    Robustly means the median of the later half, and never from a warm-up: what is measured depends on the learning
    rate, so a constant from a much lower rate than the run's would keep the period too short. Whenever the rate exceeds
    the one at which the calibration began by the factor `RISING`, the calibration begins again.

    Attributes:
        value: The constant, once the calibration is over.
    """

    def __init__(self, share: float, robust: bool) -> None:
        self.share = share
        self.robust = robust
        self.samples: list[float] = []
        self.value: float | None = None
        self._rate = 0.0  # at which the calibration began
        self._until = share  # of the run; later when the calibration had to start over

    def begins_again(self, lr: float, progress: float) -> bool:
        """Whether a rise of the learning rate drops everything measured so far; to be called before ``over``."""
        rises = self.robust and lr > RISING * self._rate
        again = rises and self._rate > 0.0
        if rises:
            self._rate = lr
        if again:
            self.samples, self.value = [], None
            # As long again, in proportion, as a calibration without a warm-up: one sample would be noise.
            self._until = max(self.share, (1.0 + self.share) * progress)
        return again

    def over(self, progress: float) -> bool:
        if self.value is not None:
            return True
        if progress > 0.0:
            return progress >= min(self._until, 1.0)
        return len(self.samples) >= CALIBRATION_AVERAGINGS

    def add(self, sample: float) -> None:
        self.samples.append(sample)

    def settle(self) -> float | None:
        """The constant; None without a single sample. The samples are dropped, later ones cannot change it."""
        if self.value is None and self.samples:
            self.value = self.so_far()
            self.samples = []
        return self.value

    def so_far(self) -> float | None:
        if self.value is not None or not self.samples:
            return self.value
        if self.robust:
            return median(self.samples[len(self.samples) // 2 :])
        return math.fsum(self.samples) / len(self.samples)

    def state_dict(self) -> State:
        return {"samples": list(self.samples), "value": self.value, "rate": self._rate, "until": self._until}

    def load_state_dict(self, state: State) -> None:
        self.samples, self.value = list(state["samples"]), state["value"]
        self._rate, self._until = state["rate"], state["until"]


class Adaptive(Period):
    """ADPSGD: keep the spread proportional to the learning rate (Jiang and Agrawal, arXiv 2007.06134).

    The paper's loop, written from our recollection of its pseudo-code (only its abstract could be read here), with
    gamma_k the learning rate (``seen.lr``), S_k the spread and K the length of the run::

        p = p_init; C2 = 0                                   # start
        every p local steps:
            average; measure S_k
            if k < K_s:                C2 = running mean of S_k / gamma_k      # K_s = sample * K
            elif S_k < 0.7 gamma_k C2:  p += 1                                 # low
            elif S_k > 1.3 gamma_k C2:  p -= 1, never below 1                  # high

    The price of local steps in the descent bound is the spread weighted by the learning rate; S <= gamma C2 keeps the
    rate. S grows like p gamma^2, so p settles near a constant over gamma, and stays where it is under a constant gamma.

    With ``guard=False`` exactly the loop above runs. The guards:

    * ``"c2"``: C2 is the median of the later half of the calibration. The running mean includes the first steps of the
      run, where gradients are much larger than ever after; the target comes out too high and p races away. And C2 is
      not measured in a warm-up: S / gamma is proportional to gamma, the target would come out too low and p fall to 1.
    * ``"ramp"``: p starts at 1 and doubles up to ``start`` only while local steps do no harm (see `Ramp`). Where
      ``start`` itself breaks the training, the paper's rule calibrates C2 on the broken run.
    * a ``cap`` of 16 ``start``, unless another is given.

    Two cases this leaves open, in both modes: an averaging whose numbers are not finite, whose learning rate is
    zero or whose stint was cut short (the end of an epoch or of the run) decides nothing; and when the calibration is
    over without a sample, the first averaging after it becomes the sample.

    Args:
        start: Period during the calibration (p_init).
        low: Below ``low`` times the target the period grows.
        high: Above ``high`` times the target the period shrinks.
        sample: Share of the run that calibrates C2. In a run of unknown length, the first 50 averagings do.
        growth: ``"step"`` moves p by 1, ``"factor"`` by a factor of 1.25 and at least 1: after a tenfold drop of the
            learning rate steps of 1 may not arrive before the run ends.
        guard: All guards, none, or the name of the only one wanted.
        cap: Longest period; None for 16 ``start`` with a guard and no limit without.
    """

    kind = "adaptive"

    def __init__(
        self,
        *,
        start: int = 4,
        low: float = 0.7,
        high: float = 1.3,
        sample: float = 0.25,
        growth: Literal["step", "factor"] = "step",
        guard: bool | Literal["c2", "ramp"] = True,
        cap: int | None = None,
    ) -> None:
        self.start = whole("start", start, 1)
        self.low = within("low", low, 0.0, 1.0)
        self.high = within("high", high, 1.0, math.inf)
        self.growth = one_of("growth", growth, ["step", "factor"])
        if not isinstance(guard, bool):
            one_of("guard", guard, ["c2", "ramp"])
        if cap is not None and whole("cap", cap, 1) < start:
            raise InputError(f"cap must be at least start = {start}, got {cap}")
        self.cap = cap if cap is not None or guard is False else 16 * start
        self._calibration = _Calibration(within("sample", sample, 0.0, 1.0), robust=guard in (True, "c2"))
        self._ramp = Ramp(start) if guard in (True, "ramp") else None
        self._p = start if self._ramp is None else self._ramp.p

    def length(self, lr: float, progress: float) -> int:
        return self._p

    def averaged(self, seen: Averaging) -> None:
        if not _usable(seen) or seen.local_steps < self._p:
            return
        if self._ramp is not None and not self._ramp.over:
            self._p = self._ramp.climb(seen)
            return
        if self._calibration.begins_again(seen.lr, seen.progress):
            self._p = self._calibrates_at
            if seen.local_steps != self._p:
                return
        if not self._calibration.over(seen.progress):
            self._calibration.add(seen.spread / seen.lr)
            return
        c2 = self._calibration.settle()
        if c2 is None:
            self._calibration.add(seen.spread / seen.lr)
        elif seen.spread < self.low * seen.lr * c2:
            self._p = self._longer()
        elif seen.spread > self.high * seen.lr * c2:
            self._p = self._shorter()

    @property
    def _calibrates_at(self) -> int:
        return self.start if self._ramp is None else self._ramp.p

    def _longer(self) -> int:
        longer = self._p + 1 if self.growth == "step" else max(self._p + 1, int(self._p * FACTOR))
        return longer if self.cap is None else min(longer, self.cap)

    def _shorter(self) -> int:
        shorter = self._p - 1 if self.growth == "step" else min(self._p - 1, math.ceil(self._p / FACTOR))
        return max(1, shorter)

    def telemetry(self) -> State:
        c2 = self._calibration.so_far()
        return {} if c2 is None else {"c2": c2}

    def state_dict(self) -> State:
        ramp = None if self._ramp is None else self._ramp.state_dict()
        return {
            "kind": self.kind,
            "version": VERSION,
            "p": self._p,
            "calibration": self._calibration.state_dict(),
            "ramp": ramp,
        }

    def load_state_dict(self, state: State) -> None:
        state = own_state(state, self.kind, VERSION)
        if (state["ramp"] is None) != (self._ramp is None):
            raise InputError("this state of 'adaptive' was saved with another guard; give the same options as then")
        self._p = state["p"]
        self._calibration.load_state_dict(state["calibration"])
        if self._ramp is not None:
            self._ramp.load_state_dict(state["ramp"])


class Budget(Period):
    """The period that spends a given number of averagings best: p* = sqrt(kappa / (gamma_k S_k / p_k)).

    A step at period p adds about gamma s p to the weighted spread, where s = S_k / p_k is the spread one local step
    makes, and costs 1/p of an averaging. Minimising gamma s p + kappa / p gives p*. kappa, the price of an averaging in
    units of weighted spread, is set so that ``start`` is optimal during the calibration (the first quarter of the run,
    median of its later half): kappa = start^2 gamma s. Afterwards p* = start sqrt((gamma s) then / (gamma s) now):
    ``start`` buys the number of averagings, the rule distributes them.

    p* is a real number; what rounding adds or takes away is carried to the next stint, so that the mean period is p*.

    Args:
        start: Period during the calibration; need not be whole.
        cap: Longest period. p* grows like gamma^(-3/2), so a drop of the learning rate soon reaches it.
    """

    kind = "budget"

    def __init__(self, *, start: float = 4.0, cap: int = 64) -> None:
        if not 1 <= start < math.inf:
            raise InputError(f"start must be at least 1, got {start:g}")
        if whole("cap", cap, 1) < start:
            raise InputError(f"cap must be at least start = {start:g}, got {cap}")
        self.start = float(start)
        self.cap = cap
        self._calibration = _Calibration(0.25, robust=True)
        self._wanted = self.start
        self._carry = 0.0
        self._p = self._next()

    def length(self, lr: float, progress: float) -> int:
        return self._p

    def averaged(self, seen: Averaging) -> None:
        if _usable(seen) and seen.local_steps >= min(self._p, self.start):
            price = seen.lr * seen.spread / seen.local_steps
            if self._calibration.begins_again(seen.lr, seen.progress):
                self._wanted = self.start
            if not self._calibration.over(seen.progress):
                self._calibration.add(price)
            else:
                base = self._calibration.settle()
                if base is None:
                    self._calibration.add(price)
                else:
                    self._wanted = self._best(base, price)
        self._p = self._next()

    def _best(self, base: float, price: float) -> float:
        if price <= 0.0 or base / price > (self.cap / self.start) ** 2:
            return float(self.cap)
        return max(1.0, self.start * math.sqrt(base / price))

    def _next(self) -> int:
        exact = self._wanted + self._carry
        p = min(self.cap, max(1, round(exact)))
        self._carry = max(-0.5, min(0.5, exact - p))
        return p

    def telemetry(self) -> State:
        base = self._calibration.so_far()
        return {} if base is None else {"kappa": self.start**2 * base}

    def state_dict(self) -> State:
        return {
            "kind": self.kind,
            "version": VERSION,
            "p": self._p,
            "wanted": self._wanted,
            "carry": self._carry,
            "calibration": self._calibration.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        state = own_state(state, self.kind, VERSION)
        self._p, self._wanted, self._carry = state["p"], state["wanted"], state["carry"]
        self._calibration.load_state_dict(state["calibration"])


def _usable(seen: Averaging) -> bool:
    return seen.lr > 0.0 and math.isfinite(seen.lr) and math.isfinite(seen.spread) and seen.spread >= 0.0
