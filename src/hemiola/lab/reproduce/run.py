"""Run a claim: its experiments or its function, then its numbers, checks, picture and page."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

from hemiola import __version__
from hemiola.errors import InputError
from hemiola.lab.execute import run_experiment
from hemiola.lab.progress import Display
from hemiola.lab.report.read import Folder, read_folder
from hemiola.lab.reproduce import pictures
from hemiola.lab.reproduce.folder import ClaimFolder, Finding
from hemiola.lab.reproduce.numbers import Measured, measure
from hemiola.lab.reproduce.page import html_page
from hemiola.lab.reproduce.parts import Found, Parts, Rows
from hemiola.lab.reproduce.table import Picture, PublishedClaim, load_experiment
from hemiola.lab.reproduce.verdict import in_words, judge
from hemiola.lab.tasks.files import require

# The functions of the table by name, and where they are; imported when they are needed.
FUNCTIONS = {
    "herding": "functions",
    "update_times": "functions",
    "staleness": "functions",
    "log_speedup": "functions",
    "gradient_norms": "gradient_norms",
}


class Interrupted(Exception):
    """Somebody asked a claim to stop; what is finished is kept."""


def check_data(claim: PublishedClaim, quick: bool, data: Path | None) -> None:
    """Refuse to start a claim whose data are not there.

    Raises:
        InputError: Says which files are missing, and what fetches them.
    """
    for name in claim.data_of(quick):
        try:
            require(name, data)
        except InputError as error:
            raise InputError(f"claim {claim.name!r}: {error}") from None


def reproduce(
    claim: PublishedClaim,
    out: Path,
    quick: bool = False,
    resume: bool = False,
    data: Path | None = None,
    jobs: int | None = None,
    display: Callable[[], Display] = Display.silent,
) -> Finding:
    """Run a claim to its end and write its page.

    Args:
        claim: Which.
        out: Folder of all claims.
        quick: The smaller version.
        resume: Go on with what the folder holds.
        data: Folder of the data sets.
        jobs: Parts of an experiment side by side.
        display: Makes what shows the progress of an experiment.

    Raises:
        InputError: The folder or the data cannot be used.
        Interrupted: It was told to stop.
        RuntimeError: A part of an experiment failed.
    """
    check_data(claim, quick, data)
    folder = ClaimFolder(out, claim, quick)
    with folder.opened(resume):
        if claim.function:
            with folder.timed(claim.name):
                found = _call(claim, folder, data, jobs, display())
            seconds = folder.seconds(claim.name)
        else:
            files = claim.files_of(quick)
            for file in files:
                with folder.timed(file):
                    _run(file, folder, data, jobs, display())
            found = measured(claim, {file: read_folder(folder.run_folder(file)) for file in files}, quick)
            seconds = sum(folder.seconds(file) for file in files)
        judged = judge(claim, found.numbers, quick)
        outcome = Finding(
            found.numbers,
            reproduced=all(one.holds for one in judged),
            words=in_words(judged),
            minutes=round(seconds / 60, 2),
            version=__version__,
            definition=claim.definition(quick),
        )
        picture = pictures.draw([(panel, found.rows.get(panel.title, [])) for panel in claim.panels])
        folder.write("picture.svg", picture)
        folder.write("page.html", html_page(claim, outcome, judged, picture, quick))
        folder.save(outcome)
    return outcome


def measured(claim: PublishedClaim, folders: dict[str, Folder], quick: bool) -> Found:
    """The declared numbers of a claim, and the rows of its pictures."""
    numbers = {number.name: measure(number, folders[number.file]) for number in claim.measured(quick)}
    return Found(numbers, {panel.title: _rows(claim, panel, folders, numbers, quick) for panel in claim.panels})


def _rows(
    claim: PublishedClaim, panel: Picture, folders: dict[str, Folder], numbers: dict[str, Measured], quick: bool
) -> Rows:
    if panel.file:
        return pictures.curve_rows(panel, folders[panel.file]) if panel.file in folders else []
    return [
        {
            "line": number.line,
            "x": number.x,
            "mean": found.value,
            "low": found.value - (found.deviation if found.deviation == found.deviation else 0.0),
            "high": found.value + (found.deviation if found.deviation == found.deviation else 0.0),
        }
        for number in claim.measured(quick)
        if number.x is not None and (not panel.runs or number.line in panel.runs)
        for found in [numbers[number.name]]
    ]


def _call(claim: PublishedClaim, folder: ClaimFolder, data: Path | None, jobs: int | None, display: Display) -> Found:
    module = importlib.import_module(f"hemiola.lab.reproduce.{FUNCTIONS[claim.function]}")
    parts = Parts(folder.path / "parts", jobs or len(os.sched_getaffinity(0)), display)
    try:
        found: Found = getattr(module, claim.function)(parts, data, **claim.options_of(folder.quick))
    except KeyboardInterrupt:
        raise Interrupted(claim.name) from None
    return found


def _run(file: str, folder: ClaimFolder, data: Path | None, jobs: int | None, display: Display) -> None:
    """Run an experiment, or what is left of it; another claim may have run it already."""
    outcome = run_experiment(load_experiment(file, folder.quick), folder.run_folder(file), data, jobs, True, display)
    if outcome.interrupted:
        raise Interrupted(f"{file}: {outcome.finished} of {outcome.total} parts finished")
    if outcome.failed:
        first = outcome.failed[0]
        raise RuntimeError(f"{file}: {first.cell.run!r}, seed {first.cell.seed}, failed: {first.why}")
