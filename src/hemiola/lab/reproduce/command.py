"""``hemiola reproduce``: list the claims, run some of them, or write docs/results.md from finished folders.

Heavy imports wait until they are needed, so that ``hemiola --help`` is quick.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hemiola.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hemiola.lab.reproduce.table import PublishedClaim

ALL = "all"


def reproduce_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Claims to run, or all; lists them without.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for results and pages.")] = Path("hemiola-reproduce"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller versions, at most two minutes each.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the folder already holds.")] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of the data sets; HEMIOLA_DATA otherwise.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Parts side by side; the number of cores otherwise.")
    ] = None,
    docs: Annotated[bool, typer.Option("--docs", help="Write docs/results.md from the finished claims.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list of claims as JSON.")] = False,
) -> None:
    """Run published claims, check them, and write a page on each; without a name, list them."""
    from rich.console import Console

    from hemiola.lab.reproduce.docs import write_docs
    from hemiola.lab.reproduce.table import claim_named, claims

    console = Console(markup=False, emoji=False, highlight=False)
    if data is None and os.environ.get("HEMIOLA_DATA"):
        data = Path(os.environ["HEMIOLA_DATA"])
    if docs:
        if names:
            raise InputError(f"--docs takes no claims, got {', '.join(names)}; it uses all that --out holds")
        for path in write_docs(out, Path("docs")):
            console.print(f"written: {path}", soft_wrap=True)
    elif not names:
        rows = _listed(out, quick)
        if as_json:
            typer.echo(json.dumps(rows, indent=2))
        else:
            console.print(_listing(rows))
    elif as_json:
        raise InputError("--json is for the list of claims; numbers.json in a claim's folder has what it measured")
    else:
        chosen = list(claims().values()) if names == [ALL] else [claim_named(name) for name in names]
        _run(chosen, names, out, quick, resume, data, jobs, console)


def _listed(out: Path, quick: bool) -> list[dict[str, Any]]:
    """Every claim as plain values."""
    from hemiola.lab.reproduce.docs import known_minutes
    from hemiola.lab.reproduce.folder import ClaimFolder
    from hemiola.lab.reproduce.table import claims

    return [
        {
            "name": claim.name,
            "paper": claim.paper,
            "claim": claim.claim,
            "task": claim.task,
            "minutes": known_minutes(claim.name, quick),
            "state": ClaimFolder(out, claim, quick).state,
        }
        for claim in claims().values()
    ]


def _listing(rows: list[dict[str, Any]]) -> Table:
    """A block for every paper, so that what a claim says has room on a narrow terminal."""
    from rich.table import Table

    from hemiola.lab.reproduce.table import table
    from hemiola.lab.reproduce.verdict import in_minutes

    listing = Table("claim", "what it says (what it is tested on)", "minutes", "state", box=None, header_style="bold")
    for paper, title in table().papers.items():
        listing.add_row("", f"{paper}: {title}", "", "", style="bold")
        for row in (each for each in rows if each["paper"] == paper):
            minutes = "" if row["minutes"] is None else in_minutes(row["minutes"])
            listing.add_row(row["name"], f"{row['claim']} ({row['task']})", minutes, row["state"])
    return listing


def _run(
    chosen: list[PublishedClaim],
    names: list[str],
    out: Path,
    quick: bool,
    resume: bool,
    data: Path | None,
    jobs: int | None,
    console: Console,
) -> None:
    """One after the other. With ``all``, a claim whose data are not there is left out, with a line that says so."""
    from hemiola.lab.progress import Display
    from hemiola.lab.reproduce.folder import ClaimFolder
    from hemiola.lab.reproduce.run import Interrupted, check_data, reproduce
    from hemiola.lab.reproduce.verdict import in_minutes

    left_out = []
    for claim in chosen:
        try:
            check_data(claim, quick, data)
        except InputError as error:
            if names != [ALL]:
                raise
            left_out.append(str(error))
    able = [claim for claim in chosen if not any(f"claim {claim.name!r}:" in line for line in left_out)]
    failed = []
    for claim in able:
        console.print(f"{claim.name}: {claim.claim}", soft_wrap=True)
        try:
            outcome = reproduce(claim, out, quick, resume, data, jobs, lambda: Display(console))
        except Interrupted as stopped:
            again = ["hemiola", "reproduce", *names, "--out", str(out), *(["--quick"] if quick else []), "--resume"]
            typer.echo(f"hemiola: stopped in {stopped}; go on with: {shlex.join(again)}", err=True)
            raise typer.Exit(130) from None
        except RuntimeError as error:
            failed.append(f"{claim.name}: {error}")
            typer.echo(f"hemiola: {failed[-1]}", err=True)
            continue
        console.print(f"  {outcome.words}", soft_wrap=True)
        page = ClaimFolder(out, claim, quick).path / "page.html"
        console.print(f"  {in_minutes(outcome.minutes)} minutes; page: {page}", soft_wrap=True)
    for line in left_out:
        console.print(f"left out: {line}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)
