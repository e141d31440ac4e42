"""Every cell of an experiment, in parallel processes, until all are finished or someone says stop."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from hemiola.clusters.ray.factory import RayFactory
from hemiola.clusters.torch.group import Place
from hemiola.contracts import TaskLike
from hemiola.flat import FlatModel
from hemiola.lab.experiment import Cell, Experiment
from hemiola.lab.fork_server import fork_context, start_fork_server
from hemiola.lab.here import run_here, stay_here
from hemiola.lab.launching import launch_on
from hemiola.lab.progress import Display
from hemiola.lab.ranks import TorchrunGroup, torch_factory
from hemiola.lab.store import Failure, Store
from hemiola.lab.worker import work_on
from hemiola.peers import RankLostError
from hemiola.training.optimum import optimum

# A cell told to stop finishes its update and writes a checkpoint; then it is ended the hard way.
STOP_PATIENCE_SECONDS = 60.0


@dataclass
class RunOutcome:
    """How an experiment ended: how many cells are finished, which failed and why, and whether it was told to stop."""

    finished: int
    total: int
    failed: list[Failure]
    stopped: bool = False

    @property
    def interrupted(self) -> bool:
        """Whether something is left to do that has not failed; also where a single cell's process was told to stop."""
        return self.stopped or self.finished + len(self.failed) < self.total


@dataclass
class _Active:
    cell: Cell
    process: BaseProcess
    pipe: Connection
    began: float
    ended: dict[str, Any] | None = None


def run_experiment(
    experiment: Experiment,
    folder: Path,
    data: Path | None = None,
    jobs: int | None = None,
    resume: bool = False,
    display: Display | None = None,
) -> RunOutcome:
    """Run every cell that is not finished, and write results.csv and log.jsonl.

    Args:
        experiment: What to run.
        folder: Where results go.
        data: Folder of the data sets.
        jobs: Cells side by side; as many as there are cores by default.
        resume: Go on with what the folder already holds.
        display: Shows progress; None for silence.
    """
    place = Place.find()
    if place is not None and any(torch_factory(cell) is not None for cell in experiment.cells):
        return _run_as_rank(place, experiment, folder, data, resume, display or Display.silent())
    facts = check_with_data(experiment, data)
    store = Store(folder, experiment, data)
    display = display or Display.silent()
    store.open(facts, resume, jobs, display.say)
    try:
        waiting = [cell for cell in experiment.cells if store.finished(cell) is None]
        display.begin(len(experiment.cells), len(experiment.cells) - len(waiting))
        staying = stay_here(waiting)
        if len(waiting) > len(staying):
            start_fork_server()
        with _stop_requests() as stop, display:
            others = [cell for cell in waiting if cell not in staying]
            failed = _run_all(others, store, data, jobs or len(os.sched_getaffinity(0)), stop, display)
            failed += run_here(staying, store, data, stop, display)
        finished = store.assemble()
        return RunOutcome(finished, len(experiment.cells), failed, stop.is_set())
    finally:
        store.close()


def _run_as_rank(
    place: Place, experiment: Experiment, folder: Path, data: Path | None, resume: bool, display: Display
) -> RunOutcome:
    """Run every cell together with the other processes that torchrun has started; rank 0 alone has the folder."""
    cells = experiment.cells
    group = TorchrunGroup(place, cells, experiment.given)
    store = Store(folder, experiment, data)
    display = display if group.first else Display.silent()
    try:

        def open_store() -> list[int]:
            store.open(check_with_data(experiment, data), resume or place.restarts > 0, say=display.say)
            return [number for number, cell in enumerate(cells) if store.finished(cell) is None]

        waiting = group.agree(open_store)
        display.begin(len(cells), len(cells) - len(waiting))
        with _stop_requests() as stop, display:
            for number in waiting:
                cell, began = cells[number], time.monotonic()
                display.started(cell)
                cell_folder = store.cell_folder(cell)
                with cell_folder.working() if group.first else nullcontext():
                    result = group.train(cell, data, cell_folder, stop.is_set, partial(display.heard, cell))
                    if result is not None and group.first:
                        cell_folder.save_result(result)
                ended = {"ended": "stopped" if result is None else result.row["status"]}
                display.ended(cell, ended, result, time.monotonic() - began)
                if result is None:
                    break
        group.close()
        if not group.first:
            return RunOutcome(0, 0, [])  # the first rank has the folder, and says what became of them
        return RunOutcome(store.assemble(), len(cells), [], stop.is_set())
    except RankLostError as lost:
        print(f"hemiola: {lost}; `hemiola resume` goes on from the last checkpoint", file=sys.stderr)
        sys.exit(1)
    finally:
        store.close()


def check_with_data(experiment: Experiment, data: Path | None) -> dict[str, Any]:
    """Build every run once, so that a mistake shows before anything is computed; returns facts about the task."""
    tasks: dict[str, TaskLike] = {}
    for cell in experiment.cells:
        if cell.seed == experiment.seeds[0]:
            with experiment.blaming(cell.run, cell.point, lambda other: other.plan(data)):
                plan, _ = cell.plan(data)
            tasks[str(cell.settings.task)] = plan.task
    for task in tasks.values():
        if task.convex:
            optimum(task)  # Found once here and cached, not once in every process.
    first = next(iter(tasks.values()))
    return {
        "name": first.name,
        "metric": first.metric,
        "higher_is_better": first.higher_is_better,
        "convex": first.convex,
        "examples": len(first.train),
        "parameters": FlatModel(first.model()).size,
    }


def _run_all(
    waiting: list[Cell], store: Store, data: Path | None, jobs: int, stop: threading.Event, display: Display
) -> list[Failure]:
    queue: list[Cell] = list(waiting)
    failed: list[Failure] = []
    active: list[_Active] = []
    stop_by = float("inf")
    while active or (queue and not stop.is_set()):
        while queue and not stop.is_set() and _may_start(queue[0], active, jobs):
            active.append(_launch(queue.pop(0), store, data))
            display.started(active[-1].cell)
        if stop.is_set() and stop_by == float("inf"):
            stop_by = time.monotonic() + STOP_PATIENCE_SECONDS
            _tell_to_stop(active)
        if time.monotonic() > stop_by:
            for one in active:
                one.process.kill()
        wait([one.pipe for one in active] + [one.process.sentinel for one in active], timeout=0.2)
        for one in list(active):
            _read(one, display)
            if not one.process.is_alive():
                _read(one, display)
                active.remove(one)
                ended = one.ended or {"ended": "failed", "error": _how_it_ended(one, store)}
                if ended["ended"] == "failed" and not (stop.is_set() and one.ended is None):
                    failed.append(store.failure(one.cell, ended["error"]))
                display.ended(one.cell, ended, store.finished(one.cell), time.monotonic() - one.began)
                one.pipe.close()
    return failed


def _may_start(cell: Cell, active: list[_Active], jobs: int) -> bool:
    """A real cluster has the machine to itself: cells side by side would be each other's stragglers."""
    if not active:
        return True
    return len(active) < jobs and not any(one.cluster().real for one in [cell, *(running.cell for running in active)])


def _launch(cell: Cell, store: Store, data: Path | None) -> _Active:
    context = fork_context()
    mine, theirs = context.Pipe()
    target = launch_on if torch_factory(cell) is not None else work_on
    process = context.Process(target=target, args=(cell, store.cell_folder(cell), data, theirs), daemon=True)
    with _without_the_script(cell):
        process.start()
    theirs.close()
    return _Active(cell, process, mine, time.monotonic())


@contextmanager
def _without_the_script(cell: Cell) -> Iterator[None]:
    """Processes that start import the caller's script, and would run it again where it has no main guard.

    Nothing here needs it, unless the cell has objects whose classes are defined there.
    """
    script = sys.modules["__main__"]
    if b"__main__" not in pickle.dumps(cell):
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _read(one: _Active, display: Display) -> None:
    try:
        while one.pipe.poll():
            message = one.pipe.recv()
            if "ended" in message:
                one.ended = message
            else:
                display.heard(one.cell, message)
    except (EOFError, OSError):
        pass  # The process is gone; whether it had ended well is in one.ended.


def _how_it_ended(one: _Active, store: Store) -> str:
    """Why a process ended that did not say it; Ray ends those whose raylet or GCS has died."""
    code = one.process.exitcode or 0
    last_words = store.cell_folder(one.cell).output().lower()
    if isinstance(one.cell.cluster(), RayFactory) and ("raylet" in last_words or "gcs" in last_words):
        return "Ray died"
    return (
        f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended with code {code}"
    )


def _tell_to_stop(active: list[_Active]) -> None:
    for one in active:
        try:
            one.pipe.send("stop")
        except OSError:
            continue  # It has ended already.


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event instead of ending this process."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
