"""How example numbers travel with a batch: from the data set through workers and collate to the loop.

A tracked DataLoader reads its data set through `Numbered` and collates with `Tagging`, in its workers as well as in
this process; what comes out is a `Tagged` batch, which the loader's iterator takes apart again before anyone sees it.
The user's data set and collate function run as before and the batch is what they made of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils.collate import default_convert
from torch.utils.data._utils.pin_memory import pin_memory

from hemiola.errors import InputError
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
    """A collate function that calls the user's and remembers what went in.

    Args:
        collate: The user's.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        keeps = collate is default_collate or collate is default_convert
        self._provenance = None if keeps else Provenance(collate)

    def __call__(self, fetched: Any) -> Any:
        if not isinstance(fetched, Fetched):
            return self.collate(fetched)
        numbers = as_numbers(fetched.numbers)
        if fetched.single or self._provenance is None:
            return Tagged(self.collate(fetched.items), numbers, None)
        if not isinstance(fetched.items, list) or len(fetched.items) != len(fetched.numbers):
            # A data set that makes batches of its own: what is in them cannot be told.
            kept = None if not isinstance(fetched.items, list) else UNKNOWN
            return Tagged(self.collate(fetched.items), numbers, kept)
        items = list(fetched.items)  # a collate function may sort or shorten its argument
        return Tagged(batch := self.collate(fetched.items), numbers, self._provenance.rows(items, batch))


def as_numbers(found: Any) -> np.ndarray | None:
    """Example numbers as an array, or None if they are something else."""
    if isinstance(found, np.ndarray):
        return found.astype(np.int64).ravel() if found.dtype.kind in "iu" else None
    try:
        return np.array([operator.index(each) for each in found], np.int64)
    except TypeError:
        return None


# ------------------------------------------------------------------------------------------------------------ loaders


class Listener(Protocol):
    """Who wants to know; see ``following.py``."""

    def starting(self) -> int | None:
        """An iterator is about to be made; its number, or None if its batches are of no interest."""

    def note(self, tagged: Tagged, iteration: int) -> None:
        """A batch is about to be handed to the loop."""

    def ended(self) -> None:
        """An iterator has nothing left."""


def track(loader: DataLoader[Any], listener: Listener) -> None:
    """Make a loader's iterators number their batches; the batches themselves do not change.

    Args:
        loader: Any DataLoader; from now on every iterator of it is tracked.
        listener: Told of every batch, before the loop gets it.
    """
    inner: Any = getattr(loader, "base_dataloader", loader)  # Accelerate's loaders wrap another one
    if not isinstance(inner, DataLoader):
        raise InputError(f"track needs a torch.utils.data.DataLoader, got {type(loader).__name__}")
    if isinstance(inner.dataset, IterableDataset):
        raise InputError("a loader of an IterableDataset cannot be tracked, because its examples have no numbers")
    known = inner.__dict__.get("_get_iterator")
    if isinstance(known, _Iterators):
        known.listener = listener
        return
    inner.__dict__["_get_iterator"] = _Iterators(inner, listener)
    if inner.persistent_workers:
        inner.__dict__["_iterator"] = None  # its workers, if there are any, do not number


class _Iterators:
    """Stands in for a loader's ``_get_iterator``."""

    def __init__(self, loader: DataLoader[Any], listener: Listener) -> None:
        self._loader, self.listener = loader, listener
        self._tagging = Tagging(loader.collate_fn)

    def __call__(self) -> Any:
        loader, iteration = self._loader, self.listener.starting()
        dataset, collate = loader.dataset, loader.collate_fn
        if self._tagging.collate is not collate:
            self._tagging = Tagging(collate)
        # Around DataLoader.__setattr__, which refuses; the iterator keeps what it finds here.
        loader.__dict__["dataset"], loader.__dict__["collate_fn"] = Numbered(dataset), self._tagging
        try:
            iterator: Any = type(loader)._get_iterator(loader)
        finally:
            loader.__dict__["dataset"], loader.__dict__["collate_fn"] = dataset, collate
        iterator.__class__ = _numbering(type(iterator))
        iterator._hemiola_listener, iterator._hemiola_iteration = self.listener, iteration
        return iterator


_classes: dict[type, type] = {}


def _numbering(kind: type) -> type:
    """A DataLoader's iterator that takes the numbers out of its batches."""
    if kind not in _classes:
        plain: Any = kind

        def __next__(self: Any) -> Any:
            try:
                found = plain.__next__(self)
            except StopIteration:
                if self._hemiola_iteration is not None:
                    self._hemiola_listener.ended()
                raise
            if not isinstance(found, Tagged):
                return found
            if self._hemiola_iteration is not None:
                self._hemiola_listener.note(found, self._hemiola_iteration)
            return found.batch

        def _reset(self: Any, *args: Any, **kwargs: Any) -> None:
            self._hemiola_iteration = self._hemiola_listener.starting()
            plain._reset(self, *args, **kwargs)

        _classes[kind] = type(kind.__name__, (kind,), {"__next__": __next__, "_reset": _reset})
    return _classes[kind]
