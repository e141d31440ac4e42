"""The report for a terminal: the table, the conclusion, and how sure it is."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hemiola.lab.report import conclusion, words
from hemiola.lab.report.summary import MeanOfSeeds, RunSummary, Summary
from hemiola.lab.report.verdicts import BETTER, WORSE, Verdict, verdicts


def tell(summary: Summary, console: Console) -> None:
    """Print what a comparison says."""
    found = {verdict.run: verdict for verdict in verdicts(summary)}
    console.print(table(summary))
    for group in summary.groups:
        compared = [found[run.name] for run in group[1:] if found[run.name].aspects]
        if compared:
            console.print()
            console.print(against(group[0].name, compared))
    console.print()
    for line in conclusion.conclusions(summary, found):
        console.print(Text(line, style="bold"))
    for line in [
        *(one for verdict in found.values() for one in conclusion.missed(verdict)),
        *conclusion.notes(summary, found),
    ]:
        console.print(Text(line, style="dim"))


def table(summary: Summary) -> Table:
    """One row for every run, at its best point of the sweep; the best of a column is bold and starred."""
    columns = summary.columns((summary.objective, "test_metric", "epochs", "seconds", "bytes_per_worker"))
    made = _plain_table()
    made.add_column("run", overflow="fold")
    for name in columns:
        made.add_column(summary.title(name), justify="right")
    for run in summary.runs:
        made.add_row(_head(run), *(_cell(summary, name, run.best.cells[name]) for name in columns))
    if summary.runs:
        made.caption = "mean ± standard deviation over seeds; * the best, and what is not shown to be worse"
    return made


def against(reference: str, compared: list[Verdict]) -> Table:
    """Every run against the reference, one column for every question."""
    questions = {"seconds": "time", "bytes_per_worker": "bytes", "epochs": "epochs", "end": "at the end"}
    asked = [name for name in questions if any(name in verdict.aspects for verdict in compared)]
    made = _plain_table()
    made.add_column(f"against {reference}", overflow="fold")
    for name in asked:
        made.add_column(questions[name])
    for verdict in compared:
        cells = []
        for name in asked:
            aspect = verdict.aspects.get(name)
            style = {BETTER: "green", WORSE: "red"}.get(aspect.verdict, "") if aspect else ""
            cells.append(Text(conclusion.short(aspect) if aspect else "", style=style))
        made.add_row(Text(verdict.run, style="bold"), *cells)
    return made


def _plain_table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim", caption_justify="left", caption_style="dim")


def _head(run: RunSummary) -> Text:
    head = Text(run.name, style="bold")
    detail = [words.point(run.best.point)] if len(run.points) > 1 else []
    if not run.best.sound:
        detail.append(run.best.seeds)
    return head.append(f" ({', '.join(detail)})", style="dim") if detail else head


def _cell(summary: Summary, measure: str, cell: MeanOfSeeds) -> Text:
    mean, deviation = summary.shown(measure, cell)
    text = Text(mean + ("*" if cell.best else ""), style="bold" if cell.best else "")
    return text.append(f" ±{deviation}", style="dim") if deviation else text
