"""AdaSync: wait for few workers while the loss is high, for more as it falls.

Dutta, Wang, Joshi, "Slow and Stale Gradients Can Win the Race" (JSAIT 2021, arXiv 2003.10579), section V. In every time
window the K that minimises the paper's error bound at the window's end solves

    K_t^2 T'(K_t) = K_0^2 T'(K_0) F(w_0) / F(w_t)

Symbols: K_0 ``start``, P ``workers``, T(K) the mean time of an update, F(w_0) / F(w_t) ``ratio``. F is not evaluated:
a mean of the losses that arrive stands in for it. The paper's rule has five weaknesses in practice, each of which has
a guard that can be turned off by leaving its name out of ``guard``:

* ``delays``: the closed forms for K-sync and K-async assume (shifted) exponential delays. T(K) is taken from the
  measured delays instead, cancelled ones included.
* ``floor``: the paper takes the lowest loss F* for 0. Under label noise the ratio then stays small and K stops
  growing. A running estimate of F* is subtracted from both losses, while the loss is clearly slowing down.
* ``stuck``: where K_0 is unstable at this learning rate, the loss never falls and K never grows. K is raised whenever
  the loss of a window is clearly above that of the window before or no lower than at the start, or is not finite.
* ``plateau``: the rule takes K_0 for the best K at the start. Where noise at the present K holds the loss up, far above
  what a larger K reaches, the loss hardly falls and K stays. K is raised whenever the loss has not clearly fallen over
  the latest twelve windows, all of them at the present K, in which there were as many updates as K_0 makes in two: a
  large K makes few, and takes longer to show what it reaches.
* ``hysteresis``: K moves only when two windows in a row ask for a move in the same direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from hemiola.contracts import Arrivals, State
from hemiola.errors import InputError, nearest
from hemiola.pace.laws import Empirical, Floats
from hemiola.pace.spacings import fit_delays, mean_spacings
from hemiola.state import own_state

Guard = Literal["delays", "floor", "stuck", "plateau", "hysteresis"]
GUARDS: tuple[Guard, ...] = get_args(Guard)

VERSION = 3
MEMORY = 1024  # delays remembered
CLEAR = 3.0  # a change of loss is clear from this many standard errors on
HISTORY = 6  # windows a floor is seen in; over more of them a fast beginning looks like a floor nearby
PATIENCE = 12  # windows a plateau is seen in; over fewer of them a slow fall drowns in noise
SLOWING = 2.0  # a loss is slowing down from this many standard errors on; a lesser sign of a floor is taken for none
SETTLING = 2  # windows at K_0, of whose updates there must be as many before a plateau is one
CLOSEST = 0.7  # the floor is never put above this share of the lowest loss of a window


# ------------------------------------------------------------------------------------------------------- the rules


def batch_rule(start: int, ratio: float) -> float:
    """K-batch-async under any delays, K-batch-sync under exponential ones, where T'(K) is constant: K_0 sqrt(ratio)."""
    return start * math.sqrt(ratio)


def exponential_rule(start: int, workers: int, ratio: float) -> float:
    """K-sync and K-async under (shifted) exponential delays, where T'(K) is taken for 1 / (mu (P - K)).

    K^2 / (P - K) = c with c = K_0^2 / (P - K_0) ratio; the shift drops out.
    """
    c = start**2 / (workers - start) * ratio
    return (-c + math.sqrt(c * c + 4 * c * workers)) / 2


def spacing_rule(start: int, spacings: Floats, ratio: float) -> float:
    """K-sync and K-async under measured delays, with T(K+1) - T(K), ``spacings[K - 1]``, for T'(K).

    The smallest K with K^2 (T(K+1) - T(K)) >= K_0^2 (T(K_0+1) - T(K_0)) ratio, between whole numbers by interpolation,
    so that it is rounded as the closed forms are: the smallest whole K is higher by a half on average, which slowed
    AdaSync down in trials. Beyond P - 1 the cost is taken to grow like 1 / (P - K). All P workers where one more than
    K_0 costs no time.
    """
    workers = len(spacings) + 1
    costs = np.arange(1, workers) ** 2 * spacings
    wanted = costs[start - 1] * ratio
    if not wanted > 0:
        return workers
    # Equality at K_0 itself must not be lost to rounding.
    enough = np.flatnonzero(costs >= wanted * (1 - 1e-9))
    if not len(enough):
        return float(workers - costs[-1] / wanted)
    k = int(enough[0]) + 1
    if k == 1:
        return 1.0
    below, above = costs[k - 2 : k]
    return float(k - 1 + min(1.0, (wanted - below) / (above - below)))


# ------------------------------------------------------------------------------------------------------- the policy


class AdaSync:
    """Chooses K for a `Quorum` from the losses and delays that arrive.

    Args:
        start: K_0; at least 1 and below the number of workers, because waiting for all from the start leaves nothing
            to adapt (and divides by zero in the rule).
        window: How often K is reconsidered, in mean step times; not in seconds, so that one default suits every
            cluster.
        guard: True for all guards, False for none (the paper's rule), or some by name.
    """

    def __init__(self, *, start: int = 1, window: float = 20.0, guard: bool | Sequence[Guard] = True) -> None:
        if start < 1:
            raise InputError(f"start must be at least 1, got {start}")
        if not (math.isfinite(window) and window > 0):
            raise InputError(f"window must be finite and above 0, got {window}")
        names = (list(GUARDS) if guard else []) if isinstance(guard, bool) else list(guard)
        for name in names:
            if name not in GUARDS:
                raise InputError(f"guard must be among {', '.join(GUARDS)}, got {name!r}{nearest(name, list(GUARDS))}")
        self.start = start
        self.window = window
        self.guards = frozenset(names)
        self.begin(start + 1, counts_workers=True)

    def begin(self, workers: int, counts_workers: bool) -> None:
        """Start a run; ``counts_workers`` if K distinct workers count, not K batches."""
        if not self.start < workers:
            raise InputError(f"start of adasync must be below the number of workers, {workers}, got {self.start}")
        self.k = self.start
        self._workers = workers
        self._counts_workers = counts_workers
        self._delays = _Delays()
        self._first = _Tally()  # the losses of the first P reports: F(w_0)
        self._window = _Tally()
        self._opened = 0.0  # cluster time at which the present window began
        self._means: list[float] = []  # of the latest windows
        self._errors: list[float] = []  # standard errors of these means
        self._floor = 0.0
        self._ratio = 1.0
        self._held = 0  # windows since K moved
        self._updates = 0  # since K moved
        self._enough = 0  # updates before a plateau is one; 0 while K_0 has not made them
        self._asked = self.start  # what the window before asked for
        self._least = 1  # below this the loss was seen to rise

    def updated(self, seen: Arrivals) -> None:
        """Take note of an update, and reconsider K at the end of a window."""
        self._delays.add(seen.durations, seen.censored)
        for loss in map(float, seen.losses):
            if self._first.count < self._workers:
                self._first.add(loss)
            self._window.add(loss)
        self._updates += 1
        if self._window.count and seen.seconds - self._opened >= self.window * self._delays.mean():
            self._reconsider()
            self._window = _Tally()
            self._opened = float(seen.seconds)

    def _reconsider(self) -> None:
        loss, error = self._window.mean(), self._window.error()
        stuck = "stuck" in self.guards and self._is_stuck(loss, error)
        self._means = [*self._means, loss][-PATIENCE:]
        self._errors = [*self._errors, error][-PATIENCE:]
        if "floor" in self.guards:
            self._floor = (self._floor + loss_floor(self._means[-HISTORY:], self._errors[-HISTORY:])) / 2
        wanted = self._rule(loss)
        self._held += 1
        if not self._enough and len(self._means) == SETTLING:
            self._enough = self._updates
        if stuck or ("plateau" in self.guards and self._is_plateau()):
            self._least = min(self._workers, self.k + max(1, self.k // 2))
        if "hysteresis" in self.guards:
            both = sorted((wanted, self._asked))
            self._asked = wanted
            wanted = min(max(self.k, both[0]), both[1])
        wanted = max(wanted, self._least)
        if wanted != self.k:
            self.k, self._held, self._updates = wanted, 0, 0

    def _is_stuck(self, loss: float, error: float) -> bool:
        if self._window.refused:
            return True
        if not self._means:
            return False
        return loss >= self._first.mean() or loss - self._means[-1] > CLEAR * math.hypot(error, self._errors[-1])

    def _is_plateau(self) -> bool:
        return self._held >= PATIENCE and self._updates >= self._enough and not falls(self._means, self._errors)

    def _rule(self, loss: float) -> int:
        """The rule's K, rounded and clipped to [1, P]; the present K where the losses say nothing."""
        if not (loss > self._floor and self._first.mean() > self._floor):
            return self.k
        self._ratio = (self._first.mean() - self._floor) / (loss - self._floor)
        if not self._counts_workers:
            k = batch_rule(self.start, self._ratio)
        elif "delays" in self.guards:
            k = spacing_rule(self.start, mean_spacings(self._delays.law(), self._workers), self._ratio)
        else:
            k = exponential_rule(self.start, self._workers, self._ratio)
        return min(max(1, round(k)), self._workers)

    def telemetry(self) -> State:
        """What the present K was decided from."""
        return {"adasync_ratio": self._ratio, "adasync_floor": self._floor, "adasync_least": self._least}

    def state_dict(self) -> State:
        return {
            "kind": "adasync",
            "version": VERSION,
            "start": self.start,
            "k": self.k,
            "finished": list(self._delays.finished),
            "censored": list(self._delays.censored),
            "first": self._first.numbers(),
            "window": self._window.numbers(),
            "opened": self._opened,
            "means": list(self._means),
            "errors": list(self._errors),
            "floor": self._floor,
            "ratio": self._ratio,
            "held": self._held,
            "updates": self._updates,
            "enough": self._enough,
            "asked": self._asked,
            "least": self._least,
        }

    def load_state_dict(self, state: State) -> None:
        own_state(state, "adasync", VERSION)
        if state["start"] != self.start:
            raise InputError(f"the saved adasync had start = {state['start']}, this one has {self.start}")
        self.k = int(state["k"])
        self._delays = _Delays(list(state["finished"]), list(state["censored"]))
        self._first = _Tally(*state["first"])
        self._window = _Tally(*state["window"])
        self._opened = float(state["opened"])
        self._means = list(state["means"])
        self._errors = list(state["errors"])
        self._floor = float(state["floor"])
        self._ratio = float(state["ratio"])
        self._held = int(state["held"])
        self._updates = int(state["updates"])
        self._enough = int(state["enough"])
        self._asked = int(state["asked"])
        self._least = int(state["least"])


def loss_floor(means: Sequence[float], errors: Sequence[float]) -> float:
    """Where the losses of equally long windows are heading, at least 0 and below the lowest of them.

    Aitken's extrapolation of a geometric decay a, b, c, the means of three thirds of the windows:
    c - (b - c)^2 / ((a - b) - (b - c)). While the decay is not slowing down by more than the windows' standard errors
    explain there is no sign of a floor, and it is 0; once it has stopped, the floor is where the loss is.
    """
    if len(means) < 3:
        return 0.0
    (a, b, c), (da, db, dc) = _thirds(means, errors)
    before, after = a - b, b - c
    # The root is the standard error of (a - b) - (b - c).
    if before <= max(after, 0.0) or before - after < SLOWING * math.sqrt(da + 4 * db + dc):
        return 0.0
    estimate = c if after <= 0 else c - after**2 / (before - after)
    return float(min(max(0.0, estimate), CLOSEST * max(0.0, min(means))))


def falls(means: Sequence[float], errors: Sequence[float]) -> bool:
    """Whether the last third of equally long windows is clearly below the first."""
    (first, _, last), (error_of_first, _, error_of_last) = _thirds(means, errors)
    return bool(first - last > CLEAR * math.sqrt(error_of_first + error_of_last))


def _thirds(means: Sequence[float], errors: Sequence[float]) -> tuple[Floats, Floats]:
    """The means of three thirds of the windows, and the squares of their standard errors."""
    third = len(means) // 3
    losses, squares = (np.asarray(values, dtype=float)[-3 * third :] for values in (means, np.square(errors)))
    return losses.reshape(3, third).mean(axis=1), squares.reshape(3, third).sum(axis=1) / third**2


class _Tally:
    """Count, mean and standard error of finite numbers; the others are only counted."""

    def __init__(self, count: int = 0, total: float = 0.0, squares: float = 0.0, refused: int = 0) -> None:
        self.count, self.total, self.squares, self.refused = int(count), total, squares, int(refused)

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self.count, self.total, self.squares = self.count + 1, self.total + value, self.squares + value * value
        else:
            self.refused += 1

    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def error(self) -> float:
        return math.sqrt(max(0.0, self.squares / self.count - self.mean() ** 2) / self.count) if self.count else 0.0

    def numbers(self) -> list[float]:
        return [self.count, self.total, self.squares, self.refused]


class _Delays:
    """The latest delays: those that finished, and those that were cut short, with the share of each kept."""

    def __init__(self, finished: list[float] | None = None, censored: list[float] | None = None) -> None:
        self.finished: list[float] = finished or []
        self.censored: list[float] = censored or []

    def add(self, finished: Sequence[float], censored: Sequence[float]) -> None:
        self.finished.extend(float(delay) for delay in finished if math.isfinite(delay))
        self.censored.extend(float(delay) for delay in censored if math.isfinite(delay))
        while len(self.finished) + len(self.censored) > 2 * MEMORY:
            # The older half of both goes together, so that the share that was cut short stays true.
            del self.finished[: len(self.finished) // 2], self.censored[: len(self.censored) // 2]

    def mean(self) -> float:
        """Of a step: all that was lived through over the steps that finished, exact where delays are exponential.

        The finished ones alone are too short where others were cancelled: they were the fast ones.
        """
        return (sum(self.finished) + sum(self.censored)) / len(self.finished) if self.finished else 0.0

    def law(self) -> Empirical:
        return fit_delays(self.finished, self.censored)
