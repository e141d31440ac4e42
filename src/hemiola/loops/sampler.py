"""`OrderedSampler`: the order policies in one's own training loop.

    sampler = hemiola.OrderedSampler(dataset, order="cd-grab")
    loader = sampler.track(DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4))
    with sampler.watch(model):
        for epoch in range(epochs):
            for x, y in loader:
                ...                     # the loop as it was

An epoch's life: the loop asks for an iterator (``_enter``: all ranks' orders are asked for); the DataLoader draws
examples, ahead of the loop; the watch asks which examples a forward pass was given (``claim``) and tells when they were
trained on (``trained``), and the rows of whole units go to the exchange; when the loop asks for the next iterator the
epoch is over (``_leave``). Examples are known by their numbers where the loader is tracked (``tracking.py``) or the
loop says so (``visiting``), and counted otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from hemiola.contracts import Order, State
from hemiola.errors import InputError
from hemiola.gradients.sketch import parse_sketch
from hemiola.loops.arguments import dataset_size, own_group, place, policy
from hemiola.loops.deal import Deal, deal_left
from hemiola.loops.deal import deal as deal_units
from hemiola.loops.deck import Counters, DeckEpoch, DeckRows
from hemiola.loops.epoch import Claim, Epoch, IndexIterator
from hemiola.loops.following import Following
from hemiola.loops.identity import track
from hemiola.loops.notices import Notices, refuse_sharding, who_draws
from hemiola.loops.rows import RowExchange
from hemiola.loops.tally import Tally
from hemiola.loops.telemetry import Log, Logs
from hemiola.loops.watch import Scaler, Watch
from hemiola.options import one_of
from hemiola.order.scored import scores_of
from hemiola.own import checked_sequence
from hemiola.state import own_state

Loader = TypeVar("Loader", bound=DataLoader[Any])

log = logging.getLogger("hemiola")


class OrderedSampler(Sampler[int]):
    """Hands out a data set's examples in the order a policy chooses; like ``DistributedSampler``.

    Every rank gets its own share of the units, the same number of examples each. Epochs advance by themselves: every
    iterator that is trained on is the next epoch. The policy learns from gradients only inside ``watch``.

    Args:
        dataset: Anything with a length; it is never read. An order by score asks it for ``scores()``.
        order: A policy's name (``hemiola.order.ORDERS``) or a policy.
        unit: Examples that stay together, 1 by default; with a policy, the policy's.
        num_replicas: Ranks; by default those of torch.distributed, or 1.
        rank: This rank; by default that of torch.distributed, or 0.
        seed: The same on all ranks.
        drop_last: Leave out the examples that do not make the same number of units for every rank, instead of
            appending them, some twice, to every epoch.
        deal: ``"shards"``, or ``"deck"``: one order over all examples, and every rank takes the next ones when it is
            ready, so that slow ranks take fewer and every example comes once an epoch. Then ``len`` is an estimate,
            and ``state_dict`` is for all ranks to call together.
        sketch: ``"exact"``, ``"fold:K"`` or ``"ghost:R"``; with a policy, the policy's. By default ``ghost:4`` for
            units of one example and ``fold:1024`` for larger ones.
    """

    KIND, VERSION = "ordered-sampler", 3

    def __init__(
        self,
        dataset: Sized,
        order: str | Order = "cd-grab",
        unit: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        sketch: str | None = None,
        deal: Literal["shards", "deck"] = "shards",
    ) -> None:
        self._examples = dataset_size(dataset)
        self._ranks, self.rank = place(num_replicas, rank)
        self.policy = policy(order, unit, sketch)
        self._scores = scores_of(dataset) if self.policy.wants_scores else None
        self.seed, self.drop_last = seed, drop_last
        self._counters = Counters(self._ranks) if one_of("deal", deal, ["shards", "deck"]) == "deck" else None
        # For the policy, and here, a deck is the shard of one rank that has everything.
        self._hands, self._hand = (self._ranks, self.rank) if self._counters is None else (1, 0)
        self._deal = deal_units(self._examples, self.policy.unit, self._hands, seed, drop_last)
        self._watch: Watch | None = None
        self._group: dist.ProcessGroup | None = None
        self._exchange: RowExchange | DeckRows | None = None
        self._saved: tuple[State, bool] | None = None  # for the exchange of a watch that is yet to come
        self._directions: list[Tensor] = []
        self._drawing: IndexIterator | None = None
        self._unwatched_draws = self._loaded = False
        self._notices, self._logs = Notices(self.rank), Logs("order")
        self._following = Following(self._notices)
        self._announced = False
        self._begin(self._deal)
        self._enter(0)

    def _begin(self, dealt: Deal) -> None:
        self.policy.begin([dealt.shards.shape[1]] * dealt.ranks, self.seed, lockstep=True)
        self.policy.meet([dealt.units[shard].ravel() for shard in dealt.shards], self._examples, self._scores)

    # ------------------------------------------------------------------------------------------------- as a sampler

    def __len__(self) -> int:
        return self._deal.length if self._counters is None else -(-self._deal.length // self._ranks)

    def __iter__(self) -> Iterator[int]:
        """Start the next epoch, or go on with one that was loaded or not trained on; an evaluation starts nothing."""
        # Not a generator: what an iterator means is decided when the loop asks for it, not when it first draws.
        refuse_sharding(self)
        self._following.asked_in_eval = self._following.evaluating()
        if self._following.asked_in_eval:
            if self._following.untried():
                self._now.issued = len(self._now)  # it may turn out to be training, of a model in eval mode
            return iter(self._now.sequence.tolist())
        self._following.drawn_by = who_draws()
        if self._watch is not None:
            self._watch.settle()
        whole = self._now.issued == len(self._now)
        if self._unwatched_draws and (whole or not (self._watch is not None or self._loaded)):
            self._now.pass_drawn()
        self._unwatched_draws = False
        if self._now.done > self._now.start or self._now.empty:
            self._leave()
            self._enter(self.epoch + 1)
        elif self._watch is not None and whole and not self._watch.seen.evaluations:
            self._check_learnt()  # all of it was handed out, and none of it has come back
        self._drawing = IndexIterator(self._now, self._drew)
        return self._drawing

    def _drew(self, drawing: IndexIterator) -> bool:
        """Called before an example is handed out; False to an iterator that its loop has left but still reads ahead."""
        if drawing is not self._drawing:
            return False
        self._unwatched_draws |= self._watch is None
        return True

    @property
    def _now(self) -> Epoch:
        return self._following.now

    @property
    def epoch(self) -> int:
        """The epoch at hand, from 0."""
        return self._now.number

    @property
    def position(self) -> int:
        """Examples of the epoch that the loop is through with; without a watch, those that were drawn."""
        if self._watch is None and self._unwatched_draws:
            return self._now.issued
        return self._now.done

    def set_epoch(self, epoch: int) -> None:
        """Accepted, because frameworks call it; epochs advance by themselves, so it changes nothing."""
        if not isinstance(epoch, int) or epoch < 0:
            raise InputError(f"the epoch must be a whole number of at least 0, got {epoch!r}")

    def telemetry(self) -> State:
        """Numbers for a log.

        ``epoch``; of that epoch so far the examples ``handed_out`` (workers read ahead of the loop), ``trained_on`` and
        ``learnt_from``, whose gradients the policy was shown; and what the policy tells, such as its ``herding`` bound
        and ``skipped`` pairs.
        """
        if self._watch is not None:
            self._watch.settle()
        now = self._now
        counts = {"handed_out": now.issued, "trained_on": now.trained, "learnt_from": now.learnt}
        return {"epoch": self.epoch, **counts, **self.policy.telemetry()}

    def log_to(self, log: Log) -> None:
        """Call ``log({"order/herding": ..., ...}, epoch)`` with what `telemetry` has, at the end of every epoch.

        ``hemiola.loggers`` has such functions for TensorBoard, Weights & Biases and MLflow.
        """
        self._logs.add(log)

    # ----------------------------------------------------------------------------------------------------- epochs

    def _enter(self, epoch: int, remainder: np.ndarray | None = None) -> None:
        """Start an epoch: ask for the orders of all ranks; or take what another number of ranks has left of one."""
        self._remainder, self._loaded = remainder, False
        self._tally = Tally(self.policy.unit, self._deal.shards.shape[1])
        self._ordered_done = 0
        if remainder is not None:
            self._orders, self._observed = [], False
            self._following.enter(Epoch(epoch, remainder[self.rank]))
        else:
            units = self._deal.shards.shape[1]
            self._orders = [checked_sequence(self.policy, worker, epoch, units) for worker in range(self._hands)]
            self._observed = self.policy.wants(self._hand, epoch)
            examples = self._deal.examples(self._hand, self._orders[self._hand])
            if self._counters is None:
                self._following.enter(Epoch(epoch, examples))
            else:
                take = self._counters.of(epoch)
                self._following.enter(DeckEpoch(epoch, examples, take, self._ranks, self.policy.unit))
            if self._exchange is not None:
                self._exchange.begin(epoch)
        if self._watch is not None:
            self._now.watched = True
            self._watch.refresh(self._observed)

    def _leave(self) -> None:
        """End an epoch: make sure that every rank's policy has seen the same."""
        self._check()
        if self._exchange is not None and self._observed:
            self._exchange.finish()
        self._logs.tell(self.telemetry(), self.epoch)
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in self.policy.telemetry().items())
        log.info("order: epoch %d is over%s", self.epoch, f": {numbers}" if numbers else "")

    def _check(self) -> None:
        """At an epoch's end: does what was handed out agree with what was trained on, and was anything learnt?"""
        now, whole = self._now, self._now.issued == len(self._now)
        if self._watch is None:
            if whole and self._observed and not now.watched:
                self._notices.unwatched(now, self._facts()["order"])
            return
        missing = now.issued - now.done - self._watch.pending
        if not self._following.tracked and now.done > now.start and not now.spoilt:
            if whole and (missing >= max(now.largest, 1) or (missing > 0 and now.uneven)):
                self._notices.missing(now, missing)
            elif not whole and (now.unused or now.uneven):
                self._notices.uncertain(now)
        self._check_learnt()

    def _check_learnt(self) -> None:
        now, watch = self._now, self._watch
        assert watch is not None
        assert self._following.model is not None
        used = now.trained > 0 or (now.issued == len(now) and not watch.seen.evaluations)
        if self._observed and used and not now.empty and not now.learnt and not now.spoilt and not watch.pending:
            self._notices.learnt_nothing(now, watch, self._following.model)

    # ------------------------------------------------------------------------------------- which batch is at hand

    def track(self, loader: Loader) -> Loader:
        """Let example numbers travel with the batches of a DataLoader that draws from this sampler.

        From now on it is known which examples a forward pass was given, whatever was skipped, dropped by collate,
        reordered or prefetched. The batches do not change, and neither does the loader, which is returned. Track a
        loader when it is made, before it is asked for an iterator.
        """
        track(loader, self._following)
        self._following.tracked = True
        return loader

    def visiting(self, examples: Iterable[int] | Tensor) -> None:
        """Say which examples the next forward passes are given, in this order, until something else is said or yielded.

        For loops that prefetch or put batches together in a way of their own; call it right before the forward pass.
        """
        self._following.visiting(examples)

    def tell_losses(self, losses: Tensor) -> None:
        """Say the losses of the examples of the last forward pass, one each, for an order that wants them.

        Call it before the next forward pass, as in ``losses = F.cross_entropy(model(x), y, reduction="none")``,
        ``sampler.tell_losses(losses)``, ``losses.mean().backward()``. Other orders take no note of it.
        """
        if self._watch is not None:
            self._watch.tell(losses)

    # -------------------------------------------------------------------------------------- what the watch reports

    def watch(self, model: nn.Module, scaler: Scaler | None = None) -> AbstractContextManager[OrderedSampler]:
        """Learn from the gradients of the training loop in this ``with`` block, which does not change.

        Under torch.distributed every rank must enter it, at the same time.

        Args:
            model: The model that is trained, or its DistributedDataParallel wrapper, batch first.
            scaler: The loop's ``torch.amp.GradScaler``; gradients of steps with different scales are made alike by it.
        """
        return _Watching(self, model, scaler)

    def attach(self, model: nn.Module, scaler: Scaler | None = None) -> None:
        """Start what `watch` does in its block, for loops that are no block of code; end it with `detach`."""
        self._open(model, scaler)

    def detach(self) -> None:
        """End what `attach` has started. Every rank must call it; nothing happens if nothing is attached."""
        if self._watch is not None:
            self._close(failed=False)

    def _open(self, model: nn.Module, scaler: Scaler | None) -> None:
        if self._watch is not None:
            raise InputError("this sampler already watches a model; leave that `with` block first")
        spec = None if self.policy.sketch is None else parse_sketch(self.policy.sketch)
        if spec is not None and spec.int8:
            raise InputError(
                f"sketch = {self.policy.sketch!r}: int8 sketches are for the clusters of an experiment; in one's own "
                "loop rows travel behind the training, so leave ':int8' out"
            )
        if self._learns and self._ranks > 1 and self._group is None:
            self._group = own_group(self._ranks)
        share = None if self._group is None else self._broadcast
        losses = self.policy.wants_losses
        self._watch = Watch(model, spec, self.seed, self, scaler, share, self._following.modes, losses)
        self._following.model = model
        self._watch.refresh(False)
        self._now.watched = True
        try:
            self._connect()
        except InputError:
            self._close(failed=True)
            raise

    def _close(self, failed: bool, abandoned: bool = False) -> None:
        """End the watch; ``abandoned`` where a generator that was suspended in it is closed.

        That may be the garbage collector's doing, when the process ends at the latest, and touching the tensors that
        it collects makes torch abort: then no directions are kept, and another watch finds its own.
        """
        assert self._watch is not None
        try:
            if not failed:
                self._watch.settle()
                self._check()
                if self._exchange is not None:
                    self._exchange.pause()
                if self._now.done == len(self._now):
                    self._logs.tell(self.telemetry(), self.epoch)
        finally:
            if not abandoned:
                self._directions = self._watch.directions() or self._directions
            self._watch.close()
            self._watch = self._following.model = None

    def _connect(self) -> None:
        """Give the watch its exchange, and what a state or an earlier watch has left for it."""
        assert self._watch is not None
        if not self._learns:
            return
        if self._exchange is None:
            units = self._deal.shards.shape[1]
            sliced = self.policy.sketch == "exact" and self.policy.slices and not self.policy.wants_losses
            width, dtype = self._watch.width, self._watch.dtype
            if self._counters is not None and self._group is not None:
                self._exchange = DeckRows(self.policy, width, dtype, self._group)
            else:
                self._exchange = RowExchange(self.policy, self._hands, units, width, dtype, self._group, sliced)
            self._exchange.begin(self.epoch)
            if self._saved is not None:
                self._exchange.load_state_dict(*self._saved)
        self._saved = None
        self._watch.adopt(self._directions)

    @property
    def _learns(self) -> bool:
        """Whether the policy wants to be shown anything."""
        return self.policy.sketch is not None or self.policy.wants_losses

    def _broadcast(self, found: Tensor) -> Tensor:
        shared = found.cpu().contiguous()
        dist.broadcast(shared, src=0, group=self._group)
        return shared

    def claim(self, given: list[Tensor]) -> Claim:
        """Called by the watch: which examples is this forward pass given?"""
        assert self._watch is not None
        if self._ranks > 1 and self._drawing is None and self._now.issued == 0 and not self._following.explicit:
            self._notices.replaced(self._ranks)
        return self._following.claim(given, self._watch.pending)

    def fits_units(self, claim: Claim) -> bool:
        """Called by the watch: do these examples lie in one unit?"""
        units = self._following.places(claim) // self.policy.unit
        return len(units) == 0 or bool(units.min() == units.max())

    def wants_rows(self, claim: Claim) -> bool:
        """Called by the watch: should these examples come with rows?"""
        if not self._observed or claim.epoch is not self._now or claim.epoch.spoilt:
            return False
        places = self._following.places(claim)
        return len(places) > 0 and bool(places.min() < self._deal.ordered)

    def unused(self, claim: Claim) -> None:
        """Called by the watch: these examples were not trained on after all."""
        claim.epoch.unused += 1

    def trained(self, claim: Claim, rows: Tensor | None) -> None:
        """Called by the watch: these examples were trained on."""
        self._unwatched_draws = self._loaded = False
        epoch = claim.epoch
        places, done = self._following.trained(claim)
        fresh = epoch.train(places, claim.examples) & (places < self._deal.ordered)
        if epoch is not self._now or not self._observed or self._exchange is None:
            return
        if rows is None or epoch.spoilt:
            rows, places = None, places[:0]
        elif not fresh.all():
            places, rows = places[fresh], rows if len(rows) == 1 else rows[torch.from_numpy(fresh)]
        self._learn(places, rows, done[done < self._deal.ordered])

    def _learn(self, places: np.ndarray, rows: Tensor | None, done: np.ndarray) -> None:
        assert self._exchange is not None
        assert self._watch is not None
        order, unit = self._orders[self._hand], self.policy.unit
        if rows is not None and not self._announced:
            self._announced = True
            what = f"balancing {self.policy.sketch}" if self.policy.sketch else f"{self.policy.kind},"
            log.info("order: %s on %s", what, self._watch.method)
        self._now.learnt += len(places)
        self._ordered_done += len(done)
        means = None if rows is None else rows.detach().cpu()
        complete = self._tally.add(order[places // unit], means, order[done // unit])
        if complete is not None:
            self._exchange.put(*complete)
        self._exchange.advance(self._ordered_done // unit)

    # ------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """Everything needed to go on from here, in mid-epoch too: plain numbers and tensors.

        Save it on every rank to go on exactly. A state saved on one rank only can be loaded by all (not with
        ``sketch = "exact"``); then the last few units of the other ranks are not balanced in this epoch.
        """
        if self._watch is not None:
            self._watch.settle()
            self._directions = self._watch.directions() or self._directions
        elif self._unwatched_draws:
            self._now.pass_drawn()
        exchange = None if self._saved is None else self._saved[0]
        if self._exchange is not None:
            self._exchange.collect()
            exchange = self._exchange.state_dict()
        return {
            "kind": self.KIND,
            "version": self.VERSION,
            **self._facts(),
            "ranks": self._ranks,
            "rank": self.rank,
            "epoch": self.epoch,
            "position": self._now.done,
            "progress": self._progress(),
            "shards": torch.from_numpy(self._deal.shards.copy()),
            "rests": torch.from_numpy(self._deal.rests.copy()),
            "remainder": None if self._remainder is None else torch.from_numpy(self._remainder.copy()),
            "policy": self.policy.state_dict(),
            "exchange": exchange,
            "tally": self._tally.state_dict(),
            "directions": [each.cpu() for each in self._directions],
        }

    def _progress(self) -> State:
        """How far the epoch is; of a deck, what any rank is through with."""
        now, shared = self._now, {}
        if isinstance(now, DeckEpoch) and self._ranks > 1:
            shared = {"passed": torch.from_numpy(now.everybody(self._group))}
        return now.state_dict() | shared

    def load_state_dict(self, state: State) -> None:
        """Go on from a state of the same data set, order and seed; it may come from another number of ranks."""
        own_state(state, self.KIND, self.VERSION, self._facts())
        if self._counters is not None:
            self._load_deck(state)
            return
        ranks, own = int(state["ranks"]), state["rank"] == self.rank
        if self.policy.sketch == "exact" and ranks == self._ranks and not own:
            raise InputError(
                f"with sketch = 'exact' every rank loads its own state; rank {self.rank} got rank {state['rank']}'s"
            )
        if self._exchange is not None:
            self._exchange.collect()
        if self._watch is not None:
            self._watch.forget()
        dealt = Deal(self._deal.units, state["shards"].numpy().copy(), state["rests"].numpy().copy())
        self._begin(dealt)
        self.policy.load_state_dict(state["policy"])
        self._exchange, self._saved, self._directions = None, None, list(state["directions"])
        epoch, position = int(state["epoch"]), int(state["position"])
        remainder = None if state["remainder"] is None else state["remainder"].numpy().copy()
        if ranks == self._ranks:
            self._deal = dealt
            self._enter(epoch, remainder)
            self._now.load_state_dict(state["progress"], own)
            self._loaded = True
            if position == len(self._now):
                self._now.start = 0  # it is over, and the next iterator is the next epoch
            self._ordered_done = self._now.ordered_done(self._deal.ordered)
            if own:
                self._tally.load_state_dict(state["tally"])
            if state["exchange"] is not None:
                self._saved = state["exchange"], own
        else:
            self._take_over(dealt, epoch, state, remainder)
        if self._watch is not None:
            self._connect()

    def _load_deck(self, state: State) -> None:
        """Any rank's state does for all: a deck knows nothing of ranks but what all of them are through with."""
        assert self._counters is not None
        if self._watch is not None:
            self._watch.forget()
        self._begin(self._deal)
        self.policy.load_state_dict(state["policy"])
        self._exchange, self._saved, self._directions = None, None, list(state["directions"])
        self._counters.begin_again()
        self._enter(int(state["epoch"]))
        now, progress = self._now, state["progress"]
        assert isinstance(now, DeckEpoch)
        passed = np.zeros(len(now.sequence), bool)
        if progress["passed"] is None:
            passed[: progress["done"]] = True
        elif progress["passed"].dtype == torch.bool:
            passed[:] = progress["passed"].numpy()
        else:
            passed[:] = np.unpackbits(progress["passed"].numpy())[: len(passed)].astype(bool)
        own = state["rank"] == self.rank
        now.go_on(passed, int(progress["trained"]) if own else 0, int(progress["learnt"]) if own else 0)
        self._loaded = True
        if passed.all():
            now.start = 0  # it is over, and the next iterator is the next epoch
        self._ordered_done = now.ordered_done(self._deal.ordered)
        if own and state["ranks"] == self._ranks:
            self._tally.load_state_dict(state["tally"])
        if self._watch is not None:
            self._connect()

    def _take_over(self, dealt: Deal, epoch: int, state: State, remainder: np.ndarray | None) -> None:
        """Go on with what another number of ranks has left."""
        position = int(state["position"])
        whole = position >= (dealt.length if remainder is None else remainder.shape[1])
        if remainder is None:
            # A finished epoch has decided the next orders, unless other ranks hold a part of what decides.
            decided = epoch + 1 if whole and self.policy.sketch != "exact" else epoch
            orders = [self.policy.sequence(worker, epoch) for worker in range(dealt.ranks)]
            remainder = np.stack([dealt.examples(worker, order) for worker, order in enumerate(orders)])
            if decided > epoch:
                orders = [self.policy.sequence(worker, decided) for worker in range(dealt.ranks)]
        else:
            orders = [self.policy.sequence(worker, epoch + 1) for worker in range(dealt.ranks)]
        lefts = remainder[:, position:].copy()
        saved = Epoch(epoch, remainder[state["rank"]])
        saved.load_state_dict(state["progress"], own=True)
        lefts[state["rank"]] = saved.left()  # of the other ranks it is known only how far they are
        left = deal_left(lefts, self._ranks, self.drop_last)
        self._deal, orders = dealt.again(self._examples, self._ranks, orders, self.drop_last)
        self._begin(self._deal)
        self.policy.adopt(epoch + 1, orders)
        if left.shape[1]:
            self._enter(epoch, left)
        else:
            self._enter(epoch + 1)

    def _facts(self) -> State:
        return {
            "examples": self._examples,
            "order": self.policy.kind,
            "unit": self.policy.unit,
            "sketch": self.policy.sketch,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "deal": "shards" if self._counters is None else "deck",
        }


class _Watching(AbstractContextManager["OrderedSampler"]):
    """The block of `OrderedSampler.watch`; not a generator, which would run its end when it is garbage-collected."""

    def __init__(self, sampler: OrderedSampler, model: nn.Module, scaler: Scaler | None) -> None:
        self._sampler, self._model, self._scaler = sampler, model, scaler

    def __enter__(self) -> OrderedSampler:
        self._sampler._open(self._model, self._scaler)
        return self._sampler

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sampler._close(failed=kind is not None, abandoned=kind is GeneratorExit)
