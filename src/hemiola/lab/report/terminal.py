"""The table of the report for a terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from hemiola.lab.report import words
from hemiola.lab.report.summary import Cell, RunSummary, Summary


def table(summary: Summary) -> Table:
    """One row for every run, at its best point of the sweep; the best of a column is bold and starred."""
    columns = summary.columns((summary.objective, "test_metric", "epochs", "seconds", "bytes_per_worker"))
    made = Table(box=None, pad_edge=False, header_style="dim", caption_justify="left", caption_style="dim")
    made.add_column("run", overflow="fold")
    for name in columns:
        made.add_column(summary.title(name), justify="right")
    for run in summary.runs:
        made.add_row(_head(run), *(_cell(summary, name, run.best.cells[name]) for name in columns))
    if summary.runs:
        made.caption = "mean ± standard deviation over seeds; * best, or within the best one's deviation"
    return made


def _head(run: RunSummary) -> Text:
    head = Text(run.name, style="bold")
    detail = [words.point(run.best.point)] if len(run.points) > 1 else []
    if not run.best.sound:
        detail.append(run.best.seeds)
    return head.append(f" ({', '.join(detail)})", style="dim") if detail else head


def _cell(summary: Summary, measure: str, cell: Cell) -> Text:
    mean, deviation = summary.shown(measure, cell)
    text = Text(mean + ("*" if cell.best else ""), style="bold" if cell.best else "")
    return text.append(f" ±{deviation}", style="dim") if deviation else text
