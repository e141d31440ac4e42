"""From a finished cell to a row of results.csv and lines of log.jsonl."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hemiola.lab.experiment import Cell
from hemiola.lab.report.read import COLUMNS
from hemiola.training import Training


@dataclass(frozen=True)
class Result:
    """One finished cell, as plain values.

    Attributes:
        row: Its row of results.csv, by column.
        log: Its lines of log.jsonl, one dict per evaluation.
    """

    row: dict[str, Any]
    log: list[dict[str, Any]]


def result_of(cell: Cell, training: Training) -> Result:
    """Gather what a cell gave."""
    name = {"run": cell.run, "seed": cell.seed, "sweep": cell.point}
    last = training.records[-1]
    row = {column: last.get(column) for column in COLUMNS}
    row |= {"run": cell.run, "seed": cell.seed, "workers": cell.settings.workers, "status": training.status}
    row |= cell.point
    return Result(row, [name | record for record in training.records])


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
