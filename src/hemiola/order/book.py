"""What is known so far about one worker's one epoch, and the order that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hemiola.contracts import State


@dataclass
class Book:
    """Used units and their signs.

    In pair balance the units 2i and 2i + 1 in the order of use are pair i, and ``signs[i]`` is its sign; in mean
    balance ``signs[i]`` is the sign of the i-th used unit. 0 means not known: not balanced yet, or skipped as
    non-finite.

    Attributes:
        epoch: The worker's epoch.
        size: Units in the worker's shard.
        paired: Pair balance or mean balance.
        used: Unit numbers in the order of use; the first ``count`` entries are filled.
        steps: Visits so far.
    """

    epoch: int
    size: int
    paired: bool
    count: int = 0
    steps: int = 0
    used: np.ndarray = field(init=False)
    seen: np.ndarray = field(init=False)
    signs: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.used = np.zeros(self.size, np.int64)
        self.seen = np.zeros(self.size, bool)
        self.signs = np.zeros(self.size // 2 if self.paired else self.size, np.int8)

    def add(self, units: np.ndarray) -> np.ndarray | None:
        """Note a visit to these units; returns which of them are new to this epoch, or None if all are."""
        fresh = None
        if np.count_nonzero(self.seen[units]):
            fresh = ~self.seen[units]
            units = units[fresh]
        self.seen[units] = True
        self.used[self.count : self.count + len(units)] = units
        self.count += len(units)
        self.steps += 1
        return fresh

    def next_order(self, order: np.ndarray) -> np.ndarray:
        """The order that follows ``order``: a permutation whatever was used, balanced or skipped.

        +1 sends a pair's first unit to the next free place from the front and its second to the next free place from
        the back; -1 the other way round. A skipped pair is placed as if +1. Whatever has no place by then, the odd unit
        and the units whose reports are missing, keeps its old sequence around the meeting point. In mean balance +1 is
        the front and -1 the back.
        """
        if self.paired:
            pairs = self.used[: self.count // 2 * 2].reshape(-1, 2)
            plus = self.signs[: len(pairs)] >= 0
            front = np.where(plus, pairs[:, 0], pairs[:, 1])
            back = np.where(plus, pairs[:, 1], pairs[:, 0])
        else:
            signs = self.signs[: self.count]
            front = self.used[: self.count][signs > 0]
            back = self.used[: self.count][signs < 0]
        placed = np.zeros(self.size, bool)
        placed[front] = True
        placed[back] = True
        return np.concatenate([front, order[~placed[order]], back[::-1]])

    def state_dict(self) -> State:
        """Plain numbers and tensors."""
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "used": torch.from_numpy(self.used[: self.count].copy()),
            "signs": torch.from_numpy(self.signs.copy()),
        }

    @classmethod
    def from_state(cls, state: State, size: int, paired: bool) -> Book:
        """The book that ``state_dict`` described."""
        book = cls(int(state["epoch"]), size, paired)
        book.add(state["used"].numpy())
        book.steps = int(state["steps"])
        book.signs[:] = state["signs"].numpy()
        return book
