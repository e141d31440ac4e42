"""docs/results.md and its figures, from finished folders: no number in it is typed.

What finished folders hold is gathered in `measured.json` beside the table; the page is made from the two alone, so that
a test can make it again.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from hemiola.errors import InputError
from hemiola.lab.reproduce.folder import ClaimFolder, Finding
from hemiola.lab.reproduce.page import asked, command_of
from hemiola.lab.reproduce.table import PublishedClaim, claims, table
from hemiola.lab.reproduce.verdict import in_minutes, judge, with_deviation

FIGURES = "results"


def measured_path() -> Path:
    """Where the gathered outcomes are kept."""
    return Path(str(files("hemiola.lab.reproduce") / "measured.json"))


@cache
def _measured() -> dict[str, dict[str, Any]]:
    """By claim and version ("full" or "quick"), the outcome as JSON."""
    try:
        found: dict[str, dict[str, Any]] = json.loads(measured_path().read_text("utf-8"))
        return found
    except FileNotFoundError:
        return {}


def known_minutes(name: str, quick: bool) -> float | None:
    """How long a claim took when docs/results.md was written."""
    saved = _measured().get(name, {}).get("quick" if quick else "full")
    return None if saved is None else float(saved["minutes"])


def write_docs(out: Path, docs: Path) -> list[Path]:
    """Gather what has finished in a folder, and write the page and its figures.

    Claims that have not run there keep what was gathered before.

    Raises:
        InputError: There is no docs/results.md to write, or nothing has finished.
    """
    page = docs / "results.md"
    if not page.is_file():
        raise InputError(f"{page} is not there; --docs is for a checkout of hemiola's repository, called in its root")
    found = {name: dict(versions) for name, versions in _measured().items() if name in claims()}
    figures = docs / FIGURES
    written = []
    for claim in claims().values():
        for quick in (True, False):  # The full version's picture comes last and stays.
            folder = ClaimFolder(out, claim, quick)
            outcome = folder.outcome()
            if outcome is None:
                continue
            found.setdefault(claim.name, {})["quick" if quick else "full"] = outcome.as_json()
            picture = (folder.path / "picture.svg").read_text("utf-8")
            if picture and (not quick or "full" not in found[claim.name]):
                figures.mkdir(exist_ok=True)
                (figures / f"{claim.name}.svg").write_text(picture, "utf-8")
                written.append(figures / f"{claim.name}.svg")
    if not found:
        raise InputError(f"{out}: no claim has run to its end there")
    ordered = {name: found[name] for name in claims() if name in found}
    measured_path().write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")
    _measured.cache_clear()
    page.write_text(results_page(), "utf-8")
    return [*dict.fromkeys(written), measured_path(), page]


def results_page() -> str:
    """docs/results.md as text. What was measured before a claim was changed does not count."""
    found = {
        name: {
            version: Finding.from_json(saved)
            for version, saved in versions.items()
            if saved["definition"] == claims()[name].definition(version == "quick")
        }
        for name, versions in _measured().items()
    }
    parts = [_HEAD, _overview(found)]
    for paper, title in table().papers.items():
        parts.append(f"## {paper}\n\n{title}.\n")
        parts += [_section(claim, found.get(claim.name, {})) for claim in claims().values() if claim.paper == paper]
    return "\n".join(parts)


_HEAD = """# Results

Every published claim that is tested here, with what came out. This page is written by `hemiola reproduce --docs` from
the folders of finished claims; no number in it is typed. `hemiola reproduce` lists the claims, `hemiola reproduce NAME`
runs one, `make reproduce` runs the quick version of all. A check is a bound that a number has to keep for the claim to
count as reproduced; where it is missed, the page says so. All runs are on two CPU cores; cluster seconds are virtual.
Whole tables of runs are in [Tables behind the results](measurements.md).
"""


def _overview(found: dict[str, dict[str, Finding]]) -> str:
    lines = ["| claim | full version | minutes | quick version | minutes |", "|---|---|---|---|---|"]
    for claim in claims().values():
        cells = []
        for version in ("full", "quick"):
            outcome = found.get(claim.name, {}).get(version)
            verdict = "not run" if outcome is None else "reproduced" if outcome.reproduced else "**not reproduced**"
            cells += [verdict, "" if outcome is None else in_minutes(outcome.minutes)]
        lines.append(f"| [{claim.name}](#{claim.name}) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _section(claim: PublishedClaim, versions: dict[str, Finding]) -> str:
    quick = "full" not in versions
    outcome = versions.get("quick" if quick else "full")
    lines = [f"### {claim.name}", "", f"**{claim.claim}** Tested on {claim.task}.", ""]
    lines += [f"The paper reports: {claim.reports}", ""]
    if outcome is None:
        return "\n".join([*lines, "Not run to its end yet.", ""])
    if quick:
        lines += [f"Only the quick version has run to its end: {claim.quick}", ""]
    lines += [f"    {command_of(claim, quick)}", ""]
    bounds = asked(judge(claim, outcome.numbers, quick))
    lines += ["| number | mean ± deviation over seeds | asked |", "|---|---|---|"]
    labels = claim.labels(quick)
    lines += [
        f"| {labels.get(name, name)} | {with_deviation(one)} | {bounds.get(name, '')} |"
        for name, one in outcome.numbers.items()
    ]
    lines += ["", outcome.words, ""]
    if claim.remark:
        lines += [claim.remark, ""]
    return "\n".join([*lines, f"![{claim.name}]({FIGURES}/{claim.name}.svg)", ""])
