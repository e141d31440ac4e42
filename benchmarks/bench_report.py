"""A report of 2,000 cells and a 100 MB log: its time against parsing the same log, and its size.

``python benchmarks/bench_report.py DIR`` leaves such a folder in DIR.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ratio import Ratio

from hemiola.lab.report import write_report
from hemiola.lab.report.read import COLUMNS

RUNS, POINTS, SEEDS, EVALUATIONS, WORKERS, AVERAGINGS = 20, 20, 5, 20, 8, 11


def write_large(folder: Path) -> int:
    """Write a folder as ``hemiola run`` does, of 20 runs, 20 values of a sweep and 5 seeds; returns its log's bytes."""
    rng = random.Random(0)
    rates = [round(0.01 * 1.2**point, 4) for point in range(POINTS)]
    names = [f"run {run}" for run in range(RUNS)]
    settings = {
        "task": "digits-logistic",
        "workers": WORKERS,
        "cluster": {"name": "simulated"},
        "optimizer": {"lr": 0.01},
    }
    experiment = {
        "seeds": list(range(SEEDS)),
        "sweep": {"optimizer.lr": rates},
        "run": [settings | {"name": name} for name in names],
    }
    task = {"name": "digits-logistic", "metric": "accuracy", "higher_is_better": True, "convex": True}
    (folder / "experiment.json").write_text(json.dumps({"hemiola": "0", "experiment": experiment, "task": task}))
    with (folder / "log.jsonl").open("w") as log, (folder / "results.csv").open("w") as table:
        table.write(",".join([*COLUMNS, "optimizer.lr"]) + "\n")
        for run, name in enumerate(names):
            for rate in rates:
                for seed in range(SEEDS):
                    for line in _cell(rng, run, name, rate, seed):
                        log.write(json.dumps(line) + "\n")
                    row = line | {"workers": WORKERS, "status": "done", "optimizer.lr": rate}
                    table.write(",".join(str(row.get(column, "")) for column in [*COLUMNS, "optimizer.lr"]) + "\n")
    return (folder / "log.jsonl").stat().st_size


def _cell(rng: random.Random, run: int, name: str, rate: float, seed: int) -> Iterator[dict[str, object]]:
    best = 0.05 * (1 + run / RUNS)
    for evaluation in range(EVALUATIONS):
        gap = math.exp(-evaluation * rate / best * math.exp(-rate / best)) * math.exp(rng.gauss(0, 0.1))
        history = [
            {
                "step": 8 * (AVERAGINGS * evaluation + i),
                "period": 8,
                "spread": rng.random(),
                "lr": rate,
                "c2": rng.random(),
                "bytes": 5200.0,
                "seconds": evaluation + i / AVERAGINGS,
            }
            for i in range(AVERAGINGS)
        ]
        yield {
            "run": name,
            "seed": seed,
            "sweep": {"optimizer.lr": rate},
            "updates": AVERAGINGS * evaluation,
            "epochs": float(evaluation),
            "seconds": evaluation * (1 + rng.random() / 100),
            "lr": rate,
            "train_loss": 0.1 + gap,
            "train_gap": gap,
            "test_loss": 0.2 + gap,
            "test_metric": 1 - gap / 3,
            "bytes_per_worker": 5200.0 * AVERAGINGS * evaluation,
            "averagings": AVERAGINGS * evaluation,
            "mean_period": 8.0,
            "weighted_spread": rng.random(),
            "mean_staleness": rng.random(),
            "max_staleness": 5,
            "mean_update_seconds": rng.random(),
            "units_cancelled": 0,
            "units_dropped": 3 * evaluation,
            "wall_seconds": rng.random(),
            "order": {"herding": rng.random(), "skipped": 0},
            "period": {"p": 8, "history": history, "c2": rng.random()},
            "pace": {"k": 4, "staleness": {str(age): 10 * evaluation for age in range(6)}, "idle_share": rng.random()},
            "workers": [
                {"used": 180 * evaluation, "cancelled": 0, "dropped": evaluation, "refused": 0} for _ in range(WORKERS)
            ],
        }


def ratios() -> Iterator[Ratio]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        size = write_large(folder)
        started = time.perf_counter()
        page = write_report(folder)
        took = time.perf_counter() - started
        started = time.perf_counter()
        with (folder / "log.jsonl").open("rb") as log:
            for line in log:
                json.loads(line)
        parsing = time.perf_counter() - started
        cells = RUNS * POINTS * SEEDS
        note = f"{cells:,} cells, a log of {size / 1e6:.0f} MB: {took:.1f} s, of which {parsing:.1f} s parse JSON"
        yield Ratio("a report over parsing its log", took / parsing, "<= 4", note)
        yield Ratio("megabytes of the page", page.stat().st_size / 1e6, "<= 2", "interactive, with Vega inside")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    print(f"{write_large(Path(sys.argv[1])) / 1e6:.0f} MB of log")
