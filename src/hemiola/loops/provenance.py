"""Which items ended up in which rows of a batch, when the user's own collate function made it.

Most collate functions keep every item in its row, some drop the bad ones, some sort by length. They are not asked: the
batch is compared with the items. Two leaves of the data (a tensor of the batch; a tensor, array, list or number of the
items) that agree in every row are witnesses; the batch's rows are the items that all witnesses allow. Only a few
numbers of each row are compared, and all of them where these do not decide. Where there are no witnesses, because
collate transforms everything, as many rows as items means that nothing was dropped, and fewer rows are explained by
running collate on single items. What cannot be explained is `UNKNOWN`, and nothing is learnt from that batch.

A collate function that kept every item in its row in `PROVEN` batches, as a witness that tells them all apart has
shown, is expected to go on like that: from then on a few rows of every batch are compared, others each time, and the
rest only if one of them is not in its place. That costs next to nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

UNKNOWN = np.zeros(0, np.int64)
FEW = 16  # numbers of a row that are compared at first
PROVEN = 16  # batches
SPOTS = 8  # rows of a batch

Path = tuple[Callable[[Any], Any], ...]  # steps from a container to a leaf


class Provenance:
    """Explains the batches of one collate function.

    Args:
        collate: The function; run again, on single items, only where rows are missing and their values do not tell.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._witnesses: list[tuple[int, int]] = []  # found in a batch that kept every item in its row
        self._probe: Probe | None = None
        self._kept = 0  # batches in a row, in which every item was in its row

    def rows(self, items: list[Any], batch: Any) -> np.ndarray | None:
        """For each row of the batch its item; None when they are the same, `UNKNOWN` when it cannot be told."""
        if self._probe is not None and self._kept >= PROVEN and self._probe.in_place(items, batch):
            return None
        outputs = [each for each in leaves(batch) if isinstance(each, Tensor) and each.dim() > 0]
        if not outputs:
            return None  # nothing with rows: whoever knows this batch knows how to use it
        count = len(outputs[0])
        outputs = [each for each in outputs if len(each) == count]
        columns = _columns(items)
        if count == len(items) and self._in_place(outputs, columns):
            self._note_kept(items, batch, outputs, columns)
            return None
        self._kept = 0
        return self._elsewhere(items, outputs, columns, count)

    def _elsewhere(
        self, items: list[Any], outputs: list[Tensor], columns: list[list[Any]], count: int
    ) -> np.ndarray | None:
        """For each row its item, of a batch that is not known to have kept every item in its row."""
        allowed: np.ndarray | None = None
        for numbers in (FEW, None):
            allowed = self._allowed(outputs, columns, count, len(items), numbers)
            if allowed is None:
                return None if count == len(items) else self._explained(items, count)
            if not allowed.any(1).all():
                return UNKNOWN
            if (allowed.sum(1) == 1).all() or (numbers is None and _alike(allowed, columns)):
                return _choose(allowed)
        kept = self._explained(items, count)
        assert allowed is not None
        return kept if len(kept) and allowed[np.arange(count), kept].all() else UNKNOWN

    def _in_place(self, outputs: list[Tensor], columns: list[list[Any]]) -> bool:
        """Whether every row is that of the item in the same place, as far as witnesses tell."""
        if self._witnesses:
            pairs = [(o, i) for o, i in self._witnesses if o < len(outputs) and i < len(columns)]
            return bool(pairs) and all(_same(outputs[o], columns[i]) for o, i in pairs)
        in_place = [[(o, i) for i in _likely(o, columns) if _same(outputs[o], columns[i])] for o in range(len(outputs))]
        if any(_decisive(outputs[o], columns[i]) for mine in in_place for o, i in mine[:1]):
            self._witnesses = [mine[0] for mine in in_place if mine]
            return True
        pairs = []
        for output, mine in zip(outputs, in_place, strict=True):
            if not mine and any(_witness(output, column, FEW) is not None for column in columns):
                return False  # its rows are all there, but elsewhere
            pairs += mine[:1]
        self._witnesses = pairs
        return bool(pairs)

    def _note_kept(self, items: list[Any], batch: Any, outputs: list[Tensor], columns: list[list[Any]]) -> None:
        """Every item is in its row. Let a witness that tells all of them apart be the one that is asked later."""
        self._kept += self._probe is not None
        for o, i in self._witnesses:
            if self._probe is None and _decisive(outputs[o], columns[i]):
                output = next(path for path, leaf in walk(batch) if leaf is outputs[o])
                item = next(path for path, leaf in walk(items[0]) if leaf is columns[i][0])
                self._probe = Probe(output, item)

    def _allowed(
        self, outputs: list[Tensor], columns: list[list[Any]], count: int, items: int, numbers: int | None
    ) -> np.ndarray | None:
        """(rows, items): which item each row may be; None without witnesses."""
        allowed, found = np.ones((count, items), bool), False
        for o, output in enumerate(outputs):
            known = [i for at, i in self._witnesses if at == o and i < len(columns)]
            for i in known or ([] if self._witnesses else _likely(o, columns)):
                agrees = _witness(output, columns[i], numbers)
                if agrees is not None:
                    allowed &= agrees
                    found = True
                    break
        return allowed if found else None

    def _explained(self, items: list[Any], count: int) -> np.ndarray:
        """Run collate on each item: those it makes a row of are the ones in the batch."""
        state = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
        kept = []
        try:
            for number, item in enumerate(items):
                try:
                    found = [x for x in leaves(self._collate([item])) if isinstance(x, Tensor) and x.dim() > 0]
                except Exception:  # an empty batch is often an error, of any kind
                    continue
                if found and len(found[0]) == 1:
                    kept.append(number)
        finally:
            torch.set_rng_state(state[0])
            np.random.set_state(state[1])  # noqa: NPY002
            random.setstate(state[2])
        return np.array(kept) if len(kept) == count else UNKNOWN


class Probe:
    """Whether some rows of a batch are the items in the same places, judged by one leaf that tells items apart.

    Args:
        output: Where in the batch the leaf is.
        item: Where in an item it is.
    """

    def __init__(self, output: Path, item: Path) -> None:
        self._output, self._item = output, item
        self._turn = 0

    def in_place(self, items: list[Any], batch: Any) -> bool:
        """True if it is so; False if it is not, or cannot be told this way."""
        every = -(-len(items) // SPOTS)
        self._turn += 1
        spots = range(self._turn % every, len(items), every)
        try:
            rows = _reach(batch, self._output)
            if len(rows) != len(items):
                return False
            rows = rows.detach().numpy().reshape(len(rows), -1)
            found = [_array(_reach(items[spot], self._item)) for spot in spots]
            arrays = [each for each in found if each is not None]
            apart = len({each.tobytes() for each in arrays}) == len(spots)
            return apart and all(map(_holds, rows[spots], arrays))
        except (LookupError, TypeError, AttributeError):
            return False  # other items, or another batch, than before


def _columns(items: list[Any]) -> list[list[Any]]:
    """The leaves of all items, one list for each place in an item; None for items that have fewer places."""
    found = [list(leaves(item)) for item in items]
    widest = max(map(len, found), default=0)
    return [[each[i] if len(each) == widest else None for each in found] for i in range(widest)]


def _holds(row: np.ndarray, item: np.ndarray) -> bool:
    """Whether a row is an item, padded at its end or at its beginning."""
    size, item = item.size, item.astype(row.dtype, copy=False)
    if not 0 < size <= len(row):
        return False
    return np.array_equal(row[:size], item) or np.array_equal(row[len(row) - size :], item)


def _likely(output: int, columns: list[list[Any]]) -> list[int]:
    """Where in the items to look for a leaf of the batch: first in the same place."""
    return sorted(range(len(columns)), key=lambda i: i != output)


def _witness(rows: Tensor, items: list[Any], numbers: int | None) -> np.ndarray | None:
    """(rows, items): which items each row may be; None if some row is none of them."""
    agrees = _agree(rows, items, numbers)
    return agrees if agrees is not None and agrees.any(1).all() else None


def _same(rows: Tensor, items: list[Any]) -> bool:
    """Whether row i is item i, for all of them."""
    arrays = [_array(item) for item in items]
    if any(each is None for each in arrays) or rows.dtype == torch.bfloat16 or not rows.numel():
        return False
    flat = rows.detach().numpy().reshape(len(rows), -1)
    width = flat.shape[1]
    if all(each.size == width for each in arrays):  # type: ignore[union-attr]
        step = max(1, width // FEW)
        return bool(_equal(flat[:, ::step], np.stack([each[::step] for each in arrays])).all())  # type: ignore[index]
    agrees = _agree(rows, items, FEW)
    return agrees is not None and bool(agrees.diagonal().all())


def _decisive(rows: Tensor, items: list[Any]) -> bool:
    """Whether every row is one item only."""
    agrees = _agree(rows, items, FEW)
    return agrees is not None and bool((agrees.sum(1) == 1).all())


def _alike(allowed: np.ndarray, columns: list[list[Any]]) -> bool:
    """Whether the items that a row may be are the same in everything that can be compared."""
    for row in np.unique(allowed[allowed.sum(1) > 1], axis=0):
        first, *others = np.flatnonzero(row).tolist()
        for column in columns:
            one = _array(column[first])
            for other in others:
                two = _array(column[other])
                if one is None or two is None or one.shape != two.shape or not _equal(one, two):
                    return False
    return True


def _choose(allowed: np.ndarray) -> np.ndarray:
    """An item for each row; items that look alike are taken in their order."""
    free, chosen = allowed.copy(), []
    for row in range(len(allowed)):
        candidates = np.flatnonzero(free[row])
        if not len(candidates):  # more rows than items like them: one was repeated
            candidates = np.flatnonzero(allowed[row])
        chosen.append(int(candidates[0]))
        free[:, chosen[-1]] = False
    return np.array(chosen, np.int64)


def _agree(rows: Tensor, items: list[Any], numbers: int | None) -> np.ndarray | None:
    """(rows, items): whether an item's numbers are those of the row; None where they cannot be compared."""
    arrays = [_array(item) for item in items]
    if all(each is None for each in arrays) or rows.dtype == torch.bfloat16 or not rows.numel():
        return None
    flat = rows.detach().flatten(1).numpy() if rows.dim() > 1 else rows.detach().numpy()[:, None]
    width = flat.shape[1]
    agrees = np.zeros((len(flat), len(items)), bool)
    whole = [number for number, each in enumerate(arrays) if each is not None and each.size == width]
    if whole:
        step = 1 if numbers is None else max(1, width // numbers)
        found = np.stack([arrays[number][::step] for number in whole])  # type: ignore[index]
        agrees[:, whole] = _equal(flat[:, None, ::step], found[None])
    for number, each in enumerate(arrays):  # shorter ones are padded, at the end or at the beginning; not numbers
        if each is not None and 0 < each.size < width and np.ndim(items[number]) > 0:
            some = each if numbers is None else each[:numbers]
            agrees[:, number] = _equal(flat[:, : len(some)], some)
            start = width - each.size
            agrees[:, number] |= _equal(flat[:, start : start + len(some)], some)
    return agrees


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f" or b.dtype.kind == "f":
        # NaN is a number like any other here; float64 items may have become float32.
        return np.asarray(np.isclose(a, b, rtol=1e-6, atol=0, equal_nan=True).all(-1))
    return np.asarray((a == b).all(-1))


def _array(leaf: Any) -> np.ndarray | None:
    """A leaf's numbers in one dimension."""
    if isinstance(leaf, Tensor):
        if leaf.dtype == torch.bfloat16 or leaf.is_sparse or leaf.device.type != "cpu":
            return None
        return leaf.detach().numpy().reshape(-1)
    if isinstance(leaf, str | bytes) or leaf is None:
        return None
    found = np.asarray(leaf)
    return found.reshape(-1) if found.dtype.kind in "biuf" else None


def leaves(found: Any) -> Iterator[Any]:
    """What nested containers hold, in the order it is written; a list of numbers is one leaf."""
    return (leaf for _, leaf in walk(found))


def walk(found: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of nested containers, each with the way to it."""
    if isinstance(found, Tensor | np.ndarray):
        yield path, found
    elif isinstance(found, Mapping):
        for key, each in found.items():
            yield from walk(each, (*path, itemgetter(key)))
    elif isinstance(found, tuple | list) and not (found and all(type(x) in (int, float, bool) for x in found)):
        for number, each in enumerate(found):
            yield from walk(each, (*path, itemgetter(number)))
    elif hasattr(found, "__dataclass_fields__"):
        for name, each in vars(found).items():
            yield from walk(each, (*path, attrgetter(name)))
    else:
        yield path, found


def _reach(found: Any, path: Path) -> Any:
    for step in path:
        found = step(found)
    return found
