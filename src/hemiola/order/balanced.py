"""What every balanced order shares: matching reports to units, balancing in blocks, one order after the other.

Nothing is decided while an epoch runs, so ``observe`` only notes the units in their worker's `Book` and copies their
rows into a buffer. When the buffer is full, or a worker wants its next order, the rows in it are balanced in the order
they arrived, against the sums of their epoch number (``balance.py``), and the signs go into the books.

An epoch may end with reports still under way. Then the next order is made from what is known, the units without a
sign keep their sequence around the meeting point (`Book.next_order`), and what arrives later is ignored. If less than
half of the epoch is known, because a stint is about as long as an epoch, the newest older epoch that is known well
enough takes its place: an order that is one epoch late is worth nearly as much, a half-random one is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch

from hemiola.contracts import Order, State, Visit
from hemiola.errors import InputError
from hemiola.gradients.sketch import default_sketch, parse_sketch
from hemiola.order.balance import Sums, balance
from hemiola.order.book import Book
from hemiola.order.buffer import Buffer, Items
from hemiola.order.monitor import Monitor
from hemiola.streams import stream

VERSION = 2
OPEN_BOOKS = 4  # per worker; more are open only while nothing at all is reported for several epochs


def check_begin(sizes: Sequence[int]) -> list[int]:
    """Validated shard sizes."""
    if len(sizes) == 0:
        raise InputError("an order needs at least 1 worker, got none")
    for worker, size in enumerate(sizes):
        if size < 1:
            raise InputError(f"every worker needs at least 1 unit, worker {worker} has {size}")
    return [int(size) for size in sizes]


def check_state(state: State, kind: str, facts: State) -> None:
    """Refuse the state of another kind of policy, another version, or other facts of the run."""
    if state.get("kind") != kind:
        raise InputError(f"this is the state of {state.get('kind')!r}, it cannot be loaded into the order {kind!r}")
    if state.get("version") != VERSION:
        raise InputError(f"the state of {kind!r} has version {state.get('version')!r}, this hemiola reads {VERSION}")
    for name, value in facts.items():
        if state.get(name) != value:
            raise InputError(
                f"the state of {kind!r} was saved with {name} = {state.get(name)!r}, this run has {value!r}"
            )


def as_rows(sketches: torch.Tensor) -> np.ndarray:
    """(units, k) on the CPU, in float64 if that is what they came in, else in float32."""
    dtype = torch.float64 if sketches.dtype == torch.float64 else torch.float32
    return sketches.detach().to("cpu", dtype).numpy()


class Balanced(Order):
    """Base of the balanced orders; see ``orders.py`` for the policies.

    Args:
        unit: Examples per unit.
        sketch: What units are balanced on: ``"exact"``, ``"fold:K"``, ``"ghost:R"`` or ``"ghost:R:K"``; by default a
            cheap one, see `default_sketch`.
        every: Balance every n-th epoch and keep the order in between.
        reverse: Balance on even epochs only, and run the new order backwards on the odd epoch that follows.
        signs: Deterministic signs, or the self-balancing walk.
    """

    slices = True
    paired: ClassVar[bool]
    shares: ClassVar[bool]
    """Whether workers balance against one shared sum."""

    def __init__(
        self,
        *,
        unit: int = 1,
        sketch: str | None = None,
        every: int = 1,
        reverse: bool = False,
        signs: Literal["deterministic", "probabilistic"] = "deterministic",
    ) -> None:
        for name, value in (("unit", unit), ("every", every)):
            if value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if signs not in ("deterministic", "probabilistic"):
            raise InputError(f"signs must be 'deterministic' or 'probabilistic', got {signs!r}")
        self.sketch: str | None = default_sketch(unit) if sketch is None else sketch
        parse_sketch(self.sketch)
        self.unit, self.every, self.reverse, self.signs = unit, every, reverse, signs

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        self._sizes, self._seed, self._lockstep = check_begin(sizes), seed, lockstep
        workers = range(len(self._sizes))
        self._orders = [stream("order", seed, 0, worker).permutation(self._sizes[worker]) for worker in workers]
        self._epochs = [-1 for _ in workers]
        self._books: list[list[Book]] = [[] for _ in workers]
        self._sums: dict[int, Sums] = {}
        self._buffer = Buffer(len(self._sizes), self.paired)
        self._monitor = Monitor(len(self._sizes), seed)
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
        if self.reverse:
            return epoch % 2 == 0 and epoch // 2 % self.every == 0
        return epoch % self.every == 0

    def _facing(self, epoch: int, order: np.ndarray) -> np.ndarray:
        return order[::-1] if self.reverse and epoch % 2 else order

    def _advance(self, worker: int) -> None:
        """Let the worker enter its next epoch."""
        self._flush()
        books = self._books[worker]
        known = [book for book in books if 2 * book.count >= book.size]
        if known:
            self._orders[worker] = known[-1].next_order(self._orders[worker])
            self._settled(worker, known[-1])
            books[:] = [book for book in books if book.epoch > known[-1].epoch]
        self._epochs[worker] += 1
        epoch = self._epochs[worker]
        if self.wants(worker, epoch):
            books.append(Book(epoch, self._sizes[worker], self.paired))
            del books[:-OPEN_BOOKS]
        self._forget()

    def _settled(self, worker: int, book: Book) -> None:
        """The worker's next order was made from this book."""

    def _forget(self) -> None:
        """Drop the sums of epochs that no worker is in or before."""
        live = {book.epoch for books in self._books for book in books}
        for epoch in [e for e in self._sums if e not in live and e <= min(self._epochs)]:
            del self._sums[epoch]
            self._monitor.finish(epoch, self.total)

    # -------------------------------------------------------------------------------------------- what was used

    def observe(self, visits: Sequence[Visit]) -> None:
        for visit in visits:
            self._observe(visit)

    def _observe(self, visit: Visit) -> None:
        lean = self._lean(visit)
        book = self._book(visit.worker, visit.epoch)
        if visit.sketches is None or book is None:
            return
        step, number = book.steps, book.count
        fresh = book.add(np.asarray(visit.units))
        rows = as_rows(visit.sketches)
        rows = rows if fresh is None else rows[fresh]
        self._buffer.prepare(rows.shape[1], rows.dtype)
        while len(rows) > (space := self._buffer.space):
            self._buffer.add(rows[:space], visit.epoch, visit.worker, step, number, lean)
            self._flush()
            rows, number = rows[space:], number + space
        self._buffer.add(rows, visit.epoch, visit.worker, step, number, lean)
        if book.count == book.size and self._complete(book.epoch):
            self._flush()
            self._monitor.finish(book.epoch, self.total)

    def _lean(self, visit: Visit) -> float:
        """How far signs lean from the shared sum to the worker's own; called for every visit."""
        return 0.0 if self.shares else 1.0

    def _book(self, worker: int, epoch: int) -> Book | None:
        for book in self._books[worker]:
            if book.epoch == epoch:
                return book
        return None

    def _open_book(self, worker: int, epoch: int) -> Book:
        book = self._book(worker, epoch)
        assert book is not None, "rows are balanced before their book is closed"
        return book

    def _complete(self, epoch: int) -> bool:
        books = [self._book(worker, epoch) for worker in range(len(self._sizes))]
        return all(book is not None and book.count == book.size for book in books)

    # ---------------------------------------------------------------------------------------------- balancing

    def _flush(self) -> None:
        """Balance what is in the buffer and write the signs into the books."""
        if not self._buffer.has_news:
            return
        buffer, contents = self._buffer, self._buffer.contents()
        for epoch, rows, where in buffer.new_rows(contents):
            self._monitor.add(epoch, rows, contents.worker[where], contents.step[where])
        for epoch, items in contents.items():
            self._balance(epoch, items)
        buffer.clear(contents, {(book.epoch, worker) for worker, books in enumerate(self._books) for book in books})

    def _balance(self, epoch: int, items: Items) -> None:
        vectors = self._vectors(epoch, items)
        if epoch not in self._sums:
            self._sums[epoch] = Sums(np.zeros(vectors.shape[1], vectors.dtype) if self.shares else None)
        workers, numbers = items.worker.tolist(), items.number.tolist()
        books = {worker: self._open_book(worker, epoch) for worker in set(workers)}
        coins = None
        if self.signs == "probabilistic":
            flips = {
                worker: stream("signs", self._seed, epoch, worker).random(len(book.signs))
                for worker, book in books.items()
            }
            coins = np.array([flips[worker][number] for worker, number in zip(workers, numbers, strict=True)])
        signs = balance(self._sums[epoch], vectors, items.worker, items.lean, coins, self.total)
        if len(books) == 1:
            books[workers[0]].signs[items.number] = signs
        else:
            for worker, number, sign in zip(workers, numbers, signs.tolist(), strict=True):
                books[worker].signs[number] = sign
        self._skipped += int((signs == 0).sum())

    def _vectors(self, epoch: int, items: Items) -> np.ndarray:
        """What is signed: in pair balance the difference of each pair."""
        rows = self._buffer.rows
        differences: np.ndarray = rows[items.first]
        differences -= rows[items.second]
        return differences

    # ------------------------------------------------------------------------------------------ log and state

    def telemetry(self) -> State:
        herding = {} if self._monitor.herding is None else {"herding": self._monitor.herding}
        return {**herding, "skipped": self._skipped}

    def state_dict(self) -> State:
        return {
            "kind": self.kind,
            "version": VERSION,
            **self._facts(),
            "orders": [torch.from_numpy(order.copy()) for order in self._orders],
            "epochs": list(self._epochs),
            "books": [[book.state_dict() for book in books] for books in self._books],
            "sums": [_sums_state(epoch, sums) for epoch, sums in self._sums.items()],
            "buffer": self._buffer.state_dict(),
            "monitor": self._monitor.state_dict(),
            "skipped": self._skipped,
        }

    def load_state_dict(self, state: State) -> None:
        check_state(state, self.kind, self._facts())
        self._orders = [order.numpy().copy() for order in state["orders"]]
        self._epochs = [int(epoch) for epoch in state["epochs"]]
        self._books = [
            [Book.from_state(book, size, self.paired) for book in books]
            for books, size in zip(state["books"], self._sizes, strict=True)
        ]
        self._sums = {int(saved["epoch"]): _sums_from(saved) for saved in state["sums"]}
        self._buffer.load_state_dict(state["buffer"])
        self._monitor.load_state_dict(state["monitor"])
        self._skipped = int(state["skipped"])

    def _facts(self) -> State:
        return {"seed": self._seed, "sizes": self._sizes, "unit": self.unit, "sketch": self.sketch}


def _sums_state(epoch: int, sums: Sums) -> State:
    return {
        "epoch": epoch,
        "shared": None if sums.shared is None else torch.from_numpy(sums.shared.copy()),
        "own": [[worker, torch.from_numpy(own.copy())] for worker, own in sums.own.items()],
        "squares": sums.squares,
        "count": sums.count,
    }


def _sums_from(state: State) -> Sums:
    shared = None if state["shared"] is None else state["shared"].numpy().copy()
    own = {int(worker): own.numpy().copy() for worker, own in state["own"]}
    return Sums(shared, own, float(state["squares"]), int(state["count"]))
