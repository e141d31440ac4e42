"""``hemiola advise`` and ``hemiola measure``."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hemiola.errors import InputError

if TYPE_CHECKING:
    from hemiola.lab.advise.advice import Advice
    from hemiola.lab.advise.measure import ClusterFacts

TaskArgument = Annotated[str, typer.Argument(help="A task's name, or module:function of your own.")]
BatchOption = Annotated[int | None, typer.Option("--batch", min=1, help="Examples per worker per step.")]
DataOption = Annotated[Path | None, typer.Option("--data", help="Folder of the data sets; HEMIOLA_DATA otherwise.")]
DEFAULT_WORKERS = 8


def measure(
    task: TaskArgument,
    out: Annotated[Path, typer.Option("--out", help="File for what was measured (JSON).")] = Path("measured.json"),
    batch: BatchOption = None,
    data: DataOption = None,
) -> None:
    """Time training steps here; under torchrun, on every rank, with bandwidth and latency between them."""
    from hemiola.lab.advise.measure import measure as measured_here
    from hemiola.lab.advise.measure import write_measured

    found = measured_here(_load(task, data), batch)
    if found is None:
        return
    write_measured(out, found)
    typer.echo(f"{_summary(found)}; written to {out}")


def advise(
    task: TaskArgument,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Of the cluster; 8 otherwise.")] = None,
    delay: Annotated[
        str | None, typer.Option("--delay", help="Seconds of a step: a law, or trace(FILE) of a real run.")
    ] = None,
    times: Annotated[
        Path | None,
        typer.Option("--times", help="Step times: a trace (CSV), or the log.jsonl of a run on real machines."),
    ] = None,
    bandwidth: Annotated[str | None, typer.Option("--bandwidth", help="Of the link, as in '1 Gbit/s'.")] = None,
    latency: Annotated[str, typer.Option("--latency", help="Of the link.")] = "50 us",
    measured: Annotated[
        Path | None, typer.Option("--measured", help="What `hemiola measure` wrote, instead of the options above.")
    ] = None,
    here: Annotated[bool, typer.Option("--measure", help="Time steps of the task on this machine.")] = False,
    optimizer: Annotated[str, typer.Option("--optimizer", help="A torch.optim class.")] = "SGD",
    batch: BatchOption = None,
    target: Annotated[float | None, typer.Option("--target", help="Training loss to reach.")] = None,
    epochs: Annotated[float, typer.Option("--epochs", help="Ordinary epochs that set the target otherwise.")] = 10.0,
    minutes: Annotated[float, typer.Option("--minutes", help="Time to spend.")] = 2.0,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes side by side.")] = 2,
    write: Annotated[
        Path | None, typer.Option("--write", help="Experiment file that checks the advice with new seeds.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    data: DataOption = None,
) -> None:
    """Race orders, periods and paces on the task, under a virtual clock, and say which to use."""
    from hemiola.lab.advise.race import advise as race

    with tempfile.TemporaryDirectory() as folder:
        facts = _facts(task, delay, times, measured, here, batch, data)
        whose = ""
        trace = Path(folder) / "steps.csv" if write is None else write.absolute().with_suffix(".steps.csv")
        if facts is not None:
            facts.write_trace(trace)
            workers = workers or (len(facts.step_seconds) if len(facts.step_seconds) > 1 else DEFAULT_WORKERS)
            # Of another number of workers nobody knows who is slow: all draw from all times.
            whose = "" if workers == len(facts.step_seconds) else ", pooled"
            delay = f"trace({trace}{whose})"
        link = {"bandwidth": bandwidth, "latency": latency} if bandwidth else (facts.link if facts else None)
        if not as_json and delay is None:
            typer.echo("No step times were given: every step is taken to last one second.")
        found = race(
            task,
            workers or DEFAULT_WORKERS,
            delay or "constant(1)",
            link,
            batch=batch,
            target=target,
            epochs=epochs,
            minutes=minutes,
            jobs=jobs,
            given={"optimizer": {"name": optimizer}},
            data=data,
            say=None if as_json else lambda line: typer.echo(f"  {line}"),
        )
    if as_json:
        typer.echo(json.dumps(_plain(found.record()), indent=2, allow_nan=False))
    else:
        _show(found)
    if write is not None:
        _write(write, found, None if facts is None else f"trace({trace.name}{whose})", quiet=as_json)


def _facts(
    task: str,
    delay: str | None,
    times: Path | None,
    measured: Path | None,
    here: bool,
    batch: int | None,
    data: Path | None,
) -> ClusterFacts | None:
    """What is known of the cluster: from a file, or timed here, or nothing."""
    from hemiola.lab.advise.measure import ClusterFacts, read_measured, read_times, time_steps

    told = {"--delay": delay, "--times": times, "--measured": measured, "--measure": here or None}
    given = [option for option, value in told.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} all say what a step takes: give one of them")
    if times is not None:
        return read_times(times)
    if measured is not None:
        return read_measured(measured)
    if here:
        loaded = _load(task, data)
        return ClusterFacts([time_steps(loaded, batch or loaded.batch)])
    return None


def _load(task: str, data: Path | None) -> Any:
    from hemiola.lab.tasks import load_task

    return load_task(task, {}, data, Path())


def _summary(found: ClusterFacts) -> str:
    steps = [sum(times) / len(times) for times in found.step_seconds]
    said = f"{len(steps)} worker{'s' if len(steps) > 1 else ''}, mean step {min(steps):.3g} to {max(steps):.3g} s"
    return said if found.link is None else f"{said}, {found.link['bandwidth']}, {found.link['latency']}"


def _show(found: Advice) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Cluster seconds to a training loss of {found.target:.4g}", title_justify="left")
    for column in ("candidate", "lr", "seconds", "epochs", "MB a worker", "times sooner"):
        table.add_column(column, justify="left" if column == "candidate" else "right", overflow="fold")
    for each in found.candidates:
        sooner = (
            "" if each.speedup is None else f"{each.speedup.mean:.2f} ({each.speedup.low:.2f}-{each.speedup.high:.2f})"
        )
        numbers = [f"{x:.3g}" if math.isfinite(x) else "–" for x in (each.seconds, each.epochs, each.megabytes)]
        table.add_row(each.name, f"{each.lr:g}", *numbers, sooner)
    Console().print(table)
    for line in found.lines():
        typer.echo(line)
    typer.echo("\nIn your own loop:")
    for line in found.code():
        typer.echo(f"    {line}")


def _write(path: Path, found: Advice, delay: str | None, quiet: bool) -> None:
    """The experiment file; its step times, if they were measured, lie beside it."""
    from hemiola.files import write_whole
    from hemiola.lab.toml import toml_text

    given = found.experiment()
    if delay is not None:
        given["cluster"] = {**given["cluster"], "delay": delay}
    write_whole(path, toml_text(given))
    if not quiet:
        typer.echo(f"\nThis checks it: hemiola run {path} --out advice")


def _plain(found: Any) -> Any:
    """Without numbers that JSON does not have."""
    if isinstance(found, float) and not math.isfinite(found):
        return None
    if isinstance(found, dict):
        return {key: _plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_plain(value) for value in found]
    return found
