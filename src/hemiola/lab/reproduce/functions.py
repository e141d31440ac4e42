"""Claims that are not about training runs of an experiment file: each is measured by a function.

A function gets its options from the table and returns numbers, by the names that the checks use, and the rows of its
pictures. Parts that take long are computed once and kept in the claim's folder, so that ``--resume`` goes on.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from hemiola.lab.reproduce.numbers import Measured, fit_slope
from hemiola.lab.reproduce.parts import Found, Parts, row
from hemiola.order import ORDERS
from hemiola.order.herding import simulate_herding
from hemiola.pace import PACES
from hemiola.timing.delays import parse_delay
from hemiola.timing.simulate import simulate_timing
from hemiola.timing.theory import Variant, harmonic, mean_staleness, update_time

# --------------------------------------------------------------------------------------------------------- herding

_HERDED = {"random order": "rr", "ID-GraB (mean)": "id-grab", "ID-GraB (pair)": "id-pair-grab", "CD-GraB": "cd-grab"}


def herding(
    parts: Parts, data: Path | None, *, workers: list[int], units: int, dimension: int, rounds: int, seeds: list[int]
) -> Found:
    """Prefix sums of fixed random vectors under each order: per round, and after the last against the workers."""
    found = Found()
    last: dict[tuple[str, int], list[float]] = {}
    for line, order in _HERDED.items():
        for m in workers:
            bounds = [
                parts.once(
                    f"{order}-{m}-{seed}",
                    lambda: simulate_herding(ORDERS[order](), m, units, dimension, rounds, seed),  # noqa: B023
                )
                for seed in seeds
            ]
            last[line, m] = [bound[-1] for bound in bounds]
            found.numbers[f"bound of {line}, {m} workers"] = Measured.over_seeds(last[line, m])
            found.rows.setdefault("after the last round", []).append(row(line, m, last[line, m]))
            if m == workers[-2]:
                for number, values in enumerate(zip(*bounds, strict=True)):
                    found.rows.setdefault(f"{m} workers", []).append(row(line, number, values))
    many = workers[-1]
    for line in ("random order", "ID-GraB (pair)", "ID-GraB (mean)"):
        ratios = [a / b for a, b in zip(last[line, many], last["CD-GraB", many], strict=True)]
        found.numbers[f"bound of {line} / bound of CD-GraB, most workers"] = Measured.over_seeds(ratios)
    for line in ("ID-GraB (pair)", "CD-GraB"):
        slopes = [fit_slope(workers, [last[line, m][i] for m in workers]) for i in range(len(seeds))]
        found.numbers[f"growth of the bound of {line} with the workers (exponent)"] = Measured.over_seeds(slopes)
    return found


# ---------------------------------------------------------------------------------------------------------- timing

VARIANTS: tuple[Variant, ...] = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")


def update_times(parts: Parts, data: Path | None, *, workers: int, laws: list[str], updates: int) -> Found:
    """Mean seconds of an update of every variant and K, simulated beside theory."""
    found, off, outside = Found(), 0.0, 0.0
    for law in laws:
        delay = parse_delay(law)
        for variant in VARIANTS:
            for k in range(1, workers + 1):
                seen = simulate_timing(PACES[variant](k=k), workers, delay, updates)
                theory = update_time(variant, delay, workers, k, simulate=False)
                seconds = seen.mean_update_seconds
                found.rows.setdefault(law, []).append(row(f"{variant}, simulated", k, [seconds]))
                if theory.exact and math.isfinite(theory.value):
                    off = max(off, abs(seconds / theory.value - 1))
                    found.rows[law].append(row(f"{variant}, theory", k, [theory.value]))
                else:
                    outside = max(outside, theory.low / seconds - 1, seconds / theory.high - 1)
    found.numbers["largest distance from an exact law, in %"] = Measured(100 * off)
    found.numbers["largest distance beyond a bound, in %"] = Measured(100 * outside)
    return found


def staleness(parts: Parts, data: Path | None, *, workers: int, laws: list[str], updates: int) -> Found:
    """Mean staleness of the asynchronous variants beside the laws P/K - 1 and (P - 1)/K, whatever the delays."""
    found, off, fresh_off = Found(), 0.0, 0.0
    variants: tuple[Variant, ...] = ("k-async", "k-batch-async")
    for variant in variants:
        for k in range(1, workers + 1):
            law = mean_staleness(variant, workers, k)
            found.rows.setdefault(variant, []).append(row("law", k, [law]))
            for text in laws:
                seen = simulate_timing(PACES[variant](k=k), workers, parse_delay(text), updates)
                off = max(off, abs(seen.mean_staleness - law))
                found.rows[variant].append(row(text, k, [seen.mean_staleness]))
                if variant == "k-async" and text.startswith("exponential"):
                    fresh_off = max(fresh_off, abs(seen.fresh_fraction - k / workers))
    found.numbers["largest distance of the mean staleness from its law"] = Measured(off)
    found.numbers["largest distance of the fresh fraction from K/P, K-async, exponential delays"] = Measured(fresh_off)
    return found


def log_speedup(
    parts: Parts, data: Path | None, *, workers: list[int], law: str, updates: int, seeds: list[int]
) -> Found:
    """Seconds a gradient, waiting for all over waiting for nobody: H_P, which grows like log P."""
    found, delay = Found(), parse_delay(law)
    rows = found.rows.setdefault("exponential delays", [])
    by_seed: dict[int, list[float]] = {seed: [] for seed in seeds}
    off = 0.0
    for p in workers:
        for seed in seeds:
            waiting = simulate_timing(PACES["k-sync"](k=p), p, delay, updates, seed).mean_update_seconds / p
            free = simulate_timing(PACES["k-async"](k=1), p, delay, updates * p, seed).mean_update_seconds
            by_seed[seed].append(waiting / free)
        values = [ratios[-1] for ratios in by_seed.values()]
        off = max(off, abs(float(np.mean(values)) / harmonic(p) - 1))
        rows += [row("simulated", p, values), row("H_P", p, [harmonic(p)]), row("log P", p, [math.log(p)])]
    x = np.log(workers)
    slopes = [float(np.polyfit(x, ratios, 1)[0]) for ratios in by_seed.values()]
    found.numbers["growth of the speed-up for each e-fold of workers"] = Measured.over_seeds(slopes)
    found.numbers["largest distance of the speed-up from H_P, in %"] = Measured(100 * off)
    found.numbers[f"speed-up with {workers[-1]} workers"] = Measured.over_seeds([r[-1] for r in by_seed.values()])
    return found
