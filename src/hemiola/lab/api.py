"""`hemiola.train`: the experiment file's fields as arguments, plain records as the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hemiola.clusters.torch.group import Place
from hemiola.errors import InputError
from hemiola.lab.compared import Results
from hemiola.lab.execute import check_with_data, run_experiment
from hemiola.lab.experiment import Cell, Experiment
from hemiola.lab.launching import train_on_ranks
from hemiola.lab.notebook_progress import progress_here
from hemiola.lab.ranks import Tell, torch_factory
from hemiola.lab.report.read import read_about
from hemiola.lab.results import Result
from hemiola.lab.store import Store
from hemiola.lab.worker import PROGRESS_SECONDS, progress_of, train_cell
from hemiola.training import Training


def train(
    *,
    out: Path | str | None = None,
    data: Path | str | None = None,
    jobs: int | None = None,
    resume: bool = False,
    **experiment: Any,
) -> Results:
    """Run an experiment from Python.

    ``hemiola.train(task="digits-logistic", workers=4, stop={"epochs": 3}, order="cd-grab")`` does what ``hemiola run``
    does with a file that says the same; every field of the experiment file is a keyword.

    Args:
        out: Folder for results.csv, log.jsonl and resumable state; without it everything runs in this process and
            nothing is written.
        data: Folder of the data sets, else HEMIOLA_DATA.
        jobs: With ``out``: parallel processes; as many as there are cores by default.
        resume: With ``out``: go on with what the folder already holds.
        **experiment: The fields of an experiment file, as plain values.

    Returns:
        One `Result` per run, sweep point and seed, in that order: ``result.row`` is its row of results.csv,
        ``result.log`` its evaluations. ``results.conclusion()`` says what they say together.

    Raises:
        InputError: Something in the experiment cannot be used.
        RuntimeError: A part of the experiment failed for another reason; the message says which and why.
    """
    checked = Experiment(experiment)
    folder = None if data is None else Path(data)
    if out is None:
        if jobs is not None or resume:
            raise InputError("jobs and resume need a folder to work in; give out=DIR")
        about = {"experiment": checked.resolved(), "task": check_with_data(checked, folder)}
        return Results(_train_all(checked.cells, folder), lambda: about)
    outcome = run_experiment(checked, Path(out), folder, jobs, resume, progress_here())
    if outcome.failed:
        first = outcome.failed[0]
        where = f" (whole traceback: {first.kept})" if first.trace else ""
        raise RuntimeError(
            f"{len(outcome.failed)} of {outcome.total} parts failed; first {first.cell.run!r}, seed {first.cell.seed}: "
            f"{first.why}{where}"
        )
    store = Store(Path(out), checked, folder)
    finished = [result for cell in checked.cells if (result := store.finished(cell)) is not None]
    return Results(finished, lambda: read_about(Path(out)))


def _train_all(cells: Sequence[Cell], data: Path | None) -> list[Result]:
    """Train cells in this process, one after the other, and keep nothing but their results."""
    found: list[Result] = []
    with progress_here() as display:
        display.begin(len(cells), 0)
        for cell in cells:
            began = time.monotonic()
            display.started(cell)
            result = _train(cell, data, partial(display.heard, cell))
            display.ended(cell, {"ended": "done"}, result, time.monotonic() - began)
            found += [] if result is None else [result]
    return found


def _train(cell: Cell, data: Path | None, tell: Tell) -> Result | None:
    if torch_factory(cell) is None:
        return train_cell(cell, data, None, _Teller(tell))
    if Place.find() is not None:
        raise InputError("under torchrun, hemiola.train needs a folder that rank 0 keeps results in; give out=DIR")
    return train_on_ranks(cell, data, tell)


class _Teller:
    """Called after every update: tells now and then how far a cell is."""

    def __init__(self, tell: Tell) -> None:
        self.tell, self.next = tell, 0.0

    def __call__(self, training: Training) -> bool:
        now = time.monotonic()
        if now >= self.next:
            self.next = now + PROGRESS_SECONDS
            self.tell(progress_of(training, 0.0))
        return True
