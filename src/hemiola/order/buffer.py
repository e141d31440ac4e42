"""Rows that have arrived and are not balanced yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from hemiola.contracts import State
from hemiola.errors import InputError
from hemiola.order.book import Book

ROWS, NUMBERS = 128, 2**19  # rows balanced at a time, and the most numbers they may hold: more would leave the cache


class Item(NamedTuple):
    """One vector to be signed: a pair of rows, or a single one.

    Attributes:
        epoch: Whose sums it is balanced against.
        worker: Whose.
        number: Its place in its book's signs.
        first: Row of the pair's first unit, or of the unit.
        second: Row of the pair's second unit; -1 for a single one.
        lean: See `balance.balance`.
    """

    epoch: int
    worker: int
    number: int
    first: int
    second: int
    lean: float


class Buffer:
    """Rows in the order of their arrival, and the items they make up.

    Rows of units that still wait for the other half of their pair survive ``clear``.

    Args:
        workers: How many; each may have a row waiting.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._rows = np.zeros((0, 0), np.float32)
        self.count = 0
        self.new = 0
        self.items: list[Item] = []
        self.places: list[tuple[int, int, int]] = []

    @property
    def rows(self) -> np.ndarray:
        """(count, k), the rows held."""
        return self._rows[: self.count]

    @property
    def space(self) -> int:
        """How many more rows fit."""
        return len(self._rows) - self.count

    def prepare(self, width: int, dtype: np.dtype[np.floating]) -> None:
        """Make room for rows of this width; called before every ``add``."""
        if self._rows.shape[1] == width:
            return
        if self._rows.size:
            raise InputError(
                f"sketches had {self._rows.shape[1]} numbers so far, now {width}; they must not change in a run"
            )
        capacity = max(2, min(ROWS, NUMBERS // max(width, 1))) + self._workers
        self._rows = np.zeros((capacity, width), dtype)

    def add(self, rows: np.ndarray, worker: int, book: Book, number: int, lean: float) -> None:
        """Take rows of the units that ``book`` counts from ``number`` on; they must fit."""
        start, self.count = self.count, self.count + len(rows)
        self._rows[start : self.count] = rows
        self.places += [(book.epoch, worker, book.steps - 1)] * len(rows)
        for row in range(start, self.count):
            if not book.paired:
                self.items.append(Item(book.epoch, worker, number, row, -1, lean))
            elif book.waiting < 0:
                book.waiting = row
            else:
                self.items.append(Item(book.epoch, worker, number // 2, book.waiting, row, lean))
                book.waiting = -1
            number += 1

    def clear(self, books: Iterable[Book]) -> None:
        """Everything is balanced; keep only the rows that wait in one of these books."""
        waiting = sorted((book for book in books if book.waiting >= 0), key=lambda book: book.waiting)
        places = [self.places[book.waiting] for book in waiting]
        for row, book in enumerate(waiting):
            self._rows[row] = self._rows[book.waiting]
            book.waiting = row
        self.count = self.new = len(waiting)
        self.places, self.items = places, []

    def state_dict(self) -> State:
        """Plain numbers and tensors."""
        return {
            "rows": torch.from_numpy(self.rows.copy()),
            "new": self.new,
            "places": [list(place) for place in self.places],
            "items": [list(item) for item in self.items],
        }

    def load_state_dict(self, state: State) -> None:
        """Restore what ``state_dict`` returned."""
        rows = state["rows"].numpy()
        self._rows = np.zeros((0, 0), np.float32)
        if rows.shape[1]:
            self.prepare(rows.shape[1], rows.dtype)
        self._rows[: len(rows)] = rows
        self.count, self.new = len(rows), int(state["new"])
        self.places = [(int(e), int(w), int(s)) for e, w, s in state["places"]]
        self.items = [
            Item(int(e), int(w), int(n), int(a), int(b), float(lean)) for e, w, n, a, b, lean in state["items"]
        ]
