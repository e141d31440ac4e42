"""Orders from a score of every example: sorted, folded, zigzag or saw.

Units are ranked by their score, lowest first, and visited in one of four shapes. With 12 units in ranks 0 to 11 and
3 layers:

    sorted   0 1 2 3 4 5 6 7 8 9 10 11        a curriculum: from the easy to the hard
    folded   0 3 6 9  1 4 7 10  2 5 8 11      several passes from low to high, each over another part
    zigzag   0 3 6 9  10 7 4 1  2 5 8 11      the same, every second pass backwards, so that nothing jumps
    saw      sorted, but for a zigzag around each border between thirds

Folding is that of DELT (Dai et al., arXiv 2506.21545, "folding ordering"). Zigzag and saw are ZIG and SAW of the paper
that followed it ("Demystifying Data Organization for Enhanced LLM Training", Dai et al., arXiv 2605.30334). What is
here was written from the description and the defaults in that paper's repository (microsoft/data-efficacy): three
sections, a zigzag over a tenth of the units on either side of a border, three layers. Its shuffling within windows
("jittering") is left out. There a run is one pass over the data; here every epoch has the shape, and units of equal
score come in another random order each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from hemiola.contracts import Graded, Order, State, Visit
from hemiola.errors import InputError
from hemiola.options import one_of, whole
from hemiola.order.fixed import VERSION, check_begin
from hemiola.state import own_state, stamped
from hemiola.streams import stream

SECTIONS = 3  # of a saw
BORDER = 0.1  # of all units, on either side of a border between sections


class Scored(Order):
    """Visits units by their score.

    Args:
        by: ``"loss"``: the loss each unit had when it was last visited, random in the first epoch; ``"score"``: the
            scores that the task's examples have; ``"file"``: those in a file. A unit's score is the mean of its
            examples'.
        shape: ``"sorted"``, ``"folded"``, ``"zigzag"`` or ``"saw"``.
        file: With ``by = "file"``: a text file of one number a line, one line for each example of the training set.
        layers: Passes of a folded or zigzag order, and of each zigzag in a saw.
        unit: Examples per unit.
    """

    kind = "scored"

    def __init__(
        self,
        *,
        by: Literal["loss", "score", "file"] = "loss",
        shape: Literal["sorted", "folded", "zigzag", "saw"] = "sorted",
        file: str | None = None,
        layers: int = 3,
        unit: int = 1,
    ) -> None:
        self.by = one_of("by", by, ["loss", "score", "file"])
        self.shape = one_of("shape", shape, list(SHAPES))
        self.layers, self.unit = whole("layers", layers, 1), whole("unit", unit, 1)
        if (file is not None) != (by == "file"):
            raise InputError(
                f"by = {by!r} needs a file, as in file = 'scores.txt'"
                if file is None
                else f"file = {file!r} needs by = 'file', got by = {by!r}"
            )
        self.wants_losses, self.wants_scores = by == "loss", by == "score"
        self._file = None if file is None else read_scores(Path(file))

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        self._sizes, self._seed = check_begin(sizes), seed
        self._scores = [np.full(size, np.nan) for size in self._sizes]  # of units; nan where it is not known
        self._source = ""  # tells scores apart that are not losses
        self._epochs = [-1] * len(self._sizes)
        self._orders = [np.arange(size) for size in self._sizes]
        self._skipped = 0

    def meet(self, examples: Sequence[np.ndarray], count: int, scores: np.ndarray | None) -> None:
        if self.by == "loss":
            return
        found = scores if self._file is None else self._file
        if found is None:
            raise InputError("by = 'score' needs examples that have scores, and these have none; use 'loss' or 'file'")
        check_scores(found, count)
        self._scores = [unit_means(found[numbers], self.unit) for numbers in examples]
        self._source = hashlib.sha256(np.ascontiguousarray(found, np.float64).tobytes()).hexdigest()[:12]

    def sequence(self, worker: int, epoch: int) -> np.ndarray:
        if epoch < self._epochs[worker]:
            raise ValueError(f"worker {worker} is in epoch {self._epochs[worker]}, the order of epoch {epoch} is gone")
        if epoch > self._epochs[worker]:
            self._epochs[worker], self._orders[worker] = epoch, self._order(worker, epoch)
        return self._orders[worker].copy()

    def _order(self, worker: int, epoch: int) -> np.ndarray:
        scores = self._scores[worker]
        known = np.isfinite(scores)
        scores = np.where(known, scores, np.median(scores[known]) if known.any() else 0.0)
        mixed = stream("order", self._seed, epoch, worker).permutation(len(scores))
        ranked = mixed[np.argsort(scores[mixed], kind="stable")]
        visited: np.ndarray = ranked[SHAPES[self.shape](len(ranked), self.layers)]
        return visited

    def observe(self, visits: Sequence[Visit]) -> None:
        for visit in visits:
            if self.wants_losses and visit.losses is not None:
                finite = np.isfinite(visit.losses)
                self._scores[visit.worker][visit.units[finite]] = visit.losses[finite]
                self._skipped += int(np.count_nonzero(~finite))

    def adopt(self, epoch: int, orders: Sequence[np.ndarray]) -> None:
        """Run what was learnt from losses once more, until there are new ones; other scores are known anyway."""
        if self.by == "loss":
            self._epochs = [epoch for _ in orders]
            self._orders = [np.array(order, np.int64) for order in orders]

    def telemetry(self) -> State:
        """``skipped``: losses that were not finite; such a unit keeps the score it had."""
        return {"skipped": self._skipped} if self.wants_losses else {}

    def state_dict(self) -> State:
        return stamped(
            self.kind,
            VERSION,
            **self._facts(),
            losses=[torch.from_numpy(scores.copy()) for scores in self._scores] if self.wants_losses else [],
            epochs=list(self._epochs),
            orders=[torch.from_numpy(order.copy()) for order in self._orders],
            skipped=self._skipped,
        )

    def load_state_dict(self, state: State) -> None:
        own_state(state, self.kind, VERSION, self._facts())
        if self.wants_losses:
            self._scores = [losses.numpy().copy() for losses in state["losses"]]
        self._epochs = list(state["epochs"])
        self._orders = [order.numpy().copy() for order in state["orders"]]
        self._skipped = state["skipped"]

    def _facts(self) -> State:
        options = {"by": self.by, "shape": self.shape, "layers": self.layers, "unit": self.unit}
        return {"seed": self._seed, "sizes": self._sizes, **options, "scores": self._source}


# ------------------------------------------------------------------------------------------------------------- shapes


def _sorted(count: int, layers: int) -> np.ndarray:
    return np.arange(count)


def _folded(count: int, layers: int) -> np.ndarray:
    return np.concatenate([np.arange(first, count, layers) for first in range(layers)])


def _zigzag(count: int, layers: int) -> np.ndarray:
    passes = [np.arange(first, count, layers) for first in range(layers)]
    return np.concatenate([one[::-1] if number % 2 else one for number, one in enumerate(passes)])


def _saw(count: int, layers: int) -> np.ndarray:
    ranks, reach, done = np.arange(count), round(BORDER * count), 0
    for section in range(1, SECTIONS):
        border = round(count * section / SECTIONS)
        begin, end = max(done, border - reach), min(count, border + reach)
        ranks[begin:end] = begin + _zigzag(end - begin, layers)
        done = end
    return ranks


SHAPES: dict[str, Callable[[int, int], np.ndarray]] = {
    "sorted": _sorted,
    "folded": _folded,
    "zigzag": _zigzag,
    "saw": _saw,
}
"""For each shape, which rank is visited at each place, of so many units and with so many layers."""


# ------------------------------------------------------------------------------------------------------------- scores


def scores_of(examples: object) -> np.ndarray | None:
    """One score for each example, where the data set has any."""
    scores = examples.scores() if isinstance(examples, Graded) else None
    return None if scores is None else np.asarray(scores)


def unit_means(scores: np.ndarray, unit: int) -> np.ndarray:
    """The mean score of each unit; the last one may be shorter."""
    starts = np.arange(0, len(scores), unit)
    sums = np.add.reduceat(scores.astype(np.float64), starts)
    return np.asarray(sums / np.diff(np.append(starts, len(scores))))


def check_scores(scores: np.ndarray, count: int) -> None:
    """Refuse scores that are not one finite number for each of ``count`` examples."""
    if scores.ndim != 1 or scores.dtype.kind not in "iuf":
        raise InputError(f"scores must be one number for each example, got {scores.dtype} of shape {scores.shape}")
    if len(scores) != count:
        raise InputError(f"scores must be one number for each of {count} examples, got {len(scores)}")
    if not np.isfinite(scores).all():
        first = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise InputError(f"scores must be finite, got {scores[first]} for example {first}")


def read_scores(path: Path) -> np.ndarray:
    """Read a file of one number a line."""
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"file: cannot read {path}: {error}") from None
    while lines and not lines[-1].strip():
        lines.pop()
    scores = np.empty(len(lines))
    for number, line in enumerate(lines):
        try:
            scores[number] = float(line)
        except ValueError:
            raise InputError(f"file: line {number + 1} of {path} must be a number, got {line.strip()[:60]!r}") from None
        if not np.isfinite(scores[number]):
            raise InputError(f"file: line {number + 1} of {path} must be a finite number, got {line.strip()!r}")
    return scores
