"""Verbs that list what there is, and write a first experiment: tasks, policies, schema, new.

Lists are blocks of a name and indented lines, so that a narrow terminal wraps them between words; every one has
``--json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _policy_names(beginning: str) -> Iterator[str]:
    """For completion in the shell."""
    from hemiola.lab.policies import describe_policies

    return (entry.name for entry in describe_policies() if entry.name.startswith(beginning))


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(tasks)
    app.command()(policies)
    app.command()(schema)
    app.command()(new)


def tasks(as_json: JsonOption = False) -> None:
    """List the reference tasks."""
    from hemiola.lab.tasks import describe_tasks

    found = describe_tasks()
    if as_json:
        return print_json([vars(task) for task in found])
    console = _console()
    for task in found:
        facts = [
            f"{task.model}, {task.parameters:,} parameters; {task.train:,} training and {task.test:,} test examples"
            + ("; convex" if task.convex else ""),
            f"data: {task.data}" if task.data else "",
            f"options: {_given(task.options)}" if task.options else "",
        ]
        _block(console, task.name, facts)
    typer.echo('\nYour own: task = "package.module:function"; `hemiola new` writes one to start from.')
    return None


def policies(
    name: Annotated[
        str | None, typer.Argument(help="Only this policy, with what each option does.", autocompletion=_policy_names)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List every order, period and pace with its options and their defaults."""
    from hemiola.lab.policies import QUESTIONS, as_records, describe_policies

    found = describe_policies(name)
    if as_json:
        return print_json(as_records(found))
    console = _console()
    if name is not None:
        (entry,) = found
        _block(console, f"{entry.family} = {{ name = {json.dumps(entry.name)} }}", [entry.does])
        for title, options in (("options", entry.options), ("options of every period", entry.shared)):
            if options:
                console.print(f"\n{title}:")
            for option in options:
                _block(console, f"  {option.name} = {toml_value(option.default)}", [option.does], indent=6)
        return None
    for family, question in QUESTIONS.items():
        console.print(f"{family}: {question}", style="bold")
        for entry in (one for one in found if one.family == family):
            defaults = {option.name: option.default for option in entry.options}
            _block(console, f"  {entry.name}", [entry.does, _given(defaults)], indent=6)
        console.print()
    typer.echo("`hemiola policies NAME` says what each option does.")
    return None


def schema() -> None:
    """Print the JSON schema of the experiment file, for editors."""
    from hemiola.lab.schema import experiment_schema

    print_json(experiment_schema())


def new(
    folder: Annotated[Path, typer.Argument(help="Where to; made if it is missing.")] = Path("hemiola-experiment"),
) -> None:
    """Write an experiment file and a task of your own, with comments, that run as they are."""
    from hemiola.lab.scaffold import write_new

    for path in write_new(folder):
        typer.echo(f"wrote {path}")
    typer.echo(f"\nrun it:  hemiola run {folder / 'experiment.toml'} --out {folder / 'results'}")


def print_json(value: object) -> None:
    """Plain values as JSON, two spaces deep; what is no JSON, such as a missing default, as text."""
    typer.echo(json.dumps(value, indent=2, default=str))


def toml_value(value: Any) -> str:
    """A default as one would write it in the file; what is left out by default has no value."""
    if value is None:
        return "(none)"
    return json.dumps(value) if isinstance(value, bool | int | float | str | list) else str(value)


def _given(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {toml_value(value)}" for name, value in options.items())


def _block(console: Console, head: str, lines: Iterable[str], indent: int = 4) -> None:
    from rich.padding import Padding

    console.print(head, style="bold")
    for line in filter(None, lines):
        console.print(Padding(line, (0, 0, 0, indent)))


def _console() -> Console:
    """Text as it is: names and messages may hold what rich takes for markup or emoji. NO_COLOR is rich's own."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)
