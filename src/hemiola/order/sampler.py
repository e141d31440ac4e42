"""`OrderedSampler`: the order policies in one's own training loop.

    sampler = hemiola.OrderedSampler(dataset, order="cd-grab")
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
    with sampler.watch(model):
        for epoch in range(epochs):
            for x, y in loader:
                ...                     # the loop as it was

An epoch's life: the loop asks for an iterator (``_enter``: all ranks' orders are asked for); the DataLoader draws
examples, ahead of the loop; the watch tells what was trained on (``trained``), and the rows of whole units go to the
exchange; when the loop asks for the next iterator the epoch is over (``_leave``).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Sampler

from hemiola.contracts import Order, State
from hemiola.errors import InputError, SamplerWarning
from hemiola.order.arguments import dataset_size, own_group, place, policy
from hemiola.order.dealing import Deal, deal, deal_left
from hemiola.order.exchange import Exchange
from hemiola.order.sketch import parse_sketch
from hemiola.order.tally import Tally
from hemiola.order.watch import Scaler, Watch

log = logging.getLogger("hemiola")


class OrderedSampler(Sampler[int]):
    """Hands out a data set's examples in the order a policy chooses; like ``DistributedSampler``.

    Every rank gets its own share of the units, the same number of examples each. Epochs advance by themselves: every
    iterator that is trained on is the next epoch. The policy learns from gradients only inside ``watch``.

    Args:
        dataset: Anything with a length; it is never read.
        order: A policy's name (``hemiola.order.ORDERS``) or a policy.
        unit: Examples that stay together, 1 by default; with a policy, the policy's.
        num_replicas: Ranks; by default those of torch.distributed, or 1.
        rank: This rank; by default that of torch.distributed, or 0.
        seed: The same on all ranks.
        drop_last: Leave out the examples that do not make the same number of units for every rank, instead of
            appending them, some twice, to every epoch.
        sketch: ``"exact"``, ``"fold:K"`` or ``"ghost:R"``; with a policy, the policy's. By default ``ghost:4`` for
            units of one example and ``fold:1024`` for larger ones.
    """

    KIND, VERSION = "ordered-sampler", 1

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
    ) -> None:
        self._examples = dataset_size(dataset)
        self._ranks, self.rank = place(num_replicas, rank)
        self.policy = policy(order, unit, sketch)
        self.seed, self.drop_last = seed, drop_last
        self._deal = deal(self._examples, self.policy.unit, self._ranks, seed, drop_last)
        self._watch: Watch | None = None
        self._model: nn.Module | None = None
        self._group: dist.ProcessGroup | None = None
        self._exchange: Exchange | None = None
        self._saved: tuple[State, bool] | None = None  # for the exchange of a watch that is yet to come
        self._directions: list[Tensor] = []
        self._drawing: object = None
        self._sequence: np.ndarray
        self._resumed: bool
        self._announced = False
        self._begin()
        self._enter(0)

    def _begin(self) -> None:
        self.policy.begin([self._deal.shards.shape[1]] * self._ranks, self.seed, lockstep=True)

    # ------------------------------------------------------------------------------------------------- as a sampler

    def __len__(self) -> int:
        return self._deal.length

    def __iter__(self) -> Iterator[int]:
        """Start the next epoch, or go on with one that was loaded or not trained on; an evaluation starts nothing."""
        # Not a generator: what an iterator means is decided when the loop asks for it, not when it first draws.
        if self._evaluating():
            return iter(self._sequence.tolist())
        if self._watch is not None:
            self._watch.settle()
        if self.position and not self._resumed:
            self._leave()
            self._enter(self.epoch + 1)
        self._resumed, self._issued = False, self.position
        self._drawing = object()
        return self._draw(self._drawing)

    def _draw(self, drawing: object) -> Iterator[int]:
        for example in self._sequence[self.position :].tolist():
            if drawing is not self._drawing:
                return  # left by its loop, but still read ahead
            self._issued += 1
            if self._watch is None:
                self.position += 1
            yield example

    def set_epoch(self, epoch: int) -> None:
        """Accepted, because frameworks call it; epochs advance by themselves, so it changes nothing."""
        if not isinstance(epoch, int) or epoch < 0:
            raise InputError(f"the epoch must be a whole number of at least 0, got {epoch!r}")

    def telemetry(self) -> State:
        """Numbers for a log: ``epoch``, and the policy's ``herding`` bound and ``skipped`` pairs where it has them."""
        return {"epoch": self.epoch, **self.policy.telemetry()}

    # ----------------------------------------------------------------------------------------------------- epochs

    def _enter(self, epoch: int, remainder: np.ndarray | None = None) -> None:
        """Start an epoch: ask for the orders of all ranks; or take what another number of ranks has left of one."""
        self.epoch, self.position, self._issued, self._largest = epoch, 0, 0, 0
        self._resumed = self._strange = self._checked = False
        self._remainder = remainder
        self._tally = Tally(self.policy.unit, self._deal.shards.shape[1])
        if remainder is not None:
            self._orders, self._sequence, self._observed = [], remainder[self.rank], False
            return
        self._orders = [self.policy.sequence(worker, epoch) for worker in range(self._ranks)]
        self._sequence = self._deal.examples(self.rank, self._orders[self.rank])
        self._observed = self.policy.wants(self.rank, epoch)
        if self._exchange is not None:
            self._exchange.begin(epoch, self._orders)
        if self._watch is not None and self._observed:
            self._watch.refresh()

    def _leave(self) -> None:
        """End an epoch: make sure that every rank's policy has seen the same."""
        self._check()
        if self._exchange is not None and self._observed:
            self._exchange.finish()
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in self.policy.telemetry().items())
        log.info("order: epoch %d is over%s", self.epoch, f": {numbers}" if numbers else "")

    def _check(self) -> None:
        """Once per epoch: were the examples that the sampler handed out trained on, each once?"""
        missing = self._issued - self.position
        whole = self.position > 0 and self._issued == len(self._sequence)
        if self._watch is None or self._strange or self._checked or not whole or missing < max(self._largest, 1):
            return
        self._checked = True
        warnings.warn(
            f"{missing} of the {self._issued} examples rank {self.rank}'s sampler handed out in epoch {self.epoch} "
            "were not trained on. If you did not leave the loop early, a framework has sharded the sampler a second "
            "time: tell it not to (Lightning: use_distributed_sampler=False; Accelerate: do not prepare the loader)",
            SamplerWarning,
            stacklevel=4,
        )

    def _evaluating(self) -> bool:
        return self._model is not None and not (self._model.training and torch.is_grad_enabled())

    # -------------------------------------------------------------------------------------- what the watch reports

    def watch(self, model: nn.Module, scaler: Scaler | None = None) -> AbstractContextManager[OrderedSampler]:
        """Learn from the gradients of the training loop in this ``with`` block, which does not change.

        Under torch.distributed every rank must enter it, at the same time.

        Args:
            model: The model that is trained, or its DistributedDataParallel wrapper, batch first.
            scaler: The loop's ``torch.amp.GradScaler``; gradients of steps with different scales are made alike by it.
        """
        return _Watching(self, model, scaler)

    def _open(self, model: nn.Module, scaler: Scaler | None) -> None:
        if self._watch is not None:
            raise InputError("this sampler already watches a model; leave that `with` block first")
        spec = None if self.policy.sketch is None else parse_sketch(self.policy.sketch)
        if spec is not None and self._ranks > 1 and self._group is None:
            self._group = own_group(self._ranks)
        share = None if self._group is None else self._broadcast
        self._watch, self._model = Watch(model, spec, self.seed, self, scaler, share), model
        try:
            self._connect()
        except InputError:
            self._close(failed=True)
            raise

    def _close(self, failed: bool) -> None:
        assert self._watch is not None
        try:
            if not failed:
                self._watch.settle()
                self._check()
                if self._exchange is not None:
                    self._exchange.collect()
        finally:
            self._directions = self._watch.directions() or self._directions
            self._watch.close()
            self._watch = self._model = None

    def _connect(self) -> None:
        """Give the watch its exchange, and what a state or an earlier watch has left for it."""
        assert self._watch is not None
        if self.policy.sketch is None:
            return
        if self._exchange is None:
            units, sliced = self._deal.shards.shape[1], self.policy.sketch == "exact"
            width, dtype = self._watch.width, self._watch.dtype
            self._exchange = Exchange(self.policy, self._ranks, units, width, dtype, self._group, sliced)
            self._exchange.begin(self.epoch, self._orders)
            if self._saved is not None:
                self._exchange.load_state_dict(*self._saved)
        self._saved = None
        self._watch.adopt(self._directions)

    def _broadcast(self, found: Tensor) -> Tensor:
        shared = found.cpu().contiguous()
        dist.broadcast(shared, src=0, group=self._group)
        return shared

    def fits_units(self, examples: int) -> bool:
        """Whether the next ``examples`` of the epoch lie in one unit."""
        return self.position % self.policy.unit + examples <= self.policy.unit

    def wants_rows(self) -> bool:
        """Whether the next batch should come with rows."""
        return self._observed and not self._strange and self.position < self._deal.ordered

    def trained(self, examples: int, rows: Tensor | None) -> None:
        """Called by the watch: the next ``examples`` of the epoch were trained on."""
        start, self.position = self.position, self.position + examples
        self._largest = max(self._largest, examples)
        if self.position > self._issued:
            self._warn_surplus()
        self.position = min(self.position, len(self._sequence))
        if rows is None or self._strange or self._exchange is None:
            return
        if not self._announced:
            assert self._watch is not None
            self._announced = True
            log.info("order: balancing %s on %s", self.policy.sketch, self._watch.method)
        for at, means in self._tally.add(start, examples, rows.detach().cpu()):
            self._exchange.put(at, means)

    def _warn_surplus(self) -> None:
        if not self._strange:
            warnings.warn(
                f"rank {self.rank}'s model was trained on {self.position} examples in epoch {self.epoch}, but its "
                f"sampler has handed out only {self._issued}. Either a framework has replaced the sampler (Lightning: "
                "use_distributed_sampler=False), or the loop runs the model several times per batch. This epoch is not "
                "balanced",
                SamplerWarning,
                stacklevel=2,
            )
        self._strange = True

    # ------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """Everything needed to go on from here, in mid-epoch too: plain numbers and tensors.

        Save it on every rank to go on exactly. A state saved on one rank only can be loaded by all (not with
        ``sketch = "exact"``); then the last few units of the other ranks are not balanced in this epoch.
        """
        if self._watch is not None:
            self._watch.settle()
            self._directions = self._watch.directions() or self._directions
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
            "position": self.position,
            "shards": torch.from_numpy(self._deal.shards.copy()),
            "rests": torch.from_numpy(self._deal.rests.copy()),
            "remainder": None if self._remainder is None else torch.from_numpy(self._remainder.copy()),
            "policy": self.policy.state_dict(),
            "exchange": exchange,
            "tally": self._tally.state_dict(),
            "directions": [each.cpu() for each in self._directions],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a state of the same data set, order and seed; it may come from another number of ranks."""
        if state.get("kind") != self.KIND or state.get("version") != self.VERSION:
            raise InputError(
                f"this is not a state of {self.KIND} version {self.VERSION}: "
                f"kind {state.get('kind')!r}, version {state.get('version')!r}"
            )
        for name, value in self._facts().items():
            if state[name] != value:
                raise InputError(f"the sampler's state was saved with {name} = {state[name]!r}, this one has {value!r}")
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
        self.policy.begin([dealt.shards.shape[1]] * ranks, self.seed, lockstep=True)
        self.policy.load_state_dict(state["policy"])
        self._exchange, self._saved, self._directions = None, None, list(state["directions"])
        epoch, position = int(state["epoch"]), int(state["position"])
        remainder = None if state["remainder"] is None else state["remainder"].numpy().copy()
        if ranks == self._ranks:
            self._deal = dealt
            self._enter(epoch, remainder)
            self.position, self._resumed = position, position < len(self._sequence)
            if own:
                self._tally.load_state_dict(state["tally"])
            if state["exchange"] is not None:
                self._saved = state["exchange"], own
        else:
            self._take_over(dealt, epoch, position, remainder)
        if self._watch is not None:
            self._connect()

    def _take_over(self, dealt: Deal, epoch: int, position: int, remainder: np.ndarray | None) -> None:
        """Go on with what another number of ranks has left."""
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
        left = deal_left(remainder[:, position:], self._ranks, self.drop_last)
        self._deal, orders = dealt.again(self._examples, self._ranks, orders, self.drop_last)
        self._begin()
        if hasattr(self.policy, "adopt"):
            self.policy.adopt(epoch + 1, orders)
        if left.shape[1]:
            self._enter(epoch, left)
        else:
            self._enter(epoch + 1)

    def _facts(self) -> State:
        return {
            "examples": self._examples,
            "order": getattr(self.policy, "kind", type(self.policy).__name__),
            "unit": self.policy.unit,
            "sketch": self.policy.sketch,
            "seed": self.seed,
            "drop_last": self.drop_last,
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
        self._sampler._close(failed=kind is not None)
