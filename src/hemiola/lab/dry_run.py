"""``hemiola run --dry-run``: what would run, and about how long it would take, from a few updates of every run."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hemiola.lab.experiment import Cell, Experiment
from hemiola.lab.worker import one_thread
from hemiola.plan import Amount, Plan
from hemiola.training import Training

PROBE_SECONDS = 0.4  # of a run's updates; at least one


@dataclass(frozen=True)
class ProbedRun:
    """What one run of the file would be.

    Attributes:
        run: Its name.
        cells: Its seeds times the points of the sweep.
        seconds: About how long one of them takes here, alone; None on a real cluster, which only a run can tell.
    """

    run: str
    cells: int
    seconds: float | None


@dataclass(frozen=True)
class DryRun:
    """What an experiment would be.

    Attributes:
        runs: Each with its cells.
        jobs: Cells side by side.
        seconds: About how long all of it takes; None where a run's own is not known.
    """

    runs: tuple[ProbedRun, ...]
    jobs: int
    seconds: float | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"cells": sum(run.cells for run in self.runs)}


def dry_run(experiment: Experiment, data: Path | None, jobs: int | None) -> DryRun:
    """Count the cells, and let the first of every run take a few updates; nothing is written."""
    side_by_side = jobs or len(os.sched_getaffinity(0))
    found: dict[str, list[Cell]] = {}
    for cell in experiment.cells:
        found.setdefault(cell.run, []).append(cell)
    runs = tuple(ProbedRun(run, len(cells), _seconds(cells[0], data)) for run, cells in found.items())
    each = [run.seconds for run in runs for _ in range(run.cells)]
    known = [seconds for seconds in each if seconds is not None]
    total = sum(known) / min(side_by_side, len(each)) if len(known) == len(each) else None
    return DryRun(runs, side_by_side, total)


def _seconds(cell: Cell, data: Path | None) -> float | None:
    """How long a cell takes: a few of its updates and its first evaluation, times how many there will be."""
    plan, make_cluster = cell.plan(data)
    if make_cluster.real:
        return None
    with one_thread(), torch.random.fork_rng(devices=[]):
        training = Training(plan, make_cluster)
        try:
            return _probe(training, plan)
        finally:
            training.close()


def _probe(training: Training, plan: Plan) -> float:
    began = time.perf_counter()
    training.run(lambda _: False)  # the first evaluation, and one update to warm up
    first = time.perf_counter() - began
    began, progress = time.perf_counter(), training.progress
    training.run(lambda _: time.perf_counter() - began < PROBE_SECONDS)
    spent, done = time.perf_counter() - began, training.progress - progress
    evaluations = _length(plan.stop) / _length(plan.every) if _same_measure(plan.stop, plan.every) else 0.0
    return (spent / done if done > 0 else spent) + first * max(evaluations, 1.0)


def _length(amount: Amount) -> float:
    return amount.epochs or amount.updates or amount.seconds or 1.0


def _same_measure(one: Amount, other: Amount) -> bool:
    measures = ("epochs", "updates", "seconds")
    return all((getattr(one, name) is None) == (getattr(other, name) is None) for name in measures)
