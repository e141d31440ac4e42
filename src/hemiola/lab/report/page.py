"""The report as one HTML file that needs nothing else: no network, no other file.

Above the fold the conclusion and one picture, then the table, then curves, then what the policies and the workers did.
A section without content is not there. Vega and Vega-Lite travel inside the page, compressed (vl-convert's bundle is
0.9 MB as text, 0.4 MB so); every browser since 2023 can unpack it.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from importlib.metadata import version

import vl_convert

from hemiola.cache import cache_folder, keep
from hemiola.contracts import FOLLOWED
from hemiola.lab.report import conclusion, words
from hemiola.lab.report.drawing import Drawing
from hemiola.lab.report.html import (
    Cells,
    chart_figure,
    definition_list,
    html_table,
    named,
    part,
    section,
    swatch,
    switch,
)
from hemiola.lab.report.log import number, table
from hemiola.lab.report.read import Folder
from hemiola.lab.report.rows import GROUPS, swept_keys
from hemiola.lab.report.settings import command, described, reproduce
from hemiola.lab.report.summary import DRAWN, POLICIES, RESULTS, Ended, MeanOfSeeds, RunSummary, Summary
from hemiola.lab.report.verdicts import BETTER, WORSE, Verdict, verdicts


def render(summary: Summary, headline: str | None = None) -> str:
    """The page of a folder, or of several; ``headline``: what it says first, in place of its own conclusions."""
    folder, drawing = summary.folder, Drawing(summary)
    found = {verdict.run: verdict for verdict in verdicts(summary)}
    task = str(folder.task.get("name") or words.options(folder.shared.get("task", "results")))
    names = words.listed(folder.runs) if len(folder.runs) < 4 else f"{len(folder.runs)} runs compared"
    title = str(folder.experiment.get("title") or f"{task}: {names}")
    concluded = conclusion.conclusions(summary, found) if headline is None else [headline]
    said = "".join(f'<p class="conclusion">{escape(line)}</p>' for line in concluded)
    body = [
        _picture(drawing),
        _results(summary),
        _against(summary, found),
        _progress(drawing),
        _sweep(drawing),
        _policies(drawing),
        _workers(drawing),
        _runs(folder),
        section("How to reproduce it", "", reproduce(folder)),
    ]
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
{said}
</header>
<main>
{"".join(body)}
</main>
<footer>
<p>Lines are means over seeds, bands reach from the lowest to the highest seed; long logs are drawn from the lowest and
the highest point of each short stretch.{_left_out(summary)} Figures for a paper:
<code>{escape(command(folder))} --figure time-to-target.svg</code>.</p>
<p>Made by hemiola {escape(folder.version)}. Charts are drawn by <a href="https://vega.github.io/vega/">Vega</a>, which
is part of this file.</p>
</footer>
<div id="tip" role="status" hidden></div>
<noscript><p class="note">The charts need JavaScript; the tables do not.</p></noscript>
<script type="application/json" id="data">{_embedded(drawing.payload())}</script>
<script type="application/octet-stream" id="vega">{_vega()}</script>
<script type="module">
{_asset("page.js")}</script>
</body>
</html>
"""


def _facts(folder: Folder) -> str:
    shared, task = folder.shared, folder.task
    cluster, seeds = shared.get("cluster"), shared.get("seeds")
    name = cluster if isinstance(cluster, str) else table(cluster).get("name")
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
        f"{name} cluster" if name else "",
    ]
    return " · ".join(fact for fact in facts if fact)


def _left_out(summary: Summary) -> str:
    if len(summary.runs) <= DRAWN:
        return ""
    return f" Charts show {DRAWN} of the {len(summary.runs)} runs: the references and those that end best."


# ------------------------------------------------------------------------------------------------- what came out of it


def _picture(drawing: Drawing) -> str:
    """What it takes to reach the lowest target, run by run."""
    kinds = {"seconds": "time", "bytes_per_worker": "bytes", "epochs": "epochs", "end": "end"}
    there: dict[str, list[str]] = {}
    for cost, name in kinds.items():
        for panel in drawing.panels("end" if cost == "end" else f"{name}-to-target"):
            place = drawing.add(panel, f"target-{drawing.runs.index(panel.run)}")
            there.setdefault(cost, []).append(place)
    if not there:
        return ""
    drawing.choose("cost", list(there))
    places = list(dict.fromkeys(place for found in there.values() for place in found))
    buttons = [(cost, name) for cost, name in kinds.items() if cost in there]
    figures = "".join(chart_figure(place, "<b></b>") for place in places)
    return (
        f'<div class="picture">{figures}<div class="switches">{switch("cost", "What is compared", buttons)}'
        '<span class="note">bar: mean; dot: one seed</span></div></div>'
    )


def _results(summary: Summary) -> str:
    note = "Mean ± standard deviation over seeds. Tinted: the best of a column, and what is not shown to be worse."
    if summary.swept:
        note += f" Each run at the point of the sweep with its lowest {words.OBJECTIVES[summary.objective]}."
    return section("Results", note, results_table(summary))


def results_table(summary: Summary) -> str:
    """How every run ended; nothing where none has."""
    columns = summary.columns(RESULTS)
    return _run_table(summary, columns) if columns else ""


def _run_table(summary: Summary, columns: Sequence[str]) -> str:
    def cells(run: RunSummary) -> Cells:
        return [
            (_cell(summary, name, run.best.cells[name]), "number best" if run.best.cells[name].best else "number")
            for name in columns
        ]

    heads = [summary.title(name) for name in columns]
    return html_table("Run", heads, [(_run_head(summary, run), cells(run)) for run in summary.runs])


def _run_head(summary: Summary, run: RunSummary) -> str:
    detail = [words.point(run.best.point) if len(run.points) > 1 else "", run.best.seeds]
    small = ", ".join(escape(one) for one in detail if one)
    return f"{named(summary.folder.runs.index(run.name), run.name)}<small>{small}</small>"


def _cell(summary: Summary, measure: str, cell: MeanOfSeeds) -> str:
    if math.isnan(cell.mean):
        return ""
    mean, deviation = summary.shown(measure, cell)
    text = escape(mean) + (f' <span class="deviation">± {escape(deviation)}</span>' if deviation else "")
    return text + ('<span class="vh"> (best)</span>' if cell.best else "")


def _against(summary: Summary, found: Mapping[str, Verdict]) -> str:
    """Every run against its reference: one column for every question."""
    questions = {"seconds": "time", "bytes_per_worker": "bytes", "epochs": "epochs", "end": "at the end"}
    tables = []
    for group in summary.groups:
        compared = [(run, found[run.name]) for run in group[1:] if found[run.name].aspects]
        asked = [name for name in questions if any(name in verdict.aspects for _, verdict in compared)]
        rows = []
        for run, verdict in compared:
            cells: Cells = []
            for name in asked:
                aspect = verdict.aspects.get(name)
                kind = {BETTER: "good", WORSE: "bad"}.get(aspect.verdict, "") if aspect else ""
                cells.append((escape(conclusion.short(aspect)) if aspect else "", kind))
            rows.append((_run_head(summary, run), cells))
        heads = [questions[name] for name in asked]
        tables.append(part(f"Against {group[0].name}", "", html_table("Run", heads, rows, numeric=False)))
    missed = [line for one in found.values() for line in conclusion.missed(one)]
    notes = "".join(f'<p class="note">{escape(line)}</p>' for line in [*missed, *conclusion.notes(summary, found)])
    return section("How sure that is", "", "".join(tables) + notes if any(tables) or notes else "")


def _progress(drawing: Drawing) -> str:
    """The curves, with the legend of the whole page."""
    figures, measures = [], {}
    for x in ("epochs", "seconds", "bytes"):
        places = set()
        for y in ("gap", "loss", "test-loss", "metric"):
            for panel in drawing.panels(f"{y}-vs-{x}"):
                places.add(drawing.add(panel, f"against-{x}"))
                measures[panel.when["measure"]] = panel.title
        figures += [chart_figure(place, "<b></b> <span></span>") for place in places]
    if not figures:
        return ""
    summary = drawing.summary
    first = summary.objective if summary.objective in measures else next(iter(measures))
    drawing.choose("measure", [first])
    legend = "".join(
        f'<button type="button" data-run="{place}" aria-pressed="false">{swatch(place)}{escape(run)}</button>'
        for place, run in enumerate(drawing.runs)
        if run in summary.curves
    )
    switches = switch("measure", "What is drawn", list(measures.items()))
    switches += switch("scale", "Vertical axis", [("log", "log"), ("linear", "linear")])
    return section(
        "Progress",
        "",
        '<p class="note screen">Click a run, here or in a chart, to highlight it everywhere.</p>'
        f'<div class="controls"><div class="legend" role="group" aria-label="Runs">{legend}</div>'
        f'<div class="switches">{switches}</div></div><div class="charts">{"".join(figures)}</div>',
    )


def _sweep(drawing: Drawing) -> str:
    """The whole curve over each swept value, and the numbers."""
    summary = drawing.summary
    if not summary.swept:
        return ""
    keys = swept_keys(summary)
    points = sorted(
        {one.point for run in summary.runs for one in run.points},
        key=lambda at: [(number(value), value) for _, value in at],
    )
    rows = []
    for at in points:
        cells: Cells = []
        for run in summary.runs:
            ended = next((one for one in run.points if one.point == at), None)
            best = ended is not None and run.best.point == at and run.best.counts["done"] > 0
            cells.append((_swept_cell(summary, ended) if ended else "", "number best" if best else "number"))
        rows.append((escape(words.point(at)), cells))
    name = words.OBJECTIVES[summary.objective]
    note = f"The {name} at the end, a mean over the last tenth; band and dots: the seeds, each run's best point tinted."
    if len(keys) > 1:
        note += " Each curve is at the best of the other swept values."
    numbers = html_table("Point", [run.name for run in summary.runs], rows)
    if len(points) > 12:
        numbers = f"<details><summary>All {len(points)} points in numbers</summary>{numbers}</details>"
    return section("The sweep", note, drawing.charts("sweep", "two") + numbers)


def _swept_cell(summary: Summary, ended: Ended) -> str:
    if not ended.counts["done"]:
        return f"<small>{escape(ended.seeds)}</small>"
    mean, deviation = words.with_deviation(ended.final.mean, ended.final.deviation)
    text = escape(mean) + (f' <span class="deviation">± {escape(deviation)}</span>' if deviation else "")
    return text if ended.sound else f"{text} <small>{escape(ended.seeds)}</small>"


# --------------------------------------------------------------------------------------- what policies and workers did


def _policies(drawing: Drawing) -> str:
    """What was decided while it ran."""
    explained = {
        "period-over-time": "Period: local steps between two averagings.",
        "k-over-time": "K: reports an update waits for, where it changes.",
        "lr-over-time": "",
        "spread-over-time": "Spread: mean squared distance of the workers' weights from their mean when they averaged.",
        "herding": "Herding bound: the largest norm of a prefix sum of centred gradients within an epoch, in sketch "
        "space; smaller is a better order, and below 1 beside it better than a random one of the same gradients.",
    }
    grids = {name: drawing.charts(name, "") for name in explained}
    said = [explained[name] for name, grid in grids.items() if grid]
    skipped = {run: line.mean["skipped"][-1] for run, line in drawing.summary.curves.items()}
    lost = [f"{run} {words.figure(count)}" for run, count in skipped.items() if count > 0]
    if lost:
        said.append(f"Pairs skipped because a gradient was not finite (mean over seeds): {words.listed(lost)}.")
    figures = "".join(grids.values())
    return section(
        "What the policies decided",
        " ".join(filter(None, said)),
        figures and f'<div class="charts two">{figures}</div>',
    )


def _workers(drawing: Drawing) -> str:
    """Where the workers' time and the examples went."""
    summary = drawing.summary
    workers = number(summary.folder.shared.get("workers"))
    lines = f" The first {FOLLOWED} workers are shown." if workers > FOLLOWED else ""
    means = f" Neighbouring workers are shown as the means of {GROUPS} groups." if workers > GROUPS else ""
    body = [
        part(
            "A time line of workers",
            f"Who did what in a short window of the first seed; where nothing is drawn a worker waits.{lines}",
            drawing.charts("timeline", "two"),
        ),
        part("Time and work in numbers", "Mean ± standard deviation over seeds.", _work(summary)),
        part("Predicted and measured", "What theory expects of the delays and the pace.", _prediction(summary)),
        part(
            "Staleness",
            "Updates between reading the weights and using the report, over all merged reports.",
            drawing.charts("staleness", "small"),
        ),
        part(
            "Whose units were used",
            "What became of every worker's units, summed over seeds. Cancelled units come again; dropped ones were too "
            f"stale, refused ones not finite.{means}",
            drawing.charts("ledger", "small"),
        ),
        part(
            "Which labels were used",
            "Visits to an average example of each label, by what became of them, over all seeds.",
            drawing.charts("labels", "small"),
        ),
    ]
    return section("What the workers did", "", "".join(body))


def _work(summary: Summary) -> str:
    columns = [name for name in summary.columns(POLICIES) if any(run.best.cells[name].mean > 0 for run in summary.runs)]
    if "averagings" in columns and all(
        run.best.cells["averagings"].mean == run.best.cells["updates"].mean for run in summary.runs
    ):
        columns.remove("averagings")
    return _run_table(summary, columns) if columns else ""


def _prediction(summary: Summary) -> str:
    measured = {"mean_update_seconds": "update_seconds", "mean_staleness": "staleness"}
    laws = {run.name: summary.folder.predicted.get(run.name, {}) for run in summary.runs}

    def known(run: RunSummary, measure: str) -> bool:
        expected = laws[run.name].get(measured[measure], math.nan)
        mean = run.best.cells[measure].mean
        return math.isfinite(expected) and math.isfinite(mean) and (expected > 0 or mean > 0)

    asked = [measure for measure in measured if any(known(run, measure) for run in summary.runs)]
    rows = []
    for run in summary.runs:
        cells: Cells = []
        for measure in asked:
            if not known(run, measure):
                cells += [("", "number")] * 3
                continue
            expected, cell = laws[run.name][measured[measure]], run.best.cells[measure]
            off = f"{100 * (cell.mean / expected - 1):+.1f} %".replace("-", "−") if expected else ""
            cells += [
                (escape(words.figure(expected / summary.unit(measure)[0])), "number"),
                (_cell(summary, measure, cell), "number"),
                (off, "number"),
            ]
        if any(html for html, _ in cells):
            rows.append((_run_head(summary, run), cells))
    heads = [text for name in asked for text in (f"{summary.title(name)}, predicted", "measured", "deviation")]
    return html_table("Run", heads, rows)


def _runs(folder: Folder) -> str:
    """What each run was, and what all have in common."""
    hidden = {"run", "name", "order", "period", "pace", "sweep", "title", *folder.shared}
    extra = list(dict.fromkeys(key for run in folder.runs for key in folder.settings(run) if key not in hidden))
    rows = []
    for place, run in enumerate(folder.runs):
        settings = folder.settings(run)
        cells: Cells = [(escape(words.policy(kind, settings)), "") for kind in ("order", "period", "pace")]
        cells += [
            (escape(words.options(settings.get(key)) if settings.get(key) is not None else ""), "") for key in extra
        ]
        rows.append((named(place, run), cells))
    heads = ["Order: which example next", "Period: when to average", "Pace: how many to wait for", *extra]
    common = definition_list(described(folder))
    return section(
        "What each run was",
        "",
        html_table("Run", heads, rows, numeric=False) + part("The same for all", "", common),
    )


# ---------------------------------------------------------------------------------------------------------- the parts


def _embedded(value: object) -> str:
    """JSON that cannot end the script element it is in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return resources.files("hemiola.lab.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _vega() -> str:
    """Vega, Vega-Lite and the function ``vegaEmbed``, gzipped, in base64; bundling takes a second and is done once."""
    path = cache_folder() / f"vega-{version('vl-convert-python')}.json"
    try:
        text = str(json.loads(path.read_text())["vega"])
        gzip.decompress(base64.b64decode(text))  # which checks its sum
    except (OSError, ValueError, KeyError, TypeError, EOFError, zlib.error):
        bundle = vl_convert.javascript_bundle(snippet="window.vegaEmbed = vegaEmbed;").encode()
        text = base64.b64encode(gzip.compress(bundle, compresslevel=9, mtime=0)).decode()
        keep(path, {"vega": text})
    return text
