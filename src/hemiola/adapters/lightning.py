"""Lightning: `Ordered`, a callback that chooses the order, and `LocalSteps`, a strategy that chooses the period.

    trainer = L.Trainer(
        strategy=hemiola.lightning.LocalSteps(hemiola.Adaptive(start=4)),
        callbacks=[hemiola.lightning.Ordered("cd-grab")],
    )

Either works without the other. The period is a strategy because a strategy owns what wraps the model, what a checkpoint
holds, and what is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from hemiola.adapters.states import gather_states, pick_state
from hemiola.contracts import Order, Period, State
from hemiola.errors import InputError
from hemiola.loops.averager import Averager, Record
from hemiola.loops.sampler import OrderedSampler

CHECKPOINT_KEY = "hemiola_averager"


class Ordered(Callback):
    """Trains in the order a policy chooses: gives the training loader an `OrderedSampler`, and shows it the gradients.

    Lightning's own distributed sampler is not used for training, whatever ``use_distributed_sampler`` says. What the
    sampler tells is logged at the end of every epoch as ``order/...``, and its state is part of every checkpoint.

    Args:
        order, unit, seed, drop_last, sketch: As for `OrderedSampler`.

    Attributes:
        sampler: The sampler; None before the training data are set up.
    """

    def __init__(
        self,
        order: str | Order = "cd-grab",
        unit: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        sketch: str | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "order": order,
            "unit": unit,
            "seed": seed,
            "drop_last": drop_last,
            "sketch": sketch,
        }
        self.sampler: OrderedSampler | None = None
        self._loaded: list[State] | None = None
        self._watching: AbstractContextManager[OrderedSampler] | None = None
        self._undo: list[Callable[[], None]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the place of Lightning's choice of a sampler, for training loaders only."""
        if stage != "fit":
            return
        connector: Any = trainer._data_connector
        prepare = connector._prepare_dataloader

        def prepare_ordered(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
            if mode != RunningStage.TRAINING:
                return prepare(dataloader, shuffle=shuffle, mode=mode)
            return self._give_sampler(trainer, dataloader)

        connector._prepare_dataloader = prepare_ordered
        self._undo.append(lambda: delattr(connector, "_prepare_dataloader"))

    def _give_sampler(self, trainer: Trainer, loader: object) -> DataLoader[Any]:
        if not isinstance(loader, DataLoader):
            raise InputError(f"only a DataLoader can be ordered, the training loader is a {type(loader).__name__}")
        if not isinstance(loader.batch_sampler, BatchSampler):
            raise InputError(
                f"a loader with a batch sampler of its own cannot be ordered: {type(loader.batch_sampler).__name__}"
            )
        if self.sampler is not None and not trainer.fit_loop._should_reload_train_dl:
            raise InputError("one training loader can be ordered, this module has several")
        before = self.sampler
        self.sampler = OrderedSampler(
            loader.dataset,  # type: ignore[arg-type]
            num_replicas=trainer.world_size,
            rank=trainer.global_rank,
            **self._options,
        )
        if self._loaded is not None:
            self.sampler.load_state_dict(pick_state(self._loaded, trainer.global_rank, trainer.world_size))
            self._loaded = None
        elif before is not None:  # loaders are made anew every few epochs
            self.sampler.load_state_dict(before.state_dict())
            self._unwatch()
            self._watch(trainer)
        return self.sampler.track(_update_dataloader(loader, self.sampler))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to watch."""
        self._undo.append(_step_by_call(pl_module))
        self._watch(trainer)

    def _watch(self, trainer: Trainer) -> None:
        assert self.sampler is not None
        self._watching = self.sampler.watch(trainer.lightning_module, getattr(trainer.precision_plugin, "scaler", None))
        self._watching.__enter__()

    def _unwatch(self, error: BaseException | None = None) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.__exit__(None if error is None else type(error), error, None)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what the sampler tells."""
        assert self.sampler is not None
        _tell(trainer, {f"order/{key}": value for key, value in self.sampler.telemetry().items()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop to watch."""
        self._unwatch()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop to watch, without waiting for other ranks."""
        self._unwatch(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give everything back."""
        while self._undo:
            self._undo.pop()()

    def state_dict(self) -> State:
        """The states of all ranks' samplers."""
        return {} if self.sampler is None else {"ranks": gather_states(self.sampler.state_dict())}

    def load_state_dict(self, state_dict: State) -> None:
        """Keep the states until the training data are set up."""
        self._loaded = state_dict.get("ranks")


def _tell(trainer: Trainer, numbers: dict[str, Any]) -> None:
    """Log numbers that are the same on every rank."""
    for logger in trainer.loggers:
        logger.log_metrics({key: float(value) for key, value in numbers.items()}, step=trainer.global_step)


def _step_by_call(module: LightningModule) -> Callable[[], None]:
    """Let ``training_step`` run as the module's ``forward``, so that forward hooks see it; returns the undoing.

    Most training steps call ``self(x)``, some ``self.net(x)`` or several parts: all of them are then seen.
    """
    step = module.training_step

    def called(*args: Any, **kwargs: Any) -> Any:
        own = vars(module).get("forward")

        def restore() -> None:
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own

        def forward(*args: Any, **kwargs: Any) -> Any:
            restore()
            return step(*args, **kwargs)

        vars(module)["forward"] = forward
        try:
            return nn.Module.__call__(module, *args, **kwargs)
        finally:
            restore()

    module.training_step = called  # type: ignore[method-assign]
    return lambda: delattr(module, "training_step")


class LocalSteps(DDPStrategy):
    """Ranks take local steps and average when a period says so, instead of exchanging gradients every step.

    What is validated, tested and saved are the averaged weights. A resumed run goes on from them, with the period where
    it was and, as Lightning saves it, rank 0's optimizer state.

    Args:
        period: When to average; `Adaptive` by default.
        wire, error_feedback, momentum, overlap, buffers, timeout, checkpoint: As for `Averager`.
        options: As for Lightning's ``DDPStrategy``.

    Attributes:
        averager: The averager; None before training.
    """

    strategy_name = "hemiola_local_steps"

    def __init__(
        self,
        period: Period | None = None,
        *,
        averager: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._period, self._averager_options = period, averager or {}
        self.averager: Averager | None = None
        self._trainer: Trainer | None = None
        self._loaded: list[State] | None = None
        self._evaluating: AbstractContextManager[nn.Module] | None = None
        self._logged = 0

    def setup(self, trainer: Trainer) -> None:
        """As Lightning does it; the trainer tells the number of steps later."""
        self._trainer = trainer
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """No wrapper: gradients stay local."""

    def _register_ddp_hooks(self) -> None:
        """No hooks: gradients stay local."""

    def on_train_start(self) -> None:
        """Make the averager and start from the same weights."""
        assert self._trainer is not None
        assert self.model is not None
        if len(self.optimizers) != 1:
            raise InputError(f"LocalSteps averages a model with one optimizer, this one has {len(self.optimizers)}")
        steps = self._trainer.estimated_stepping_batches
        self.averager = Averager(
            self.model,
            self.optimizers[0],
            period=self._period,
            steps=int(steps) if steps != float("inf") else None,
            scaler=getattr(self.precision_plugin, "scaler", None),
            **self._averager_options,
        )
        if self._loaded is not None and len(self._loaded) == self.world_size:
            self.averager.load_state_dict(self._loaded[self.global_rank])
        self.averager.__enter__()
        self._logged = 0

    def on_train_end(self) -> None:
        """Average a last time."""
        if self.averager is not None:
            self.averager.__exit__(None, None, None)

    def on_exception(self, exception: BaseException) -> None:
        """Leave without waiting for other ranks."""
        if self.averager is not None:
            self.averager.__exit__(type(exception), exception, None)
        super().on_exception(exception)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning does it; what was averaged meanwhile is logged."""
        result = super().optimizer_step(*args, **kwargs)
        if self.averager is not None:
            for record in self.averager.history[self._logged :]:
                self._log(record)
            self._logged = len(self.averager.history)
        return result

    def _log(self, record: Record) -> None:
        assert self._trainer is not None
        numbers = {"steps": record.period, "spread": record.spread, "bytes": record.bytes}
        _tell(self._trainer, {f"period/{key}": value for key, value in numbers.items()})

    # ----------------------------------------------------------------------------- averaged weights for evaluation

    def on_validation_start(self) -> None:
        """Validate the averaged weights."""
        if self.averager is not None and self._trainer is not None and self._trainer.state.fn == "fit":
            self._evaluating = self.averager.averaged()
            self._evaluating.__enter__()

    def on_validation_end(self) -> None:
        """Go on with this rank's own."""
        evaluating, self._evaluating = self._evaluating, None
        if evaluating is not None:
            evaluating.__exit__(None, None, None)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The averaged weights. All ranks must call this."""
        if self.averager is None or self._evaluating is not None:
            return dict(super().lightning_module_state_dict())
        with self.averager.averaged():
            return {key: value.detach().clone() for key, value in super().lightning_module_state_dict().items()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """As Lightning does it, with the states of all ranks' averagers."""
        if self.averager is not None:
            checkpoint[CHECKPOINT_KEY] = gather_states(self.averager.state_dict())
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Lightning does it; the averagers' states are kept until training starts."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._loaded = checkpoint.get(CHECKPOINT_KEY)
        return checkpoint
