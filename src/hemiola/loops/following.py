"""Following a loop: which epoch and which examples is it at?

Where the loader is tracked (``tracking.py``) or the loop says so (``visiting``), examples are known by their numbers.
Otherwise they are counted: the next forward pass that gets a backward pass is the next batch that was handed out.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from hemiola.errors import InputError
from hemiola.loops.epoch import Claim, Epoch
from hemiola.loops.identity import Tagged, as_numbers
from hemiola.loops.notices import Notices
from hemiola.loops.tracking import LoadedBatch, Tracker

NONE = np.zeros(0, np.int64)


class Following:
    """The epoch at hand, the one before, and the batches in between.

    Args:
        notices: What the user is told.

    Attributes:
        now: The epoch at hand.
        before: The epoch before, whose last batches a loop that prefetches still holds.
        tracked: Whether examples are known by their numbers.
        model: The watched model, if there is one.
        modes: In which the model was trained so far: in training mode (True), in eval mode (False).
        drawn_by: Who asked for the last iterator, see `notices.who_draws`.
        asked_in_eval: Whether the last iterator was taken for an evaluation, because the model was in eval mode.
    """

    now: Epoch

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self.before: Epoch | None = None
        self.tracked = False
        self.model: nn.Module | None = None
        self.modes: set[bool] = set()
        self.drawn_by: tuple[str | None, bool] = (None, False)
        self.asked_in_eval = False
        self._tracker = Tracker()
        self._iterations = 0

    def enter(self, epoch: Epoch) -> None:
        """An epoch starts."""
        self.before, self.now = getattr(self, "now", None), epoch

    def evaluating(self) -> bool:
        """Whether an iterator that is asked for now is for an evaluation."""
        if self.model is None:
            return False
        return not torch.is_grad_enabled() or not (self.model.training or self.modes == {False})

    def untried(self) -> bool:
        """Whether a model in eval mode has never been trained, so that this may be how it is trained."""
        return torch.is_grad_enabled() and not self.modes and self.now.done == self.now.start

    # ------------------------------------------------------------------------------ what a tracked loader tells

    def starting(self) -> int | None:
        if self.evaluating() and not self.untried():
            return None
        self._iterations += 1
        self._tracker.start()
        return self._iterations

    def note(self, tagged: Tagged, iteration: int) -> None:
        if tagged.numbers is None:
            self._notices.unmatched("the loader's sampler yields something else than numbers of examples")
            return
        epoch, places = self._located(tagged.numbers)
        if places.min(initial=0) < 0:
            self._notices.foreign(int(tagged.numbers[places.argmin()]))
            return
        epoch.note(places)
        rows: np.ndarray | None = places if tagged.kept is None else places[tagged.kept]
        if tagged.kept is not None and not len(tagged.kept) and len(places):
            rows = None
            self._notices.unmatched("collate_fn makes rows of which it cannot be told which examples they are")
        self._tracker.add(LoadedBatch(epoch, places, rows, iteration), tagged.batch)

    def ended(self) -> None:
        now = self.now
        missing = now.issued - now.yielded
        if now.yielded > now.start and now.issued == len(now) and missing >= max(now.largest, 1):
            self._notices.sharded(now, missing)

    # ----------------------------------------------------------------------------------------- what the loop says

    def visiting(self, examples: Iterable[int] | Tensor) -> None:
        """The next forward passes are given these examples."""
        numbers = as_numbers(examples.tolist() if isinstance(examples, Tensor) else list(examples))
        if numbers is None or not len(numbers):
            raise InputError(f"visiting needs the numbers of the examples, got {examples!r}")
        epoch, places = self._located(numbers)
        if places.min() < 0:
            raise InputError(f"example {numbers[places.argmin()]} is not one of those this rank visits in this epoch")
        self.tracked = True
        self._tracker.last = LoadedBatch(epoch, places, places, explicit=True)

    # ---------------------------------------------------------------------------------------- what the watch asks

    def claim(self, given: list[Tensor], pending: int) -> Claim:
        """Which examples is this forward pass given, after ``pending`` others whose backward passes are due?"""
        examples = len(given[0])
        if self.asked_in_eval and self.now.done == len(self.now) and self.model is not None and self.model.training:
            self._notices.asked_in_eval(self.now)
            return Claim(self.now, examples)
        if not self.tracked or self._tracker.last is None:
            if self.tracked:
                self._notices.untracked()
            self._check_drawing(pending + examples)
            return Claim(self.now, examples, counted=True)
        found = self._tracker.match(given, examples)
        if found is None:
            self._notices.unmatched(
                "the loop prefetches and gives the model other tensors than the loader yielded; name the examples with "
                "sampler.visiting(numbers) before each forward pass"
            )
            return Claim(self.now, examples)
        batch, rows = found
        if batch.rows is None:
            return Claim(batch.epoch, examples, batch=batch)
        if rows is None:
            self._notices.unmatched(
                f"the model was given {examples} examples where the batch at hand has {len(batch.rows)}"
            )
            return Claim(batch.epoch, examples, batch=batch)
        return Claim(batch.epoch, examples, batch.rows[rows], batch)

    @property
    def explicit(self) -> bool:
        """Whether the loop itself says which examples come."""
        return self._tracker.last is not None and self._tracker.last.explicit

    def places(self, claim: Claim) -> np.ndarray:
        """The claim's places, as far as they can be told."""
        if claim.counted:
            return claim.epoch.next_places(claim.examples)
        return NONE if claim.places is None else claim.places

    def trained(self, claim: Claim) -> tuple[np.ndarray, np.ndarray]:
        """The claim's examples were trained on: their places, and all places that the loop is through with now."""
        epoch = claim.epoch
        if claim.counted:
            places = epoch.count(claim.examples)
            if epoch.surplus and not epoch.spoilt:
                self._notices.surplus(epoch)
                epoch.spoilt = True
            return places, epoch.pass_by(places)
        batches = [] if claim.batch is None else self._tracker.passed(claim.batch)
        passed = [epoch.pass_by(each.places) for each in batches if each.epoch is epoch]
        return self.places(claim), np.concatenate([NONE, *passed])

    def _located(self, numbers: np.ndarray) -> tuple[Epoch, np.ndarray]:
        """The epoch at hand, or the one before where these examples have not been handed out again yet; and places."""
        places = self.now.places(numbers)
        if self.before is None or self.before.done == len(self.before) or self.now.handed_out(places):
            return self.now, places
        earlier = self.before.places(numbers)
        return (self.before, earlier) if len(earlier) and earlier.min() >= 0 else (self.now, places)

    def _check_drawing(self, examples: int) -> None:
        """While batches are counted: does someone draw from the sampler who may reorder them?"""
        drawn_by, any_order = self.drawn_by
        if any_order:
            self._notices.reordered("DataLoader(in_order=False)")
        elif drawn_by is not None and self.now.issued > self.now.counted + examples:
            self._notices.reordered(f"{drawn_by} draws from this sampler ahead of the loop and")
