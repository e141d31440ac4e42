"""The Hugging Face Trainer: `OrderedMixin` chooses the order, `LocalSteps` the period.

    class MyTrainer(hemiola.transformers.OrderedMixin, Trainer):
        order = "cd-grab"

    trainer = MyTrainer(..., callbacks=[hemiola.transformers.LocalSteps(hemiola.Adaptive(start=4))])

Either works without the other. Their states are in ``checkpoint-N/``, a file for each rank, and
``trainer.train(resume_from_checkpoint=True)`` takes them up.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers import trainer as trainer_module

from hemiola.adapters.accelerate import OrderedShard, ordered
from hemiola.contracts import Order, Period, State
from hemiola.errors import InputError
from hemiola.loops.averager import Averager

CHECKPOINT = "checkpoint-{step}"
ORDER_FILE, PERIOD_FILE = "hemiola-order-{rank}.pt", "hemiola-period-{rank}.pt"


class OrderedMixin:
    """For a subclass of ``transformers.Trainer``: trains in the order a policy chooses.

    Attributes:
        order, order_unit, order_seed, order_sketch: As for `OrderedSampler`; set them in the subclass.
        ordered_loader: The training loader; its ``order`` is the sampler.
    """

    order: str | Order = "cd-grab"
    order_unit: int | None = None
    order_seed: int = 0
    order_sketch: str | None = None
    ordered_loader: OrderedShard | None = None
    _order_watching: AbstractContextManager[Any] | None = None

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The Trainer's loader, in an order."""
        trainer: Any = self
        prepared = super().get_train_dataloader()  # type: ignore[misc]
        self.ordered_loader = ordered(
            trainer.accelerator,
            prepared,
            None,
            order=self.order,
            unit=self.order_unit,
            seed=self.order_seed,
            sketch=self.order_sketch,
        )
        return self.ordered_loader  # type: ignore[return-value]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; the model is watched from its first epoch on."""
        try:
            result = super().train(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self._stop_watching(error)
            raise
        self._stop_watching(None)
        return result

    def _stop_watching(self, error: BaseException | None) -> None:
        watching, self._order_watching = self._order_watching, None
        if watching is not None:
            watching.__exit__(None if error is None else type(error), error, None)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        if self.ordered_loader is not None:
            folder = Path(trainer._get_output_dir(trial=None)) / CHECKPOINT.format(step=trainer.state.global_step)
            _save(folder / ORDER_FILE.format(rank=trainer.args.process_index), self.ordered_loader.order.state_dict())

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        given = kwargs.get("resume_from_checkpoint", args[3] if len(args) > 3 else None)
        if given is not None and self.ordered_loader is not None:
            state = _load(Path(given), ORDER_FILE, trainer.args.process_index)
            if state is None:
                raise InputError(f"{given} was not saved by a Trainer with an order; start without the checkpoint")
            self.ordered_loader.order.load_state_dict(state)
        return found

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"] if "model" in kwargs else args[0]
        if self._order_watching is None:
            if self.ordered_loader is None:
                raise InputError("this Trainer's get_train_dataloader was overridden by a class before OrderedMixin")
            trainer: Any = self
            watching = self.ordered_loader.order.watch(model, getattr(trainer.accelerator, "scaler", None))
            watching.__enter__()
            self._order_watching = watching
        # An evaluation leaves the model in eval mode, in which an iterator of the loader would be an evaluation's, too.
        model.train()
        with _nothing_skipped():
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]


@contextmanager
def _nothing_skipped() -> Iterator[None]:
    """A resumed order hands out what is left; the Trainer would skip as many batches once more."""
    skip = trainer_module.skip_first_batches
    trainer_module.skip_first_batches = lambda loader, num_batches=0: loader
    try:
        yield
    finally:
        trainer_module.skip_first_batches = skip


class LocalSteps(TrainerCallback):
    """Ranks take local steps and average when a period says so, instead of exchanging gradients every step.

    What is evaluated and saved are the averaged weights. A resumed run goes on from them, with the period where it was
    and, as the Trainer saves it, rank 0's optimizer state.

    Args:
        period: When to average; `Adaptive` by default.
        options: As for `Averager`.

    Attributes:
        averager: The averager; None before training.
    """

    def __init__(self, period: Period | None = None, **options: Any) -> None:
        self._period, self._options = period, options
        self.averager: Averager | None = None
        self._averaged: AbstractContextManager[nn.Module] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the averager and start from the same weights."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self.averager = Averager(
            _wrapper_of(model) or model,
            getattr(optimizer, "optimizer", optimizer),
            period=self._period,
            steps=state.max_steps,
            **self._options,
        )
        if state.global_step:
            folder = Path(args.output_dir or ".") / CHECKPOINT.format(step=state.global_step)
            saved = _load(folder, PERIOD_FILE, args.process_index)
            if saved is not None:
                self.averager.load_state_dict(saved)
        self.averager.__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the averaged weights to what comes now, if it evaluates or saves."""
        if self.averager is not None and self._averaged is None and (control.should_evaluate or control.should_save):
            self._averaged = self.averager.averaged()
            self._averaged.__enter__()

    on_epoch_end = on_step_end

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go on with this rank's own weights."""
        averaged, self._averaged = self._averaged, None
        if averaged is not None:
            averaged.__exit__(None, None, None)

    on_epoch_begin = on_step_begin

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add this rank's state to the checkpoint."""
        if self.averager is not None:
            folder = Path(args.output_dir or ".") / CHECKPOINT.format(step=state.global_step)
            _save(folder / PERIOD_FILE.format(rank=args.process_index), self.averager.state_dict())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Average a last time."""
        self.on_step_begin(args, state, control)
        if self.averager is not None:
            self.averager.__exit__(None, None, None)


def _wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel around a model. The Trainer shows callbacks the model only."""
    found = (each for each in gc.get_objects() if isinstance(each, DistributedDataParallel) and each.module is model)
    return next(found, None)


def _save(path: Path, state: State) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _load(folder: Path, name: str, rank: int) -> State | None:
    """This rank's state; rank 0's where the number of ranks has grown."""
    for each in (rank, 0):
        path = folder / name.format(rank=each)
        if path.exists():
            state: State = torch.load(path, weights_only=True)
            return state
    return None
