"""States: plain, stamped with a kind and a version, refused where they do not belong.

Everything that can be stopped and resumed gives a dict of plain values and tensors that ``torch.load`` reads with
``weights_only=True``. This file writes the stamp, checks it, and turns attributes into plain values and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hemiola.errors import InputError

State = dict[str, Any]

_ARRAY = "hemiola.array"  # the only key of a dict that stands for a NumPy array


def stamped(kind: str, version: int, **content: Any) -> State:
    """A state: whose it is, in which version, and what it holds."""
    return {"kind": kind, "version": version, **content}


def own_state(state: State, kind: str, version: int, facts: Mapping[str, Any] | None = None) -> State:
    """Return ``state`` if it is of this kind and version and was saved under the same facts.

    Args:
        state: What is to be loaded.
        kind: Whose state it has to be.
        version: The version that can be read.
        facts: Values that the state holds too and that must be the same, e.g. sizes and seed of the run.

    Raises:
        InputError: saying what differs.
    """
    found = state.get("kind") if isinstance(state, dict) else None
    if found != kind:
        raise InputError(f"this is not the state of a {kind!r}: its kind is {found!r}")
    if state.get("version") != version:
        raise InputError(f"the state of {kind!r} has version {state.get('version')!r}, this hemiola reads {version}")
    for name, value in (facts or {}).items():
        if state.get(name) != value:
            raise InputError(
                f"the state of {kind!r} was saved with {name} = {state.get(name)!r}, this run has {value!r}"
            )
    return state


def pack(value: Any, what: str) -> Any:
    """A copy of a value in which everything is plain; ``what`` names it in the message if it cannot be.

    Numbers, strings, None, tensors, NumPy arrays and numbers, and lists, tuples and dicts of these.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    if isinstance(value, list | tuple):
        return type(value)(pack(each, what) for each in value)
    if isinstance(value, dict):
        return {key: pack(each, what) for key, each in value.items()}
    raise InputError(
        f"{what} is a {type(value).__name__}, which a state cannot hold; use numbers, strings, tensors, arrays, lists, "
        "dicts, or write state_dict and load_state_dict"
    )


def unpack(value: Any) -> Any:
    """The reverse of `pack`."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return value[_ARRAY].numpy().copy() if set(value) == {_ARRAY} else {k: unpack(v) for k, v in value.items()}
    return type(value)(unpack(each) for each in value) if isinstance(value, list | tuple) else value
