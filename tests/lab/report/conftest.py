"""Synthetic results folders: the shapes of real ones, every number from a formula."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hemiola.lab.results import COLUMNS

POLICIES = {
    "ordinary": {},
    "CD-GraB": {"order": {"name": "cd-grab", "unit": 1, "sketch": "fold:1024"}},
    "ADPSGD": {"period": {"name": "adaptive", "start": 4, "wire": "int8"}},
    "AdaSync": {"pace": {"name": "k-async", "k": "adasync", "start": 2}},
    "all three": {
        "order": {"name": "cd-grab"},
        "period": {"name": "adaptive", "start": 4},
        "pace": {"name": "k-async", "k": 4},
    },
}


def write(folder: Path, experiment: dict, rows: list[dict], log: list[dict]) -> Path:
    """Write the three files as ``hemiola run`` does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.json").write_text(json.dumps(experiment))
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    columns = [*COLUMNS, *experiment["experiment"].get("sweep", {})]
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return folder


def about(runs: dict[str, dict], *, convex: bool = True, seeds: int = 3, **more: object) -> dict:
    """An experiment.json."""
    experiment = {
        "task": "digits-logistic",
        "workers": 8,
        "batch": 1,
        "seeds": list(range(seeds)),
        "stop": {"epochs": 30},
        "evaluate": {"every_epochs": 1},
        "optimizer": {
            "name": "SGD",
            "lr": 0.2,
            "momentum": 0.9,
            "schedule": {"name": "MultiStepLR", "milestones": [0.5, 0.75], "gamma": 0.1},
        },
        "shards": {"split": "iid"},
        "cluster": {
            "name": "simulated",
            "delay": "shifted-exponential(1, 1)",
            "slow": {"3": 5.0},
            "link": {"bandwidth": "100 Mbit/s", "latency": "50 us"},
        },
        "run": [{"name": name, **policies} for name, policies in runs.items()],
    }
    task = {
        "name": "digits-logistic",
        "metric": "accuracy",
        "higher_is_better": True,
        "convex": convex,
        "examples": 1437,
        "parameters": 650,
    }
    predicted = {
        "AdaSync": {"update_seconds": 1.24, "staleness": 1.0},
        "ordinary": {"update_seconds": 8.2, "staleness": 0},
    }
    return {"hemiola": "0.1.0", "experiment": experiment | more, "task": task, "predicted": predicted}


def line(run: str, seed: int, **numbers: object) -> dict:
    """One line of log.jsonl with the given numbers."""
    return {
        "run": run,
        "seed": seed,
        "sweep": {},
        "order": {},
        "period": {"p": 1},
        "pace": {"k": 8},
        "workers": [],
        **numbers,
    }


def realistic(
    folder: Path,
    runs: dict[str, dict] | None = None,
    seeds: int = 3,
    epochs: int = 30,
    every: float = 1.0,
    **more: object,
) -> Path:
    """A folder like that of the demo: losses fall, periods grow, workers straggle."""
    runs = POLICIES if runs is None else runs
    sweep = more.get("sweep", {})
    points = [{key: value} for key, values in sweep.items() for value in values] or [{}]
    rows, log = [], []
    for place, (name, policies) in enumerate(runs.items()):
        for point in points:
            for seed in range(seeds):
                lines = list(_run(name, policies, place, point, seed, epochs, every))
                rows.append(_row(lines[-1], point))
                log += lines
    return write(folder, about(runs, seeds=seeds, **more), rows, log)


def _run(name, policies, place, point, seed, epochs, every):
    noise = np.random.default_rng([place, seed])
    ordered, adaptive, paced = (kind in policies for kind in ("order", "period", "pace"))
    lr = point.get("optimizer.lr", 0.2)
    rate = lr * (1.4 if ordered else 1.0)
    seconds_per_epoch = 180 * 8.2 * (0.16 if paced else 1) * (0.9 if adaptive else 1)
    averaged = 0
    for i in range(round(epochs / every) + 1):
        epoch = i * every
        floor = 2e-5 if ordered else 4e-4
        gap = (2.1 * math.exp(-rate * epoch * 1.4) + 0.06 / (1 + epoch) ** 2 + floor) * math.exp(noise.normal(0, 0.12))
        history = []
        while adaptive and averaged < epoch * 180:
            drop = 10.0 ** -((averaged > 90 * epochs) + (averaged > 135 * epochs))
            period = round(4 + 3 * averaged / 5400 + 5 * (1 - drop))
            averaged += period
            history.append(
                {
                    "step": averaged,
                    "period": period,
                    "spread": 0.02 * drop * period * math.exp(noise.normal(0, 0.3)),
                    "lr": lr * drop,
                    "c2": None,
                    "bytes": 650.0,
                    "seconds": averaged * 1.1,
                }
            )
        updates = round(epoch * 180 * (2 if paced else 1))
        stale = {str(s): round(8 * updates * 0.5 ** (s + 1)) for s in range(14)} if paced else {"0": 8 * updates}
        yield line(
            name,
            seed,
            sweep=point,
            updates=updates,
            epochs=epoch,
            seconds=epoch * seconds_per_epoch * math.exp(noise.normal(0, 0.01)),
            lr=lr,
            train_loss=0.11 + gap,
            train_gap=gap,
            test_loss=0.16 + gap * 0.9,
            test_metric=0.972 - 0.5 * gap**0.8,
            bytes_per_worker=epoch * 180 * 650 * 4 * 1.75 * (0.06 if adaptive else 1),
            averagings=averaged // 6 if adaptive else updates,
            mean_period=6.1 if adaptive else 1.0,
            weighted_spread=0.013 if adaptive else 0.0,
            mean_staleness=0.99 if paced else 0.0,
            max_staleness=13 if paced else 0,
            units_cancelled=0,
            units_dropped=3 * epoch if paced else 0,
            wall_seconds=epoch * 0.2,
            order={"herding": 40 * math.exp(-epoch / 3) + 2 + noise.random(), "herding_ratio": 0.5, "skipped": 0}
            if ordered and epoch
            else {},
            period={"p": 4, "history": history} if adaptive else {"p": 1},
            pace={
                "k": 4 if paced else 8,
                "staleness": stale,
                "idle_share": 0.04 if paced else 0.61,
                "wasted_share": 0.01 if paced else 0.0,
                "mean_update_seconds": 1.26 if paced else 8.21,
            },
            workers=[
                {
                    "used": 180 * epoch * (0.3 if paced and worker == 3 else 1),
                    "cancelled": 9 * epoch * paced,
                    "dropped": 12.0 * epoch * (paced and worker == 3),
                    "refused": 0,
                }
                for worker in range(8)
            ],
        )


def _row(last: dict, point: dict) -> dict:
    numbers = {key: last[key] for key in COLUMNS if key in last}
    return {
        **numbers,
        "workers": 8,
        "mean_update_seconds": last["pace"]["mean_update_seconds"],
        "status": "done",
        **point,
    }


def small(folder: Path, runs: dict[str, list[list[tuple]]], *, status: dict | None = None, **more: object) -> Path:
    """A folder by hand: for every run, for every seed, its (epochs, seconds, bytes, loss) at every evaluation.

    The gap is the loss. Evaluations without a row in results.csv: give the seed the status "running".
    """
    rows, log = [], []
    for name, seeds in runs.items():
        for seed, points in enumerate(seeds):
            for updates, (epochs, seconds, sent, loss) in enumerate(points):
                numbers = {"updates": updates, "epochs": epochs, "seconds": seconds, "bytes_per_worker": sent}
                log.append(line(name, seed, **numbers, train_loss=loss, train_gap=loss))
            ended = (status or {}).get((name, seed), "done")
            if ended != "running":
                kept = {key: log[-1][key] for key in (*numbers, "train_loss", "train_gap")}
                rows.append({"run": name, "seed": seed, **kept, "status": ended})
    return write(folder, about({name: {} for name in runs}, **more), rows, log)


@pytest.fixture(scope="session")
def folders() -> SimpleNamespace:
    """The builders of this file."""
    return SimpleNamespace(write=write, about=about, line=line, realistic=realistic, small=small, policies=POLICIES)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The realistic folder, built once; tests only read it."""
    return realistic(tmp_path_factory.mktemp("demo"))
