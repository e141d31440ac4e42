"""The report as one HTML file that needs nothing else: no network, no other file.

Vega and Vega-Lite travel inside the page, compressed (vl-convert's bundle is 0.9 MB as text, 0.4 MB so); every
browser since 2023 can unpack it. All curve charts share two specifications, one for each scale of the vertical axis,
and one table of numbers, rounded to five significant digits.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from functools import cache
from html import escape
from importlib import resources

import vl_convert

from hemiola.lab.report import charts, tables, words
from hemiola.lab.report.conclusion import sentences
from hemiola.lab.report.curves import STRETCHES
from hemiola.lab.report.drawing import Drawing
from hemiola.lab.report.html import Cells, chart_figure, definition_list, html_table, section, swatch
from hemiola.lab.report.read import Folder, number, table
from hemiola.lab.report.summary import POLICIES, RESULTS, Cell, RunSummary, Summary, summarise


def render(folder: Folder) -> str:
    """The page of a folder."""
    summary = summarise(folder)
    drawing = Drawing(folder, summary)
    body = [
        _curves(drawing),
        _order(drawing),
        _period(drawing),
        _pace(drawing),
        _work(folder, summary),
        _sweep(summary),
        _runs(folder),
        _experiment(folder),
    ]
    task = str(folder.task.get("name") or words.options(folder.shared.get("task", "results")))
    names = words.listed(folder.runs) if len(folder.runs) < 4 else f"{len(folder.runs)} runs compared"
    title = str(folder.experiment.get("title") or f"{task}: {names}")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="hemiola {escape(folder.version)}">
<link rel="icon" href="data:,">
<title>{escape(title)} · hemiola</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<header>
<p class="eyebrow">hemiola report</p>
<h1>{escape(title)}</h1>
<p class="facts">{escape(_facts(folder))}</p>
{_headline(folder, summary)}
</header>
<main>
{_results(folder, summary)}
{"".join(body)}
</main>
<footer>
<p>Lines are means over seeds, bands reach from the lowest to the highest seed. Logs of more than {2 * STRETCHES}
evaluations are drawn from the lowest and the highest point of each of {STRETCHES} stretches. Figures for a paper:
<code>hemiola report DIR --figure {_example(summary)}-vs-seconds.svg</code>.</p>
<p>Made by hemiola {escape(folder.version)}. Charts are drawn by <a href="https://vega.github.io/vega/">Vega</a>, which
is part of this file.</p>
</footer>
<div id="tip" role="status" hidden></div>
<noscript><p class="failed">The charts need JavaScript; the tables do not.</p></noscript>
<script type="application/json" id="data">{_embedded(drawing.payload())}</script>
<script type="application/octet-stream" id="vega">{_vega()}</script>
<script type="module">
{_asset("page.js")}</script>
</body>
</html>
"""


# ------------------------------------------------------------------------------------------------------- the sections


def _example(summary: Summary) -> str:
    return "gap" if summary.objective == "train_gap" else "loss"


def _headline(folder: Folder, summary: Summary) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in sentences(folder, summary))
    return f'<ul class="headline">{items}</ul>'


def _facts(folder: Folder) -> str:
    shared, task = folder.shared, folder.task
    cluster, seeds = table(shared.get("cluster")), shared.get("seeds")
    facts = [
        str(task.get("name") or "") if shared.get("title") else "",
        *(
            f"{words.figure(number(task[key]))} {key}"
            for key in ("parameters", "examples")
            if number(task.get(key)) > 0
        ),
        f"{shared['workers']} workers" if "workers" in shared else "",
        f"batch {shared['batch']}" if "batch" in shared else "",
        f"{len(seeds)} seeds" if isinstance(seeds, list) and len(seeds) > 1 else "",
        f"{cluster['name']} cluster" if cluster.get("name") else "",
    ]
    return " · ".join(fact for fact in facts if fact)


def _results(folder: Folder, summary: Summary) -> str:
    columns = summary.columns(RESULTS)
    if not columns:
        return ""
    note = (
        "Mean ± sample standard deviation over the seeds that finished. Bold on a tint: the best mean of a column, and "
        "any within its deviation."
    )
    if summary.swept:
        note += f" Each run is shown at the point of the sweep with its lowest {words.OBJECTIVES[summary.objective]}."
    return section("Results", note, _run_table(folder, summary, columns))


def _run_table(folder: Folder, summary: Summary, columns: list[str]) -> str:
    def cells(run: RunSummary) -> Cells:
        return [
            (_cell(summary, name, run.best.cells[name]), "number best" if run.best.cells[name].best else "number")
            for name in columns
        ]

    heads = [summary.title(name) for name in columns]
    rows = [(_run_head(folder, run), cells(run)) for run in summary.runs]
    return html_table("Run", heads, rows, numeric=True)


def _run_head(folder: Folder, run: RunSummary) -> str:
    detail = [words.point(run.best.point) if len(run.points) > 1 else "", run.best.seeds]
    small = ", ".join(escape(part) for part in detail if part)
    return f"{swatch(folder.runs.index(run.name))}{escape(run.name)}<small>{small}</small>"


def _cell(summary: Summary, measure: str, cell: Cell) -> str:
    mean, deviation = summary.shown(measure, cell)
    text = escape(mean) + (f' <span class="deviation">± {escape(deviation)}</span>' if deviation else "")
    return text + ('<span class="vh"> (best)</span>' if cell.best else "")


def _curves(drawing: Drawing) -> str:
    if not drawing.measures:
        return ""
    drawing.add_curves()
    figures = []
    for x, against in zip(tables.AGAINST, ("epochs", "cluster time", "bytes sent"), strict=True):
        title = tables.axis(drawing.lines, x)[1]
        identity = drawing.add(
            "curves", f"against-{x}", f"{against}, one line for every run", table="curves", x=x, title=title
        )
        figures.append(chart_figure(identity, f"<b></b> <span>against {against}</span>"))
    return section(
        "Progress",
        "",
        '<p class="note screen">Click a run, here or in a chart, to highlight it everywhere.</p>'
        f'{_controls(drawing)}<div class="charts">{"".join(figures)}</div>',
    )


def _controls(drawing: Drawing) -> str:
    legend = "".join(
        f'<button type="button" data-run="{place}" aria-pressed="false">{swatch(place)}{escape(run)}</button>'
        for place, run in enumerate(drawing.runs)
        if run in drawing.lines
    )
    named = [(name, words.measure_name(name, drawing.summary.task)) for name in drawing.measures]
    measures = _switch("measure", "What is drawn", named) if len(drawing.measures) > 1 else ""
    scales = _switch("scale", "Vertical axis", [("log", "log"), ("linear", "linear")])
    return (
        f'<div class="controls"><div class="legend" role="group" aria-label="Runs">{legend}</div>'
        f'<div class="switches">{measures}{scales}</div></div>'
    )


def _switch(key: str, label: str, values: list[tuple[str, str]]) -> str:
    buttons = "".join(
        f'<button type="button" data-set="{key}" data-value="{value}">{escape(text)}</button>' for value, text in values
    )
    return f'<div class="group" role="group" aria-label="{label}">{buttons}</div>'


def _order(drawing: Drawing) -> str:
    if not tables.available(drawing.lines, ["herding"]):
        return ""
    identity = drawing.add(
        "curves",
        "herding",
        "herding bound against epochs",
        table="curves",
        x="epochs",
        y="herding",
        title="epochs",
        yTitle="herding bound",
    )
    skipped = {run: line.steps[-1]["skipped"].mean for run, line in drawing.lines.items()}
    lost = [f"{run} {words.figure(count)}" for run, count in skipped.items() if count > 0]
    note = (
        "The largest norm of a prefix sum of centred gradients within the epoch, in sketch space: smaller is a better "
        "order."
    )
    if lost:
        note += f" Pairs skipped because a gradient was not finite (mean over seeds): {words.listed(lost)}."
    return section(
        "Order: the herding bound",
        note,
        f'<div class="charts two">{chart_figure(identity, "Herding bound <span>against epochs</span>")}</div>',
    )


def _period(drawing: Drawing) -> str:
    figures = []
    for name in ("period", "spread"):
        rows = tables.period_rows(drawing.folder, drawing.summary, name)
        if rows:
            drawing.add_spans(name, rows)
            label = f"{name} against local steps"
            identity = drawing.add(
                "curves", f"{name}-over-time", label, table=name, x="x", y=name, title="local steps", yTitle=name
            )
            figures.append(chart_figure(identity, f"{name.capitalize()} <span>over local steps</span>"))
    note = (
        "Period: local steps between two averagings. Spread: mean squared distance of the workers' weights from their "
        "mean when they averaged. Line and band: mean and range over the averagings of all seeds in each stretch of "
        "steps."
    )
    return (
        section("Period: when the workers averaged", note, f'<div class="charts two">{"".join(figures)}</div>')
        if figures
        else ""
    )


def _pace(drawing: Drawing) -> str:
    folder = drawing.folder
    histograms, ledgers = [], []
    for run in drawing.summary.runs:
        place = folder.runs.index(run.name)
        caption = f"{swatch(place)}{escape(run.name)}"
        if rows := tables.staleness_rows(folder, run):
            drawing.add_rows(f"staleness-{place}", rows)
            identity = drawing.add(
                "staleness",
                f"staleness-{place}",
                f"staleness of {run.name}",
                table=f"staleness-{place}",
                ink=charts.colour(place),
            )
            histograms.append(chart_figure(identity, caption))
        if rows := tables.ledger_rows(folder, run):
            drawing.add_rows(f"ledger-{place}", rows)
            identity = drawing.add("ledger", f"ledger-{place}", f"ledger of {run.name}", table=f"ledger-{place}")
            ledgers.append(chart_figure(identity, caption))
    stale = "Updates between reading the weights and using the report, over all merged reports."
    units = (
        "What became of every worker's units, summed over seeds. Cancelled units come again; dropped ones were too "
        "stale, refused ones not finite."
    )
    if number(folder.shared.get("workers")) > tables.GROUPS:
        units += f" Neighbouring workers are shown as the means of {tables.GROUPS} groups."
    parts = [
        section("Pace: staleness", stale, f'<div class="charts small">{"".join(histograms)}</div>')
        if histograms
        else "",
        section("Pace: the ledger", units, f'<div class="charts small">{"".join(ledgers)}</div>') if ledgers else "",
        _prediction(folder, drawing.summary),
    ]
    return "".join(parts)


def _prediction(folder: Folder, summary: Summary) -> str:
    rows = []
    for run in summary.runs:
        law = folder.predicted.get(run.name, {})
        pairs = [
            ("mean_update_seconds", law.get("update_seconds", math.nan)),
            ("mean_staleness", law.get("staleness", math.nan)),
        ]
        if not any(math.isfinite(expected) for _, expected in pairs):
            continue
        cells: Cells = []
        for measure, expected in pairs:
            cell = run.best.cells[measure]
            off = (
                f"{100 * (cell.mean / expected - 1):+.1f} %"
                if expected and math.isfinite(cell.mean / expected)
                else "–"
            )
            cells += [
                (escape(words.figure(expected / summary.unit(measure)[0])), "number"),
                (_cell(summary, measure, cell), "number"),
                (off.replace("-", "−"), "number"),
            ]
        rows.append((_run_head(folder, run), cells))
    time, stale = summary.title("mean_update_seconds"), summary.title("mean_staleness")
    heads = [f"{time}, predicted", "measured", "deviation", f"{stale}, predicted", "measured", "deviation"]
    note = (
        "What theory expects of the delays and the pace, beside what was measured (mean ± sample standard deviation "
        "over seeds)."
    )
    return (
        section("Pace: predicted against measured", note, html_table("Run", heads, rows, numeric=True)) if rows else ""
    )


def _work(folder: Folder, summary: Summary) -> str:
    columns = [name for name in summary.columns(POLICIES) if any(run.best.cells[name].mean for run in summary.runs)]
    return (
        section(
            "What the policies did",
            "Mean ± sample standard deviation over seeds.",
            _run_table(folder, summary, columns),
        )
        if columns
        else ""
    )


def _sweep(summary: Summary) -> str:
    if not summary.swept:
        return ""
    points = sorted(
        {one.point for run in summary.runs for one in run.points},
        key=lambda at: [(number(value), value) for _, value in at],
    )
    rows = []
    for at in points:
        cells: Cells = []
        for run in summary.runs:
            ended = next((one for one in run.points if one.point == at), None)
            text = _cell(summary, summary.objective, ended.cells[summary.objective]) if ended else "–"
            if ended and not ended.sound:
                text += f" <small>{escape(ended.seeds)}</small>"
            cells.append((text, "number best" if run.best.point == at and run.best.counts["done"] else "number"))
        rows.append((escape(words.point(at)), cells))
    note = f"Final {words.OBJECTIVES[summary.objective]} at every point; each run's best in bold on a tint."
    return section("The sweep", note, html_table("Point", [run.name for run in summary.runs], rows, numeric=True))


def _runs(folder: Folder) -> str:
    known = {"run", "name", "order", "period", "pace", "sweep", *folder.shared}
    extra = list(dict.fromkeys(key for run in folder.runs for key in folder.settings(run) if key not in known))
    rows = []
    for place, run in enumerate(folder.runs):
        settings = folder.settings(run)
        cells: Cells = [(escape(words.policy(kind, settings)), "") for kind in ("order", "period", "pace")]
        cells += [(escape(words.options(settings.get(key))), "") for key in extra]
        rows.append((swatch(place) + escape(run), cells))
    heads = ["Order: which example next", "Period: when to average", "Pace: how many to wait for", *extra]
    return section("What each run was", "", html_table("Run", heads, rows, numeric=False)) if rows else ""


def _experiment(folder: Folder) -> str:
    hidden = {"title", "order", "period", "pace"}
    given = [(key, words.options(value)) for key, value in folder.shared.items() if key not in hidden]
    return section("The experiment", "", definition_list(given)) if given else ""


# ---------------------------------------------------------------------------------------------------------- the parts


def _embedded(value: object) -> str:
    """JSON that cannot end the script element it is in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return resources.files("hemiola.lab.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _vega() -> str:
    """Vega, Vega-Lite and the function ``vegaEmbed``, gzipped, in base64."""
    packed = gzip.compress(
        vl_convert.javascript_bundle(snippet="window.vegaEmbed = vegaEmbed;").encode(), compresslevel=9, mtime=0
    )
    return base64.b64encode(packed).decode()
