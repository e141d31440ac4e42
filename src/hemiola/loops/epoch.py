"""One rank's epoch: which examples it hands out, and how far the loop has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hemiola.contracts import State
from hemiola.errors import InputError

if TYPE_CHECKING:
    from hemiola.loops.tracking import LoadedBatch


class Epoch:
    """What this rank visits in one epoch. A *place* is an index into ``sequence``.

    Args:
        number: From 0.
        sequence: Example numbers in the order they are handed out.

    Attributes:
        issued: Examples handed out, to the DataLoader's workers for example.
        done: Places the loop is through with: trained on, or skipped.
        trained: Examples trained on, each counted once.
        learnt: Examples whose gradients reached the order policy.
        start: ``done`` when the epoch was entered or loaded.
        largest: The largest batch so far.
        uneven: Whether a smaller batch was followed by another one.
        unused: Forward passes without a backward pass.
        spoilt: Whether counting has gone wrong, so that no row can be trusted.
        watched: Whether a model was watched in it.
        yielded: Examples that came out of a tracked loader.
        empty: Whether it is over and this rank had no part in it.
        resumable: Whether how many were drawn says which.
    """

    empty = False
    resumable = True

    def __init__(self, number: int, sequence: np.ndarray) -> None:
        self.number, self.sequence = number, sequence
        self.issued = self.done = self.trained = self.learnt = self.start = 0
        self.largest = self.unused = self.yielded = 0
        self.uneven = self.spoilt = self.watched = False
        self._last = 0
        self._passed = np.zeros(len(sequence), bool)
        self._trained = np.zeros(len(sequence), bool)
        self._noted = np.zeros(len(sequence), bool)
        self._place_of = np.full(sequence.max(initial=-1) + 2, -1)  # the last one is for what is beyond
        self._place_of[sequence[::-1]] = np.arange(len(sequence))[::-1]
        self._repeats = np.count_nonzero(self._place_of >= 0) < len(sequence)
        self.plan()

    def __len__(self) -> int:
        return len(self.sequence)

    def plan(self) -> np.ndarray:
        """An iterator is asked for: the examples it hands out, which are those that are not done yet."""
        self._planned = np.flatnonzero(~self._passed)
        self._noted = self._passed.copy()
        self._counted = 0
        self.issued, self.yielded = self.done, self.done
        left: np.ndarray = self.sequence[self._planned]
        return left

    def draw(self) -> np.ndarray:
        """More examples for an iterator that has handed out its own; here there are none."""
        return self.sequence[:0]

    def places(self, examples: np.ndarray) -> np.ndarray:
        """Where these examples are in the epoch; -1 for those that are not."""
        try:
            found: np.ndarray = self._place_of[examples]
        except IndexError:  # of another data set, or of another rank
            found = self._place_of[examples.clip(-1, len(self._place_of) - 1)]
        if self._repeats:
            # An example that comes twice: its first place that is neither done nor in a batch yet.
            for i, (example, place) in enumerate(zip(examples.tolist(), found.tolist(), strict=True)):
                if place >= 0 and self._noted[place]:
                    again = np.flatnonzero((self.sequence == example) & ~self._noted)
                    found[i] = again[0] if len(again) else place
        return found

    def note(self, places: np.ndarray) -> None:
        """These places came out of a tracked loader, in one batch."""
        self._noted[places] = True
        self.yielded += len(places)
        self.largest = max(self.largest, len(places))

    def next_places(self, count: int) -> np.ndarray:
        """The places of the next ``count`` examples, if every batch so far was trained on in the order handed out."""
        return self._planned[self._counted : self._counted + count]

    def count(self, count: int) -> np.ndarray:
        """Take the next ``count`` places."""
        places = self.next_places(count)
        self._counted += count
        self.uneven |= self._last < self.largest
        self._last, self.largest = count, max(self.largest, count)
        return places

    @property
    def counted(self) -> int:
        """How many places were counted, or were done when counting started."""
        return len(self) - len(self._planned) + self._counted

    def ordered_done(self, ordered: int) -> int:
        """How many of the first ``ordered`` places are done."""
        return int(np.count_nonzero(self._passed[:ordered]))

    @property
    def surplus(self) -> bool:
        """Whether more were counted than were handed out."""
        return self._counted > self._drawn

    @property
    def _drawn(self) -> int:
        """How many of the planned places were handed out."""
        return self.issued - (len(self) - len(self._planned))

    def handed_out(self, places: np.ndarray) -> bool:
        """Whether all of these places were handed out by now."""
        if not len(places) or places.min() < 0 or not self._drawn:
            return False
        return bool(places.max() <= self._planned[self._drawn - 1])

    def pass_drawn(self) -> np.ndarray:
        """Nobody watches, so the loop is through with what was handed out."""
        return self.pass_by(self._planned[: self._drawn])

    def pass_by(self, places: np.ndarray) -> np.ndarray:
        """The loop is through with these places; returns those that are new."""
        fresh: np.ndarray = places[~self._passed[places]]
        self._passed[fresh] = True
        self.done += len(fresh)
        return fresh

    def train(self, places: np.ndarray, examples: int) -> np.ndarray:
        """So many examples were trained on, at these places if they are known; returns which for the first time."""
        fresh: np.ndarray = ~self._trained[places]
        self._trained[places] = True
        self.trained += int(np.count_nonzero(fresh)) if len(places) else examples
        return fresh

    def left(self) -> np.ndarray:
        """The examples that are not done yet."""
        rest: np.ndarray = self.sequence[~self._passed]
        return rest

    def state_dict(self) -> State:
        """How far the loop has come."""
        prefix = bool(self._passed[: self.done].all())
        mask = None if prefix else torch.from_numpy(np.packbits(self._passed))
        return {"done": self.done, "passed": mask, "trained": self.trained, "learnt": self.learnt}

    def load_state_dict(self, state: State, own: bool) -> None:
        """Restore what ``state_dict`` returned, on this rank or (less exactly) on another one."""
        self.start = self.done = int(state["done"])
        if own and state["passed"] is not None:
            self._passed = np.unpackbits(state["passed"].numpy())[: len(self)].astype(bool)
        else:
            self._passed[: self.done] = True
        if own:
            self.trained, self.learnt = int(state["trained"]), int(state["learnt"])
        self.plan()


class IndexIterator(Iterator[int]):
    """An iterator of the sampler: hands out what is left of an epoch.

    torchdata's StatefulDataLoader keeps the state of the iterator beside that of the sampler, as they were when a batch
    was drawn. By the time the loop gets that batch it has been trained on those before, which the sampler's state could
    not know; so what was drawn is what a loop that goes on from there is through with.

    Args:
        epoch: Planned anew.
        drew: Asked before an example is handed out; if it says no, there are no more.
    """

    def __init__(self, epoch: Epoch, drew: Callable[[IndexIterator], bool]) -> None:
        self._epoch, self._drew = epoch, drew
        self._examples = epoch.plan().tolist()
        self._next = 0

    def __next__(self) -> int:
        if not self._drew(self):
            raise StopIteration
        if self._next == len(self._examples):
            self._examples += self._epoch.draw().tolist()
        if self._next == len(self._examples):
            raise StopIteration
        example: int = self._examples[self._next]
        self._next += 1
        self._epoch.issued += 1
        return example

    def state_dict(self) -> State:
        """How much of which epoch was drawn."""
        if not self._epoch.resumable:
            raise InputError(
                "with deal = 'deck' an iterator cannot be saved, as torchdata's StatefulDataLoader does; use a "
                "DataLoader, and save sampler.state_dict() on all ranks together"
            )
        return {"epoch": self._epoch.number, "issued": self._epoch.issued}

    def load_state_dict(self, state: State) -> None:
        """Go on after what was drawn, if it is of the same epoch."""
        if state["epoch"] == self._epoch.number and self._epoch.done < state["issued"] <= len(self._epoch):
            self._epoch.issued = state["issued"]
            self._epoch.pass_drawn()
            self._epoch.start = self._epoch.done
            self._examples, self._next = self._epoch.plan().tolist(), 0


@dataclass
class Claim:
    """The examples of one forward pass.

    Attributes:
        epoch: Which epoch's.
        examples: How many the model was given.
        places: Where they are in the epoch; None where they are counted, or cannot be told.
        batch: The tracked batch they are from, if any.
        counted: Whether places are found by counting, when the backward pass has come.
    """

    epoch: Epoch
    examples: int
    places: np.ndarray | None = None
    batch: LoadedBatch | None = None
    counted: bool = False
