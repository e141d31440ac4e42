"""How example numbers travel with a batch: from the data set through workers and collate to the loop.

A tracked DataLoader reads its data set through `Numbered` and collates with `Tagging`, in its workers as well as in
this process; what comes out is a `Tagged` batch, which the loader's iterator takes apart again before anyone sees it
(``tracking.py``). The user's data set and collate function run as before and the batch is what they made of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_convert
from torch.utils.data._utils.pin_memory import pin_memory

from hemiola.loops.provenance import UNKNOWN, Provenance


class Fetched:
    """Items on their way from the data set to collate."""

    def __init__(self, numbers: list[Any], items: Any, single: bool) -> None:
        self.numbers, self.items, self.single = numbers, items, single


class Tagged:
    """A batch and the examples it was made of.

    Attributes:
        batch: What the user's collate function returned.
        numbers: The examples that were read for it; None where the sampler's output is not numbers.
        kept: For each row of the batch, which of ``numbers`` it is; None when they are the same; `UNKNOWN`.
    """

    def __init__(self, batch: Any, numbers: np.ndarray | None, kept: np.ndarray | None) -> None:
        self.batch, self.numbers, self.kept = batch, numbers, kept

    def pin_memory(self) -> Tagged:
        """As the DataLoader asks for it."""
        return Tagged(pin_memory(self.batch), self.numbers, self.kept)  # type: ignore[no-untyped-call]


class Numbered:
    """A data set whose items come with their numbers; in everything else it is the data set."""

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_numbered", dataset)

    def __getitems__(self, numbers: list[Any]) -> Fetched:
        dataset = object.__getattribute__(self, "_numbered")
        if getattr(dataset, "__getitems__", None):
            return Fetched(numbers, dataset.__getitems__(numbers), False)
        return Fetched(numbers, [dataset[number] for number in numbers], False)

    def __getitem__(self, number: Any) -> Fetched:
        """A loader without automatic batching: one number, or a list of them."""
        dataset = object.__getattribute__(self, "_numbered")
        single = not isinstance(number, list | tuple)
        return Fetched([number] if single else list(number), dataset[number], single)

    # A worker_init_fn finds the data set here (get_worker_info().dataset), and may look at it and change it.

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "_numbered"))

    def __getattribute__(self, name: str) -> Any:
        if name in ("__getitems__", "__reduce_ex__", "__reduce__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_numbered"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_numbered"), name, value)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Numbered, (object.__getattribute__(self, "_numbered"),)


class Tagging:
    """A collate function that calls the user's and remembers what went in."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        keeps = collate is default_collate or collate is default_convert
        self._provenance = None if keeps else Provenance(collate)

    def __call__(self, fetched: Any) -> Any:
        if not isinstance(fetched, Fetched):
            return self._collate(fetched)
        numbers = as_numbers(fetched.numbers)
        if fetched.single or self._provenance is None:
            return Tagged(self._collate(fetched.items), numbers, None)
        if not isinstance(fetched.items, list) or len(fetched.items) != len(fetched.numbers):
            # A data set that makes batches of its own: what is in them cannot be told.
            kept = None if not isinstance(fetched.items, list) else UNKNOWN
            return Tagged(self._collate(fetched.items), numbers, kept)
        items = list(fetched.items)  # a collate function may sort or shorten its argument
        return Tagged(batch := self._collate(fetched.items), numbers, self._provenance.rows(items, batch))


def as_numbers(found: Any) -> np.ndarray | None:
    """Example numbers as an array, or None if they are something else."""
    if isinstance(found, np.ndarray):
        return found.astype(np.int64).ravel() if found.dtype.kind in "iu" else None
    try:
        return np.array([operator.index(each) for each in found], np.int64)
    except TypeError:
        return None
