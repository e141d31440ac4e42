"""What samplers and averagers tell, handed to functions of the user's as it happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hemiola.errors import InputError

Log = Callable[[dict[str, float], int], object]
"""Takes numbers by name, and the step they belong to."""


class Logs:
    """The functions that are told.

    Args:
        prefix: Put before every name, with a slash.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix, self._last = prefix, -1
        self._logs: list[Log] = []

    def add(self, log: Log) -> None:
        """Tell this function too, from now on."""
        if not callable(log):
            raise InputError(f"log_to takes a function of numbers and a step, got {type(log).__name__}")
        if log in self._logs:
            raise InputError("this log is told already; log_to is called once for each")
        self._logs.append(log)

    def tell(self, numbers: Mapping[str, Any], step: int) -> None:
        """Tell everyone these numbers, once for each step; what is None is left out."""
        if self._logs and step != self._last:
            self._last = step
            named = {f"{self._prefix}/{key}": float(value) for key, value in numbers.items() if value is not None}
            for log in self._logs:
                log(dict(named), step)
