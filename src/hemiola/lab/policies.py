"""Every policy with its options, as its constructor and its docstring have them: ``hemiola policies [NAME]``.

There is no second list to keep in step: a policy that is a row of its family's table is shown here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hemiola.errors import InputError, unknown
from hemiola.options import default_options
from hemiola.order import ORDERS
from hemiola.pace import PACES
from hemiola.period import PERIODS
from hemiola.wire.exchange import Exchange

FAMILIES: dict[str, dict[str, Any]] = {"order": ORDERS, "period": PERIODS, "pace": dict(PACES)}
QUESTIONS = {
    "order": "which example does each worker visit next?",
    "period": "how many local steps between two averagings?",
    "pace": "how many workers does an update wait for?",
}


@dataclass(frozen=True)
class Option:
    """One option of a policy: its name, its default as TOML or Python would write it, and what it does."""

    name: str
    default: Any
    does: str


@dataclass(frozen=True)
class PolicyEntry:
    """One policy of a family; ``shared`` are the options that every policy of the family has beside its own."""

    family: str
    name: str
    does: str
    options: tuple[Option, ...]
    shared: tuple[Option, ...] = ()


def describe_policies(name: str | None = None) -> list[PolicyEntry]:
    """All policies, or the one of this name.

    Raises:
        InputError: There is no policy of this name.
    """
    every = list(_entries())
    if name is None:
        return every
    found = [entry for entry in every if entry.name == name]
    if not found:
        raise InputError(unknown("policy", name, [entry.name for entry in every]))
    return found


def as_records(entries: list[PolicyEntry]) -> list[dict[str, Any]]:
    """The same as plain values."""
    return [asdict(entry) for entry in entries]


def _entries() -> Iterator[PolicyEntry]:
    for family, table in FAMILIES.items():
        shared = _options(Exchange) if family == "period" else ()
        for name, policy in table.items():
            yield PolicyEntry(family, name, _first_sentence(policy), _options(policy), shared)


def _options(make: Any) -> tuple[Option, ...]:
    texts = _documented(make)
    return tuple(Option(name, default, texts.get(name, "")) for name, default in default_options(make).items())


def _first_sentence(policy: Any) -> str:
    """Up to the end of the first line of the docstring, without the marks of its markup."""
    return _plain((inspect.getdoc(policy) or "").split("\n")[0])


def _documented(make: Any) -> dict[str, str]:
    """What the docstrings of a class and of its bases say of each option, in the sections of Google's style."""
    found: dict[str, str] = {}
    for base in reversed(inspect.getmro(make)):
        section = re.search(
            r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)*)", inspect.cleandoc(base.__doc__ or ""), re.MULTILINE
        )
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.MULTILINE):
            found[name] = _plain(" ".join(text.split()))
    return found


def _plain(text: str) -> str:
    return re.sub(r"`+", "", text)
