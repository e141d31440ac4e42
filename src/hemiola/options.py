"""Options of policies and tasks, checked against the constructor that will take them.

A policy is added by writing a class and a row in a table; its options, their types and defaults are its constructor's
keyword parameters, so there is no second place to keep in step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from hemiola.errors import InputError, unknown


def option_names(constructor: Callable[..., Any]) -> list[str]:
    """Names of the parameters a constructor takes by keyword."""
    parameters = inspect.signature(constructor).parameters.values()
    return [p.name for p in parameters if p.name != "self" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def check_options(constructor: Callable[..., Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return ``given`` with its types checked against the constructor's annotations.

    Raises:
        InputError: naming ``where.key``, the value, and what is allowed.
    """
    allowed = option_names(constructor)
    for key in given:
        if key not in allowed:
            raise InputError(f"{where}: {unknown('option', key, allowed)}")
    hints = get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor)
    parameters = inspect.signature(constructor).parameters
    fields: dict[str, Any] = {
        name: (
            hints.get(name, Any),
            ... if parameters[name].default is inspect.Parameter.empty else parameters[name].default,
        )
        for name in allowed
    }
    model = create_model("Options", __config__=ConfigDict(strict=True, arbitrary_types_allowed=True), **fields)
    try:
        checked = model.model_validate(dict(given))
    except ValidationError as error:
        raise InputError(first_error(error, where)) from None
    return {name: getattr(checked, name) for name in given}


def first_error(error: ValidationError, where: str = "") -> str:
    """Turn pydantic's first complaint into one line: key, what is allowed, value."""
    problem = error.errors(include_url=False)[0]
    path = ".".join([where] * bool(where) + [str(part) for part in problem["loc"] if not _is_type_tag(part)])
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    value = "" if problem["type"] in ("missing", "value_error") else f", got {_short(problem['input'])}"
    if problem["type"] == "missing":
        message = "is required"
    return f"{path}: {message}{value}" if path else message


def _is_type_tag(part: object) -> bool:
    """Pydantic adds the branch of a union ('int', 'literal[...]', ...) to the path; a user did not write it."""
    return isinstance(part, str) and (part in {"int", "float", "str", "bool"} or "[" in part)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
