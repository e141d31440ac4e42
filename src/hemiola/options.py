"""Options: checked against the constructor that takes them, and against what is possible; one clear line each.

A policy, a task or a cluster is added by writing a class or a function and a row in a table: its options, their types
and defaults are its keyword parameters, so there is no second place to keep in step. Types are checked strictly by
pydantic, which one's own loop does not need: there, Python's own arguments reach the constructors, which use `whole`,
`within` and `one_of`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from hemiola.errors import InputError, nearest, unknown

if TYPE_CHECKING:
    from pydantic import ValidationError

# ------------------------------------------------------------------------------------------ names and types of options


def option_names(make: Callable[..., Any]) -> list[str]:
    """Names of the parameters a constructor or a function takes by keyword."""
    return [p.name for p in _parameters(make) if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def default_options(make: Callable[..., Any]) -> dict[str, Any]:
    """Every option and its default, `inspect.Parameter.empty` where it has none."""
    return {p.name: p.default for p in _parameters(make) if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def check_options(
    make: Callable[..., Any], given: Mapping[str, Any], where: str, reserved: Collection[str] = ()
) -> dict[str, Any]:
    """Return ``given`` with names and types checked against the parameters of what takes it.

    Args:
        make: A class or a function.
        given: Options by name.
        where: Their place in messages, e.g. ``"order"``.
        reserved: Parameters that are not options, because the caller fills them in.

    Raises:
        InputError: naming ``where.key``, the value, and what is allowed.
    """
    parameters = [p for p in _parameters(make) if p.name not in reserved]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for key in given:
        if key not in named and (not takes_any or key in reserved):
            raise InputError(f"{where}: {unknown('option', key, named)}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given:
            raise InputError(f"{where}.{name}: is required")
    hints = _hints(make)
    return {key: _typed(value, hints.get(key, Any), f"{where}.{key}") for key, value in given.items()}


def _typed(value: Any, hint: Any, where: str) -> Any:
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

    try:
        adapter = TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    except PydanticUserError:  # a type that checks itself, such as a dataclass
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise InputError(first_error(error, where)) from None


def first_error(error: ValidationError, where: str = "") -> str:
    """Turn pydantic's first complaint into one line: key, what is allowed, value."""
    problem = error.errors(include_url=False)[0]
    path = ".".join([where] * bool(where) + [str(part) for part in problem["loc"] if not _is_type_tag(part)])
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    value = "" if problem["type"] in ("missing", "value_error") else f", got {_short(problem['input'])}"
    if problem["type"] == "missing":
        message = "is required"
    return f"{path}: {message}{value}" if path else message


def _parameters(make: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):  # some callables written in C do not tell
        return []


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    """Types of the parameters; none where annotations name what cannot be found at run time."""
    try:
        return get_type_hints(make.__init__ if inspect.isclass(make) else make, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def _is_type_tag(part: object) -> bool:
    """Pydantic adds the branch of a union ('int', 'literal[...]', ...) to the path; a user did not write it."""
    return isinstance(part, str) and (part in {"int", "float", "str", "bool"} or "[" in part)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -------------------------------------------------------------------------------------------------- values of options


def whole(name: str, value: int, least: int) -> int:
    """Return ``value`` if it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")
    return value


def within(name: str, value: float, above: float, below: float) -> float:
    """Return ``value`` if it lies strictly between ``above`` and ``below``."""
    if not above < value < below:
        raise InputError(f"{name} must be above {above:g} and below {below:g}, got {value:g}")
    return float(value)


def one_of(name: str, value: object, allowed: list[str]) -> str:
    """Return ``value`` if it is one of the allowed names."""
    if value not in allowed:
        hint = nearest(value, allowed) if isinstance(value, str) else ""
        raise InputError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{hint}")
    return str(value)


SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def quantity(name: str, text: str, units: Mapping[str, float]) -> float:
    """Read ``"10 Gbit/s"`` or ``"50 us"``."""
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z/]+)\s*", text)
    known = ", ".join(units)
    if not match or match.group(2) not in units:
        raise InputError(f"{name} must be a number and a unit ({known}), got {text!r}")
    try:
        value = float(match.group(1)) * units[match.group(2)]
    except ValueError:
        raise InputError(f"{name} must be a number and a unit ({known}), got {text!r}") from None
    if not 0 <= value < float("inf"):
        raise InputError(f"{name} must not be negative or infinite, got {text!r}")
    return value
