"""Results in a notebook: the conclusion, the table and two pictures, without a script, so that they are saved too."""

from __future__ import annotations

import base64
from html import escape

from hemiola.errors import InputError
from hemiola.lab.report import charts, conclusion
from hemiola.lab.report.page import results_table
from hemiola.lab.report.summary import Summary
from hemiola.lab.report.verdicts import verdicts

# Only what is inside: a notebook has styles of its own. Pictures are drawn on white, also in a dark notebook.
_STYLE = """<style scoped>
.hemiola td, .hemiola th { text-align: right; vertical-align: top; }
.hemiola th[scope=row] { text-align: left; }
.hemiola th small, .hemiola .deviation { display: block; font-weight: normal; opacity: .7; }
.hemiola .best { font-weight: bold; }
.hemiola .swatch { width: 26px; height: 10px; margin-right: 8px; vertical-align: middle; }
.hemiola .vh { display: none; }
.hemiola img { background: white; max-width: 100%; margin: 8px 8px 0 0; }
</style>"""


def notebook_html(summary: Summary) -> str:
    """What Jupyter shows for the results of an experiment."""
    found = {verdict.run: verdict for verdict in verdicts(summary)}
    said = "".join(f"<p><b>{escape(line)}</b></p>" for line in conclusion.conclusions(summary, found))
    measure = "gap" if summary.objective == "train_gap" else "loss"
    pictures = [picture for name in ("time-to-target", f"{measure}-vs-seconds") if (picture := _picture(summary, name))]
    return f'<div class="hemiola">{_STYLE}{said}{results_table(summary)}{"".join(pictures)}</div>'


def _picture(summary: Summary, name: str) -> str:
    try:
        svg = charts.figure(summary, f"{name}.svg")
    except InputError:  # nothing of this kind was logged
        return ""
    return f'<img alt="{escape(name)}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
