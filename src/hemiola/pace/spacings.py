"""Order statistics: how long the K-th fastest of P workers takes, and the law of delays that were seen only in part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import scipy  # its parts are imported when they are first used: scipy.stats takes a second
from scipy import special

from hemiola.pace.laws import Empirical, Floats, Law

TAIL_POINTS = 32  # what was censored beyond the longest finished delay is stood in for by this many points


def order_statistic_mean(law: Law, k: int, workers: int) -> float:
    """E[X_{K:P}], the mean of the K-th smallest of P independent draws; exact for an `Empirical` law.

    X_{K:P} <= x exactly when at least K of P draws are, which has probability I_{F(x)}(K, P - K + 1), the regularised
    incomplete beta function. Hence E[X_{K:P}] is the integral of 1 - I_{F(x)} over x, a sum for a discrete law. For the
    others it is E[isf(U)]: the survival probability U of X_{K:P} has the law Beta(P - K + 1, K).
    """
    if isinstance(law, Empirical):
        later = special.betaincc(k, workers - k + 1, law.cdf(law.values)[:-1])
        return float(law.values[0] + np.diff(law.values) @ later)
    survival, weights = _beta_nodes(workers - k + 1, k)
    return float(weights @ law.isf(survival))


def mean_spacings(law: Empirical, workers: int) -> Floats:
    """E[X_{K+1:P}] - E[X_{K:P}] for K = 1, ..., P - 1: what waiting for one more worker costs.

    Between x and x + dx exactly K of P draws have arrived with probability binomial(K; P, F(x)).
    """
    gaps, shares = np.diff(law.values), law.cdf(law.values)[:-1]
    counts = np.arange(1, workers)[:, None]
    logs = special.xlogy(counts, shares) + special.xlog1py(workers - counts, -shares)
    ways = -special.betaln(counts + 1, workers - counts + 1) - np.log(workers + 1)
    return np.asarray(np.exp(ways + logs) @ gaps)


def fit_delays(finished: Sequence[float], censored: Sequence[float]) -> Empirical:
    """The law of delays of which some were cut short: the product-limit estimate of Kaplan and Meier.

    Updates that cancel never see the slow workers finish, so the finished delays alone are far too short. What
    remains alive beyond the longest finished delay is given an exponential tail, whose rate is that of the upper half:
    endings over time lived through.
    """
    if not len(censored):
        return Empirical(finished)
    survival = scipy.stats.ecdf(scipy.stats.CensoredData(uncensored=list(finished), right=list(censored))).sf
    times, alive = survival.quantiles, survival.probabilities
    masses = -np.diff(np.concatenate(([1.0], alive)))
    if alive[-1] <= 0:
        return Empirical(times[masses > 0], masses[masses > 0])
    last, middle = float(max(finished)), float(np.median(finished))
    everything = np.concatenate((finished, censored))
    lived = np.maximum(everything - middle, 0.0).sum()
    rate = max(1, int((np.asarray(finished) > middle).sum())) / lived
    tail = last - np.log1p(-(np.arange(TAIL_POINTS) + 0.5) / TAIL_POINTS) / rate
    values = np.concatenate((times[masses > 0], tail))
    return Empirical(values, np.concatenate((masses[masses > 0], np.full(TAIL_POINTS, alive[-1] / TAIL_POINTS))))


@cache
def _panels() -> tuple[Floats, Floats]:
    """Gauss-Legendre nodes and weights on panels that are narrow around 0 and grow with the distance from it."""
    outward = np.concatenate((np.arange(0.0, 8.0), np.geomspace(8.0, 700.0, 24)))
    edges = np.concatenate((-outward[:0:-1], outward[: np.searchsorted(outward, 50.0)]))
    points, weights = np.polynomial.legendre.leggauss(16)
    low, high = edges[:-1, None], edges[1:, None]
    return (((high - low) * points + high + low) / 2).ravel(), ((high - low) * weights / 2).ravel()


def _beta_nodes(a: int, b: int) -> tuple[Floats, Floats]:
    """Nodes and weights for E[f(U)], U of the law Beta(a, b), where f may have a pole at 0.

    In z = log(U / (1 - U)) the density is smooth, falls like exp(a z) and exp(-b z), and needs no inverse of the
    incomplete beta function (scipy's is NaN for some arguments). Its mean and variance place the panels. To the left
    they reach U = 1e-304, so that heavy tails are seen; to the right, f is bounded.
    """
    offsets, weights = _panels()
    centre, spread = special.digamma(a) - special.digamma(b), np.sqrt(special.polygamma(1, a) + special.polygamma(1, b))
    z = centre + spread * offsets
    density = np.exp(a * z - (a + b) * np.logaddexp(0.0, z) - special.betaln(a, b))
    inside = z > -700
    return special.expit(z[inside]), (spread * weights * density)[inside]
