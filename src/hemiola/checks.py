"""Checks of impossible options that many share, one clear line each."""

from __future__ import annotations

from hemiola.errors import InputError, nearest


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
