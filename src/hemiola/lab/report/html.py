"""The few pieces of HTML the page is put together from.

What a parameter calls HTML, the caller has escaped; everything else is escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hemiola.lab.report import marks

Cells = list[tuple[str, str]]  # (HTML, class)


def section(title: str, note: str, body: str) -> str:
    """A part of the page under its heading; the note is plain text. There is none without a body."""
    about = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{about}{body}\n</section>\n" if body else ""


def part(title: str, note: str, body: str) -> str:
    """A part of a section."""
    about = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<h3>{escape(title)}</h3>\n{about}{body}\n" if body else ""


def html_table(corner: str, heads: Sequence[str], rows: Sequence[tuple[str, Cells]], *, numeric: bool = True) -> str:
    """A table with a heading for every row and column; on a narrow screen every row becomes a card of its own."""
    if not rows:
        return ""
    side = ' class="number"' if numeric else ""
    head = f'<th scope="col">{escape(corner)}</th>' + "".join(
        f'<th scope="col"{side}>{escape(text)}</th>' for text in heads
    )
    body = ""
    for first, cells in rows:
        inner = "".join(_cell(name, *cell) for name, cell in zip(heads, cells, strict=True))
        body += f'<tr><th scope="row">{first}</th>{inner}</tr>\n'
    kind = "" if numeric else ' class="wide"'
    return f"<table{kind}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"


def _cell(head: str, html: str, kind: str) -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<td{name} data-label="{escape(head)}">{html}</td>' if html else f"<td{name}></td>"


def chart_figure(place: str, caption: str) -> str:
    """The place of a chart; the script fills it in."""
    return f'<figure><figcaption>{caption}</figcaption><div class="chart" id="{place}"></div></figure>'


def switch(key: str, label: str, values: Sequence[tuple[str, str]]) -> str:
    """Buttons of which one is pressed: (value, text)."""
    buttons = "".join(
        f'<button type="button" data-set="{key}" data-value="{value}">{escape(text)}</button>' for value, text in values
    )
    return f'<div class="group" role="group" aria-label="{escape(label)}">{buttons}</div>' if len(values) > 1 else ""


def definition_list(items: Sequence[tuple[str, str]]) -> str:
    """Names and what they are; plain text."""
    made = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in items)
    return f"<dl>{made}</dl>" if made else ""


def swatch(place: int) -> str:
    """A run's colour and dash, as its lines are drawn."""
    dashes = " ".join(map(str, marks.dash(place)))
    stroke = f'stroke="{marks.colour(place)}" stroke-width="2.5"' + (f' stroke-dasharray="{dashes}"' if place else "")
    return f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><path d="M0 5H26" {stroke}/></svg>'


def named(place: int, run: str) -> str:
    """A run's name with its swatch."""
    name = escape(run)
    return swatch(place) + (name if len(run) <= 24 else f'<span class="long">{name}</span>')
