"""Distributions: a finite sample, an exponential, and a mixture of two of those.

They answer the few questions `theory` and `delays` ask of a frozen ``scipy.stats`` distribution: ``mean``, ``var``,
``cdf``, ``sf``, ``ppf`` and ``isf``. scipy has only the second of them, and to import it from there takes longer than
many a simulated run.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class Law(Protocol):
    """The part of a frozen ``scipy.stats`` distribution that is used here."""

    def mean(self) -> float: ...

    def var(self) -> float: ...

    def cdf(self, x: ArrayLike) -> Floats: ...

    def sf(self, x: ArrayLike) -> Floats: ...

    def ppf(self, q: ArrayLike) -> Floats: ...

    def isf(self, q: ArrayLike) -> Floats: ...


class Empirical:
    """A discrete law: ``values`` with ``weights``, by default equal ones: a trace resampled with replacement."""

    def __init__(self, values: ArrayLike, weights: ArrayLike | None = None) -> None:
        points = np.asarray(values, dtype=np.float64).ravel()
        shares = np.ones_like(points) if weights is None else np.asarray(weights, dtype=np.float64).ravel()
        order = np.argsort(points, kind="stable")
        self.values: Floats = points[order]
        self.weights: Floats = shares[order] / shares.sum()
        self._cumulative: Floats = np.minimum(np.cumsum(self.weights), 1.0)
        self._cumulative[-1] = 1.0

    def mean(self) -> float:
        return float(self.weights @ self.values)

    def var(self) -> float:
        return float(self.weights @ (self.values - self.mean()) ** 2)

    def cdf(self, x: ArrayLike) -> Floats:
        padded = np.concatenate(([0.0], self._cumulative))
        return np.asarray(padded[np.searchsorted(self.values, x, side="right")])

    def sf(self, x: ArrayLike) -> Floats:
        return 1.0 - self.cdf(x)

    def ppf(self, q: ArrayLike) -> Floats:
        return np.asarray(self.values[np.searchsorted(self._cumulative, q, side="left").clip(0, len(self.values) - 1)])

    def isf(self, q: ArrayLike) -> Floats:
        return self.ppf(1.0 - np.asarray(q))


class Exponential:
    """At least ``shift``, and exponential with mean ``mean`` beyond it."""

    def __init__(self, mean: float, shift: float = 0.0) -> None:
        self._mean, self._shift = mean, shift

    def mean(self) -> float:
        return self._shift + self._mean

    def var(self) -> float:
        return self._mean**2

    def cdf(self, x: ArrayLike) -> Floats:
        return np.asarray(-np.expm1(-self._age(x)))

    def sf(self, x: ArrayLike) -> Floats:
        return np.asarray(np.exp(-self._age(x)))

    def ppf(self, q: ArrayLike) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(self._shift - self._mean * np.log1p(-np.asarray(q, dtype=np.float64)))

    def isf(self, q: ArrayLike) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(self._shift - self._mean * np.log(np.asarray(q, dtype=np.float64)))

    def _age(self, x: ArrayLike) -> Floats:
        return np.maximum((np.asarray(x, dtype=np.float64) - self._shift) / self._mean, 0.0)


class Hyperexponential:
    """Exponential with mean ``mean1`` with probability ``p``, else with mean ``mean2``."""

    def __init__(self, p: float, mean1: float, mean2: float) -> None:
        self.p, self.mean1, self.mean2 = p, mean1, mean2

    def mean(self) -> float:
        return self.p * self.mean1 + (1 - self.p) * self.mean2

    def var(self) -> float:
        return 2 * (self.p * self.mean1**2 + (1 - self.p) * self.mean2**2) - self.mean() ** 2

    def cdf(self, x: ArrayLike) -> Floats:
        return 1.0 - self.sf(x)

    def sf(self, x: ArrayLike) -> Floats:
        age = np.maximum(np.asarray(x, dtype=np.float64), 0.0)
        return np.asarray(self.p * np.exp(-age / self.mean1) + (1 - self.p) * np.exp(-age / self.mean2))

    def ppf(self, q: ArrayLike) -> Floats:
        return self.isf(1.0 - np.asarray(q, dtype=np.float64))

    def isf(self, q: ArrayLike) -> Floats:
        """The inverse of ``sf`` by bisection: between the answers of the two parts, where the mixture's must lie."""
        target = np.asarray(q, dtype=np.float64)
        with np.errstate(divide="ignore"):
            unit = -np.log(target)
        low, high = unit * min(self.mean1, self.mean2), unit * max(self.mean1, self.mean2)
        endless = np.isinf(high)
        low, high = np.where(endless, 0.0, low), np.where(endless, 0.0, high)
        for _ in range(60):
            middle = (low + high) / 2
            early = self.sf(middle) > target
            low, high = np.where(early, middle, low), np.where(early, high, middle)
        return np.where(endless, np.inf, high)
