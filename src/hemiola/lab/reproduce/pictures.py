"""The picture of a claim: panels of lines with bands over seeds, drawn as one SVG file in the axes of the paper."""

from __future__ import annotations

import math
from typing import Any

import altair as alt
import vl_convert

from hemiola.lab.report import charts
from hemiola.lab.report.read import Folder
from hemiola.lab.reproduce.functions import Rows
from hemiola.lab.reproduce.numbers import best_point, logs_at
from hemiola.lab.reproduce.table import Panel

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


def curve_rows(panel: Panel, folder: Folder) -> Rows:
    """Mean and range over seeds of each run at its best point, evaluation by evaluation."""
    rows: Rows = []
    for run in panel.runs or folder.runs:
        logs = list(logs_at(folder, run, best_point(folder, run, panel.y)).values())
        for moment in zip(*logs, strict=False):
            x = [seen.numbers[panel.x] for seen in moment]
            y = [seen.numbers[panel.y] for seen in moment]
            if all(map(math.isfinite, (*x, *y))):
                rows.append({"line": run, "x": sum(x) / len(x), "mean": sum(y) / len(y), "low": min(y), "high": max(y)})
    return rows


def draw(panels: list[tuple[Panel, Rows]]) -> str:
    """The panels side by side, two in a row, as SVG; a line looks the same in all of them."""
    lines = list(dict.fromkeys(str(row["line"]) for _, rows in panels for row in rows))
    drawn = [_panel(panel, rows, lines) for panel, rows in panels if rows]
    if not drawn:
        return ""
    chart = alt.concat(*drawn, columns=2).resolve_scale(color="shared", strokeDash="shared")
    svg: str = vl_convert.vegalite_to_svg(charts.spec(chart, charts.PICTURE))
    return svg


def _panel(panel: Panel, rows: Rows, lines: list[str]) -> Any:
    shown = [
        row
        for row in rows
        if all(math.isfinite(row[key]) for key in ("x", "mean", "low", "high"))
        and (not panel.log_y or row["low"] > 0)
        and (not panel.log_x or row["x"] > 0)
    ]
    legend = alt.Legend(
        title=None, symbolType="stroke", symbolSize=300, symbolStrokeWidth=2, symbolOpacity=1, columns=1
    )
    ink = alt.Color(
        "line:N",
        legend=legend,
        scale=alt.Scale(domain=lines, range=[charts.colour(place) for place in range(len(lines))]),
    )
    dash = alt.StrokeDash(
        "line:N",
        legend=legend,
        scale=alt.Scale(domain=lines, range=[charts.dash(place) for place in range(len(lines))]),
    )
    x_scale = alt.Scale(type="log", nice=False) if panel.log_x else alt.Scale(zero=False, nice=False)
    y_scale = alt.Scale(type="log", nice=False) if panel.log_y else alt.Scale(zero=False, nice=True)
    x_title, y_title = panel.x_title or _TITLES.get(panel.x, panel.x), panel.y_title or _TITLES.get(panel.y, panel.y)
    across = alt.X("x:Q", title=x_title, scale=x_scale, axis=alt.Axis(tickCount=5, grid=False, format="~s"))
    up = alt.Y("mean:Q", title=y_title, scale=y_scale, axis=alt.Axis(tickCount=5, format="~g"))
    base = alt.Chart(alt.InlineData(values=shown))
    band = base.mark_area(opacity=0.15, strokeWidth=0).encode(
        x=across, y=alt.Y("low:Q", title=y_title, scale=y_scale), y2="high:Q", color=ink
    )
    line = base.mark_line(strokeWidth=1.8, point=_few(shown)).encode(x=across, y=up, color=ink, strokeDash=dash)
    return alt.layer(band, line).properties(width=WIDTH, height=HEIGHT, title=panel.title)


def _few(rows: Rows) -> bool:
    """Whether points are to be drawn: where there are so few that a line alone would not show them."""
    lines = {row["line"] for row in rows}
    return bool(lines) and len(rows) / len(lines) <= 12
