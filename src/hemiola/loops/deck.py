"""One deck of examples for all ranks of one's own loop: whoever is ready takes the next block from the top.

Every rank knows the whole epoch, the same on all; an atomic counter in the job's key-value store says how much of it
was taken. Slow ranks take fewer. What a rank has taken and not trained on is its own to give out again; when a state is
saved the ranks tell each other what they are through with, and the rest is dealt anew by whoever loads it, however many
they are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from hemiola.contracts import Order, State, Visit
from hemiola.errors import InputError
from hemiola.loops.epoch import Epoch
from hemiola.peers import everyone

BLOCK = 32  # examples taken at a time, fewer where there are few; a rank asks the store once for each block

_decks = 0


class Counters:
    """The counters of one sampler's epochs.

    Args:
        ranks: With one there is nobody to share with, and no store is needed.
    """

    def __init__(self, ranks: int) -> None:
        global _decks
        _decks += 1  # every rank makes its samplers in the same order, so they agree on this
        self._deck, self._again = _decks, 0
        self._alone = ranks == 1
        if not self._alone and not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                f"deal = 'deck' on {ranks} replicas needs torch.distributed, whose store says who takes what; "
                "call init_process_group() first"
            )

    def of(self, epoch: int) -> Callable[[int], int]:
        """A function that takes so many from this epoch and returns how many were taken before."""
        if self._alone:
            taken = [0]

            def take_alone(count: int) -> int:
                taken[0] += count
                return taken[0] - count

            return take_alone
        store, key = _get_default_store(), f"hemiola/deck/{self._deck}/{self._again}/{epoch}"
        return lambda count: int(store.add(key, count)) - count

    def begin_again(self) -> None:
        """A state was loaded, on every rank: what is left is dealt from the start."""
        self._again += 1


class DeckEpoch(Epoch):
    """One epoch of the whole deck, and this rank's part in it. A *place* is one of the deck's.

    Args:
        number: From 0.
        sequence: All examples, in the order they are dealt.
        take: See `Counters.of`.
        ranks: How many take from it.
        unit: Examples that stay together.
    """

    resumable = False

    def __init__(self, number: int, sequence: np.ndarray, take: Callable[[int], int], ranks: int, unit: int) -> None:
        self._take = take
        few = len(sequence) // (4 * ranks)  # at least four blocks for everybody
        self._block = max(1, min(BLOCK, few) // unit) * unit
        self._mine = np.zeros(0, np.int64)  # places taken so far
        self._exhausted = False
        self._left = np.arange(len(sequence))  # what is dealt, by place
        super().__init__(number, sequence)

    def __len__(self) -> int:
        """This rank's examples, once it is known how many there are; until then, everybody's.

        What was done before the state that this epoch was loaded from counts as its own.
        """
        return len(self.sequence) - len(self._left) + len(self._mine) if self._exhausted else len(self.sequence)

    @property
    def empty(self) -> bool:  # type: ignore[override]
        return self._exhausted and not len(self._mine)

    def plan(self) -> np.ndarray:
        """What this rank has taken already and not trained on comes first."""
        self._planned = self._mine[~self._passed[self._mine]]
        self._noted = self._passed.copy()
        self._counted = 0
        self._before = self.done
        self.issued, self.yielded = self.done, self.done
        left: np.ndarray = self.sequence[self._planned]
        return left

    def draw(self) -> np.ndarray:
        """Take the next block."""
        start = self._take(self._block)
        places = self._left[start : start + self._block]
        self._exhausted = self._exhausted or not len(places)
        self._mine, self._planned = np.append(self._mine, places), np.append(self._planned, places)
        examples: np.ndarray = self.sequence[places]
        return examples

    @property
    def counted(self) -> int:
        return self._before + self._counted

    @property
    def _drawn(self) -> int:
        return self.issued - self._before

    def handed_out(self, places: np.ndarray) -> bool:
        return len(places) > 0 and bool(np.isin(places, self._planned[: self._drawn]).all())

    def everybody(self, group: dist.ProcessGroup | None) -> np.ndarray:
        """Which places anybody is through with; all ranks must call this."""
        masks = everyone(torch.from_numpy(np.packbits(self._passed)), group)
        packed = np.bitwise_or.reduce([mask.numpy() for mask in masks])
        passed: np.ndarray = np.unpackbits(packed)[: len(self.sequence)].astype(bool)
        return passed

    def go_on(self, passed: np.ndarray, trained: int, learnt: int) -> None:
        """Go on where these places are done; the others are dealt."""
        self._passed = passed
        self.start = self.done = int(np.count_nonzero(passed))
        self.trained, self.learnt = trained, learnt
        self._left = np.flatnonzero(~passed)
        self.plan()


class DeckRows:
    """Rows of the units that each rank visits, until all ranks show them to the policy together, by place.

    It has the same calls as `hemiola.loops.rows.Exchange`. Ranks visit different numbers of units, so rows are
    exchanged when all of them have come to the same point: an epoch's end, the end of the watch, a saved state.

    Args:
        policy: Observes.
        width: Numbers per row.
        dtype: Of the rows.
        group: The ranks.
    """

    def __init__(self, policy: Order, width: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self._policy, self._group = policy, group
        self._empty = torch.zeros(0, width, dtype=dtype)

    def begin(self, epoch: int) -> None:
        """Start an epoch."""
        self._epoch = epoch
        self._units: list[np.ndarray] = []
        self._rows: list[Tensor] = []
        place = self._policy.sequence(0, epoch)
        self._place_of = np.empty(len(place), np.int64)
        self._place_of[place] = np.arange(len(place))

    def put(self, units: np.ndarray, rows: Tensor) -> None:
        """Take rows of units this rank has visited."""
        self._units.append(units)
        self._rows.append(rows.clone())

    def advance(self, done: int) -> None:
        """Nothing is sent before all ranks come."""

    def collect(self) -> None:
        """Show the policy what all ranks have so far. Every rank calls this."""
        self._exchange("collect")

    def finish(self) -> None:
        """End the epoch, when every rank has."""
        while not self._exchange(f"finish {self._epoch}"):
            pass

    def pause(self) -> None:
        """The watch ends, on every rank."""
        while not self._exchange("pause"):
            pass

    def _exchange(self, why: str) -> bool:
        """Show everybody's rows to the policy; returns whether all ranks came for the same reason."""
        units = np.concatenate([np.zeros(0, np.int64), *self._units])
        mine = {"why": why, "units": torch.from_numpy(units), "rows": torch.cat([self._empty, *self._rows])}
        self._units, self._rows = [], []
        all_ranks = everyone(mine, self._group)
        units = np.concatenate([each["units"].numpy() for each in all_ranks])
        rows = torch.cat([each["rows"] for each in all_ranks])
        by_place = np.argsort(self._place_of[units], kind="stable")
        if len(units):
            rows, losses = rows[torch.from_numpy(by_place)], self._policy.wants_losses
            self._policy.observe([Visit.of_rows(0, self._epoch, units[by_place], rows, 1, losses)])
        return all(each["why"] == why for each in all_ranks)

    def state_dict(self) -> State:
        """Nothing: `collect` has shown everything to the policy."""
        return {}

    def load_state_dict(self, state: State, own: bool) -> None:
        """Nothing."""
