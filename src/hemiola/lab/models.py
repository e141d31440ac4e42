"""The model that comes out of a finished cell, and the way from a folder into one's own code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hemiola.contracts import TaskLike
from hemiola.errors import InputError, unknown
from hemiola.files import replacing
from hemiola.flat import FlatModel
from hemiola.lab.experiment import Cell, Experiment
from hemiola.lab.report.log import point_of
from hemiola.lab.report.read import read_folder
from hemiola.lab.report.summary import summarise
from hemiola.lab.results import Result, Trained
from hemiola.lab.store import Store, module_of, reopen
from hemiola.streams import seed_torch
from hemiola.training import Training


def trained_by(cell: Cell, data: Path | None, training: Training) -> Trained:
    """The model that a training has just ended with; its weights are in memory."""
    kept = training.kept
    state = named_weights(training.plan.task, training.plan.seed, kept.weights)
    about = {"keep": training.plan.keep, "updates": kept.version, "test_metric": kept.metric}
    return Trained(lambda: state, lambda: module_of(cell, data), about)


def named_weights(task: TaskLike, seed: int, weights: Tensor) -> dict[str, Tensor]:
    """A flat vector as the state_dict of the task's model; what the vector does not hold is as the seed made it."""
    with torch.random.fork_rng(devices=[]):
        seed_torch("model", seed)
        module = task.model()
    FlatModel(module).load(weights)
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
        for name, value in module.state_dict().items()
    }


class FoundModel(NamedTuple):
    """A finished cell of a folder, and whether its point of the sweep was chosen here as the run's best."""

    cell: Cell
    result: Result
    chosen: bool

    def __str__(self) -> str:
        """``'CD-GraB', seed 0, optimizer.lr = 0.1 (its best point): the last weights, after 1500 updates``."""
        assert self.result.trained is not None
        kept, status = self.result.trained.kept, self.result.row["status"]
        point = "".join(f", {key} = {value}" for key, value in self.cell.point.items())
        return (
            f"{self.cell.run!r}, seed {self.cell.seed}{point}{' (its best point)' if self.chosen else ''}"
            f"{'' if status == 'done' else f', which {status}'}: "
            f"the {kept['keep']} weights, after {kept['updates']} updates"
        )


def load_model(
    folder: Path | str,
    run: str | None = None,
    *,
    seed: int | None = None,
    at: Mapping[str, Any] | None = None,
    data: Path | str | None = None,
) -> nn.Module:
    """The trained model of a run, from the folder that ``hemiola run --out`` or ``hemiola.train(out=...)`` wrote.

    ``model = hemiola.load_model("out/demo", "CD-GraB")`` makes the task's module and loads the weights that the run
    has left.

    Args:
        folder: The results folder.
        run: The run's name; may be left out where there is only one.
        seed: Which seed; the experiment's first by default.
        at: The point of the sweep, as in ``{"optimizer.lr": 0.1}``; the run's best by default.
        data: Folder of the data sets, which the task may need to make its model; as the run was started by default.

    Returns:
        The module, in eval mode, on the CPU.

    Raises:
        InputError: No such run, seed or point; it is not finished; its weights are damaged.
    """
    return find(Path(folder), run, seed, at, None if data is None else Path(data)).result.model()


def export(found: FoundModel, out: Path | None = None) -> Path:
    """Copy the weights of a finished cell into a file of one's own, a plain state_dict; returns where it is."""
    slug = re.sub(r"[^a-z0-9]+", "-", found.cell.run.lower()).strip("-")
    target = out or Path(f"{slug or 'run'}-seed{found.cell.seed}.pt")
    with replacing(target) as file:
        torch.save(found.result.weights(), file)
    return target


def find(
    folder: Path, run: str | None, seed: int | None, at: Mapping[str, Any] | None, data: Path | None = None
) -> FoundModel:
    """The finished cell of a folder that these name; see `load_model`."""
    saved = reopen(folder)
    experiment = saved.experiment
    cells = _matching(folder, experiment, run, seed, at or {})
    chosen = len(cells) > 1
    cell = _best_point(folder, cells) if chosen else cells[0]
    result = Store(folder, experiment, data or saved.data).finished(cell)
    if result is None:
        raise InputError(
            f"{folder}: run {cell.run!r}, seed {cell.seed} is not finished; `hemiola resume {folder}` goes on"
        )
    return FoundModel(cell, result, chosen)


def _matching(
    folder: Path, experiment: Experiment, run: str | None, seed: int | None, at: Mapping[str, Any]
) -> list[Cell]:
    """The cells that are meant: one for each point of the sweep that is left open."""
    runs, seed = experiment.runs, experiment.seeds[0] if seed is None else seed
    if run is None and len(runs) > 1:
        raise InputError(f"{folder}: holds several runs; name one of {', '.join(runs)}")
    if run is not None and run not in runs:
        raise InputError(f"{folder}: {unknown('run', run, runs)}")
    if seed not in experiment.seeds:
        raise InputError(f"{folder}: no seed {seed}; there are {', '.join(map(str, experiment.seeds))}")
    for key in at:
        if key not in experiment.sweep:
            raise InputError(f"{folder}: {unknown('key of the sweep', key, experiment.sweep)}")
    cells = [
        cell
        for cell in experiment.cells
        if cell.run == (run or runs[0])
        and cell.seed == seed
        and point_of({key: cell.point[key] for key in at}) == point_of(at)
    ]
    if not cells:
        places = "; ".join(f"{key} = {', '.join(map(str, experiment.sweep[key]))}" for key in at)
        raise InputError(f"{folder}: no such point of the sweep; there are {places}")
    return cells


def _best_point(folder: Path, cells: list[Cell]) -> Cell:
    """Of a run's points, the one that the report calls its best."""
    runs = {run.name: run for run in summarise(read_folder(folder)).runs}
    order = [ended.point for ended in runs[cells[0].run].points] if cells[0].run in runs else []
    known = [cell for cell in cells if point_of(cell.point) in order]
    return min(known, key=lambda cell: order.index(point_of(cell.point))) if known else cells[0]
