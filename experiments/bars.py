"""Read result folders and print the numbers that docs/results.md quotes.

    python experiments/bars.py OUT [NAME ...]

OUT holds the folders that ``hemiola run experiments/NAME.toml --out OUT/NAME`` wrote; all that are there unless named.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

Line = dict
Runs = dict[str, list[Line]]  # run -> its log lines


def read(folder: Path) -> Runs:
    runs: Runs = defaultdict(list)
    for text in (folder / "log.jsonl").read_text().splitlines():
        line = json.loads(text)
        runs[line["run"]].append(line)
    return runs


def by_point(lines: list[Line]) -> dict[str, list[Line]]:
    points = defaultdict(list)
    for line in lines:
        points[json.dumps(line["sweep"])].append(line)
    return points


def last(lines: list[Line]) -> list[Line]:
    """The last line of every seed."""
    return list({line["seed"]: line for line in lines}.values())


def best_at(lines: list[Line], key: str, epoch: float) -> tuple[float, str]:
    """Smallest mean over seeds of a quantity at an epoch, over the sweep's points, and at which point."""
    means = {}
    for point, some in by_point(lines).items():
        values = [line[key] for line in some if abs(line["epochs"] - epoch) < 0.05]
        if values:
            means[point] = mean(values)
    point = min(means, key=lambda p: means[p])
    return means[point], point


def order(runs: Runs, epochs: list[int]) -> None:
    baseline = next(iter(runs))
    for epoch in epochs:
        base, at = best_at(runs[baseline], "train_gap", epoch)
        print(f"epoch {epoch}: {baseline}: gap {base:.3e} at {at}")
        for run, lines in runs.items():
            if run != baseline:
                gap, at = best_at(lines, "train_gap", epoch)
                print(f"  {run}: gap {gap:.3e} at {at}; {baseline} / it = {base / gap:.1f}")


def paces_and_orders(runs: Runs) -> None:
    for pace in dict.fromkeys(run.split(",")[0] for run in runs):
        some = {run: lines for run, lines in runs.items() if run.startswith(pace)}
        order(some, [30])
        for run, lines in some.items():
            at = {point: best_at(every, "train_gap", 30)[0] for point, every in by_point(lines).items()}
            print(f"  {run} at every point: " + ", ".join(f"{point} {gap:.2e}" for point, gap in at.items()))


def table(runs: Runs, columns: list[str]) -> None:
    print(f"{'':36s}" + "".join(f"{column:>18s}" for column in columns))
    for run, lines in runs.items():
        cells = [mean(line[column] for line in last(lines)) for column in columns]
        print(f"{run:36s}" + "".join(f"{cell:18.5g}" for cell in cells))


def seed_by_seed(runs: Runs, better: str, worse: str) -> None:
    """How much lower one run's training loss is than another's, seed by seed, with its standard error."""
    losses = [{line["seed"]: line["train_loss"] for line in last(runs[run])} for run in (better, worse)]
    found = [losses[1][seed] - losses[0][seed] for seed in losses[0]]
    print(f"{better} below {worse}: {mean(found):.4f} +- {stdev(found) / len(found) ** 0.5:.4f}")


def period_sorted(runs: Runs) -> None:
    table(runs, PERIOD)
    seed_by_seed(runs, "adaptive with guards", "QSR")
    seed_by_seed(runs, "ADPSGD (the paper's rule)", "QSR, fewer averagings")


def mean_curve(lines: list[Line], step: float) -> list[tuple[float, float]]:
    """(seconds, loss) averaged over seeds, where all have one; evaluations are ``step`` cluster seconds apart."""
    at = defaultdict(list)
    for line in lines:
        at[round(line["seconds"] / step)].append(line)
    seeds = {line["seed"] for line in lines}
    return [
        (mean(line["seconds"] for line in some), mean(line["train_loss"] for line in some))
        for _, some in sorted(at.items())
        if len({line["seed"] for line in some}) == len(seeds)
    ]


def first_at(curve: list[tuple[float, float]], loss: float) -> float | None:
    """When a curve is at or below a loss for the first time."""
    return next((seconds for seconds, found in curve if found <= loss), None)


def for_good(curve: list[tuple[float, float]], loss: float) -> float | None:
    """When a curve is at or below a loss and stays there."""
    above = [number for number, (_, found) in enumerate(curve) if found > loss]
    after = above[-1] + 1 if above else 0
    return curve[after][0] if after < len(curve) else None


def by_seed(lines: list[Line], loss: float) -> tuple[float, float] | None:
    """Mean over seeds of when each one's own curve is at or below a loss for the first time, and its standard error."""
    curves = defaultdict(list)
    for line in lines:
        curves[line["seed"]].append((line["seconds"], line["train_loss"]))
    times = [time for curve in curves.values() if (time := first_at(curve, loss)) is not None]
    if len(times) < max(2, len(curves)):
        return None
    return mean(times), stdev(times) / len(times) ** 0.5


def pace(runs: Runs, losses: list[float], step: float) -> None:
    print(f"{'cluster seconds to a mean loss of':38s}" + "".join(f"{loss:>8}" for loss in losses), end="")
    print(f"{'for good':>10}{'seed by seed':>16}  final loss")
    for run, lines in runs.items():
        curve, own = mean_curve(lines, step), by_seed(lines, losses[-1])
        times = [first_at(curve, loss) for loss in losses] + [for_good(curve, losses[-1])]
        widths = [8] * len(losses) + [10]
        cells = "".join(f"{'-' if t is None else format(t, '.0f'):>{w}}" for t, w in zip(times, widths, strict=True))
        seeds = "-" if own is None else f"{own[0]:.0f} +- {own[1]:.0f}"
        print(f"{run:38s}{cells}{seeds:>16}  {mean(line['train_loss'] for line in last(lines)):.4f}")


def seconds_to(lines: list[Line], gap: float) -> tuple[float, str] | None:
    """Smallest mean over seeds of when a gap is first reached, over the points where every seed reaches it."""
    times = {}
    for point, some in by_point(lines).items():
        reached = defaultdict(list)
        for line in some:
            if line["train_gap"] <= gap:
                reached[line["seed"]].append(line["seconds"])
        if len(reached) == len({line["seed"] for line in lines}):
            times[point] = mean(min(seconds) for seconds in reached.values())
    return min((seconds, point) for point, seconds in times.items()) if times else None


def together(runs: Runs, gaps: list[float]) -> None:
    """Cluster seconds to each gap, how many times sooner than the first run, and the point of the sweep."""
    base = {gap: seconds_to(next(iter(runs.values())), gap) for gap in gaps}
    for run, lines in runs.items():
        seeds = len({line["seed"] for line in lines})
        print(f"{run} ({seeds} seeds)")
        for gap in gaps:
            found, ordinary = seconds_to(lines, gap), base[gap]
            if found is None:
                print(f"  gap {gap:g}: not reached by all seeds at any point")
            else:
                ratio = "" if ordinary is None else f", {ordinary[0] / found[0]:.2f} times sooner"
                print(f"  gap {gap:g}: {found[0]:.1f} s{ratio} at {found[1]}")


PERIOD = ["averagings", "mean_period", "train_loss", "test_metric", "weighted_spread", "bytes_per_worker", "seconds"]
REPORTS: dict[str, Callable[[Runs], None]] = {
    "order-digits": lambda runs: order(runs, [10, 30, 60]),
    "order-digits-sorted": lambda runs: order(runs, [10, 30]),
    "order-paces": paces_and_orders,
    "order-cifar": lambda runs: table(runs, ["train_loss", "test_metric", "bytes_per_worker"]),
    "order-m4": lambda runs: table(runs, ["train_loss", "test_loss"]),
    "order-hmda": lambda runs: table(runs, ["train_loss", "train_gap", "test_metric"]),
    "order-lstm": lambda runs: table(runs, ["train_loss", "test_metric"]),
    "period-digits": lambda runs: table(runs, PERIOD),
    "period-digits-sorted": period_sorted,
    "period-cifar": lambda runs: table(runs, PERIOD),
    "period-link-10g": lambda runs: table(runs, ["seconds", "averagings", "train_loss"]),
    "period-link-100g": lambda runs: table(runs, ["seconds", "averagings", "train_loss"]),
    "pace-digits-shifted": lambda runs: pace(runs, [1.2, 0.8, 0.58], 8.0),
    "pace-digits-exponential": lambda runs: pace(runs, [1.2, 0.8, 0.58], 4.0),
    "together-digits": lambda runs: together(runs, [5e-3, 1.5e-3, 5e-4]),
    "pace-cifar": lambda runs: pace(runs, [1.8, 1.5, 1.3], 50.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the numbers that docs/results.md quotes.")
    parser.add_argument("out", type=Path, help="where the result folders are, each by the name of its experiment")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all that are there if none; of {', '.join(REPORTS)}")
    given = parser.parse_args()
    for name in given.names:
        if name not in REPORTS:
            parser.error(f"no experiment {name!r}; there are {', '.join(REPORTS)}")
    for name in given.names or [name for name in REPORTS if (given.out / name / "log.jsonl").exists()]:
        print(f"\n{name}")
        REPORTS[name](read(given.out / name))


if __name__ == "__main__":
    main()
