"""The charts of one page, and what the page's script needs to draw them."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from hemiola.lab.report import charts, tables, words
from hemiola.lab.report.read import Folder
from hemiola.lab.report.summary import Summary


class Drawing:
    """The charts of one page: sections add to it, `payload` is what the page's script reads."""

    def __init__(self, folder: Folder, summary: Summary) -> None:
        self.folder = folder
        self.summary = summary
        self.runs = folder.runs
        self.lines = tables.mean_curves(folder, summary)
        self.measures = tables.available(self.lines, tables.MEASURES)
        self.charts: list[dict[str, Any]] = []
        self.tables: dict[str, Any] = {}

    def add(self, spec: str, identity: str, label: str, **more: str) -> str:
        """Add a chart; returns the figure to put into the page."""
        self.charts.append({"id": identity, "spec": spec, "label": label, **more})
        return identity

    def add_rows(self, name: str, rows: charts.Rows) -> None:
        """Add a table of a chart that is not a curve."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        self.tables[name] = {"columns": columns, "rows": [[_short(row.get(key)) for key in columns] for row in rows]}

    def add_spans(self, name: str, rows: charts.Rows) -> None:
        """Add a table of one curve chart, its measure called ``name``."""
        columns = ["run", "x", name, f"{name}_low", f"{name}_high"]
        cells = [
            [self.runs.index(row["run"]), *(_short(row[key]) for key in ("x", "mean", "low", "high"))] for row in rows
        ]
        self.tables[name] = {"columns": columns, "rows": cells}

    def add_curves(self) -> None:
        """Add the table that all charts over evaluations share."""
        measures = tables.available(self.lines, (*tables.MEASURES, "herding"))
        units = {x: tables.axis(self.lines, x)[0] for x in tables.AGAINST}
        rows = []
        for run, line in self.lines.items():
            for step in line.steps:
                spans = [number for name in measures for number in (step[name].mean, step[name].low, step[name].high)]
                rows.append(
                    [self.runs.index(run), *(_short(step[x].mean / units[x]) for x in units), *map(_short, spans)]
                )
        columns = ["run", *units, *(name + end for name in measures for end in ("", "_low", "_high"))]
        self.tables["curves"] = {"columns": columns, "rows": rows}

    def payload(self) -> dict[str, Any]:
        """What page.js reads."""
        measure = self.summary.objective if self.summary.objective in self.measures else next(iter(self.measures), "")
        rows = tables.curve_rows(self.lines, "epochs", measure) if measure else []
        return {
            "runs": self.runs,
            "measures": {name: words.measure_name(name, self.summary.task) for name in self.measures},
            "measure": measure,
            "scale": "log" if tables.prefers_log(rows) else "linear",
            "tail": tables.TAIL,
            "tables": self.tables,
            "specs": _specifications(tuple(self.runs)),
            "charts": self.charts,
        }


@cache
def _specifications(runs: tuple[str, ...]) -> dict[str, Any]:
    """The four specifications; ``§x`` and ``§ink`` stand for what differs between charts of one kind."""
    places = {run: place for place, run in enumerate(runs)}
    made = {
        "curves-log": charts.curves(places, "§x", None, True, charts.PAGE),
        "curves-linear": charts.curves(places, "§x", None, False, charts.PAGE),
        "staleness": charts.staleness("§ink", charts.PAGE),
        "ledger": charts.ledger(charts.PAGE),
    }
    return {name: charts.spec(chart, charts.PAGE) for name, chart in made.items()}


def _short(value: object) -> object:
    """Five significant digits, null for what is not finite."""
    if isinstance(value, float):
        rounded = float(f"{value:.5g}")  # may round up to infinity
        return rounded if math.isfinite(rounded) else None
    return value
