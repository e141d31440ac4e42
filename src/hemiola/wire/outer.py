"""An outer optimizer: what becomes of a merged change before it is applied to the weights.

Plain averaging applies the mean change as it is. An outer optimizer takes it for a step of its own: g = -change is a
*pseudo-gradient*, and what is applied is what the optimizer makes of it. It runs once where the weights are kept, or
identically on every rank, and costs no bytes.

    SGD with Nesterov momentum      DiLoCo (arXiv 2311.08105)                          preset ``"diloco"``
    any other torch.optim class     FedOpt: FedAdam, ... (arXiv 2003.00295)            by its name
    momentum in units of the rate   SlowMo (arXiv 1910.00643)                          preset ``"slowmo"``
    momentum every N-th report      Delayed Nesterov (arXiv 2401.09135, algorithm 3)   preset ``"delayed-nesterov"``

SGD with rate 1 and no momentum is no outer optimizer, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hemiola.contracts import Period
from hemiola.errors import InputError, unknown
from hemiola.optimizers import OPTIMIZERS, Optimizer
from hemiola.options import option_names, whole
from hemiola.state import State, own_state, pack, stamped, unpack


class Rule(Protocol):
    """One kind of outer optimizer."""

    def apply(self, change: Tensor, lr: float) -> Tensor:
        """What is applied in place of the merged change; ``lr`` is the rate of the workers' own steps."""

    def content(self) -> State:
        """What it remembers."""

    def restore(self, content: State) -> None:
        """Remember this."""


class TorchRule:
    """A torch.optim class. It sees pseudo-gradients at weights of zero, so what it makes of them is the step.

    Args:
        name: Of the class.
        lr: Outer learning rate.
        arguments: Its other arguments, without weight decay, which needs the weights.
    """

    def __init__(self, name: str, lr: float, arguments: Mapping[str, Any]) -> None:
        if arguments.get("weight_decay"):
            raise InputError("outer.weight_decay: belongs to the workers' optimizer, not to the outer one")
        try:
            self._spec = Optimizer(name, lr, dict(arguments))
        except InputError as error:
            raise InputError(f"outer {error}") from None
        self._optimizer: torch.optim.Optimizer | None = None
        self._remembered: State | None = None  # until the size is known

    def apply(self, change: Tensor, lr: float) -> Tensor:
        optimizer = self._ready(change)
        (step,) = optimizer.param_groups[0]["params"]
        with torch.no_grad():
            step.zero_()
        step.grad = -change
        optimizer.step()
        step.grad = None
        return step.detach().clone()  # type: ignore[no-any-return]

    def _ready(self, like: Tensor) -> torch.optim.Optimizer:
        if self._optimizer is None:
            self._optimizer = self._spec.attach(nn.Parameter(torch.zeros_like(like)))
            if self._remembered:
                groups = self._optimizer.state_dict()["param_groups"]
                self._optimizer.load_state_dict({"state": {0: self._remembered}, "param_groups": groups})
        return self._optimizer

    def content(self) -> State:
        if self._optimizer is None:
            return {"optimizer": self._remembered or {}}
        return {"optimizer": self._optimizer.state_dict()["state"].get(0, {})}

    def restore(self, content: State) -> None:
        self._optimizer, self._remembered = None, content["optimizer"]


class SlowMo:
    """u <- b u + g / lr;  weights -= a lr u, with lr the workers' own rate, so that momentum survives its schedule.

    Args:
        lr: The paper's slow learning rate alpha.
        momentum: Its slow momentum beta.
    """

    def __init__(self, *, lr: float = 1.0, momentum: float = 0.6) -> None:
        self.lr, self.momentum = _positive("lr", lr), _share("momentum", momentum)
        self._u: Tensor | None = None

    def apply(self, change: Tensor, lr: float) -> Tensor:
        if lr <= 0.0:  # a schedule that has come to its end: nothing was learnt that could be scaled
            return change
        u = torch.zeros_like(change) if self._u is None else self._u
        self._u = self.momentum * u - change / lr
        return -self.lr * lr * self._u

    def content(self) -> State:
        return {"u": self._u}

    def restore(self, content: State) -> None:
        self._u = content["u"]


class DelayedNesterov:
    """Momentum that is refreshed with every N-th update only, and used in all of them as much as ``activation`` says.

    Where K < P workers make an update, N single reports in a row stand for one synchronous update, and momentum applied
    to each of them would count N times. With D the sum of the last N pseudo-gradients::

        every N-th:  m <- b m + D / N;  weights -= e ((1 - c N + c) b m + g / N)
        otherwise:                      weights -= e (c b m + g / N)

    With N = 1 this is Nesterov momentum as in DiLoCo.

    Args:
        lr: e.
        momentum: b.
        every: N; 1 where every update merges every worker.
        activation: c, in [0, 1/N].
    """

    def __init__(self, *, lr: float = 0.7, momentum: float = 0.9, every: int = 1, activation: float = 0.0) -> None:
        self.lr, self.momentum = _positive("lr", lr), _share("momentum", momentum)
        self.every = whole("outer.every", every, 1)
        if not 0.0 <= activation <= 1.0 / every:
            raise InputError(f"outer.activation: must be between 0 and 1 / every = {1 / every:g}, got {activation}")
        self.activation = float(activation)
        self._m: Tensor | None = None
        self._sum: Tensor | None = None
        self._count = 0

    def apply(self, change: Tensor, lr: float) -> Tensor:
        g, n, c = -change, self.every, self.activation
        m = torch.zeros_like(g) if self._m is None else self._m
        total = g if self._sum is None else self._sum + g
        self._count += 1
        if self._count % n:
            self._m, self._sum = m, total
            return -self.lr * (c * self.momentum * m + g / n)
        self._m, self._sum = self.momentum * m + total / n, None
        return -self.lr * ((1 - c * n + c) * self.momentum * self._m + g / n)

    def content(self) -> State:
        return {"m": self._m, "sum": self._sum, "count": self._count}

    def restore(self, content: State) -> None:
        self._m, self._sum, self._count = content["m"], content["sum"], content["count"]


_DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
_OWN: dict[str, type] = {"slowmo": SlowMo, "delayed-nesterov": DelayedNesterov}
PRESETS = ("diloco", *_OWN)


class Outer:
    """An outer optimizer by name, for one run.

    Args:
        name: ``"diloco"``, ``"slowmo"``, ``"delayed-nesterov"``, or a torch.optim class such as ``"SGD"``.
        options: Of the preset or the class; ``lr`` is 1 unless given.

    Attributes:
        plain: Whether it applies every change as it is, so that it can be left out.
    """

    KIND, VERSION = "outer", 1

    def __init__(self, name: str = "diloco", **options: Any) -> None:
        if not isinstance(name, str) or name not in (*PRESETS, *OPTIMIZERS):
            raise InputError(f"outer: {unknown('outer optimizer', name, [*PRESETS, *OPTIMIZERS])}")
        self.name, self.options = name, dict(options)
        self._rule: Rule
        if name in _OWN:
            for key in options:
                if key not in option_names(_OWN[name]):
                    raise InputError(f"outer: for {name}, {unknown('option', key, option_names(_OWN[name]))}")
            self._rule = _OWN[name](**options)
        else:
            arguments = {**_DILOCO, **options} if name == "diloco" else {"lr": 1.0, **options}
            lr = _positive("lr", arguments.pop("lr"))
            self._rule = TorchRule("SGD" if name == "diloco" else name, lr, arguments)
        self.plain = (
            name == "SGD"
            and options.get("lr", 1.0) == 1.0
            and not any(options.get(key) for key in ("momentum", "weight_decay", "maximize"))
        )

    @classmethod
    def made(cls, given: Outer | str | Mapping[str, Any] | None) -> Outer | None:
        """From what a user gives: a name, a table with a name and options, or an `Outer`; None stays None."""
        if given is None or isinstance(given, Outer):
            return given
        if isinstance(given, str):
            return cls(given)
        if not isinstance(given, Mapping) or "name" not in given:
            raise InputError(
                f"outer must be a name such as 'diloco', or a table such as {{'name': 'SGD', 'lr': 0.7}}, got {given!r}"
            )
        return cls(**given)

    def check(self, period: Period) -> None:
        """Refuse periods that it cannot go with."""
        if not period.local:
            raise InputError(
                f"outer = {self.name!r} works on the change of local steps, and full communication has none; "
                "use a local period such as constant"
            )
        if period.clock is not None:
            raise InputError(
                f"outer = {self.name!r} is not for averagings that follow the clock; use a period that counts steps"
            )

    def __call__(self, change: Tensor, lr: float) -> Tensor:
        """What is applied to the weights in place of this merged change.

        Args:
            change: Of the parameters; buffers are averaged as they are.
            lr: Learning rate of the workers' own steps.
        """
        return change if self.plain else self._rule.apply(change, lr)

    def state_dict(self) -> State:
        return stamped(
            self.KIND,
            self.VERSION,
            name=self.name,
            options=dict(self.options),
            content=pack(self._rule.content(), "outer"),
        )

    def load_state_dict(self, state: State) -> None:
        own_state(state, self.KIND, self.VERSION, {"name": self.name, "options": self.options})
        self._rule.restore(unpack(state["content"]))


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < float("inf"):
        raise InputError(f"outer.{name}: must be a positive number, got {value!r}")
    return float(value)


def _share(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise InputError(f"outer.{name}: must be at least 0 and below 1, got {value!r}")
    return float(value)
