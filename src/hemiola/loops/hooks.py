"""How the averager hears of optimizer steps without a change to the user's loop; each function returns its undoing."""

import gc
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hemiola.errors import InputError

Undo = Callable[[], None]


def after_step(optimizer: Optimizer, stepped: Callable[[], None]) -> Undo:
    """Call ``stepped`` after every optimizer step that was taken."""
    handle = optimizer.register_step_post_hook(lambda *_: stepped())
    return handle.remove


def after_attempt(scaler: torch.amp.GradScaler, optimizer: Optimizer, stepped: Callable[[], None]) -> Undo:
    """Call ``stepped`` after every ``scaler.step(optimizer)``, also one that was skipped because of an overflow.

    A rank that skips a step never reaches the optimizer's hooks. Counting attempts keeps all ranks at the same count at
    the same place of their loops, so the averaging cannot collide with other collectives of the loop.
    """
    original = scaler.step

    def step(chosen: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        result = original(chosen, *args, **kwargs)
        if chosen is optimizer:
            stepped()
        return result

    scaler.step = step  # type: ignore[method-assign, assignment]

    def undo() -> None:
        del scaler.step  # the instance attribute; the method of the class shows again

    return undo


def around(model: nn.Module, ranks: Sequence[int]) -> list[DistributedDataParallel]:
    """Every DistributedDataParallel that all-reduces gradients of this model between ``ranks``.

    Inside the model: a compiled DDP. Or around it: the model is ``ddp.module``, or what Lightning, Fabric or the
    transformers Trainer hand out; the module does not know its wrapper, the garbage collector does. One that works
    within other groups only (DDP in each machine, averaging between machines) is none of ours.
    """
    parameters = {id(p) for p in model.parameters()}
    known = gc.get_objects() if len(ranks) > 1 else []
    wrappers = [one for one in [*model.modules(), *known] if issubclass(type(one), DistributedDataParallel)]
    return [
        ddp
        for ddp in dict.fromkeys(wrappers)
        if any(id(p) in parameters for p in ddp.parameters())
        and len(set(ranks) & set(dist.get_process_group_ranks(ddp.process_group))) > 1
    ]


def without_all_reduce(model: DistributedDataParallel) -> Undo:
    """Keep the gradients of a DistributedDataParallel model local.

    DDP takes one communication hook for life, so the hook stays and looks at a switch: local while it is on, DDP's
    usual all-reduce otherwise. While it is on, DDP does not send its buffers around before every forward pass either.
    """
    switch = _switches.get(model)
    if switch is None:
        switch = switch_of(model)
        try:
            model.register_comm_hook(switch, Switch.hook)
        except RuntimeError as error:
            del _switches[model]
            raise InputError(
                "the DistributedDataParallel around this model has a communication hook of its own and would go on "
                "exchanging gradients; wrap the module anew without one"
            ) from error
    sent_buffers = model.broadcast_buffers
    model.broadcast_buffers = False
    switch.local = True

    def undo() -> None:
        model.broadcast_buffers = sent_buffers
        switch.local = False

    return undo


class Switch:
    """Whether gradients stay local; its hook is DDP's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.local = False

    # DDP checks these annotations at run time, so this file must not turn annotations into strings.
    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Hand a bucket back as it is, or all-reduce it."""
        if not self.local:
            return allreduce_hook(self.group, bucket)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def switch_of(model: DistributedDataParallel) -> Switch:
    """The switch whose hook is registered with this model, or will be by whoever asks first."""
    return _switches.setdefault(model, Switch(model.process_group))


_switches: WeakKeyDictionary[DistributedDataParallel, Switch] = WeakKeyDictionary()
