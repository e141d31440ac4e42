"""Order statistics: how long the K-th fastest of P workers takes, and the law of delays that were seen only in part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy import special, stats

from hemiola.pace.laws import Empirical, Floats, Law

TAIL_POINTS = 32  # what was censored beyond the longest finished delay is stood in for by this many points


def order_statistic_mean(law: Law, k: int, workers: int) -> float:
    """E[X_{K:P}], the mean of the K-th smallest of P independent draws; exact for an `Empirical` law.

    X_{K:P} <= x exactly when at least K of P draws are, which has probability I_{F(x)}(K, P - K + 1), the regularised
    incomplete beta function. Hence E[X_{K:P}] is the integral of 1 - I_{F(x)} over x, a sum for a discrete law; for the
    others it is the integral over v in (0, 1) of isf(I^{-1}(v)).
    """
    if isinstance(law, Empirical):
        later = special.betaincc(k, workers - k + 1, law.cdf(law.values)[:-1])
        return float(law.values[0] + np.diff(law.values) @ later)
    shares, weights = _nodes()
    return float(weights @ law.isf(special.betaincinv(workers - k + 1, k, shares)))


def mean_spacings(law: Empirical, workers: int) -> Floats:
    """E[X_{K+1:P}] - E[X_{K:P}] for K = 1, ..., P - 1: what waiting for one more worker costs.

    Between x and x + dx exactly K of P draws have arrived with probability binomial(K; P, F(x)).
    """
    gaps, shares = np.diff(law.values), law.cdf(law.values)[:-1]
    counts = np.arange(1, workers)[:, None]
    return np.asarray(stats.binom.pmf(counts, workers, shares[None, :]) @ gaps)


def fit_delays(finished: Sequence[float], censored: Sequence[float]) -> Empirical:
    """The law of delays of which some were cut short: the product-limit estimate of Kaplan and Meier.

    Updates that cancel never see the slow workers finish, so the finished delays alone are far too short. What
    remains alive beyond the longest finished delay is given an exponential tail, whose rate is that of the upper half:
    endings over time lived through.
    """
    if not len(censored):
        return Empirical(finished)
    survival = stats.ecdf(stats.CensoredData(uncensored=list(finished), right=list(censored))).sf
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
def _nodes() -> tuple[Floats, Floats]:
    """Nodes v and weights for an integral over v in (0, 1) whose integrand may have a heavy tail at v = 0.

    Gauss-Legendre in y = -log v, on panels that grow geometrically, so that v reaches down to 1e-147
    (scipy's inverse of the incomplete beta function gives up at 1e-160).
    """
    edges = np.concatenate(([0.0], np.geomspace(1e-8, 1.0, 9), np.arange(2, 9) * 0.75, np.geomspace(8, 338, 10)))
    points, weights = np.polynomial.legendre.leggauss(24)
    low, high = edges[:-1, None], edges[1:, None]
    y = ((high - low) * points + high + low) / 2
    shares = np.exp(-y)
    return shares.ravel(), (shares * weights * (high - low) / 2).ravel()
