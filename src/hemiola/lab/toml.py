"""Plain values as TOML: the other direction of `tomllib`, as far as experiment files need it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")


def toml_text(document: Mapping[str, Any]) -> str:
    """A document, plain keys first; tables get a header of their own, lists of tables one for each."""
    plain = {key: value for key, value in document.items() if not _is_table(value) and not _is_tables(value)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items() if value is not None]
    for key, value in document.items():
        for table, header in (
            [(value, f"[{_key(key)}]")]
            if _is_table(value)
            else [(one, f"[[{_key(key)}]]") for one in (value if _is_tables(value) else ())]
        ):
            lines += ["", header, *(f"{_key(name)} = {_value(one)}" for name, one in table.items() if one is not None)]
    return "\n".join(lines).strip() + "\n"


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _key(key: object) -> str:
    text = str(key)
    return text if _BARE.match(text) else json.dumps(text)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items() if one is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)  # inf and nan are TOML's words too
    # A JSON string is a basic string of TOML, but for the one control character that JSON does not escape.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007F")
