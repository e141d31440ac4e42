"""What the page's script needs to draw the charts: numbers, specifications, and which switch shows what."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from hemiola.lab.report import charts, marks
from hemiola.lab.report.charts import Panel
from hemiola.lab.report.html import chart_figure, swatch
from hemiola.lab.report.summary import Summary


class Drawing:
    """The charts of one page: sections add to it, `payload` is what page.js reads.

    Columns of numbers and specifications that several charts share travel once.
    """

    def __init__(self, summary: Summary) -> None:
        self.summary = summary
        self.runs = summary.folder.runs
        self._charts: list[dict[str, Any]] = []
        self._columns: dict[str, int] = {}
        self._specs: dict[str, int] = {}
        self._state: dict[str, str] = {"scale": "linear"}

    def panels(self, name: str) -> list[Panel]:
        """The panels of a chart of the table."""
        return list(charts.CHARTS[name](self.summary, marks.PAGE))

    def add(self, panel: Panel, place: str) -> str:
        """Add a chart; returns the place to put into the page."""
        if panel.when.get("measure", self.summary.objective) == self.summary.objective and len(panel.specs) > 1:
            self._state["scale"] = "log" if panel.log else "linear"
        self._charts.append(
            {
                "place": place,
                "title": panel.title,
                "against": panel.against,
                "rows": self._pooled(panel.rows),
                "specs": {scale: self._spec(spec) for scale, spec in panel.specs.items()},
                "when": dict(panel.when),
            }
        )
        return place

    def charts(self, name: str, kind: str) -> str:
        """Figures for all panels of a chart, in a grid of this kind; without a grid where the kind is empty."""
        figures = []
        for number, panel in enumerate(self.panels(name)):
            place = self.add(panel, f"{name}-{number}")
            caption = (
                f"{swatch(self.runs.index(panel.run))}{escape(panel.run)}" if panel.run else "<b></b> <span></span>"
            )
            figures.append(chart_figure(place, caption))
        made = "".join(figures)
        return f'<div class="charts {kind}">{made}</div>' if made and kind else made

    def choose(self, key: str, values: Sequence[str]) -> None:
        """What a switch is set to when the page opens: the first of the values."""
        self._state[key] = values[0]

    def payload(self) -> dict[str, Any]:
        """What page.js reads."""
        return {
            "runs": self.runs,
            "state": self._state,
            "style": marks.style(marks.PAGE),
            "columns": [json.loads(text) for text in self._columns],
            "specs": [json.loads(text) for text in self._specs],
            "charts": self._charts,
        }

    def _pooled(self, rows: marks.Rows) -> dict[str, int]:
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: _place(self._columns, _column([row.get(name) for row in rows])) for name in names}

    def _spec(self, spec: marks.Spec) -> int:
        return _place(self._specs, spec)


def _place(pool: dict[str, int], value: object) -> int:
    return pool.setdefault(json.dumps(value, separators=(",", ":"), allow_nan=False), len(pool))


def _column(values: Sequence[object]) -> list[object] | dict[str, list[Any]]:
    """Numbers as they are; words, which repeat, as places in a list of them."""
    if any(isinstance(value, str) for value in values):
        words = list(dict.fromkeys(values))
        places = {word: place for place, word in enumerate(words)}
        return {"words": words, "at": [places[value] for value in values]}
    return [_short(value) for value in values]


def _short(value: object) -> object:
    """Five significant digits, null for what is not finite."""
    if isinstance(value, float):
        rounded = float(f"{value:.5g}")  # may round up to infinity
        return rounded if math.isfinite(rounded) else None
    return value
