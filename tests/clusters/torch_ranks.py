"""Trains experiments on any cluster and hands back what tests compare: in this process, or as ranks of a torch cluster.

Ranks are real processes with a real gloo group. They are forked from a server that has imported torch once, because
importing it is most of the time such a test takes; `test_torch_real.py` starts them as users do.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hemiola.clusters.torch.clocked import ClockedCollectiveCluster
from hemiola.clusters.torch.group import Place, join, leave
from hemiola.contracts import Order, State
from hemiola.lab.cell_folder import CellFolder
from hemiola.lab.experiment import Experiment
from hemiola.lab.ranks import RankWatch, train_as_rank
from hemiola.lab.tasks import Task
from hemiola.training import Training

FILE = Path(__file__)
TASKS = FILE.stem


@dataclass
class Job:
    """One run.

    Attributes:
        given: Of the experiment; its first cell is run.
        folder: Where a checkpoint is read from and written to, if anywhere.
        stop_at: Ask to stop at this update; the last rank asks, not the first.
        kill_at: The last rank kills itself at this update, unless it was started again.
        data: Folder of data sets.
    """

    given: dict[str, Any]
    folder: Path | None = None
    stop_at: int | None = None
    kill_at: int | None = None
    data: Path | None = None

    @property
    def cell_folder(self) -> CellFolder | None:
        """Jobs that share a folder go on from each other, also with another number of workers."""
        return None if self.folder is None else CellFolder(self.folder, {"run": "a job", "seed": 0, "digest": "same"})


@dataclass
class Trained:
    """What a run gave, on one rank."""

    status: str
    weights: Tensor
    log: list[dict[str, Any]]
    counts: dict[str, list[list[int]]] = field(default_factory=dict)
    period: dict[str, Any] = field(default_factory=dict)
    updates: int = 0
    memory: list[Tensor] = field(default_factory=list)
    dealt: list[list[int]] = field(default_factory=list)

    def curve(self, key: str = "train_loss") -> list[float]:
        return [line[key] for line in self.log]


def train_here(job: Job) -> Trained:
    """Train in this process: the simulated cluster, or the driver of a Ray cluster."""
    plan, make_cluster = Experiment(job.given).cells[0].plan(job.data)
    training = Training(plan, make_cluster)
    try:
        if job.cell_folder is not None and (state := job.cell_folder.load_checkpoint(print)) is not None:
            training.load_state_dict(state)
        status = training.run(lambda now: job.stop_at is None or now.version < job.stop_at)
        if status == "running":
            assert job.cell_folder is not None
            job.cell_folder.save_checkpoint(training.state_dict())
        return _trained(training)
    finally:
        training.close()


def train_on_ranks(jobs: list[Job], workers: int, rendezvous: Path) -> list[list[Trained]]:
    """Train all jobs, one after the other, in one group; returns for each job what every rank has."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hemiola.lab.ranks", "torch._dynamo"])
    rendezvous.mkdir(exist_ok=True)
    processes = []
    for rank in range(workers):
        place = Place(rank, workers, rank, 0)
        argument = {"JOBS": (jobs_plain(jobs), vars(place), str(rendezvous))}
        processes.append(context.Process(target=runpy.run_path, args=(str(FILE), argument, "__rank__"), daemon=True))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * workers
    found = [torch.load(rendezvous / f"{rank}.pt", weights_only=True) for rank in range(workers)]
    return [[Trained(**one) for one in everyone] for everyone in zip(*found, strict=True)]


def jobs_plain(jobs: list[Job]) -> list[dict[str, Any]]:
    """Plain values: a class of this file would be another class in the process that runs it as a script."""
    return [vars(job) for job in jobs]


def run_rank(jobs: list[dict[str, Any]], place: Place, rendezvous: Path) -> None:
    """What every rank does."""
    sys.path.insert(0, str(FILE.parent))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    join(place, "gloo", 120, rendezvous / f"group-{place.restarts}")
    trained = [_train_as_rank(Job(**job), place) for job in jobs]
    torch.save([vars(one) for one in trained], rendezvous / f"{place.rank}.pt")
    leave()


def _train_as_rank(job: Job, place: Place) -> Trained:
    cell = Experiment(job.given).cells[0]
    last = place.rank == place.world - 1
    kept: list[Training] = []

    class Watch(RankWatch):
        def __call__(self, training: Training) -> bool:
            kept[:] = [training]
            if last and place.restarts == 0 and training.version == job.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(training)

    def asked_to_stop() -> bool:
        return last and job.stop_at is not None and kept[0].version >= job.stop_at

    train_as_rank(cell, job.data, Watch(job.cell_folder, asked_to_stop, lambda message: None))
    return _trained(kept[0])


def _trained(training: Training) -> Trained:
    local = getattr(getattr(training.cluster, "runner", None), "local", {})
    return Trained(
        status=training.status,
        weights=training.versions[training.version].clone(),
        log=training.records,
        counts={fate: [part.tolist() for part in parts] for fate, parts in training.ledger.counts.items()},
        period=training.plan.period.state_dict(),
        updates=training.version,
        memory=[
            value.clone()
            for _, optimizer in sorted(local.items())
            for state in optimizer.state.values()
            for _, value in sorted(state.items())
            if isinstance(value, Tensor)
        ],
        dealt=_dealt(training),
    )


def _dealt(training: Training) -> list[list[int]]:
    """How often each unit was given out and did not come back; what a clocked rank still has in stock comes back."""
    if isinstance(training.cluster, ClockedCollectiveCluster):
        training.cluster._give_back()
    return visits_dealt(training.queues.state_dict(), training.plan.order, training.sizes)


def visits_dealt(queues: State, order: Order, sizes: list[int]) -> list[list[int]]:
    """For each queue, or for the one deck, how often each unit is over according to its state."""
    expected = []
    for worker, (queue, size) in enumerate(zip(queues.get("queues", [queues]), sizes, strict=True)):
        visits = np.full(size, queue["epoch"])
        visits[order.sequence(worker, queue["epoch"])[: queue["position"]]] += 1
        for _, _, units in queue["returned"]:
            visits[units] -= 1
        expected.append(visits.tolist())
    return expected


# ------------------------------------------------------------------------------------------------------ tasks to train


def _rows(count: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    inputs, rule = torch.randn(count, 6, generator=draws), torch.randn(6, 3, generator=draws)
    return inputs, (inputs @ rule).argmax(1)


def small(*, examples: int = 60, hidden: int = 8, spoilt: int = 0) -> Task:
    """A little classification; the last ``spoilt`` examples for training are not finite."""
    inputs, targets = _rows(examples + 20)
    inputs[examples - spoilt : examples] = float("nan")
    return Task(
        name="small",
        model=lambda: nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3)),
        train=(inputs[:examples], targets[:examples]),
        test=(inputs[examples:], targets[examples:]),
        lr=0.2,
        batch=5,
    )


def normed(*, examples: int = 60) -> Task:
    """With BatchNorm, whose running statistics have to be averaged, too."""
    inputs, targets = _rows(examples + 20)
    return Task(
        name="normed",
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)),
        train=(3 * inputs[:examples] + 1, targets[:examples]),
        test=(3 * inputs[examples:] + 1, targets[examples:]),
        lr=0.2,
        batch=5,
    )


def broken() -> Task:
    """Raises on one example only, so on one worker only."""
    task = small()
    read = task.train.batch

    def batch(indices: Any) -> tuple[Tensor, Tensor]:
        if 7 in indices and len(indices) < 60:
            raise ZeroDivisionError("example 7 is cursed")
        return read(indices)

    task.train.batch = batch  # type: ignore[method-assign]
    return task


if __name__ == "__rank__":
    _jobs, _place, _rendezvous = JOBS  # type: ignore[name-defined]  # noqa: F821 - given by train_on_ranks
    run_rank(_jobs, Place(**_place), Path(_rendezvous))
elif __name__ == "__main__":
    # Started by the elastic launcher: `python -m torch_ranks FOLDER`, with the jobs in FOLDER/jobs.
    import pickle

    _found = Place.find()
    assert _found is not None
    _folder = Path(sys.argv[1])
    run_rank(pickle.loads((_folder / "jobs").read_bytes()), _found, _folder)
