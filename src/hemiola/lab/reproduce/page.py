"""The page of one claim: one HTML file that needs nothing else."""

from __future__ import annotations

import shlex
from html import escape

from hemiola.lab.reproduce.folder import Finding
from hemiola.lab.reproduce.table import PublishedClaim, table
from hemiola.lab.reproduce.verdict import Judged, in_minutes, with_deviation

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { text-align: left; padding: .2rem .8rem .2rem 0 }
th { font-weight: 600; border-bottom: 1px solid #999 } td { border-bottom: 1px solid #ddd; vertical-align: top }
code { background: #f2f2f2; padding: .1rem .3rem } svg { max-width: 100%; height: auto }
.verdict { border-left: 4px solid; padding-left: .8rem } .yes { border-color: #009e73 } .no { border-color: #d55e00 }
"""


def command_of(claim: PublishedClaim, quick: bool) -> str:
    """What runs the claim."""
    words = ["hemiola", "reproduce", claim.name, "--out", "DIR"]
    return shlex.join([*words, *(["--data", "DATA"] if claim.data_of(quick) else []), *(["--quick"] if quick else [])])


def asked(judged: list[Judged]) -> dict[str, str]:
    """By number, what was asked of it and whether that holds."""
    return {
        one.check.number: f"{'at least' if one.check.most is None else 'at most'} {one.bound:.4g}: "
        + ("holds" if one.holds else "missed")
        for one in judged
    }


def html_page(claim: PublishedClaim, outcome: Finding, judged: list[Judged], picture: str, quick: bool) -> str:
    """The claim, what the paper reports, what came out, the picture, the command and the verdict."""
    bounds, labels = asked(judged), claim.labels(quick)
    cells = [
        (labels.get(name, name), with_deviation(found), bounds.get(name, "")) for name, found in outcome.numbers.items()
    ]
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    version = f"<p>This is the quick version: {escape(claim.quick)}</p>" if quick else ""
    remark = f"<p>{escape(claim.remark)}</p>" if claim.remark else ""
    kind = "yes" if outcome.reproduced else "no"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{escape(claim.name)}</title><style>{_STYLE}</style>
<h1>{escape(claim.claim)}</h1>
<p>{escape(table().papers[claim.paper])}. Tested on {escape(claim.task)}.</p>
<p><b>The paper reports:</b> {escape(claim.reports)}</p>{version}
<p class="verdict {kind}">{escape(outcome.words)}</p>
<table><tr><th>number</th><th>mean ± deviation over seeds</th><th>asked</th></tr>{rows}</table>
{picture}
{remark}
<p><code>{escape(command_of(claim, quick))}</code></p>
<p>It took {escape(in_minutes(outcome.minutes))} minutes with hemiola {escape(outcome.version)}.</p>
</html>
"""
