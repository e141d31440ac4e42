"""``hemiola report DIR --figure loss-vs-seconds.svg``: one chart as a picture for a paper or a slide."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import altair
import vl_convert

from hemiola.errors import InputError, unknown
from hemiola.lab.report import charts, tables, words
from hemiola.lab.report.read import Folder
from hemiola.lab.report.summary import Summary, summarise

_MEASURES = {"gap": "train_gap", "loss": "train_loss", "test-loss": "test_loss", "metric": "test_metric"}
_AGAINST = {"epochs": "epochs", "seconds": "seconds", "bytes": "bytes_per_worker"}
FIGURES = [f"{y}-vs-{x}" for y in _MEASURES for x in _AGAINST]
FIGURES += ["herding", "period-over-time", "spread-over-time", "staleness", "ledger"]

_FORMATS: dict[str, Callable[[str], bytes]] = {
    ".svg": lambda spec: vl_convert.vegalite_to_svg(spec).encode(),
    ".png": lambda spec: vl_convert.vegalite_to_png(spec, scale=2.0),
    ".pdf": lambda spec: vl_convert.vegalite_to_pdf(spec),
}


def draw(folder: Folder, name: str) -> bytes:
    """Draw the figure a file name stands for, in the format of its suffix."""
    figure, suffix = PurePath(name).stem, PurePath(name).suffix.lower()
    if suffix not in _FORMATS:
        raise InputError(f"a figure must end in {', '.join(_FORMATS)}, got {name!r}")
    if figure not in FIGURES:
        raise InputError(unknown("figure", figure, FIGURES))
    return _FORMATS[suffix](json.dumps(_specification(folder, summarise(folder), figure)))


def _specification(folder: Folder, summary: Summary, figure: str) -> dict[str, Any]:
    if figure in ("staleness", "ledger"):
        return _by_run(folder, summary, figure)
    lines = tables.mean_curves(folder, summary)
    if figure in ("period-over-time", "spread-over-time"):
        measured = figure.split("-")[0]
        rows, x, y = tables.period_rows(folder, summary, measured), "local steps", measured
    elif figure == "herding":
        rows, x, y = tables.curve_rows(lines, "epochs", "herding"), "epochs", "herding bound"
    else:
        measure, against = (
            names[part] for names, part in zip((_MEASURES, _AGAINST), figure.split("-vs-"), strict=True)
        )
        rows, x, y = (
            tables.curve_rows(lines, against, measure),
            tables.axis(lines, against)[1],
            words.measure_name(measure, summary.task),
        )
    if not rows:
        raise _nothing(folder, figure)
    drawn = {row["run"] for row in rows}
    places = {run: place for place, run in enumerate(folder.runs) if run in drawn}
    chart = charts.curves(places, x, y, tables.prefers_log(rows), charts.PICTURE)
    return charts.spec(chart, charts.PICTURE, rows)


def _by_run(folder: Folder, summary: Summary, figure: str) -> dict[str, Any]:
    """One panel for every run that has something to show."""
    panels, data = [], {}
    for run in summary.runs:
        rows = tables.staleness_rows(folder, run) if figure == "staleness" else tables.ledger_rows(folder, run)
        if rows:
            data[run.name] = rows
            ink = charts.colour(folder.runs.index(run.name))
            look = charts.PICTURE
            panel = charts.staleness(ink, look, run.name) if figure == "staleness" else charts.ledger(look, run.name)
            panels.append(panel.properties(title=run.name, width=320))
    if not panels:
        raise _nothing(folder, figure)
    made = charts.spec(altair.concat(*panels, columns=2).resolve_scale(strokeDash="independent"), charts.PICTURE)
    made["datasets"] = data
    return made


def _nothing(folder: Folder, figure: str) -> InputError:
    return InputError(f"{folder.path} has nothing to draw in {figure}: no run logged it")
