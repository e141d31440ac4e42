"""The one table of charts: what each is called, what it shows, and how it is drawn.

A chart is a row of `CHARTS`: a name, which is also that of its figure (``hemiola report DIR --figure NAME.svg``), and a
function that gives its panels, each with its rows and its specification. The page and the figures take them from here;
`rows` makes the rows, `marks` knows how things are drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath

from hemiola.errors import InputError, unknown
from hemiola.lab.report import marks, rows, words
from hemiola.lab.report.marks import PICTURE, Rows, Spec, Theme
from hemiola.lab.report.summary import RunSummary, Summary
from hemiola.lab.report.verdicts import targets
from hemiola.lab.results import BY_NAME


@dataclass(frozen=True)
class Panel:
    """One chart with its numbers.

    Attributes:
        title: What is shown.
        against: What it is shown against, or at which moment.
        rows: Its numbers.
        specs: By scale of the vertical axis, ``linear`` and ``log``, how it is drawn; one of them where the other makes
            no sense.
        log: Whether the logarithmic one shows more.
        run: The run it belongs to, if it is of one; the reference, where runs are compared.
        when: The page's switches at which it is seen.
    """

    title: str
    against: str
    rows: Rows
    specs: Mapping[str, Spec]
    log: bool = False
    run: str = ""
    when: Mapping[str, str] = field(default_factory=dict)

    @property
    def spec(self) -> Spec:
        return self.specs["log" if self.log else "linear"]


Panels = Callable[[Summary, Theme], Iterator[Panel]]

_MEASURES = {"gap": "train_gap", "loss": "train_loss", "test-loss": "test_loss", "metric": "test_metric"}
_AGAINST = {"epochs": "epochs", "seconds": "seconds", "bytes": "bytes_per_worker"}
COSTS = {"time": "seconds", "bytes": "bytes_per_worker", "epochs": "epochs"}


def _to_target(cost: str, summary: Summary, theme: Theme) -> Iterator[Panel]:
    """Bars: what the lowest target costs; one panel for every group of runs that may be compared."""
    name = words.OBJECTIVES[summary.objective]
    for group in summary.groups:
        drawn = [run for run in group if run in summary.drawn]
        aim = min(targets(group), default=math.nan)
        found = rows.target_rows(drawn, cost, aim)
        if not found:
            continue
        if cost == "end":
            title, axis = f"{name.capitalize()} at the end", BY_NAME[summary.objective].title
        else:
            title = f"{BY_NAME[cost].title.capitalize()} to a {name} of {words.level(aim)}"
            axis = words.titled(cost, rows.bar_unit(drawn, cost, aim)[1])
        spec = marks.bars(found, _places(summary, found), axis, theme)
        yield Panel(title, "", found, {"linear": spec}, run=group[0].name, when={"cost": cost})


def _curves(measure: str, against: str, summary: Summary, theme: Theme) -> Iterator[Panel]:
    """A measure against epochs, cluster time or bytes."""
    if found := rows.curve_rows(summary, against, measure):
        x, y = rows.axis(summary, against)[1], words.measure_name(measure, summary.task)
        # An accuracy is a share: its distance from nothing is no news. A perplexity or an error may span decades.
        linear = measure == "test_metric" and summary.task.get("higher_is_better", True)
        yield _lines(
            summary, found, y, x, theme, scales=("linear",) if linear else ("log", "linear"), when={"measure": measure}
        )


def _over_time(
    what: str, find: Callable[[Summary], Rows], kind: str, summary: Summary, theme: Theme
) -> Iterator[Panel]:
    """A decision over cluster time."""
    if found := find(summary):
        scales = ("log",) if kind == "curve" and rows.prefers_log(found) else ("linear",)
        yield _lines(summary, found, what, rows.axis(summary, "seconds")[1], theme, scales=scales, kind=kind)


def _herding(summary: Summary, theme: Theme) -> Iterator[Panel]:
    for measure, title in (("herding", "herding bound"), ("herding_ratio", "herding bound / that of a random order")):
        if found := rows.curve_rows(summary, "epochs", measure):
            yield _lines(summary, found, title, "epochs", theme)


def _sweep(summary: Summary, theme: Theme) -> Iterator[Panel]:
    """The end over the values of each swept key."""
    for key in rows.swept_keys(summary):
        if found := rows.sweep_rows(summary, key):
            y = f"{words.OBJECTIVES[summary.objective]} at the end"
            scales = ("log",) if rows.prefers_log(found) else ("linear",)
            yield _lines(summary, found, y, words.key(key), theme, scales=scales, kind="sweep")


def _lines(
    summary: Summary,
    found: Rows,
    y: str,
    x: str,
    theme: Theme,
    *,
    scales: Sequence[str] = ("linear",),
    kind: str = "curve",
    when: Mapping[str, str] | None = None,
) -> Panel:
    runs, title = _places(summary, found), None if theme.interactive else y
    specs = {scale: marks.lines(found, runs, x, title, theme, log=scale == "log", kind=kind) for scale in scales}
    log = "linear" not in specs or ("log" in specs and rows.prefers_log(found))
    return Panel(y, x, found, specs, log, when=when or {})


def _each(
    find: Callable[[Summary, RunSummary], Rows],
    draw: Callable[[Rows, int, Theme], Spec],
    summary: Summary,
    theme: Theme,
) -> Iterator[Panel]:
    """One panel for every run that has something to show."""
    for run in summary.drawn:
        if found := find(summary, run):
            spec = draw(found, summary.folder.runs.index(run.name), theme)
            yield Panel(run.name, "", found, {"linear": spec}, run=run.name)


def _timelines(summary: Summary, theme: Theme) -> Iterator[Panel]:
    """What workers did in short windows: the first and the last of those recorded."""
    for run in summary.drawn:
        for which in (0, -1):
            found, axis = rows.window_rows(summary, run, which)
            if found:
                yield Panel(run.name, axis, found, {"linear": marks.timeline(found, axis, theme)}, run=run.name)


CHARTS: dict[str, Panels] = {
    **{f"{name}-to-target": partial(_to_target, cost) for name, cost in COSTS.items()},
    "end": partial(_to_target, "end"),
    **{
        f"{y}-vs-{x}": partial(_curves, measure, against)
        for y, measure in _MEASURES.items()
        for x, against in _AGAINST.items()
    },
    "sweep": _sweep,
    "herding": _herding,
    "period-over-time": partial(
        _over_time, "period (local steps)", partial(rows.averaging_rows, name="period"), "steps"
    ),
    "k-over-time": partial(_over_time, "K", rows.k_rows, "steps"),
    "lr-over-time": partial(_over_time, "learning rate", rows.rate_rows, "steps"),
    "spread-over-time": partial(_over_time, "spread", partial(rows.averaging_rows, name="spread"), "curve"),
    "timeline": _timelines,
    "staleness": partial(_each, rows.staleness_rows, marks.histogram),
    "ledger": partial(_each, rows.ledger_rows, lambda found, _, theme: marks.stacked(found, "worker", "units", theme)),
    "labels": partial(
        _each, rows.label_rows, lambda found, _, theme: marks.stacked(found, "label", "visits per example", theme)
    ),
}


def _places(summary: Summary, found: Rows) -> dict[str, int]:
    """The runs in some rows, each with its place in the experiment file."""
    there = {row["run"] for row in found}
    return {run: place for place, run in enumerate(summary.folder.runs) if run in there}


# ---------------------------------------------------------------------------------------------------------- figures


def figure(summary: Summary, name: str) -> bytes:
    """Draw the chart that a file name stands for, in the format of its suffix.

    Raises:
        InputError: No such chart or format, or the folder has nothing to draw in it.
    """
    import vl_convert

    formats: dict[str, Callable[[str], bytes]] = {
        ".svg": lambda spec: vl_convert.vegalite_to_svg(spec).encode(),
        ".png": lambda spec: vl_convert.vegalite_to_png(spec, scale=2.0),
        ".pdf": lambda spec: vl_convert.vegalite_to_pdf(spec),
    }
    chart, suffix = PurePath(name).stem, PurePath(name).suffix.lower()
    if suffix not in formats:
        raise InputError(f"a figure must end in {', '.join(formats)}, got {name!r}")
    if chart not in CHARTS:
        raise InputError(unknown("figure", chart, CHARTS))
    panels = list(CHARTS[chart](summary, PICTURE))
    if not panels:
        where = ", ".join(map(str, summary.folder.paths))
        raise InputError(f"{where} has nothing to draw in {chart}: no run logged it")
    return formats[suffix](json.dumps(_picture(panels)))


def _picture(panels: Sequence[Panel]) -> Spec:
    """One panel, or several side by side under their titles."""
    top = {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "config": marks.style(PICTURE)}
    if len(panels) == 1:
        return top | panels[0].spec | {"datasets": {"rows": panels[0].rows}}
    parts = [
        panel.spec | {"data": {"name": f"rows{place}"}, "title": panel.title, "width": 320}
        for place, panel in enumerate(panels)
    ]
    data = {f"rows{place}": panel.rows for place, panel in enumerate(panels)}
    apart = {"scale": {"strokeDash": "independent", "color": "independent", "x": "independent", "y": "independent"}}
    return top | {"concat": parts, "columns": 2, "resolve": apart, "datasets": data}
