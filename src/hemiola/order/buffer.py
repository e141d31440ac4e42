"""Rows that have arrived and are not balanced yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import torch

from hemiola.contracts import State
from hemiola.errors import InputError

ROWS, NUMBERS = 128, 2**19  # rows balanced at a time, and the most numbers they may hold: more would leave the cache


class Arrival(NamedTuple):
    """Some rows that came together.

    Attributes:
        epoch: Of the worker.
        worker: Whose.
        step: How many visits of the epoch were before.
        number: How many units of the epoch were used before the first of these.
        rows: How many.
        lean: See `balance.balance`.
    """

    epoch: int
    worker: int
    step: int
    number: int
    rows: int
    lean: float


class Items(NamedTuple):
    """Vectors to be signed, each a pair of rows or a single one; a column for each fact about them.

    Attributes:
        worker: Whose.
        number: Its place in its book's signs.
        first: Row of the pair's first unit, or of the unit.
        second: Row of the pair's second unit; that of the unit again for a single one.
        lean: See `balance.balance`.
    """

    worker: np.ndarray
    number: np.ndarray
    first: np.ndarray
    second: np.ndarray
    lean: np.ndarray


class Contents:
    """What is known about the rows held, a column for each fact.

    Args:
        arrivals: In their order.
        paired: Whether an item is a pair of consecutive units of a worker's epoch, or one unit.
    """

    def __init__(self, arrivals: list[Arrival], paired: bool) -> None:
        facts = np.array([arrival[:-1] for arrival in arrivals], np.int64).reshape(-1, 5)
        rows = facts[:, 4]
        self.lean = np.repeat(np.array([arrival.lean for arrival in arrivals]), rows)
        self.epoch, self.worker, self.step, self.number = np.repeat(facts[:, :4], rows, axis=0).T
        self.number = self.number + np.arange(len(self.epoch)) - np.repeat(np.cumsum(rows) - rows, rows)
        self._paired = paired
        self.first = self.second = np.arange(len(self.epoch))
        if paired:
            self.first, self.second = self._pairs()

    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the units 2i and 2i + 1 of a worker's epoch, in the order in which the second ones came."""
        by_book = np.lexsort((self.number, self.worker, self.epoch))
        one, two = by_book[:-1], by_book[1:]
        mates = (self.epoch[one] == self.epoch[two]) & (self.worker[one] == self.worker[two])
        mates &= self.number[one] // 2 == self.number[two] // 2
        first, second = one[mates], two[mates]
        arrived = np.argsort(second)
        return first[arrived], second[arrived]

    def epochs(self, start: int) -> Iterator[tuple[int, np.ndarray]]:
        """Every epoch that has rows from ``start`` on, and which ones."""
        for epoch in np.unique(self.epoch[start:]).tolist():
            yield epoch, np.flatnonzero(self.epoch[start:] == epoch) + start

    def items(self) -> Iterator[tuple[int, Items]]:
        """For every epoch its items, in the order in which they became complete."""
        for epoch in np.unique(self.epoch[self.second]).tolist():
            here = self.epoch[self.second] == epoch
            first, second = self.first[here], self.second[here]
            number = self.number[second] // (2 if self._paired else 1)
            yield epoch, Items(self.worker[second], number, first, second, self.lean[second])

    def alone(self) -> list[int]:
        """Rows that belong to no item."""
        free = np.ones(len(self.epoch), bool)
        free[self.first] = False
        free[self.second] = False
        return np.flatnonzero(free).tolist()


class Buffer:
    """Rows in the order of their arrival, and the items they make up.

    Taking rows costs a copy and a note; what belongs together is found for all of them at once, when they are balanced.

    Args:
        workers: How many; each may have a row that waits for the other half of its pair.
        paired: Whether an item is a pair of consecutive units of a worker's epoch, or one unit.
    """

    def __init__(self, workers: int, paired: bool) -> None:
        self._workers, self._paired = workers, paired
        self._rows = np.zeros((0, 0), np.float32)
        self._count = 0
        self._waiting = 0  # so many rows at the front are left over from before the last ``clear``
        self._arrivals: list[Arrival] = []

    @property
    def rows(self) -> np.ndarray:
        """(count, k), the rows held."""
        return self._rows[: self._count]

    @property
    def space(self) -> int:
        """How many more rows fit."""
        return len(self._rows) - self._count

    @property
    def has_news(self) -> bool:
        """Whether rows have come since the last ``clear``."""
        return self._count > self._waiting

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

    def add(self, rows: np.ndarray, epoch: int, worker: int, step: int, number: int, lean: float) -> None:
        """Take rows, described as in `Arrival`; they must fit."""
        start, self._count = self._count, self._count + len(rows)
        self._rows[start : self._count] = rows
        self._arrivals.append(Arrival(epoch, worker, step, number, len(rows), lean))

    def contents(self) -> Contents:
        """What is known about the rows held."""
        return Contents(self._arrivals, self._paired)

    def new_rows(self, contents: Contents) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For every epoch the rows that came since the last ``clear``, and where they lie."""
        for epoch, where in contents.epochs(self._waiting):
            together = len(where) == where[-1] + 1 - where[0]
            yield epoch, self.rows[where[0] : where[-1] + 1] if together else self.rows[where], where

    def clear(self, contents: Contents, books: Collection[tuple[int, int]]) -> None:
        """Everything is balanced; keep only rows that wait for the other half of their pair in an open book.

        Args:
            contents: Of now.
            books: Epoch and worker of every open one.
        """
        kept = [row for row in contents.alone() if (contents.epoch[row], contents.worker[row]) in books]
        self._rows[: len(kept)] = self._rows[kept]
        columns = (contents.epoch, contents.worker, contents.step, contents.number, contents.lean)
        self._arrivals = [
            Arrival(e, w, s, n, 1, lean) for e, w, s, n, lean in zip(*(x[kept].tolist() for x in columns), strict=True)
        ]
        self._count = self._waiting = len(kept)
        if not self.space:
            # Workers that wait in several epochs at once, which is rare, must find room for what they wait for.
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])

    def state_dict(self) -> State:
        """Plain numbers and tensors."""
        return {
            "rows": torch.from_numpy(self.rows.copy()),
            "waiting": self._waiting,
            "arrivals": [list(arrival) for arrival in self._arrivals],
        }

    def load_state_dict(self, state: State) -> None:
        """Restore what ``state_dict`` returned."""
        rows = state["rows"].numpy()
        self._rows = np.zeros((0, 0), np.float32)
        if rows.shape[1]:
            self.prepare(rows.shape[1], rows.dtype)
        if len(rows) >= len(self._rows):
            self._rows = np.concatenate([rows, np.zeros_like(rows)])
        self._rows[: len(rows)] = rows
        self._count, self._waiting = len(rows), int(state["waiting"])
        self._arrivals = [
            Arrival(int(e), int(w), int(s), int(n), int(c), float(lean)) for e, w, s, n, c, lean in state["arrivals"]
        ]
