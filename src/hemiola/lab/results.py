"""One finished cell: the columns of results.csv, its row, its evaluations and its model.

`SCHEMA` is the one place that knows the columns: what writes, reads, shows and documents them asks here. A new column
is a line of it, and a value under that name in what `hemiola.training.loop.Training` records.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hemiola.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hemiola.lab.experiment import Cell
    from hemiola.training import Training


@dataclass(frozen=True)
class Column:
    """A column of results.csv, or a number that only log.jsonl has.

    Attributes:
        name: In the files.
        meaning: For the documentation.
        title: Over a column of the report or along an axis; empty for what the report does not show as a number.
        unit: Whether it is a time, a size, or a plain number.
        better: Which direction is better, if one is; ``"task"`` where the task says.
        logged: Whether only log.jsonl has it.
    """

    name: str
    meaning: str
    title: str = ""
    unit: Literal["", "seconds", "bytes"] = ""
    better: Literal["", "lower", "task"] = ""
    logged: bool = False


SCHEMA = (
    Column("run", "name of the run"),
    Column("seed", "of every random stream"),
    Column("workers", "how many"),
    Column("updates", "versions of the weights that were made", "updates"),
    Column("epochs", "passes over the training set", "epochs"),
    Column("seconds", "cluster time, virtual where simulated", "cluster time", "seconds", "lower"),
    Column("train_loss", "mean loss plus the task's l2 term", "training loss", better="lower"),
    Column("train_gap", "`train_loss` minus its minimum, on convex tasks", "gap f − f*", better="lower"),
    Column("test_loss", "mean loss on the test set", "test loss", better="lower"),
    Column("test_metric", "the task's metric on the test set", "test metric", better="task"),
    Column("bytes_per_worker", "sent by an average worker, sketches included", "sent per worker", "bytes", "lower"),
    Column("averagings", "updates that merged at least one report", "averagings"),
    Column("mean_period", "local steps per averaging", "mean period"),
    Column(
        "weighted_spread",
        "mean spread at the averagings, weighted by learning rate times local steps",
        "weighted spread",
    ),
    Column("mean_staleness", "of merged reports, in updates", "mean staleness"),
    Column("max_staleness", "of merged reports, in updates", "largest staleness"),
    Column("mean_update_seconds", "cluster time per update", "time per update", "seconds"),
    Column("units_cancelled", "units that were cancelled and came again", "units cancelled"),
    Column("units_dropped", "units whose reports were too stale or not finite", "units dropped"),
    Column("idle_share", "share of the workers' time spent waiting", "idle share", logged=True),
    Column("wasted_share", "share of the workers' time spent on what was not used", "wasted share", logged=True),
    Column("wall_seconds", "real time; the one column that differs from run to run", "wall-clock time", "seconds"),
    Column("status", "`done` or `diverged`"),
)

BY_NAME = {column.name: column for column in SCHEMA}

COLUMNS = tuple(column.name for column in SCHEMA if not column.logged)
"""The columns of results.csv that every experiment has; any other column is a swept key."""


def columns_for_people() -> str:
    """The columns of results.csv as the table of docs/experiments.md."""
    rows = [f"| `{column.name}` | {column.meaning} |" for column in SCHEMA if not column.logged]
    return "\n".join(["| column | meaning |", "|---|---|", *rows]) + "\n"


class Trained(NamedTuple):
    """The model of a finished cell.

    Attributes:
        weights: Gives its state_dict.
        module: Gives a module of the task to load it into.
        kept: Which weights they are: ``keep`` as the experiment says, ``updates`` and ``test_metric`` at that moment.
    """

    weights: Callable[[], dict[str, Tensor]]
    module: Callable[[], nn.Module]
    kept: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One finished cell.

    Attributes:
        row: Its row of results.csv, by column.
        log: Its lines of log.jsonl, one dict per evaluation.
        trained: Where its model comes from; see `model`.
    """

    row: dict[str, Any]
    log: list[dict[str, Any]]
    trained: Trained | None = field(default=None, repr=False, compare=False)

    def weights(self) -> dict[str, Tensor]:
        """The state_dict the cell has left: parameters and buffers of the task's model by name, on the CPU."""
        return self._trained().weights()

    def model(self) -> nn.Module:
        """The task's model with these weights, in eval mode."""
        module = self._trained().module()
        module.load_state_dict(self.weights())
        return module.eval()

    def _trained(self) -> Trained:
        if self.trained is None:
            raise InputError(f"run {self.row['run']!r}, seed {self.row['seed']}: its weights were not kept")
        return self.trained


def result_of(cell: Cell, training: Training, trained: Trained | None = None) -> Result:
    """Gather what a cell gave."""
    name = {"run": cell.run, "seed": cell.seed, "sweep": cell.point}
    last = training.records[-1]
    row = {column: last.get(column) for column in COLUMNS}
    row |= {"run": cell.run, "seed": cell.seed, "workers": cell.settings.workers, "status": training.status}
    row |= cell.point
    return Result(row, [name | record for record in training.records], trained)


def csv_text(rows: Iterable[dict[str, Any]], swept: Sequence[str]) -> str:
    """results.csv; floats in full, so that equal runs give equal bytes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = [*COLUMNS, *swept]
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if row.get(column) is None else _plain(row[column]) for column in columns])
    return out.getvalue()


def jsonl_text(lines: Iterable[dict[str, Any]]) -> str:
    """log.jsonl."""
    return "".join(json.dumps(line, allow_nan=True) + "\n" for line in lines)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value) if isinstance(value, list | dict) else repr(value)
