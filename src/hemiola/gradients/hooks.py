"""Functions that are put on somebody else's model, and that stay behind when the model is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """A function on a model that a copy of the model, or a pickled one, does without.

    Args:
        call: The function.
        copied: What a copy has instead, in the form of ``__reduce__``; by default something that does nothing.
    """

    def __init__(self, call: Callable[..., Any], copied: tuple[Any, ...] | None = None) -> None:
        self._call, self._copied = call, (_nothing, ()) if copied is None else copied
        # torch.compile would compile what only keeps the books, and compile it again whenever they have changed.
        self._uncompiled = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._uncompiled(*args, **kwargs)
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._copied


def _nothing() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass
