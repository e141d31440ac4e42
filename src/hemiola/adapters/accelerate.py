"""Accelerate: `ordered` puts an order on a prepared loader, `LocalSGD` averages when a period says so.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loader = hemiola.accelerate.ordered(accelerator, loader, model)
    with hemiola.accelerate.LocalSGD(accelerator, model, hemiola.Adaptive(start=4)) as local_sgd:
        ...                                    # the loop as it was

Both are part of ``accelerator.save_state`` and ``load_state``: make them before loading, and load before the loop. A
loaded loader goes on where it was by itself, so nothing needs ``skip_first_batches``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader

from hemiola.adapters.states import gather_states, pick_state
from hemiola.contracts import Order, Period, State
from hemiola.errors import InputError
from hemiola.loops.averager import Averager
from hemiola.loops.sampler import OrderedSampler
from hemiola.period import Constant

# What a DataLoader is told about how to read, apart from which examples.
READING = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


class OrderedShard(DataLoaderShard):
    """A prepared loader of this process's share of the examples, in the order a policy chooses.

    Attributes:
        order: The `OrderedSampler`.
    """

    order: OrderedSampler


def ordered(
    accelerator: Accelerator,
    loader: DataLoader[Any],
    model: nn.Module | None = None,
    order: str | Order = "cd-grab",
    unit: int | None = None,
    seed: int = 0,
    drop_last: bool = False,
    sketch: str | None = None,
) -> OrderedShard:
    """Give a loader that ``accelerator.prepare`` made an order.

    Accelerate deals batches to processes; here the order deals examples, so the prepared loader is replaced by one with
    the same data set, batch size, collate function and workers.

    Args:
        accelerator: Which prepared the loader.
        loader: The prepared loader.
        model: The prepared model, which is watched from now on; None to call ``loader.order.attach(model)`` later.
        order: As for `OrderedSampler`, also the next four.
        unit: Examples that stay together.
        seed: The same on all ranks.
        drop_last: Leave out examples that do not make the same number of units for every rank.
        sketch: What is balanced on.
    """
    if isinstance(getattr(loader, "order", None), OrderedSampler):
        raise InputError("this loader is ordered already")
    if not hasattr(loader, "base_dataloader"):
        raise InputError("hemiola.accelerate.ordered takes the loader that accelerator.prepare returned")
    if type(loader) is DataLoaderDispatcher:
        raise InputError("batches that the main process reads for all cannot be ordered; set dispatch_batches=False")
    base: DataLoader[Any] = loader.base_dataloader
    batches: Any = base.batch_sampler
    while not hasattr(batches, "batch_size") or hasattr(batches, "batch_sampler"):
        inner = getattr(batches, "batch_sampler", None)
        if inner is None:
            raise InputError(f"a loader with a batch sampler of its own cannot be ordered: {type(batches).__name__}")
        batches = inner
    sampler = OrderedSampler(
        base.dataset,  # type: ignore[arg-type]
        order=order,
        unit=unit,
        num_replicas=accelerator.num_processes,
        rank=accelerator.process_index,
        seed=seed,
        drop_last=drop_last,
        sketch=sketch,
    )
    split = accelerator.split_batches and accelerator.num_processes > 1
    size = batches.batch_size // accelerator.num_processes if split else batches.batch_size
    result = OrderedShard(
        base.dataset,
        device=loader.device,  # type: ignore[attr-defined]
        batch_sampler=BatchSampler(sampler, size, bool(batches.drop_last)),
        _drop_last=bool(batches.drop_last),
        _non_blocking=loader._non_blocking,  # type: ignore[attr-defined]
        **{name: getattr(base, name) for name in READING},
    )
    result.order = sampler
    sampler.track(result)  # type: ignore[arg-type]
    known: list[Any] = accelerator._dataloaders
    known[:] = [result if each is loader else each for each in known]
    accelerator.register_for_checkpointing(_AllRanks(sampler))
    if model is not None:
        sampler.attach(model, getattr(accelerator, "scaler", None))
    return result


class LocalSGD:
    """Accelerate's ``LocalSGD``, with any period, wire and overlap; the same call shape.

    ``step()`` may be called as for Accelerate's own, but need not: optimizer steps are counted. Inside the block,
    ``save_state`` saves the averaged weights; evaluate inside ``with local_sgd.averaged():``.

    Args:
        accelerator: Which prepared model and optimizer.
        model: The prepared model.
        local_sgd_steps: Local steps between averagings, or a period.
        enabled: False to leave everything as it is.
        optimizer: The prepared optimizer; by default the only one that the accelerator knows.
        options: As for `Averager`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int | Period,
        enabled: bool = True,
        *,
        optimizer: Any = None,
        **options: Any,
    ) -> None:
        self.averager: Averager | None = None
        if not enabled:
            return
        known = accelerator._optimizers
        if optimizer is None and len(known) != 1:
            raise InputError(f"LocalSGD averages a model with one optimizer, the accelerator has {len(known)}")
        chosen = known[0] if optimizer is None else optimizer
        self.averager = Averager(
            model,
            getattr(chosen, "optimizer", chosen),
            period=Constant(p=local_sgd_steps) if isinstance(local_sgd_steps, int) else local_sgd_steps,
            scaler=getattr(accelerator, "scaler", None),
            **options,
        )
        self._inside = False
        accelerator.register_for_checkpointing(_AllRanks(self.averager))
        accelerator.register_save_state_pre_hook(self._save_averaged)

    def __enter__(self) -> LocalSGD:
        if self.averager is not None:
            self.averager.__enter__()
            self._inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.averager is not None:
            self._inside = False
            self.averager.__exit__(kind, error, trace)

    def step(self) -> None:
        """Accepted, because Accelerate's own needs it; the optimizer's steps are counted."""

    def averaged(self) -> AbstractContextManager[Any]:
        """The averaged weights inside this block, for evaluation; see `Averager.averaged`."""
        return nullcontext() if self.averager is None else self.averager.averaged()

    def _save_averaged(self, models: list[nn.Module], weights: list[dict[str, Tensor]], _: str) -> None:
        if self.averager is None or not self._inside:
            return
        averaged = _inner(self.averager.model)
        for model, found in zip(models, weights, strict=True):
            if _inner(model) is averaged:
                with self.averager.averaged():
                    found.update({key: value.detach().clone() for key, value in averaged.state_dict().items()})


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


class _Stateful(Protocol):
    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


class _AllRanks:
    """The states of all ranks' samplers or averagers, where Accelerate saves what the main process holds."""

    def __init__(self, held: _Stateful) -> None:
        self._held = held

    def state_dict(self) -> State:
        return {"ranks": gather_states(self._held.state_dict())}

    def load_state_dict(self, state: State) -> None:
        from accelerate import PartialState

        place = PartialState()
        self._held.load_state_dict(pick_state(state["ranks"], place.process_index, place.num_processes))
