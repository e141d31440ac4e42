"""What an experiment was, in words, and how to run it again."""

from __future__ import annotations

import copy
import shlex
from html import escape
from typing import Any

from hemiola.lab.report import words
from hemiola.lab.report.html import definition_list
from hemiola.lab.report.log import table
from hemiola.lab.report.read import Folder
from hemiola.lab.toml import toml_text


def described(folder: Folder) -> list[tuple[str, str]]:
    """The settings that all runs share; of what was swept, the values."""
    shared = copy.deepcopy(folder.shared)
    sweep = table(shared.pop("sweep", None))
    for dotted in sweep:
        _without(shared, dotted.split("."))
    hidden = {"title", "order", "period", "pace"}
    given = {key: value for key, value in shared.items() if key not in hidden and value not in ({}, [], None)}
    told = [(key, words.options(value)) for key, value in given.items()]
    return told + [(f"{words.key(key)}, swept", words.options(values)) for key, values in sweep.items()]


def _without(settings: dict[str, Any], path: list[str]) -> None:
    """Leave out what a sweep replaces."""
    *tables, last = path
    inner: Any = settings
    for name in tables:
        inner = inner.get(name) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.pop(last, None)


def command(folder: Folder) -> str:
    """The command that writes this page."""
    if len(folder.paths) == 1:
        return "hemiola report DIR"
    return shlex.join(["hemiola", "report", *map(str, folder.paths)])


def reproduce(folder: Folder) -> str:
    """HTML: the commands, the file, and what it ran on."""
    if len(folder.paths) > 1:
        return f"<pre><code>{escape(command(folder))} --out report.html</code></pre>"
    if not folder.given:
        return ""
    facts = [("hemiola", folder.version), *((key, str(value)) for key, value in folder.machine.items())]
    return (
        "<pre><code>hemiola run experiment.toml --out DIR</code></pre>"
        f"<details><summary>experiment.toml</summary><pre><code>{escape(toml_text(folder.given))}</code></pre></details>"
        + definition_list([fact for fact in facts if fact[1]])
    )
