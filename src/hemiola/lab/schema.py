"""The experiment file as a JSON schema, for editors: ``hemiola schema > experiment.schema.json``.

It is made from what checks the file: the typed tables of `experiment`, and the constructors of policies, tasks and
clusters. An editor that knows it completes names and marks what is misspelt; ``hemiola run`` still has the last word.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError

from hemiola.clusters.table import CLUSTERS
from hemiola.lab.experiment import Settings
from hemiola.lab.policies import FAMILIES, describe_policies
from hemiola.lab.tasks.load import TASKS
from hemiola.optimizers import OPTIMIZERS
from hemiola.wire.exchange import Exchange
from hemiola.wire.outer import PRESETS

Schema = dict[str, Any]


def experiment_schema() -> Schema:
    """The schema of a whole experiment file."""
    settings = Settings.model_json_schema()
    keys: dict[str, Schema] = settings["properties"]
    told = {(entry.family, entry.name): entry.does for entry in describe_policies()}
    for family, table in FAMILIES.items():
        extra = _properties(Exchange) if family == "period" else {}
        keys[family] = _named(
            {name: (_properties(policy) | extra, told[family, name]) for name, policy in table.items()}
        )
    keys["cluster"] = _named({name: (_properties(make), "") for name, make in CLUSTERS.items()})
    keys["outer"] = _outer()
    tasks = _named({name: (_properties(entry.make, ("data",)), entry.model) for name, entry in TASKS.items()})
    keys["task"] = tasks
    run = {"type": "object", "properties": {"name": {"type": "string"}, **keys}, "additionalProperties": False}
    top = {
        "title": {"type": "string", "description": "Shown by the report."},
        "seeds": {"type": "array", "items": {"type": "integer", "minimum": 0}, "uniqueItems": True, "minItems": 1},
        "sweep": {"type": "object", "description": "Dotted keys to lists of values: every run at every value."},
        "run": {"type": "array", "items": run, "minItems": 1, "description": "What is compared."},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A hemiola experiment file",
        "type": "object",
        "properties": keys | top,
        "additionalProperties": False,
        "$defs": settings.get("$defs", {}),
    }


def _named(options: Mapping[str, tuple[Mapping[str, Schema], str]]) -> Schema:
    """A name alone, or a table with the name and its options; one's own by path, whose options only it knows."""
    alone = [{"const": name, "description": does} for name, (_, does) in options.items()]
    tables = [
        {
            "type": "object",
            "description": does,
            "properties": {"name": {"const": name}, **properties},
            "required": ["name"],
            "additionalProperties": False,
        }
        for name, (properties, does) in options.items()
    ]
    own = {"type": "string", "pattern": ".+:.+", "description": "Your own: module:name or file.py:name."}
    own_table = {"type": "object", "properties": {"name": own}, "required": ["name"]}
    return {"anyOf": [*alone, *tables, own, own_table]}


def _outer() -> Schema:
    """A preset or a torch.optim class, alone or with its options, which only the class knows."""
    name = {"enum": [*PRESETS, *OPTIMIZERS]}
    table = {"type": "object", "properties": {"name": name}, "required": ["name"]}
    return {"anyOf": [name, table], "description": "What becomes of a merged change before it is applied."}


def _properties(make: Any, filled_in: tuple[str, ...] = ()) -> dict[str, Schema]:
    """The options of a constructor or a function, by name."""
    parameters = inspect.signature(make).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in filled_in]
    try:
        hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    except (NameError, TypeError):
        hints = {}
    return {p.name: _typed(hints.get(p.name, Any)) for p in named}


def _typed(hint: Any) -> Schema:
    try:
        return TypeAdapter(hint).json_schema()
    except (PydanticUserError, PydanticSchemaGenerationError):  # a type that checks itself
        return {}
