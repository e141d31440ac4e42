"""Where numbers go: TensorBoard, Weights & Biases, MLflow, or a function of one's own.

    sampler.log_to(hemiola.loggers.tensorboard("runs/mine"))
    averager.log_to(hemiola.loggers.wandb(project="mine", mode="offline"))
    hemiola.loggers.log_results(results, hemiola.loggers.mlflow("runs/mlflow"))

A *log* is any function of a dictionary of numbers and a step; these are three of them. They write on the first rank
only: what samplers and averagers tell is the same on every rank, apart from bytes and seconds.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from hemiola.extras import naming_the_extra
from hemiola.loops.telemetry import Log

Write = Callable[[dict[str, float], int], None]


class Loggable(Protocol):
    """What is needed of a `hemiola.Result`."""

    @property
    def row(self) -> dict[str, Any]: ...

    @property
    def log(self) -> list[dict[str, Any]]: ...


class Logger:
    """A log that writes on the first rank only, and is closed at the end.

    Args:
        write: Takes numbers by name, and the step.
        close: Called once, by `close` or at the end of a ``with`` block.
    """

    def __init__(self, write: Write, close: Callable[[], None]) -> None:
        self._write, self._close = write, close
        self._open = True

    def __call__(self, numbers: Mapping[str, float], step: int) -> None:
        """Write numbers of a step."""
        self._write({name: float(value) for name, value in numbers.items()}, int(step))

    def close(self) -> None:
        """Write what is left. Nothing happens the second time."""
        if self._open:
            self._open = False
            self._close()

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tensorboard(folder: str | Path) -> Logger:
    """Write TensorBoard event files: ``tensorboard --logdir FOLDER`` shows them."""
    if not _first():
        return _silent()
    with naming_the_extra("hemiola.loggers.tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    return Logger(write, writer.close)  # type: ignore[no-untyped-call]


def wandb(**options: Any) -> Logger:
    """Write to a Weights & Biases run, the one under way or a new one: ``options`` are those of ``wandb.init``.

    ``mode="offline"`` writes a folder that ``wandb sync`` uploads later.
    """
    if not _first():
        return _silent()
    with naming_the_extra("hemiola.loggers.wandb"):
        import wandb as package
    own = package.run is None
    run = package.init(**options) if own else package.run
    defined: set[str] = set()

    def write(numbers: dict[str, float], step: int) -> None:
        # Samplers count epochs and averagers steps: each name has an axis of its own kind instead of W&B's one step.
        prefixes = {name.partition("/")[0] for name in numbers}
        for prefix in prefixes - defined:
            run.define_metric(f"{prefix}/at")
            run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/at")
            defined.add(prefix)
        run.log({**numbers, **{f"{prefix}/at": step for prefix in prefixes}})

    return Logger(write, run.finish if own else _nothing)


def mlflow(folder: str | Path | None = None, experiment: str = "hemiola", run: str | None = None) -> Logger:
    """Write to a new MLflow run: in a local folder, or where MLflow is set up to write."""
    if not _first():
        return _silent()
    with naming_the_extra("hemiola.loggers.mlflow"):
        if folder is not None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric
    client = MlflowClient(tracking_uri=None if folder is None else Path(folder).absolute().as_uri())
    found = client.get_experiment_by_name(experiment)
    owner = client.create_experiment(experiment) if found is None else found.experiment_id
    run_id = client.create_run(owner, run_name=run).info.run_id

    def write(numbers: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run_id, [Metric(name, value, now, step) for name, value in numbers.items()])

    return Logger(write, lambda: client.set_terminated(run_id))


def log_results(results: Iterable[Loggable], log: Log) -> None:
    """Write the evaluations of finished runs, as ``run/seed/column``; the step is the number of updates."""
    for result in results:
        prefix = f"{result.row['run']}/{result.row['seed']}"
        for line in result.log:
            numbers = {
                f"{prefix}/{name}": float(value)
                for name, value in line.items()
                if name not in ("seed", "updates") and _number(value)
            }
            log(numbers, int(line["updates"]))


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _first() -> bool:
    """Whether this is the first rank, or the only process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return int(os.environ.get("RANK", "0")) == 0


def _silent() -> Logger:
    return Logger(lambda numbers, step: None, _nothing)


def _nothing() -> None:
    pass
