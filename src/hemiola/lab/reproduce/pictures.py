"""The picture of a claim: panels of lines with bands over seeds, drawn as one SVG file in the axes of the paper."""

from __future__ import annotations

import json
import math
from typing import Any

import vl_convert

from hemiola.lab.report import marks
from hemiola.lab.report.read import Folder
from hemiola.lab.reproduce.numbers import best_point, logs_at
from hemiola.lab.reproduce.parts import Rows
from hemiola.lab.reproduce.table import Picture

WIDTH, HEIGHT = 330, 230
_TITLES = {
    "epochs": "epochs",
    "seconds": "cluster seconds",
    "updates": "updates",
    "bytes_per_worker": "bytes per worker",
    "train_loss": "training loss",
    "train_gap": "training gap f − f*",
    "test_loss": "test loss",
    "test_metric": "test metric",
}


def curve_rows(panel: Picture, folder: Folder) -> Rows:
    """Mean and range over seeds of each run at its best point, evaluation by evaluation."""
    rows: Rows = []
    for run in panel.runs or folder.runs:
        logs = list(logs_at(folder, run, best_point(folder, run, panel.y)).values())
        for moment in zip(*logs, strict=False):
            x = [seen.get(panel.x, math.nan) for seen in moment]
            y = [seen.get(panel.y, math.nan) for seen in moment]
            if all(map(math.isfinite, (*x, *y))) and min(x) >= panel.start:
                rows.append({"line": run, "x": sum(x) / len(x), "mean": sum(y) / len(y), "low": min(y), "high": max(y)})
    return rows


def draw(panels: list[tuple[Picture, Rows]]) -> str:
    """The panels side by side, two in a row, as SVG; a line looks the same in all of them."""
    lines = list(dict.fromkeys(str(row["line"]) for _, rows in panels for row in rows))
    drawn = [_panel(panel, rows, lines) for panel, rows in panels if rows]
    if not drawn:
        return ""
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "config": marks.style(marks.PICTURE),
        "concat": drawn,
        "columns": 2,
        "resolve": {"scale": {"color": "shared", "strokeDash": "shared"}},
    }
    svg: str = vl_convert.vegalite_to_svg(json.dumps(spec))
    return svg


def _panel(panel: Picture, rows: Rows, lines: list[str]) -> dict[str, Any]:
    shown = _shown(panel, rows)
    legend = {"title": None, "symbolType": "stroke", "symbolSize": 300, "symbolStrokeWidth": 2, "symbolOpacity": 1}

    def of_line(look: list[Any]) -> dict[str, Any]:
        return {"field": "line", "type": "nominal", "legend": legend, "scale": {"domain": lines, "range": look}}

    ink = of_line([marks.colour(place) for place in range(len(lines))])
    dash = of_line([marks.dash(place) for place in range(len(lines))])
    x_scale = {"type": "log", "nice": False} if panel.log_x else {"zero": False, "nice": False}
    y_scale = {"type": "log", "nice": False} if panel.log_y else {"zero": False, "nice": True}
    y_title = panel.y_title or _TITLES.get(panel.y, panel.y)
    across = {
        "field": "x",
        "type": "quantitative",
        "title": panel.x_title or _TITLES.get(panel.x, panel.x),
        "scale": x_scale,
        # As an expression every number has a prefix of its own: 500 and 1k; the format of the axis makes 0.5k of 500.
        "axis": {"tickCount": 5, "grid": False, "labelExpr": "format(datum.value, '~s')"},
    }
    height = {"type": "quantitative", "title": y_title, "scale": y_scale, "axis": {"tickCount": 5, "format": "~g"}}
    band = {
        "mark": {"type": "area", "opacity": 0.15, "strokeWidth": 0},
        "encoding": {"x": across, "y": {"field": "low", **height}, "y2": {"field": "high"}, "color": ink},
    }
    line = {
        "mark": {"type": "line", "strokeWidth": 1.8, "point": _few(shown)},
        "encoding": {"x": across, "y": {"field": "mean", **height}, "color": ink, "strokeDash": dash},
    }
    size = {"width": WIDTH, "height": HEIGHT, "title": panel.title}
    return {**size, "data": {"values": shown}, "layer": [band, line]}


def _shown(panel: Picture, rows: Rows) -> Rows:
    """What can be drawn. On a logarithmic axis a band that goes below 0 ends where the picture does."""
    finite = [row for row in rows if all(math.isfinite(row[key]) for key in ("x", "mean", "low", "high"))]
    right = [row for row in finite if row["x"] > 0] if panel.log_x else finite
    if not panel.log_y:
        return right
    above = [row for row in right if row["mean"] > 0]
    lowest = min((row[key] for row in above for key in ("mean", "low") if row[key] > 0), default=0.0)
    return [{**row, "low": row["low"] if row["low"] > 0 else lowest} for row in above]


def _few(rows: Rows) -> bool:
    """Whether points are to be drawn: where there are so few that a line alone would not show them."""
    lines = {row["line"] for row in rows}
    return bool(lines) and len(rows) / len(lines) <= 12
