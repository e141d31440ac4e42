"""What mean balance (``grab.py``) and pair balance (``cdgrab.py``) share: one order after the other, and the state.

A worker's `Pass` over its units stays open while rows may still come for it. When the worker enters its next epoch the
next order is made from the signs that are known; units without a sign keep their sequence in the middle, and what comes
later is ignored. If less than half of the pass is known by then, because a stint is about as long as an epoch, the
newest older pass that is known well enough takes its place and the pass stays open: an order that is one epoch late is
worth nearly as much, a half-random one is not.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from hemiola.contracts import Order, State, Visit
from hemiola.errors import InputError
from hemiola.gradients.sketch import default_sketch, parse_sketch
from hemiola.order.fixed import VERSION, check_begin
from hemiola.order.herding import Monitor
from hemiola.order.settling import Settling
from hemiola.order.sliced import Item, blocks
from hemiola.state import own_state
from hemiola.streams import stream

PLUS, MINUS, SKIPPED = 1, 2, 3  # signs; 0 is one that is not known
OPEN_PASSES = 4  # per worker; more are open only while nothing at all is reported for several epochs
HALF = {torch.float16, torch.bfloat16}
WALK_SCALE = 1.0  # smaller is closer to deterministic; 30 leaves prefix sums four times as long (herding simulation)


@dataclass(slots=True)
class Pass:
    """One worker's pass over its units.

    Attributes:
        worker: Whose.
        epoch: Its number.
        order: Units by place.
        signs: Of each place; in pair balance of each pair of places (2i, 2i + 1).
        coins: For probabilistic signs one number in [0, 1) for each sign, else None.
        place: Place of each unit.
        waiting: Rows whose pair is not complete, by place.
        s: The sum that its vectors are balanced against, an array or a `sliced.Sum`; None before the first has come.
        own: The sum of this worker alone, where that is another one and is kept.
    """

    worker: int
    epoch: int
    order: np.ndarray
    signs: bytearray
    coins: np.ndarray | None
    place: array[int] = field(init=False)
    waiting: dict[int, np.ndarray] = field(default_factory=dict)
    s: Any = None
    own: Any = None

    def __post_init__(self) -> None:
        self.place = array("q", np.argsort(self.order).astype(np.int64).tobytes())  # faster to read one by one


class Balanced(Order):
    """Base of the balanced orders.

    Args:
        unit: Examples per unit.
        sketch: What units are balanced on: ``"exact"``, ``"fold:K"``, ``"ghost:R"`` or ``"ghost:R:K"``; by default a
            cheap one, see `default_sketch`.
        every: Balance every n-th epoch and keep the order in between; ``"auto"``: until the order has settled, and
            again when its herding bound has grown by a tenth, see `hemiola.order.settling`.
        reverse: Balance on even epochs only, and run the new order backwards on the odd epoch that follows.
        signs: Deterministic signs, or the self-balancing walk (Alweiss, Liu, Sawhney, STOC 2021).
    """

    slices = True

    def __init__(
        self,
        *,
        unit: int = 1,
        sketch: str | None = None,
        every: int | Literal["auto"] = 1,
        reverse: bool = False,
        signs: Literal["deterministic", "probabilistic"] = "deterministic",
    ) -> None:
        if isinstance(every, str) and every != "auto":
            raise InputError(f"every must be a whole number of at least 1 or 'auto', got {every!r}")
        for name, value in (("unit", unit), ("every", 1 if every == "auto" else every)):
            if value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if signs not in ("deterministic", "probabilistic"):
            raise InputError(f"signs must be 'deterministic' or 'probabilistic', got {signs!r}")
        self.sketch: str | None = default_sketch(unit) if sketch is None else sketch
        parse_sketch(self.sketch)
        self.unit, self.every, self.reverse, self.signs = unit, every, reverse, signs

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        self._sizes, self._seed, self._lockstep = check_begin(sizes), seed, lockstep
        self._orders = [stream("order", seed, 0, j).permutation(n) for j, n in enumerate(self._sizes)]
        self._epochs = [-1 for _ in self._sizes]
        self._passes: dict[tuple[int, int], Pass] = {}  # by worker and epoch
        self._sums: dict[tuple[int, int], np.ndarray] = {}  # by epoch and, where it is one worker's own sum, worker
        self._squares: dict[int, tuple[float, int]] = {}  # by epoch, sum of ||c||^2 and how many: the walk's scale
        self._monitor = Monitor(sum(self._sizes), seed)
        self._settling = Settling() if self.every == "auto" else None
        self._width: int | None = None
        self._skipped = 0

    def adopt(self, epoch: int, orders: Sequence[np.ndarray]) -> None:
        """After ``begin``: let epoch ``epoch`` run these orders, e.g. those of `redeal` for a new number of workers."""
        for worker, (order, size) in enumerate(zip(orders, self._sizes, strict=True)):
            if not np.array_equal(np.sort(order), np.arange(size)):
                raise InputError(f"the order of worker {worker} must be a permutation of its {size} units")
        self._orders = [self._facing(epoch, np.asarray(order, np.int64)) for order in orders]
        self._epochs = [epoch - 1 for _ in orders]

    # ----------------------------------------------------------------------------------------- what comes next

    def sequence(self, worker: int, epoch: int) -> np.ndarray:
        if epoch < self._epochs[worker]:
            raise ValueError(f"worker {worker} is in epoch {self._epochs[worker]}, the order of epoch {epoch} is gone")
        while self._epochs[worker] < epoch:
            self._advance(worker)
        return self._facing(epoch, self._orders[worker]).copy()

    def wants(self, worker: int, epoch: int) -> bool:
        if self.reverse and epoch % 2:
            return False
        if self._settling is not None:
            return self._settling.measures(self._turn(epoch))
        assert isinstance(self.every, int)
        return self._turn(epoch) % self.every == 0

    def _turn(self, epoch: int) -> int:
        """Number of the order that an epoch runs, if each were balanced."""
        return epoch // 2 if self.reverse else epoch

    def _facing(self, epoch: int, order: np.ndarray) -> np.ndarray:
        return order[::-1] if self.reverse and epoch % 2 else order

    def _advance(self, worker: int) -> None:
        """Let the worker enter its next epoch."""
        mine = [this for this in self._passes.values() if this.worker == worker]
        known = [this for this in mine if 2 * self._heard(this) >= len(this.order)]
        closed = mine[: mine.index(known[-1]) + 1] if known else mine[:-OPEN_PASSES]
        if known:
            following = self._end(known[-1])
            if self._takes(known[-1].epoch):
                self._orders[worker] = following
        for this in closed:
            del self._passes[worker, this.epoch]
        self._epochs[worker] += 1
        if self._settling is not None:
            self._settling.enter(self._turn(self._epochs[worker]))
        if self.wants(worker, self._epochs[worker]):
            self._open(worker, self._epochs[worker], self._orders[worker])
        live = {epoch for _, epoch in self._passes}
        for epoch in {e for e, _ in self._sums if e not in live and e <= min(self._epochs)}:
            self._forget(epoch)

    def _takes(self, epoch: int) -> bool:
        """Whether the order that follows from this epoch replaces the one that was run in it."""
        if self._settling is None:
            return True
        of, bound = self._monitor.newest
        return self._settling.takes(self._turn(epoch), bound, self._turn(of))

    def _open(self, worker: int, epoch: int, order: np.ndarray) -> Pass:
        count = self._sign_count(len(order))
        coins = None if self.signs == "deterministic" else stream("signs", self._seed, epoch, worker).random(count)
        this = self._passes[worker, epoch] = Pass(worker, epoch, order, bytearray(count), coins)
        return this

    def _forget(self, epoch: int) -> None:
        """No worker is in this epoch or before it."""
        self._sums = {key: s for key, s in self._sums.items() if key[0] != epoch}
        self._squares.pop(epoch, None)
        self._monitor.finish(epoch, self.total)

    def _heard(self, this: Pass) -> int:
        """How many rows of a pass have come."""
        raise NotImplementedError

    def _sign_count(self, units: int) -> int:
        """How many signs a pass over so many units has."""
        raise NotImplementedError

    def _end(self, this: Pass) -> np.ndarray:
        """End a pass and return the order that follows from it: a permutation, whatever is known of it."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------- what was used

    def _arrived(self, visits: Sequence[Visit]) -> Iterator[tuple[Visit, Pass, list[int], np.ndarray]]:
        """The visits to open passes, with the places and the rows of their units."""
        arrived = []
        for visit in visits:
            if not self._lockstep:
                self._note(visit)
            this, sketches = self._passes.get((visit.worker, visit.epoch)), visit.sketches
            if this is None or sketches is None:
                continue
            rows, place = as_rows(sketches), this.place
            if rows.shape[1] != self._width:
                self._check_width(rows.shape[1])
            arrived.append((visit.epoch, visit.worker, rows))
            yield visit, this, [place[unit] for unit in visit.units.tolist()], rows
        self._monitor.add(arrived, self.total)

    def _note(self, visit: Visit) -> None:
        """Off lockstep: a worker reports, whether or not its rows are of use."""

    def _check_width(self, width: int) -> None:
        if self._width is not None:
            raise InputError(f"sketches had {self._width} numbers so far, now {width}; they must not change in a run")
        self._width = width

    def _sum(self, epoch: int, worker: int, rows: np.ndarray) -> np.ndarray:
        """The sum of this epoch and worker, zero before its first vector."""
        return self._sums.setdefault((epoch, worker), np.zeros(rows.shape[1], rows.dtype))

    def _blocks(self, items: list[Item]) -> Iterable[list[Item]]:
        """What is to be signed; in several blocks, and known by inner products, only where rows come in slices."""
        return [items] if self.total is None else blocks(items, self.total)

    def _threshold(self, this: Pass, i: int, c: Any) -> float:
        """What <s, c> is compared with, in place of 0, for probabilistic signs.

        +1 has probability 1/2 - <s, c> / (2 c0). With a coin u uniform in [0, 1) that is <s, c> <= c0 (1 - 2u). c0 is
        `WALK_SCALE` times the mean of ||c||^2 so far, so that it follows the scale of the gradients.
        """
        assert this.coins is not None
        squares, count = self._squares.get(this.epoch, (0.0, 0))
        square = float(c.dot(c))
        if math.isfinite(square):
            squares, count = self._squares[this.epoch] = squares + square, count + 1
        return WALK_SCALE * squares / max(count, 1) * (1 - 2 * float(this.coins[i]))

    # ------------------------------------------------------------------------------------------ log and state

    def telemetry(self) -> State:
        settled = {} if self._settling is None else {"measured_epochs": self._settling.count}
        return {**self._monitor.telemetry(), "skipped": self._skipped, **settled}

    def state_dict(self) -> State:
        return {
            "kind": self.kind,
            "version": VERSION,
            **self._facts(),
            "orders": [torch.from_numpy(order.copy()) for order in self._orders],
            "epochs": list(self._epochs),
            "passes": [
                {
                    "worker": this.worker,
                    "epoch": this.epoch,
                    "order": torch.from_numpy(this.order.copy()),
                    "signs": torch.tensor(list(this.signs), dtype=torch.uint8),
                    "waiting": {place: torch.from_numpy(row.copy()) for place, row in this.waiting.items()},
                }
                for this in self._passes.values()
            ],
            "sums": {key: torch.from_numpy(s.copy()) for key, s in self._sums.items()},
            "squares": dict(self._squares),
            "monitor": self._monitor.state_dict(),
            "settling": None if self._settling is None else self._settling.state_dict(),
            "width": self._width,
            "skipped": self._skipped,
        }

    def load_state_dict(self, state: State) -> None:
        own_state(state, self.kind, VERSION, self._facts())
        self._orders = [order.numpy().copy() for order in state["orders"]]
        self._epochs = list(state["epochs"])
        self._passes = {}
        for saved in state["passes"]:
            this = self._open(saved["worker"], saved["epoch"], saved["order"].numpy().copy())
            this.signs[:] = saved["signs"].numpy().tobytes()
            this.waiting = {place: row.numpy().copy() for place, row in saved["waiting"].items()}
        self._sums = {key: s.numpy().copy() for key, s in state["sums"].items()}
        self._squares = dict(state["squares"])
        self._monitor.load_state_dict(state["monitor"])
        if self._settling is not None:
            self._settling.load_state_dict(state["settling"])
        self._width, self._skipped = state["width"], state["skipped"]

    def _facts(self) -> State:
        return {"seed": self._seed, "sizes": self._sizes, "unit": self.unit, "sketch": self.sketch}


def as_rows(sketches: torch.Tensor) -> np.ndarray:
    """(units, k) on the CPU, in float64 if that is what they came in, else in float32."""
    if sketches.dtype in HALF:
        sketches = sketches.float()
    if sketches.requires_grad or not sketches.is_cpu:
        sketches = sketches.detach().cpu()
    return sketches.numpy()


def redeal(orders: Sequence[np.ndarray], workers: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Deal units again to another number of workers, each keeping about its place in the epoch.

    Args:
        orders: For every old worker, its global unit numbers in the order it would visit them next.
        workers: The new number.

    Returns:
        For every new worker its shard (sorted global unit numbers) and its order (places within that shard).
    """
    everyone = sum(len(order) for order in orders)
    if not 1 <= workers <= everyone:
        raise InputError(f"{everyone} units can be dealt to 1 to {everyone} workers, got {workers}")
    # Interleave by relative position, then deal like cards: neighbours in time go to different workers.
    places = np.concatenate([(np.arange(len(order)) + 0.5) / max(len(order), 1) for order in orders])
    deck = np.concatenate(orders)[np.argsort(places, kind="stable")]
    hands = [deck[worker::workers] for worker in range(workers)]
    shards = [np.sort(hand) for hand in hands]
    return shards, [np.searchsorted(shard, hand) for shard, hand in zip(shards, hands, strict=True)]
