"""The grammar of every chart: one place for colours, dashes, fonts and sizes.

A chart here is a Vega-Lite specification over a table of plain rows (columns ``run x mean low high`` for curves). The
page draws it interactively and `figures` draws it as a picture; the two differ in their `Look` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import altair as alt

Rows = list[dict[str, Any]]
Chart = Any  # altair types its layers and panels too loosely to say more

# Okabe and Ito's colours, told apart with any colour vision; the first run, the baseline, is neutral. A second round
# repeats the colours with other dashes, so that colour and dash together name a run, also in a grey print.
COLOURS = ("#7a7a7a", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
DASHES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3), (4, 2), (12, 4), (5, 2, 1, 2, 1, 2))
# What became of a worker's units.
FATES = {"used": "#56b4e9", "cancelled": "#e69f00", "dropped": "#d55e00", "refused": "#7a7a7a"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Look:
    """Where a chart is drawn.

    Attributes:
        ink: Colour of text, axes and grid; ``currentColor`` lets the page's light, dark and print styles decide.
        font: Font family.
        width: In pixels, or ``"container"``.
        height: In pixels.
        interactive: Whether points answer to the pointer and runs can be highlighted; then the page has the legend.
    """

    ink: str
    font: str
    width: int | str
    height: int
    interactive: bool


PAGE = Look(ink="currentColor", font=FONT, width="container", height=250, interactive=True)
PICTURE = Look(ink="#222222", font="Helvetica, Arial, sans-serif", width=480, height=300, interactive=False)


def colour(index: int) -> str:
    """Colour of the run at this place of the experiment file."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> list[int]:
    """Dash of the run at this place of the experiment file."""
    return list(DASHES[(index + index // len(COLOURS)) % len(DASHES)])


def _bright(on: float, off: float, look: Look) -> Any:
    """Opacity ``on``, or ``off`` while other runs are highlighted."""
    lit = "length(highlight) == 0 || indexof(highlight, datum.run) >= 0"
    return alt.condition(lit, alt.value(on), alt.value(off)) if look.interactive else alt.value(on)


def curves(runs: Mapping[str, int], x: str, y: str | None, log: bool, look: Look) -> Chart:
    """Mean lines with bands from the lowest to the highest seed.

    Args:
        runs: The runs to draw, each with its place in the experiment file, so that a run looks the same in all charts.
        x: Title of the horizontal axis.
        y: Title of the vertical axis; None where the caption says it.
        log: Whether the vertical axis is logarithmic; points at or below zero are then left out.
        look: Where it is drawn.
    """
    domain = list(runs)
    legend = (
        None
        if look.interactive
        else alt.Legend(title=None, symbolType="stroke", symbolSize=400, symbolStrokeWidth=2, symbolOpacity=1)
    )
    inks = alt.Scale(domain=domain, range=[colour(place) for place in runs.values()])
    stroke = alt.Color("run:N", scale=inks, legend=legend)
    dash_scale = alt.Scale(domain=domain, range=[dash(place) for place in runs.values()])
    dashes = alt.StrokeDash("run:N", scale=dash_scale, legend=legend)
    scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=False, nice=True)
    across = alt.X("x:Q", title=x, scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(tickCount=5, grid=False))
    up = alt.Y("mean:Q", title=y, scale=scale, axis=alt.Axis(tickCount=5, format="~g"))
    base = alt.Chart(alt.NamedData("rows"))
    if log:
        # The part of a band below zero has no place on this axis; the band then ends at its mean line.
        base = base.transform_filter("datum.mean > 0").transform_calculate(low="datum.low > 0 ? datum.low : datum.mean")
    band = base.mark_area(strokeWidth=0, line=False).encode(
        x=across,
        y=alt.Y("low:Q", title=y, scale=scale),
        y2="high:Q",
        color=stroke,
        opacity=_bright(0.18, 0.03, look),
    )
    line = base.mark_line(strokeWidth=2, strokeJoin="round", clip=False).encode(
        x=across, y=up, color=stroke, strokeDash=dashes, opacity=_bright(1, 0.15, look)
    )
    layers: list[alt.Chart] = [band, line]
    if look.interactive:
        near = alt.selection_point(name="near", on="pointerover", clear="pointerout", nearest=True, empty=False)
        layers.append(
            base.mark_point(size=70, filled=True, opacity=1, tooltip=alt.TooltipContent("data"))
            .encode(x=across, y=up, color=stroke, opacity=alt.condition(near, alt.value(1), alt.value(0)))
            .add_params(near)
        )
    chart = alt.layer(*layers)
    if look.interactive:
        chart = chart.add_params(alt.param(name="highlight", value=[]))
    return _sized(chart, look)


def staleness(ink: str, look: Look, data: str = "rows") -> Chart:
    """Share of merged reports by staleness of one run, a rule at the measured mean and a dashed one at the law's.

    Rows have ``staleness share``, and the two rules are rows with ``rule`` = "measured" or "law" and ``at``.
    """
    source = alt.Chart(alt.NamedData(data))
    across = alt.X(
        "left:Q",
        bin="binned",
        title="staleness (updates)",
        scale=alt.Scale(nice=False),
        axis=alt.Axis(tickMinStep=1, tickCount=6, grid=False),
    )
    bars = (
        source.transform_filter("isValid(datum.share)")
        .transform_calculate(left="datum.staleness - 0.4", right="datum.staleness + 0.4")
        .mark_bar(color=ink, tooltip=alt.TooltipContent("data") if look.interactive else None)
        .encode(
            x=across, x2="right:Q", y=alt.Y("share:Q", title="share of reports", axis=alt.Axis(format="%", tickCount=4))
        )
    )
    rules = (
        source.transform_filter("isValid(datum.at)")
        .mark_rule(strokeWidth=2, color=look.ink, tooltip=alt.TooltipContent("data") if look.interactive else None)
        .encode(
            x="at:Q",
            strokeDash=alt.StrokeDash(
                "rule:N", sort=None, scale=alt.Scale(range=[[1, 0], [3, 3]]), legend=_rule_legend(look)
            ),
        )
    )
    return _sized(alt.layer(bars, rules), look, 0.7)


def _rule_legend(look: Look) -> alt.Legend:
    return alt.Legend(
        title=None,
        orient="top",
        direction="horizontal",
        symbolStrokeColor=look.ink,
        symbolType="stroke",
        symbolSize=200,
    )


def ledger(look: Look, data: str = "rows") -> Chart:
    """Units of every worker by what became of them. Rows have ``worker fate units place``."""
    return _sized(
        alt.Chart(alt.NamedData(data))
        .mark_bar(tooltip=alt.TooltipContent("data") if look.interactive else None)
        .encode(
            x=alt.X("worker:O", title="worker", axis=alt.Axis(labelAngle=0, labelOverlap=True, grid=False)),
            y=alt.Y("units:Q", title="units", axis=alt.Axis(format="~s", tickCount=4)),
            color=alt.Color(
                "fate:N",
                scale=alt.Scale(domain=list(FATES), range=list(FATES.values())),
                legend=alt.Legend(title=None, orient="top", direction="horizontal", symbolType="square"),
            ),
            order=alt.Order("place:Q"),
        ),
        look,
        0.7,
    )


def _sized(chart: Chart, look: Look, tall: float = 1.0) -> Chart:
    sized = chart.properties(width=look.width, height=round(look.height * tall))
    return (
        sized.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding")) if look.interactive else sized
    )


def spec(chart: Chart, look: Look, rows: Rows | None = None) -> dict[str, Any]:
    """The Vega-Lite specification with the one style of all charts, and its rows if they are to travel with it."""
    styled = chart.configure(
        font=look.font,
        background="transparent" if look.interactive else "white",
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(
            gridColor=look.ink,
            domainColor=look.ink,
            tickColor=look.ink,
            gridOpacity=0.1,
            domainOpacity=0.35,
            tickOpacity=0.35,
            tickSize=4,
            labelColor=look.ink,
            titleColor=look.ink,
            labelFontSize=11,
            titleFontSize=11.5,
            titleFontWeight="normal",
            labelOpacity=0.8,
            titlePadding=8,
            labelPadding=4,
        ),
        axisY=alt.AxisConfig(domain=False, ticks=False),
        legend=alt.LegendConfig(labelColor=look.ink, labelFontSize=11.5, titleColor=look.ink, labelLimit=260),
        title=alt.TitleConfig(color=look.ink, fontSize=12.5, fontWeight=600, anchor="start"),
    )
    made: dict[str, Any] = styled.to_dict(validate=True)
    if rows is not None:
        made["datasets"] = {"rows": rows}
    return made
