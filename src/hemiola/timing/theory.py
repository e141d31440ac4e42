"""What theory says of the K-* family: time per update, staleness, and error as a function of time.

Dutta, Wang, Joshi, "Slow and Stale Gradients Can Win the Race" (JSAIT 2021, arXiv 2003.10579), and Dutta, Joshi, Ghosh,
Dube, Nagpurkar (AISTATS 2018, arXiv 1803.01113). Symbols: P ``workers``, K ``k``, X the time of one stint, T that of an
update, X_{K:P} the K-th smallest of P independent stints, H_n = 1 + 1/2 + ... + 1/n.

E[T] is exact for K-sync, K-batch-async, memoryless delays and the ends of the range of K. Elsewhere it is simulated
here, in a way that shares nothing with the timing-only cluster, and stands between bounds that are theorems.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

from hemiola.contracts import Pace
from hemiola.errors import InputError
from hemiola.pace.laws import Empirical, Floats
from hemiola.pace.spacings import order_statistic_mean
from hemiola.streams import stream
from hemiola.timing.delays import Delay

Variant = Literal["k-sync", "k-batch-sync", "k-async", "k-batch-async"]


def variant_of(pace: Pace) -> Variant:
    """Which of the four a pace is, whatever it is called."""
    if pace.cancels:
        return "k-sync" if pace.idles else "k-batch-sync"
    return "k-async" if pace.idles else "k-batch-async"


ROUNDS = 20_000  # updates behind a Monte Carlo value
Ageing = Literal["longer", "shorter", "same", "mixed"]


@dataclass(frozen=True)
class Expectation:
    """A mean, and how well it is known.

    Attributes:
        value: The mean; NaN where only bounds are known.
        error: Standard error of a Monte Carlo value, else 0.
        low, high: Bounds that hold for certain; both equal the value where it is exact.
        source: Where it comes from, in words.
    """

    value: float
    error: float
    low: float
    high: float
    source: str

    @property
    def exact(self) -> bool:
        return self.error == 0


def harmonic(n: int) -> float:
    """H_n, with H_0 = 0."""
    return float(special.digamma(n + 1) - special.digamma(1))


# -------------------------------------------------------------------------------------------------- time per update


def update_time(
    variant: Variant,
    delay: Delay,
    workers: int,
    k: int,
    slow: Mapping[int, float] | None = None,
    simulate: bool = True,
) -> Expectation:
    """E[T], the long-run mean time of an update.

    Args:
        variant: Which of the four.
        delay: The law of X.
        workers: P.
        k: K.
        slow: Factor on the times of some workers. Of the laws only that of K-batch-async, which needs no more than
            every worker's rate, holds for unequal workers.
        simulate: Whether to simulate where no law is exact; the value is NaN otherwise.
    """
    if k < 1 or (k > workers and variant in ("k-sync", "k-async")):
        raise InputError(f"k must be at least 1, and in {variant} at most the number of workers, {workers}, got {k}")
    factors = np.ones(workers)
    for worker, factor in (slow or {}).items():
        factors[worker] = factor
    # Renewal theory: worker j ends 1 / (factor_j E[X]) stints a second, if it never waits and nothing is thrown away.
    busy = k * delay.mean / float((1 / factors).sum())
    if variant == "k-batch-async":
        return _exact(busy, "renewal theory: K E[X] / P")
    if slow:
        low = busy if variant == "k-async" else 0.0
        return _inexact(variant, delay, factors, k, (low, math.inf), simulate)
    # A trace shows how its law ages only up to chance, which is no ground for a bound.
    ageing = new_against_used(delay) if delay.name != "trace" else "mixed"
    # Where nobody is under way when an update starts, or it makes no difference, T is the K-th of P fresh stints.
    if variant == "k-sync" or (variant == "k-async" and (k == workers or ageing == "same")):
        return _exact(kth_fastest(delay, workers, k), "order statistic: E[X_{K:P}]")
    if variant == "k-batch-sync" and k == 1:
        return _exact(kth_fastest(delay, workers, 1), "order statistic: E[X_{1:P}]")
    if variant == "k-async" and k == 1:
        return _exact(busy, "renewal theory: E[X] / P")
    if ageing == "same":
        return _exact(busy, "memoryless: K E[X] / P")
    return _inexact(variant, delay, factors, k, _bounds(variant, delay, workers, k, ageing), simulate)


def kth_fastest(delay: Delay, workers: int, k: int) -> float:
    """E[X_{K:P}]: closed forms for the laws that have one, else quadrature (exact for a trace)."""
    name, arguments = delay.name, delay.arguments
    if name in ("exponential", "shifted-exponential"):
        shift, mean = arguments if name == "shifted-exponential" else (0.0, arguments[0])
        return shift + mean * (harmonic(workers) - harmonic(workers - k))
    if name == "pareto":
        alpha, mean = arguments
        logs = special.gammaln([workers + 1, workers - k + 1 - 1 / alpha, workers - k + 1, workers + 1 - 1 / alpha])
        return float(mean * (alpha - 1) / alpha * np.exp(logs @ [1, 1, -1, -1]))
    return order_statistic_mean(delay.scipy, k, workers)


def _exact(value: float, source: str) -> Expectation:
    return Expectation(value, 0.0, value, value, source)


def _inexact(
    variant: Variant, delay: Delay, factors: Floats, k: int, bounds: tuple[float, float], simulate: bool
) -> Expectation:
    if not simulate:
        return Expectation(math.nan, math.inf, *bounds, "bounds only")
    return Expectation(*_simulate(variant, delay, factors, k), *bounds, "Monte Carlo")


def _bounds(variant: Variant, delay: Delay, workers: int, k: int, ageing: Ageing) -> tuple[float, float]:
    """Bounds for equal workers; see the table of docs/pace.md.

    K-async: work under way is between old and new. If new is longer than used, it ends sooner than fresh work would, so
    T <= X_{K:P} in the mean; if shorter, later, so T >= X_{K:P}. And no worker ends more than 1 / E[X] stints a second.

    K-batch-sync: K stints end no later than K distinct workers do, so T <= X_{K:P} in the mean. Wald's identity for the
    K + P stints begun by the end of an update gives E[T] = (K + P) E[X] / P - r, where r is the mean time they still
    have to go: r <= E[X] if new is longer than used, r >= E[X] if shorter.
    """
    every = k * delay.mean / workers
    if variant == "k-async":
        fresh = kth_fastest(delay, workers, k)
        return max(every, fresh if ageing == "shorter" else 0.0), fresh if ageing == "longer" else math.inf
    distinct = kth_fastest(delay, workers, k) if k <= workers else math.inf
    high = min(distinct, every if ageing == "shorter" else every + delay.mean)
    return max(kth_fastest(delay, workers, 1), every if ageing == "longer" else 0.0), high


# ------------------------------------------------------------------------------------------------------ Monte Carlo


def _simulate(variant: Variant, delay: Delay, factors: Floats, k: int) -> tuple[float, float]:
    """Mean time of an update and its standard error, over independent runs of many updates side by side."""
    generator = stream("theory", variant, len(factors), k)
    runs = 100
    each = max(1, ROUNDS // runs)
    waits = _async_waits if variant == "k-async" else _sync_waits
    means = waits(variant, delay, factors, k, generator, runs, each)
    return float(means.mean()), float(means.std(ddof=1) / math.sqrt(runs))


def _draw(delay: Delay, factors: Floats, generator: np.random.Generator, *shape: int) -> Floats:
    """Stints of every worker: an array of the given shape by workers."""
    draws = delay.sample(generator, math.prod(shape) * len(factors)).reshape(*shape, len(factors))
    return np.asarray(draws * factors)


def _sync_waits(
    variant: Variant, delay: Delay, factors: Floats, k: int, generator: np.random.Generator, runs: int, each: int
) -> Floats:
    """Updates are independent: the K-th smallest of everybody's first ends, or of all their ends."""
    means = np.empty(runs)
    for run in range(runs):
        ends = _draw(delay, factors, generator, each)
        everything = ends
        while variant == "k-batch-sync":
            # Go on until every worker's latest end lies beyond the K-th of them all, in every update.
            if everything.shape[1] >= k:
                latest = np.partition(everything, k - 1, axis=1)[:, k - 1]
                if (ends.min(axis=1) >= latest).all():
                    break
            ends = ends + _draw(delay, factors, generator, each)
            everything = np.concatenate((everything, ends), axis=1)
        means[run] = np.partition(everything, k - 1, axis=1)[:, k - 1].mean()
    return means


def _async_waits(
    variant: Variant, delay: Delay, factors: Floats, k: int, generator: np.random.Generator, runs: int, each: int
) -> Floats:
    """A Markov chain of the times still to go, run after run side by side; the start is left out."""
    left = _draw(delay, factors, generator, runs)
    total = np.zeros(runs)
    burn = 20 + 5 * math.ceil(len(factors) / k)
    for update in range(burn + each):
        first = np.argpartition(left, k - 1, axis=1)[:, :k]
        wait = np.take_along_axis(left, first, axis=1).max(axis=1)
        left -= wait[:, None]
        np.put_along_axis(
            left, first, np.take_along_axis(_draw(delay, factors, generator, runs), first, axis=1), axis=1
        )
        total += wait * (update >= burn)
    return total / each


# -------------------------------------------------------------------------------------------------------- staleness


def mean_staleness(variant: Variant, workers: int, k: int) -> float:
    """A counting identity, whatever the delays and however unequal the workers, in a long run with fixed P and K."""
    return {"k-async": workers / k - 1, "k-batch-async": (workers - 1) / k}.get(variant, 0.0)


def fresh_fraction(variant: Variant, delay: Delay, workers: int, k: int) -> float | None:
    """Share p_0 of reports with staleness 0; None where no law is known.

    Memoryless K-batch-async: the ends come from workers drawn at random, so the end before of the same worker is a
    geometric number of ends back, and the r-th report of an update is fresh if that is at most r.
    """
    if variant in ("k-sync", "k-batch-sync") or (variant == "k-async" and k == workers):
        return 1.0
    if new_against_used(delay) != "same":
        return None
    if variant == "k-async":
        return k / workers
    return 1 - (workers - 1) * (1 - (1 - 1 / workers) ** k) / k


def speedup(delay: Delay, workers: int) -> float:
    """Time of an update of synchronous SGD over that of asynchronous SGD: P E[X_{P:P}] / E[X]; P H_P if exponential."""
    return workers * kth_fastest(delay, workers, workers) / delay.mean


# ----------------------------------------------------------------------------------------------------------- ageing


def new_against_used(delay: Delay) -> Ageing:
    """Whether a stint that has run for a while has less time still to go than a new one takes.

    ``"longer"``: new longer than used, P(X > s + t) <= P(X > s) P(X > t) for all s, t: cancelling throws good work
    away. ``"shorter"``: the other way round; then cancelling pays. ``"same"``: memoryless. ``"mixed"``: none of these.

    A law is compared on a grid of its quantiles. A trace is put to the test of Hollander and Proschan (1972): the share
    of triples with X_1 > X_2 + X_3 is 1/4 for memoryless delays, with variance 5 / (432 n), and less for new longer
    than used; it is ``"mixed"`` within two standard deviations of 1/4.
    """
    if isinstance(delay.scipy, Empirical):
        return _ageing_of_trace(delay.scipy.values)
    grid = delay.scipy.ppf(np.linspace(0.01, 0.99, 99))
    logs = np.log(delay.scipy.sf(grid))
    with np.errstate(divide="ignore"):  # log 0 = -inf: nothing lasts that long
        excess = np.log(delay.scipy.sf(grid[:, None] + grid[None, :])) - (logs[:, None] + logs[None, :])
    longer, shorter = bool((excess <= 1e-9).all()), bool((excess >= -1e-9).all())
    if longer and shorter:
        return "same"
    return "longer" if longer else "shorter" if shorter else "mixed"


def _ageing_of_trace(values: Floats) -> Ageing:
    most = 1000  # triples of more values would take too long, and say no more
    sample = values if len(values) <= most else values[np.linspace(0, len(values) - 1, most).astype(int)]
    n = len(sample)
    if n < 3:
        return "longer" if sample[0] == sample[-1] else "mixed"
    one, two = np.triu_indices(n, 1)
    later = n - np.searchsorted(sample, sample[one] + sample[two], side="right")
    share = later.sum() / (len(one) * (n - 2))
    z = (share - 0.25) / math.sqrt(5 / (432 * n))
    return "longer" if z < -2 else "shorter" if z > 2 else "mixed"


# ------------------------------------------------------------------------------------------------- error over time


@dataclass(frozen=True)
class Problem:
    """The constants of the paper's theorems.

    Attributes:
        gap: F(w_0) - F*.
        smoothness: L, of the gradient.
        variance: sigma^2, of one example's gradient.
        batch: m, examples per report.
        rate: eta, the learning rate.
        strength: c, of strong convexity; not used by `gradient_bound`.
        drift: gamma, of asynchronous variants: E||grad F(w) - grad F(w_read)||^2 <= gamma E||grad F(w)||^2, at most 1.
    """

    gap: float
    smoothness: float
    variance: float
    batch: int
    rate: float
    strength: float = 0.0
    drift: float = 0.0

    def efficiency(self, fresh: float | None) -> float:
        """The paper's gamma' = 1 - gamma + p_0 / 2, p_0 the share of fresh reports; 1 where all are (None)."""
        return 1.0 if fresh is None else 1 - self.drift + fresh / 2

    def noise(self, k: int) -> float:
        """L eta sigma^2 / (K m)."""
        return self.smoothness * self.rate * self.variance / (k * self.batch)


def error_bound(problem: Problem, k: int, update_seconds: float, seconds: Floats, fresh: float | None = None) -> Floats:
    """Bound on E[F(w)] - F* after so many seconds, for a strongly convex F.

    With J = seconds / E[T]: floor + (1 - eta gamma' c)^J (gap - floor), floor = L eta sigma^2 / (2 c gamma' K m).

    Raises:
        InputError: The constants cannot be, or the rate is too large for the bound to hold.
    """
    _check_rate(problem, fresh)
    if not 0 < problem.strength <= problem.smoothness:
        raise InputError(
            f"strength must be above 0 and at most smoothness = {problem.smoothness} for the bound of a strongly "
            f"convex loss, got {problem.strength}"
        )
    efficiency = problem.efficiency(fresh)
    floor = problem.noise(k) / (2 * problem.strength * efficiency)
    decay = 1 - problem.rate * efficiency * problem.strength
    return np.asarray(floor + decay ** (np.asarray(seconds) / update_seconds) * (problem.gap - floor))


def gradient_bound(
    problem: Problem, k: int, update_seconds: float, seconds: Floats, fresh: float | None = None
) -> Floats:
    """Bound on the mean of E||grad F||^2 over the updates so far, for any smooth F; AdaSync minimises it over K.

    2 gap E[T] / (seconds eta gamma') + L eta sigma^2 / (K m gamma').

    Raises:
        InputError: The constants cannot be, or the rate is too large for the bound to hold.
    """
    _check_rate(problem, fresh)
    efficiency = problem.efficiency(fresh)
    elapsed = np.asarray(seconds, dtype=float)
    return np.asarray(
        2 * problem.gap * update_seconds / (elapsed * problem.rate * efficiency) + problem.noise(k) / efficiency
    )


def _check_rate(problem: Problem, fresh: float | None) -> None:
    """Refuse what the theorems do not cover.

    An update changes F by at most -eta grad.v + (L eta^2 / 2) ||v||^2 in the mean, v the merged gradients. Up to
    eta = 1 / L that is -(eta / 2) ||grad F||^2 plus noise; the p_0 / 2 of gamma' takes half of what is then left, and
    so eta = 1 / (2 L). At larger rates training may diverge, whatever the formula says.
    """
    if not problem.smoothness > 0:
        raise InputError(f"smoothness must be above 0, got {problem.smoothness}")
    if not 0 <= problem.drift <= 1:
        raise InputError(f"drift must be between 0 and 1, got {problem.drift}")
    if not problem.efficiency(fresh) > 0:
        raise InputError(f"with drift = {problem.drift} and no fresh reports there is no bound; drift must be below 1")
    most = 1 / problem.smoothness if fresh is None else 1 / (2 * problem.smoothness)
    if not 0 < problem.rate <= most:
        law = "1 / smoothness" if fresh is None else "1 / (2 smoothness) with stale reports"
        raise InputError(f"rate must be above 0 and at most {law} = {most:g} for the bound to hold, got {problem.rate}")
