"""The optimizer of a run: a torch.optim class on one flat vector, and a learning rate that follows the progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hemiola.errors import InputError, unknown
from hemiola.options import check_options, option_names

# Only optimizers that treat every number alike: weights travel as one vector, so shapes are not known here.
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta")

LARGEST_RATE = 1e30  # torch refuses what float32 cannot hold, with a traceback in the middle of a step

Schedule = Callable[[float], float]


def constant() -> Schedule:
    """The learning rate stays as it is."""
    return lambda progress: 1.0


def multi_step(*, milestones: list[float], gamma: float = 0.1) -> Schedule:
    """Times ``gamma`` at each milestone, a share of the run."""
    _shares("milestones", milestones)
    return lambda progress: gamma ** sum(progress >= milestone for milestone in milestones)


def step(*, step_size: float, gamma: float = 0.1) -> Schedule:
    """Times ``gamma`` after every ``step_size``, a share of the run."""
    _shares("step_size", [step_size])
    return lambda progress: gamma ** math.floor(progress / step_size + 1e-9)


def cosine(*, end: float = 0.0) -> Schedule:
    """Half a cosine from 1 to ``end``."""
    _shares("end", [end])
    return lambda progress: end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2


def linear(*, start: float = 1.0, end: float = 0.0, until: float = 1.0) -> Schedule:
    """A straight line from ``start`` to ``end``, reached at ``until``, a share of the run; a warm-up if start < end."""
    _shares("until", [until])
    return lambda progress: start + (end - start) * min(progress / until, 1.0)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "MultiStepLR": multi_step,
    "StepLR": step,
    "CosineAnnealingLR": cosine,
    "LinearLR": linear,
}


def _shares(name: str, values: list[float]) -> None:
    for value in values:
        if not 0 <= value <= 1 or (value == 0 and name in ("step_size", "until")):
            raise InputError(f"{name} must be a share of the run in [0, 1], got {value}")


@dataclass(frozen=True)
class Optimizer:
    """A torch.optim class, its arguments, and a schedule of its learning rate.

    Attributes:
        name: The class's name in torch.optim.
        lr: Learning rate before the schedule's factor.
        arguments: Everything else the class takes.
        schedule: Factor on ``lr`` as a function of the run's progress in [0, 1].
    """

    name: str
    lr: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=constant)

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise InputError(f"optimizer.name: {unknown('optimizer', self.name, OPTIMIZERS)}")
        if not 0 < self.lr <= LARGEST_RATE:
            raise InputError(f"optimizer.lr: must be a positive number of at most {LARGEST_RATE:g}, got {self.lr}")
        allowed = [name for name in option_names(getattr(torch.optim, self.name)) if name not in _NOT_FOR_USERS]
        for key in self.arguments:
            if key not in allowed:
                raise InputError(f"optimizer: for {self.name}, {unknown('argument', key, allowed)}")
        try:
            self.attach(nn.Parameter(torch.zeros(1)))
        except (ValueError, TypeError, RuntimeError) as error:
            raise InputError(f"optimizer: {self.name} refuses its arguments: {error}") from None

    def rate(self, progress: float) -> float:
        """Learning rate when this share of the run is over."""
        return self.lr * self.schedule(min(max(progress, 0.0), 1.0))

    def attach(self, parameter: Tensor) -> torch.optim.Optimizer:
        """A fresh optimizer of one flat vector."""
        made: torch.optim.Optimizer = getattr(torch.optim, self.name)(
            [parameter], lr=self.lr, foreach=False, **self.arguments
        )
        return made


_NOT_FOR_USERS = {"params", "lr", "foreach", "fused", "capturable", "differentiable"}


def make_schedule(given: str | Mapping[str, Any] | None) -> Schedule:
    """Build a schedule from what the experiment file says: a name, or a table with a name and options."""
    if given is None:
        return constant()
    if not isinstance(given, str | Mapping):
        raise InputError(
            "optimizer.schedule: must be a name or a table with one, as in { name = 'StepLR', step_size = 0.2 }, "
            f"got {given!r}"
        )
    options = {"name": given} if isinstance(given, str) else dict(given)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in SCHEDULES:
        raise InputError(f"optimizer.schedule: {unknown('schedule', name, SCHEDULES)}")
    return SCHEDULES[name](**check_options(SCHEDULES[name], options, "optimizer.schedule"))


MomentumRule = Literal["local", "average", "reset"]


# Weights travel as one vector, so what an optimizer remembers of every weight is a vector too, such as momentum.
# Everything else in its state (step counts) is one number.


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimizer of one flat vector remembers of every weight, by name; nothing before its first step."""
    return _vectors(next(iter(optimizer.state.values()), {}))


def moment_names(optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's moments; found by taking a step with two parameters."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    trial = optimizer.attach(parameter)
    trial.step()
    return sorted(moments(trial))


def combine_momentum(optimizers: list[torch.optim.Optimizer], rule: MomentumRule) -> None:
    """After an averaging, average or reset what the workers' optimizers remember."""
    if rule == "local":
        return
    found = [moments(optimizer) for optimizer in optimizers]
    for name, first in next(iter(found), {}).items():
        values = [each[name] for each in found if name in each]
        merged = torch.zeros_like(first) if rule == "reset" else torch.stack(values).mean(0)
        for value in values:
            value.copy_(merged)


def mean_state(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One optimizer's state_dict out of several: moments averaged, everything else from the first."""
    memories = [state["state"][0] for state in states if 0 in state["state"]]
    if not memories:
        return {**states[0], "state": {}}
    merged = {name: torch.stack([memory[name] for memory in memories]).mean(0) for name in _vectors(memories[0])}
    return {**states[0], "state": {0: {**memories[0], **merged}}}


def _vectors(memory: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in memory.items() if isinstance(value, Tensor) and value.dim() == 1}
