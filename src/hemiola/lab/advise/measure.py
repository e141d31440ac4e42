"""What a cluster is like: seconds of a step on every rank, and the link between them.

    torchrun --nproc-per-node 4 -m hemiola measure digits-mlp --out measured.json
    hemiola advise digits-mlp --measured measured.json

In one process only the steps are timed. A ring all-reduce of n bytes among P ranks takes 2 (P - 1) messages of n / P
bytes, so two sizes tell latency and bandwidth.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hemiola.clusters.torch.group import Place, gather, join, leave
from hemiola.contracts import TaskLike
from hemiola.errors import InputError
from hemiola.files import write_whole
from hemiola.pace.laws import Empirical
from hemiola.timing.delays import Delay
from hemiola.timing.traces import read_trace

STEPS = 60
WARM_UP = 5
SMALL, LARGE = 1, 1 << 20  # floats
REPEATS = 20
FEWEST = 20  # steps of a worker that say something about its delays


@dataclass(frozen=True)
class ClusterFacts:
    """What was measured.

    Attributes:
        step_seconds: For every rank, the times of its steps.
        bandwidth: Bytes a second between two ranks; None in one process.
        latency: Seconds of an empty message; None in one process.
    """

    step_seconds: list[list[float]]
    bandwidth: float | None = None
    latency: float | None = None

    @property
    def link(self) -> dict[str, str] | None:
        """As an experiment file says it."""
        if self.bandwidth is None or self.latency is None:
            return None
        return {"bandwidth": f"{8 * self.bandwidth / 1e6:.6g} Mbit/s", "latency": f"{1e6 * self.latency:.6g} us"}

    def write_trace(self, path: Path) -> None:
        """The step times as a trace that ``delay = "trace(FILE)"`` reads."""
        rows = [
            f"{worker},{step},{seconds:.9g}"
            for worker, times in enumerate(self.step_seconds)
            for step, seconds in enumerate(times)
        ]
        write_whole(path, "\n".join(["worker,step,step_seconds", *rows, ""]))


def time_steps(task: TaskLike, batch: int, steps: int = STEPS) -> list[float]:
    """Seconds of ordinary training steps of the task, one after the other, on this machine."""
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    random, found = np.random.default_rng(0), []
    for _ in range(WARM_UP + steps):
        inputs, targets = task.train.batch(random.integers(len(task.train), size=batch))
        began = time.perf_counter()
        optimizer.zero_grad()
        task.losses(model(inputs), targets).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(time.perf_counter() - began)
    return found[WARM_UP:]


def measure(task: TaskLike, batch: int | None = None, timeout: float = 120.0) -> ClusterFacts | None:
    """Time steps here, and the link if torchrun has started several ranks; None on ranks other than 0."""
    place = Place.find()
    times = time_steps(task, batch or task.batch)
    if place is None or place.world == 1:
        return ClusterFacts([times])
    join(place, "gloo", timeout)
    try:
        everyone = gather(times)
        small, large = (_all_reduce_seconds(size) for size in (SMALL, LARGE))
        if everyone is None:
            return None
        messages = 2 * (place.world - 1)
        latency = small / messages
        bandwidth = messages * 4 * LARGE / place.world / max(large - small, 1e-9)
        return ClusterFacts(everyone, bandwidth, latency)
    finally:
        leave()


def _all_reduce_seconds(floats: int) -> float:
    tensor, times = torch.zeros(floats), []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - began)
    return median(times)


def write_measured(path: Path, measured: ClusterFacts) -> None:
    """Keep what was measured."""
    write_whole(path, json.dumps(asdict(measured)))


def read_measured(path: Path) -> ClusterFacts:
    """Read what `write_measured` wrote."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        measured = ClusterFacts(**found)
        counts = [len(times) for times in measured.step_seconds]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: not a file that `hemiola measure` wrote: {error}") from None
    _refuse_few(counts, path)
    return measured


def read_times(path: Path) -> ClusterFacts:
    """Step times from a trace, or from the ``log.jsonl`` of a run on real machines."""
    trace = read_trace(path)
    by_worker = [times.tolist() for times in trace.by_worker()] or [list(trace.seconds)]
    _refuse_few([len(times) for times in by_worker], path)
    return ClusterFacts(by_worker)


def refuse_short_trace(delay: Delay) -> None:
    """Refuse a trace that is too short to tell how long steps take; a law of a formula always tells."""
    if delay.own is not None:
        _refuse_few([len(times) for times in delay.own.times], delay.law)
    elif delay.name == "trace" and isinstance(delay.scipy, Empirical):
        _refuse_few([len(delay.scipy.values)], delay.law)


def _refuse_few(steps: list[int], path: Path | str) -> None:
    few = [worker for worker, count in enumerate(steps) if count < FEWEST]
    if few or not steps:
        has = f"worker {few[0]} has {steps[few[0]]}" if few else "there is no worker"
        raise InputError(f"{path}: at least {FEWEST} steps of every worker are needed, {has}")
