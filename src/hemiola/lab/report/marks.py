"""The grammar of every chart: Vega-Lite specifications over plain rows, in one style.

The page draws them interactively and `figures` as pictures; the two differ in their `Theme` only. Rows are called
``rows`` in every specification and have the columns that each function names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
Rows = list[dict[str, Any]]

# Okabe and Ito's colours, told apart with any colour vision; the first run, the reference, is neutral. A second round
# repeats the colours with other dashes, so that colour and dash together name a run, also in a grey print.
COLOURS = ("#7a7a7a", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
DASHES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3), (4, 2), (12, 4), (5, 2, 1, 2, 1, 2))
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# What became of a unit.
FATES = {"used": "#56b4e9", "cancelled": "#e69f00", "dropped": "#d55e00", "refused": "#7a7a7a"}
# What a worker does; it waits where it does nothing.
DOINGS = {
    "computes": "#56b4e9",
    "sends": "#009e73",
    "receives": "#9fd8c4",
    "exchanges": "#009e73",
    "cancelled": "#e69f00",
    "cut": "#e69f00",
    "late": "#d55e00",
    "dropped": "#d55e00",
    "down": "#7a7a7a",
}


@dataclass(frozen=True)
class Theme:
    """Where a chart is drawn.

    Attributes:
        ink: Colour of text, axes and grid; ``currentColor`` lets the page's light, dark and print styles decide.
        font: Font family.
        width: In pixels, or ``"container"``.
        height: In pixels, of a chart of curves.
        interactive: Whether points answer to the pointer and runs can be highlighted; then the page has the legend.
    """

    ink: str
    font: str
    width: int | str
    height: int
    interactive: bool


PAGE = Theme(ink="currentColor", font=FONT, width="container", height=250, interactive=True)
PICTURE = Theme(ink="#222222", font="Helvetica, Arial, sans-serif", width=480, height=300, interactive=False)


def colour(place: int) -> str:
    """Colour of the run at this place of the experiment file."""
    return COLOURS[place % len(COLOURS)]


def dash(place: int) -> list[int]:
    """Dash of the run at this place of the experiment file."""
    return list(DASHES[(place + place // len(COLOURS)) % len(DASHES)])


# ---------------------------------------------------------------------------------------------------------- charts


def lines(
    rows: Rows, runs: Mapping[str, int], x: str, y: str | None, theme: Theme, *, log: bool = False, kind: str = "curve"
) -> Spec:
    """Mean lines with bands from the lowest to the highest seed: ``run x mean low high``.

    Args:
        rows: What will be drawn.
        runs: The runs in it, each with its place in the experiment file: a run looks the same in all charts.
        x: Title of the horizontal axis.
        y: Title of the vertical axis; None where the caption says it.
        theme: Where it is drawn.
        log: Whether the vertical axis is logarithmic; points at or below zero are then left out.
        kind: ``curve``; ``steps`` for what is constant in between; ``sweep`` for single points on a logarithmic axis
            where the values are positive and far apart.
    """
    scale: Spec = {"type": "log", "nice": False} if log else {"zero": False, "nice": True}
    places = [row["x"] for row in rows]
    stretched = kind == "sweep" and min(places) > 0 and max(places) >= 8 * min(places)
    across = {
        "field": "x",
        "type": "quantitative",
        "title": x,
        "scale": {"type": "log", "nice": False} if stretched else {"nice": False, "zero": False},
        "axis": _axis(places, stretched, count=5, grid=False),
    }
    heights = [row[end] for row in rows for end in ("mean", "low", "high")]
    up = {"field": "mean", "type": "quantitative", "title": y, "scale": scale, "axis": _axis(heights, log, count=5)}
    base: Spec = {}
    if log:
        # The part of a band below zero has no place on this axis; the band then ends at its mean line.
        base["transform"] = [
            {"filter": "datum.mean > 0"},
            {"calculate": "datum.low > 0 ? datum.low : datum.mean", "as": "low"},
        ]
    ink, dashes = _of_run(runs, theme)
    shape = {"interpolate": "step-after"} if kind == "steps" else {}
    band = {
        "mark": {"type": "area", "strokeWidth": 0, **shape},
        "encoding": {
            "x": across,
            "y": up | {"field": "low"},
            "y2": {"field": "high"},
            "color": ink,
            "opacity": _lit(0.18, 0.03, theme),
        },
    }
    line = {
        "mark": {"type": "line", "strokeWidth": 2, "strokeJoin": "round", "clip": False, **shape},
        "encoding": {"x": across, "y": up, "color": ink, "strokeDash": dashes, "opacity": _lit(1, 0.15, theme)},
    }
    layers = [band, line]
    if kind == "sweep":
        dots = {"mark": {"type": "point", "filled": True, "size": 40}}
        layers.append(dots | {"encoding": {"x": across, "y": up, "color": ink, "opacity": _lit(1, 0.15, theme)}})
    if theme.interactive:
        layers.append(_nearest({"x": across, "y": up, "color": ink}))
        base["params"] = [{"name": "highlight", "value": []}]
    return _sized(base | {"layer": layers}, theme, theme.height)


def bars(rows: Rows, runs: Mapping[str, int], x: str, theme: Theme) -> Spec:
    """A horizontal bar for every run, a dot for every seed, and a text: ``run mean text``, ``run seed value``.

    Room for the text is a share of the largest value, so that it fits at any width.
    """
    largest = max((value for row in rows if (value := row.get("value", row.get("mean"))) is not None), default=0.0)
    across = {
        "type": "quantitative",
        "title": x,
        "scale": {"domain": [0, (largest or 1.0) * 1.3], "nice": False},
        "axis": _axis([0, largest], False, count=4),
    }
    label = {"labelLimit": 130, "labelFontSize": 12.5, "domain": False, "ticks": False, "grid": False, "title": None}
    down = {"field": "run", "type": "nominal", "sort": None, "axis": label, "scale": {"domain": list(runs)}}
    ink = {
        "field": "run",
        "type": "nominal",
        "scale": {"domain": list(runs), "range": [colour(place) for place in runs.values()]},
        "legend": None,
    }
    told: Spec = {"tooltip": {"content": "data"}} if theme.interactive else {}
    layers = [
        {
            "transform": [{"filter": "isValid(datum.mean)"}],
            "mark": {"type": "bar", "height": {"band": 0.62}, "cornerRadiusEnd": 2, "opacity": 0.82, **told},
            "encoding": {"x": across | {"field": "mean"}, "y": down, "color": ink},
        },
        {
            "transform": [{"filter": "isValid(datum.value)"}],
            "mark": {"type": "point", "filled": True, "size": 26, "color": theme.ink, "opacity": 0.7, **told},
            "encoding": {"x": across | {"field": "value"}, "y": down},
        },
        {
            "transform": [{"filter": "isValid(datum.text)"}],
            "mark": {"type": "text", "align": "left", "dx": 8, "fontSize": 12.5, "color": theme.ink},
            "encoding": {"x": across | {"field": "end"}, "y": down, "text": {"field": "text"}},
        },
    ]
    return _sized({"layer": layers}, theme, 30 * len(runs))


def histogram(rows: Rows, place: int, theme: Theme) -> Spec:
    """Share of merged reports by staleness, rules at means: ``staleness share`` and ``rule at``."""
    told: Spec = {"tooltip": {"content": "data"}} if theme.interactive else {}
    axis = {"tickMinStep": 1, "tickCount": 6, "grid": False}
    rule_legend = {
        "title": None,
        "orient": "top",
        "direction": "horizontal",
        "symbolStrokeColor": theme.ink,
        "symbolType": "stroke",
        "symbolSize": 200,
    }
    shares = {
        "transform": [
            {"filter": "isValid(datum.share)"},
            {"calculate": "datum.staleness - 0.4", "as": "left"},
            {"calculate": "datum.staleness + 0.4", "as": "right"},
        ],
        "mark": {"type": "bar", "color": colour(place), **told},
        "encoding": {
            "x": {
                "field": "left",
                "type": "quantitative",
                "bin": "binned",
                "title": "staleness (updates)",
                "scale": {"nice": False},
                "axis": axis,
            },
            "x2": {"field": "right"},
            "y": {
                "field": "share",
                "type": "quantitative",
                "title": "share of reports",
                "axis": {"format": "%", "tickCount": 4},
            },
        },
    }
    rules = {
        "transform": [{"filter": "isValid(datum.at)"}],
        "mark": {"type": "rule", "strokeWidth": 2, "color": theme.ink, **told},
        "encoding": {
            "x": {"field": "at", "type": "quantitative"},
            "strokeDash": {
                "field": "rule",
                "type": "nominal",
                "sort": None,
                "scale": {"range": [[1, 0], [3, 3]]},
                "legend": rule_legend,
            },
        },
    }
    return _sized({"layer": [shares, rules]}, theme, round(0.7 * theme.height))


def stacked(rows: Rows, x: str, y: str, theme: Theme) -> Spec:
    """What became of units: ``name fate units place``."""
    told: Spec = {"tooltip": {"content": "data"}} if theme.interactive else {}
    present = {row["fate"] for row in rows}
    domain = [fate for fate in FATES if fate in present]
    chart = {
        "mark": {"type": "bar", **told},
        "encoding": {
            "x": {
                "field": "name",
                "type": "ordinal",
                "sort": None,
                "title": x,
                "axis": {"labelAngle": 0, "labelOverlap": True, "grid": False},
            },
            "y": {"field": "units", "type": "quantitative", "title": y, "axis": {"format": "~s", "tickCount": 4}},
            "color": _kinds("fate", domain, FATES),
            "order": {"field": "place", "type": "quantitative"},
        },
    }
    return _sized(chart, theme, round(0.7 * theme.height))


def timeline(rows: Rows, x: str, theme: Theme) -> Spec:
    """What every worker did when: ``worker what begin end``; white is waiting."""
    told: Spec = {"tooltip": {"content": "data"}} if theme.interactive else {}
    present = {row["what"] for row in rows}
    domain = [doing for doing in DOINGS if doing in present]
    begin, end = min(row["begin"] for row in rows), max(row["end"] for row in rows)
    lines = sorted({row["worker"] for row in rows}, key=lambda line: (not line.isdecimal(), line.zfill(9)))
    workers = len(lines)
    chart = {
        "mark": {"type": "bar", "height": {"band": 0.8}, "clip": True, "stroke": None, "x2Offset": -1, **told},
        "encoding": {
            "x": {
                "field": "begin",
                "type": "quantitative",
                "title": x,
                "scale": {"domain": [begin, end], "nice": False},
                "axis": _axis([begin, end], False, count=5, grid=False),
            },
            "x2": {"field": "end"},
            "y": {"field": "worker", "type": "ordinal", "sort": lines, "title": "worker", "axis": {"grid": False}},
            "color": _kinds("what", domain, DOINGS),
        },
    }
    return _sized(chart, theme, workers * max(5, min(18, 360 // workers)))


# ----------------------------------------------------------------------------------------------------------- pieces


def _of_run(runs: Mapping[str, int], theme: Theme) -> tuple[Spec, Spec]:
    """Colour and dash of every run; the page has its own legend."""
    legend = (
        None
        if theme.interactive
        else {"title": None, "symbolType": "stroke", "symbolSize": 400, "symbolStrokeWidth": 2, "symbolOpacity": 1}
    )
    run: Spec = {"field": "run", "type": "nominal", "legend": legend}
    ink = run | {"scale": {"domain": list(runs), "range": [colour(place) for place in runs.values()]}}
    return ink, run | {"scale": {"domain": list(runs), "range": [dash(place) for place in runs.values()]}}


def _lit(on: float, off: float, theme: Theme) -> Spec:
    """Opacity ``on``, or ``off`` while other runs are highlighted."""
    if not theme.interactive:
        return {"value": on}
    lit = "length(highlight) == 0 || indexof(highlight, datum.run) >= 0"
    return {"condition": {"test": lit, "value": on}, "value": off}


def _nearest(encoding: Spec) -> Spec:
    """A dot on the point that is nearest to the pointer, with what it says."""
    near = {"type": "point", "on": "pointerover", "clear": "pointerout", "nearest": True}
    shown = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    return {
        "params": [{"name": "near", "select": near}],
        "mark": {"type": "point", "size": 70, "filled": True, "opacity": 1, "tooltip": {"content": "data"}},
        "encoding": encoding | {"opacity": shown},
    }


def _kinds(field: str, domain: Sequence[str], colours: Mapping[str, str]) -> Spec:
    return {
        "field": field,
        "type": "nominal",
        "scale": {"domain": list(domain), "range": [colours[kind] for kind in domain]},
        "legend": {"title": None, "orient": "top", "direction": "horizontal", "symbolType": "square", "columns": 4},
    }


def _axis(values: Sequence[float], log: bool, *, count: int, grid: bool = True) -> Spec:
    """Labels as people write them: 40, not 4e+1."""
    ticks = {"values": log_ticks([value for value in values if value > 0], count + 2)} if log else {"tickCount": count}
    return {"labelExpr": "replace(format(datum.value, '~g'), '+', '')", "grid": grid, **ticks}


def log_ticks(values: Sequence[float], most: int) -> list[float]:
    """The ticks of a logarithmic axis: 1, 2 and 5 of every decade within the values, or powers of ten, or some."""
    if not values:
        return []
    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{digit}e{power}") for power in decades for digit in digits]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= most:
            return inside
    return inside[:: math.ceil(len(inside) / most)]


def _sized(chart: Spec, theme: Theme, height: int) -> Spec:
    sized = {"data": {"name": "rows"}, "width": theme.width, "height": height, **chart}
    return sized | ({"autosize": {"type": "fit-x", "contains": "padding"}} if theme.interactive else {})


def style(theme: Theme) -> Spec:
    """The configuration that all charts share."""
    return {
        "font": theme.font,
        "background": "transparent" if theme.interactive else "white",
        "view": {"stroke": None},
        "axis": {
            "gridColor": theme.ink,
            "domainColor": theme.ink,
            "tickColor": theme.ink,
            "gridOpacity": 0.1,
            "domainOpacity": 0.35,
            "tickOpacity": 0.35,
            "tickSize": 4,
            "labelColor": theme.ink,
            "titleColor": theme.ink,
            "labelFontSize": 11,
            "titleFontSize": 11.5,
            "titleFontWeight": "normal",
            "labelOpacity": 0.8,
            "titlePadding": 8,
            "labelPadding": 4,
        },
        "axisY": {"domain": False, "ticks": False},
        "legend": {"labelColor": theme.ink, "labelFontSize": 11.5, "titleColor": theme.ink, "labelLimit": 260},
        "title": {"color": theme.ink, "fontSize": 12.5, "fontWeight": 600, "anchor": "start"},
    }
