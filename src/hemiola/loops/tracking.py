"""Which batch is the model looking at? The batches of tracked loaders, and how forward passes are matched to them.

Every batch that a tracked loader yields is remembered with its examples. A forward pass belongs to the batch whose
memory it was given: storages are compared, so views, slices and changes in place are seen through, and what was yielded
since does not matter. A loop that gives the model something else, such as a copy on another device, is taken at its
word if it fetched a single batch before its first forward pass: then it does not prefetch, and the batch is the one
yielded last. Otherwise a few values are compared, and if they do not tell, the pass belongs to no batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hemiola.loops.epoch import Epoch
from hemiola.loops.provenance import leaves

REMEMBERED = 64  # batches; more than any loop prefetches
TENSORS = 32  # of a batch or of a call that are looked at
COMPARED = 64  # values, where a copy has to be recognised


@dataclass(eq=False)
class LoadedBatch:
    """A batch at hand.

    Attributes:
        epoch: Its epoch.
        places: Where in the epoch the examples are that were read for it.
        rows: The place of each row; None where that cannot be told.
        iteration: Which iterator of the loader it came from.
        tensors: Of the batch, as (weak storage, offset, row stride, rows).
        samples: Shapes and a few values, to recognise copies by.
        taken: Rows that forward passes have had so far, where they come in parts.
        used: Whether a forward pass was matched to it.
        passed: Whether the loop is through with it.
        explicit: Whether it was named by ``visiting``.
    """

    epoch: Epoch
    places: np.ndarray
    rows: np.ndarray | None
    iteration: int = 0
    tensors: dict[int, tuple[StorageWeakRef, int, int, int]] = field(default_factory=dict)
    samples: list[tuple[tuple[int, ...], Tensor]] = field(default_factory=list)
    taken: int = 0
    used: bool = False
    passed: bool = False
    explicit: bool = False


class Tracker:
    """The batches that were yielded and may still be trained on.

    Attributes:
        last: The one yielded or named last.
    """

    def __init__(self) -> None:
        self._batches: deque[LoadedBatch] = deque()
        self._lapsed: list[LoadedBatch] = []  # too old to be trained on
        self._storages: dict[int, LoadedBatch | None] = {}
        self.last: LoadedBatch | None = None
        self._yielded = 0
        self._ahead: int | None = None

    def start(self) -> None:
        """An iterator is asked for. What was yielded before may still be trained on, by a loop that prefetches."""
        self._yielded = 0
        if self.last is None or self.last.used:
            self._ahead = None  # not in the middle of prefetching, so find out again

    def add(self, batch: LoadedBatch, data: Any) -> None:
        """A batch is about to be handed to the loop."""
        if len(self._batches) == REMEMBERED:
            self._drop(self._batches.popleft())
        self._batches.append(batch)
        self._yielded += 1
        self.last = batch
        for tensor in tensors_in(data):
            key = _storage(tensor)
            if key is None:
                continue
            number, storage = key
            # Memory that several batches share identifies none of them.
            known = self._storages.get(number)
            self._storages[number] = batch if number not in self._storages or known is batch else None
            stride = tensor.stride(0) if tensor.dim() else 0
            batch.tensors.setdefault(number, (storage, int(tensor.storage_offset()), stride, len(tensor)))
            if self._ahead != 0:
                batch.samples.append((tuple(tensor.shape), _sample(tensor).clone()))

    def match(self, given: list[Tensor], examples: int) -> tuple[LoadedBatch, np.ndarray | None] | None:
        """The batch that a forward pass was given, and which of its rows; None where it cannot be told."""
        found = self._match(given, examples)
        if found is not None:
            found[0].used = True
        return found

    def _match(self, given: list[Tensor], examples: int) -> tuple[LoadedBatch, np.ndarray | None] | None:
        if self.last is not None and self.last.explicit:
            return self.last, self._share(self.last, examples)
        for tensor in given:
            key = _storage(tensor)
            batch = None if key is None else self._storages.get(key[0])
            if batch is not None and key is not None:
                self._note_ahead(batch)
                rows = _slice(tensor, batch.tensors[key[0]]) if len(tensor) == examples else None
                if rows is not None and batch.rows is not None and rows[-1] < len(batch.rows):
                    return batch, rows
                return batch, self._share(batch, examples)
        if self.last is None:
            return None
        if self._ahead is None:
            self._ahead = self._yielded - 1
        batch = self.last if self._ahead == 0 else self._recognised(given)
        return None if batch is None else (batch, self._share(batch, examples))

    def passed(self, batch: LoadedBatch) -> list[LoadedBatch]:
        """A batch was trained on: it and those yielded before it, which the loop has skipped, are done; if not yet."""
        found = [] if batch.passed else [batch]
        older = iter(reversed(self._batches))
        if not batch.explicit and batch in older:  # which goes on before it
            for each in older:
                if each.iteration == batch.iteration:
                    if each.passed:
                        break
                    found.append(each)
        found += [each for each in self._lapsed if each.iteration <= batch.iteration]
        self._lapsed = []
        for each in found:
            each.passed = True
        return found[::-1]

    def _share(self, batch: LoadedBatch, examples: int) -> np.ndarray | None:
        """Rows of a pass that was given all of a batch, or its next part."""
        size = -1 if batch.rows is None else len(batch.rows)
        if examples == size:
            return np.arange(size)
        if examples > size - batch.taken:
            return None
        rows = np.arange(batch.taken, batch.taken + examples)
        batch.taken += examples
        return rows

    def _note_ahead(self, batch: LoadedBatch) -> None:
        if self._ahead is None:
            self._ahead = len(self._batches) - 1 - self._batches.index(batch)

    def _recognised(self, given: list[Tensor]) -> LoadedBatch | None:
        """The only batch, or only unused one, with a tensor whose values are those of one that the model was given."""
        found = []
        for batch in self._batches:
            if any(_copied(mine, tensor) for tensor in given for shape, mine in batch.samples if shape == tensor.shape):
                found.append(batch)
        # A run that goes on from a state in the same process yields the same batches again.
        found = [batch for batch in found if not batch.used] or found
        return found[0] if len(found) == 1 else None

    def _drop(self, batch: LoadedBatch) -> None:
        if not batch.passed:
            self._lapsed.append(batch)
        for number in batch.tensors:
            self._storages.pop(number, None)


def tensors_in(data: Any) -> list[Tensor]:
    """The tensors of nested containers that have a first dimension."""
    return [each for each in leaves(data) if isinstance(each, Tensor) and each.dim() > 0][:TENSORS]


def _storage(tensor: Tensor) -> tuple[int, StorageWeakRef] | None:
    """A tensor's storage by its identity, held weakly so that the identity is not given to another one."""
    try:
        held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):
        return None
    return held.cdata, held


def _slice(tensor: Tensor, whole: tuple[StorageWeakRef, int, int, int]) -> np.ndarray | None:
    """Which rows of a whole tensor a view of it has; None if they are not rows."""
    _, offset, stride, rows = whole
    if not stride or not len(tensor):
        return None
    start, rest = divmod(int(tensor.storage_offset()) - offset, stride)
    step, odd = divmod(tensor.stride(0), stride)
    if rest or odd or start < 0 or (step < 1 and len(tensor) > 1) or start + step * (len(tensor) - 1) >= rows:
        return None
    return start + step * np.arange(len(tensor))


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // COMPARED)]


def _copied(sample: Tensor, tensor: Tensor) -> bool:
    a, b = sample.cpu(), _sample(tensor).cpu()
    if a.dtype != b.dtype:
        a = a.to(b.dtype) if b.dtype.is_floating_point else a.to(torch.float64)
        b = b.to(a.dtype)
    return bool(torch.equal(a, b))
