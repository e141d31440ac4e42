"""Verbs of the command line. Heavy imports wait until a verb needs them, so ``hemiola --help`` is quick."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hemiola.errors import InputError
from hemiola.lab import listings
from hemiola.lab.advise import verbs as advisor
from hemiola.lab.reproduce.command import reproduce_command

if TYPE_CHECKING:
    from rich.console import Console

    from hemiola.lab.experiment import Experiment
    from hemiola.lab.report.summary import Summary

app = typer.Typer(
    help="Data-parallel PyTorch training whose order, period and pace measure and adapt.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Public data sets: list what is there, fetch what is missing.", no_args_is_help=True)
app.add_typer(data_app, name="data")
listings.register(app)
app.command("reproduce")(reproduce_command)
app.command()(advisor.measure)
app.command()(advisor.advise)

DataOption = Annotated[Path | None, typer.Option("--data", help="Folder of the data sets; HEMIOLA_DATA otherwise.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show whole tracebacks of what failed.")]
JobsOption = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Parts side by side; the number of cores otherwise.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        from hemiola import __version__

        typer.echo(f"hemiola {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="The experiment file (TOML).")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for results.csv, log.jsonl and report.html.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the file.")
    ] = None,
    jobs: JobsOption = None,
    data: DataOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the folder already holds.")] = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would run, and about how long; nothing is written.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run every run x sweep point x seed of an experiment file and compare them."""
    from hemiola.lab.experiment import Experiment, parse_change

    with _tracebacks(debug):
        experiment = Experiment.load(file, dict(parse_change(change) for change in changes or []))
        if dry:
            _show_dry_run(experiment, data, jobs, as_json)
            return
        if out is None:
            raise InputError("give --out DIR, a folder for the results; or --dry-run to see what would run")
        _run_and_show(experiment, out, data, jobs, resume, debug, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A folder that `hemiola run` or `hemiola demo` has begun.")],
    jobs: JobsOption = None,
    data: DataOption = None,
    debug: DebugOption = False,
) -> None:
    """Go on with a run that was interrupted; the folder knows the experiment and what it was started with."""
    from hemiola.lab.store import reopen

    with _tracebacks(debug):
        data, folder = data.absolute() if data else None, folder.absolute()
        saved = reopen(folder)
        if saved.directory.is_dir():
            os.chdir(saved.directory)  # Own tasks may read files that are named from there.
        _run_and_show(saved.experiment, folder, data or saved.data, jobs or saved.jobs, True, debug)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = Path("hemiola-demo"),
    jobs: JobsOption = None,
    real: Annotated[
        bool, typer.Option("--real", help="A small version on real processes of this machine instead.")
    ] = False,
) -> None:
    """Three troubles and their cures, then everything together, on real data: a minute of computing."""
    typer.echo("handwritten digits (real data), softmax regression, real gradients, workers under a virtual clock")
    from hemiola.lab.demo.scenes import play, play_real
    from hemiola.lab.progress import Display

    console = _console()

    def say(line: str) -> None:
        console.print(line)

    def display() -> Display:
        return Display(console if console.is_terminal else None)

    if not (play_real(out, say, display) if real else play(out, jobs, say, display)):
        typer.echo(f"hemiola: stopped; go on with: {shlex.join(['hemiola', 'demo', '--out', str(out)])}", err=True)
        raise typer.Exit(130)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="A folder that `hemiola run` wrote, or several to compare.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write the page; report.html in the first folder otherwise.")
    ] = None,
    figure: Annotated[
        list[Path] | None,
        typer.Option("--figure", help="Write one figure to this file, e.g. loss-vs-seconds.svg, not the page."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what it says as JSON, and write nothing.")] = False,
) -> None:
    """Write report.html again, or single figures (PNG, SVG, PDF) for papers and slides."""
    from hemiola.lab.report import summary_of, write_figure, write_report

    if as_json:
        _print_json(summary_of(folders))
        return
    if not figure:
        if len(folders) > 1 and out is None:
            raise InputError("a report of several folders belongs to none of them; give --out FILE")
        typer.echo(f"report: {write_report(folders, out)}")
    for path in figure or []:
        typer.echo(f"figure: {write_figure(folders, path)}")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A folder that `hemiola run` wrote.")],
    run: Annotated[str | None, typer.Argument(help="The run's name; may be left out where there is only one.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Which seed; the experiment's first otherwise.")] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at", metavar="KEY=VALUE", help="Point of the sweep, e.g. optimizer.lr=0.1; the best otherwise."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; RUN-seedN.pt here otherwise.")] = None,
) -> None:
    """Write the model of a finished run as a plain PyTorch state_dict."""
    from hemiola.lab import models
    from hemiola.lab.experiment import parse_change

    found = models.find(folder, run, seed, dict(parse_change(point) for point in at or []))
    typer.echo(f"model: {found}")
    typer.echo(f"file:  {models.export(found, out)}")


@data_app.command("list")
def data_list(data: DataOption = None, as_json: listings.JsonOption = False) -> None:
    """Show which data sets are there."""
    from rich.table import Table

    from hemiola.lab.tasks.fetch import list_sets

    root = _data_folder(data)
    table = Table("data set", "there", "MB", "what", "files missing", box=None, header_style="bold")
    sets = list_sets(root)
    if as_json:
        return listings.print_json([vars(found) for found in sets])
    for found in sets:
        missing = ", ".join(found.missing[:2]) + (", ..." if len(found.missing) > 2 else "")
        table.add_row(found.name, "yes" if found.present else "no", f"{found.size / 1e6:.1f}", found.title, missing)
    console = _console()
    console.print(f"in {root}:" if root else "no data folder: give --data DIR or set HEMIOLA_DATA")
    console.print(table)
    return None


@data_app.command("fetch")
def data_fetch(
    name: Annotated[list[str], typer.Argument(help="Names that `hemiola data list` shows.")],
    data: DataOption = None,
) -> None:
    """Download data sets from their official sources, with checksums."""
    from rich.progress import DownloadColumn, Progress, TaskID, TransferSpeedColumn

    from hemiola.lab.tasks.fetch import fetch_set

    root = _data_folder(data)
    if root is None:
        raise InputError("where to? give --data DIR or set HEMIOLA_DATA")
    console = _console()
    with Progress(
        *Progress.get_default_columns(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bars:
        rows: dict[str, TaskID] = {}

        def show(file: str, done: int, total: int) -> None:
            if file not in rows:
                rows[file] = bars.add_task(file)
            bars.update(rows[file], completed=done, total=total or None)

        for one in name:
            for path in fetch_set(one, root, show):
                console.print(f"{one}: {path}", soft_wrap=True)


def _data_folder(given: Path | None) -> Path | None:
    return given or (Path(os.environ["HEMIOLA_DATA"]) if os.environ.get("HEMIOLA_DATA") else None)


@app.command()
def predict(
    workers: Annotated[int, typer.Option("--workers", min=1, help="How many workers.")],
    delay: Annotated[
        str | None, typer.Option("--delay", help="Law of one local step, e.g. 'shifted-exponential(1, 1)'.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Measured step times instead: numbers, CSV, or a run's log.")
    ] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Only this K.")] = None,
    slow: Annotated[
        str, typer.Option("--slow", help="Slow workers, e.g. '3=5' for worker 3 taking five times as long.")
    ] = "",
    exchange: Annotated[
        float | None, typer.Option("--exchange", help="Seconds of one exchange; a run's log has it measured.")
    ] = None,
    ring: Annotated[
        bool, typer.Option("--ring", help="Let updates take an exchange: reports by rings, behind who keeps going.")
    ] = False,
    grace: Annotated[
        float | None, typer.Option("--grace", help="Of k-sync and k-async: wait beyond K for who is hardly later.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Expected time per update, staleness and waste of every pace: theory beside simulation."""
    from hemiola.timing.predict import parse_slow, predict
    from hemiola.timing.traces import read_trace

    if (delay is None) == (trace is None):
        raise InputError("give either --delay or --trace")
    times = delay if trace is None else read_trace(trace)
    assert times is not None
    prediction = predict(workers, times, k=k, slow=parse_slow(slow), exchange=exchange, ring=ring, grace=grace)
    if as_json:
        import json

        typer.echo(json.dumps(prediction.as_json(), indent=1, allow_nan=False))
        return
    console = _console()
    console.print(prediction.as_table(console.width))
    for line in prediction.conclusions:
        console.print(line)


def _console() -> Console:
    """Text is printed as it is: names of runs, paths and messages may hold what rich takes for markup or emoji."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


@contextmanager
def _tracebacks(wanted: bool) -> Iterator[None]:
    """Show where an `InputError` comes from, if that is wanted, before it becomes one line."""
    try:
        yield
    except InputError:
        if wanted:
            typer.echo(traceback.format_exc(), err=True)
        raise


def _print_json(summary: Summary) -> None:
    import json

    from hemiola.lab.report.plain import as_json

    typer.echo(json.dumps(as_json(summary), indent=1, allow_nan=False))


def _show_dry_run(experiment: Experiment, data: Path | None, jobs: int | None, as_json: bool) -> None:
    """What would run, and about how long it would take."""
    from hemiola.lab.dry_run import dry_run

    found = dry_run(experiment, data, jobs)
    if as_json:
        import json

        typer.echo(json.dumps(found.as_json(), indent=1))
        return
    for run in found.runs:
        each = "as long as it takes: its cluster is real" if run.seconds is None else f"about {run.seconds:.1f} s each"
        typer.echo(f"{run.run}: {run.cells} {'part' if run.cells == 1 else 'parts'}, {each}")
    total = sum(run.cells for run in found.runs)
    if found.seconds is None:
        typer.echo(f"{total} parts in all")
    else:
        typer.echo(f"{total} parts in all, about {found.seconds:.0f} s with {found.jobs} side by side")


def _run_and_show(
    experiment: Experiment,
    out: Path,
    data: Path | None,
    jobs: int | None,
    resume: bool,
    debug: bool,
    as_json: bool = False,
) -> None:
    """Run, write the report, print the table; say what is left to do when it was interrupted."""
    from hemiola.lab.execute import run_experiment
    from hemiola.lab.progress import Display
    from hemiola.lab.report import summary_of, write_page
    from hemiola.lab.report.terminal import tell

    console = _console()
    outcome = run_experiment(experiment, out, data, jobs, resume, Display(None if as_json else console))
    if outcome.finished:
        summary = summary_of(out)
        page = write_page(summary, out / "report.html")
        if as_json:
            _print_json(summary)
        else:
            tell(summary, console)
            console.print(f"\nresults: {out / 'results.csv'}\nreport:  {page}", soft_wrap=True)
    for failure in outcome.failed:
        if debug and failure.trace:
            typer.echo(failure.trace, err=True)
        where = f" (whole traceback: --debug, or {failure.kept})" if failure.trace and not debug else ""
        typer.echo(f"hemiola: {failure.cell.run!r}, seed {failure.cell.seed}, failed: {failure.why}{where}", err=True)
    if outcome.interrupted:
        ranks = "TORCHELASTIC_RUN_ID" in os.environ
        again = ("torchrun ... -m " if ranks else "") + shlex.join(["hemiola", "resume", str(out)])
        typer.echo(
            f"hemiola: stopped with {outcome.finished} of {outcome.total} parts finished; go on with: {again}", err=True
        )
        raise typer.Exit(130)
    if outcome.failed:
        again = shlex.join(["hemiola", "resume", str(out)])
        typer.echo(f"hemiola: to try parts that failed again, from their last checkpoints: {again}", err=True)
        raise typer.Exit(1)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: an `InputError` is one line on stderr and exit code 2."""
    guarded(lambda: app(args=arguments, prog_name="hemiola"))


def guarded(call: Callable[[], object]) -> None:
    """Run a verb; a user's mistake or a full disk ends with one line and code 2, a closed pipe quietly."""
    try:
        call()
    except InputError as error:
        typer.echo(f"hemiola: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except SystemExit as end:
        verb = end.__context__
        if verb is not None and isinstance(verb.__cause__, KeyboardInterrupt):  # Typer turns Ctrl-C into code 130.
            typer.echo("hemiola: stopped", err=True)
        raise
    except KeyboardInterrupt:
        typer.echo("hemiola: stopped", err=True)
        sys.exit(130)
