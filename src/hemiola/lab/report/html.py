"""The few pieces of HTML the page is put together from.

What a parameter calls HTML, the caller has escaped; everything else is escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hemiola.lab.report import charts

Cells = list[tuple[str, str]]  # (HTML, class)


def section(title: str, note: str, body: str) -> str:
    """A part of the page under its heading; the note is plain text."""
    about = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{about}{body}\n</section>\n"


def html_table(corner: str, heads: Sequence[str], rows: Sequence[tuple[str, Cells]], numeric: bool) -> str:
    """A table with a heading for every row and column, which scrolls sideways where it does not fit."""
    side = ' class="number"' if numeric else ""
    head = f'<th scope="col">{escape(corner)}</th>' + "".join(
        f'<th scope="col"{side}>{escape(text)}</th>' for text in heads
    )
    body = "".join(f'<tr><th scope="row">{first}</th>{"".join(map(_cell, cells))}</tr>\n' for first, cells in rows)
    kind = "" if numeric else ' class="wide"'
    return (
        f'<div class="scroll" role="region" aria-label="{escape(corner)} table" tabindex="0">'
        f"<table{kind}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>"
    )


def _cell(cell: tuple[str, str]) -> str:
    html, kind = cell
    return f'<td class="{kind}">{html}</td>' if kind else f"<td>{html}</td>"


def chart_figure(identity: str, caption: str) -> str:
    """The place of a chart; the script fills it in."""
    return f'<figure><figcaption>{caption}</figcaption><div class="chart" id="{identity}"></div></figure>'


def definition_list(items: Sequence[tuple[str, str]]) -> str:
    """Names and what they are; plain text."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in items) + "</dl>"


def swatch(place: int) -> str:
    """A run's colour and dash, as its lines are drawn."""
    dashes = " ".join(map(str, charts.dash(place)))
    stroke = f'stroke="{charts.colour(place)}" stroke-width="2.5"' + (f' stroke-dasharray="{dashes}"' if place else "")
    return f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><path d="M0 5H26" {stroke}/></svg>'
