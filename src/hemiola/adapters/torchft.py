"""torchft: its fault-tolerant `LocalSGD`, with any period in place of the number of steps.

    with hemiola.torchft.LocalSGD(manager, model, optimizer, sync_every=hemiola.Adaptive(start=8)):
        ...                                    # the loop as it was

Quorum, recovery and the exchange itself are torchft's. Beside the weights two numbers travel, so that every replica
knows the spread and the period decides alike on all; its state is part of what the manager sends to a replica that
joins or comes back.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchft import local_sgd
from torchft.manager import Manager

from hemiola.contracts import Averaging, Period, State
from hemiola.errors import InputError
from hemiola.loops.agreement import learning_rates
from hemiola.loops.telemetry import Log, Logs
from hemiola.options import whole
from hemiola.own import checked_policy
from hemiola.period import Constant
from hemiola.state import own_state


class LocalSGD(local_sgd.LocalSGD):
    """torchft's ``LocalSGD``, which averages when a period says so.

    An averaging that torchft does not commit, because a replica was lost, is not shown to the period.

    Args:
        manager: torchft's.
        model: Its parameters are averaged; not sharded ones.
        optimizer: Its steps are counted.
        sync_every: Local steps between averagings, or a period.
        steps: Optimizer steps of the whole run; periods that depend on its length need it.

    Attributes:
        history: What the period was shown at every averaging that was committed.
    """

    KIND, VERSION = "torchft-period", 1

    def __init__(
        self,
        manager: Manager,
        model: nn.Module,
        optimizer: Optimizer,
        sync_every: int | Period,
        steps: int | None = None,
    ) -> None:
        super().__init__(manager, model, optimizer, sync_every=1)
        given = Constant(p=sync_every) if isinstance(sync_every, int) else sync_every
        self.period: Period = checked_policy(given, Period, "sync_every")
        if not self.period.local or self.period.clock is not None:
            raise InputError(f"sync_every cannot be {type(self.period).__name__}: torchft averages after local steps")
        if steps is None and self.period.needs_progress:
            raise InputError(f"period {type(self.period).__name__} depends on the length of the run: give steps=...")
        if any(isinstance(p, DTensor) for p in model.parameters()):
            raise InputError("LocalSGD with a period averages whole parameters, this model's are sharded (DTensor)")
        self.steps = None if steps is None else whole("steps", steps, 1)
        self.history: list[Averaging] = []
        self._taken = 0  # optimizer steps since the start of the run
        self._logs = Logs("period")
        self._anchor = [p.detach().clone() for p in model.parameters()]
        manager.register_state_dict_fn("hemiola", self.load_state_dict, self.state_dict)

    def log_to(self, log: Log) -> None:
        """Call ``log({"period/local_steps": ..., "period/spread": ...}, step)`` at every averaging."""
        self._logs.add(log)

    def _step_post_hook(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._local_step == 0:
            self._sync_every = self.period.length(self._lr(), self._progress())
        self._taken += 1
        super()._step_post_hook(optimizer, args, kwargs)

    def _perform_sync(self) -> None:
        """Average; and where that is committed, tell the period how far apart the replicas were."""
        averaged = self._average()
        parameters = [p.detach() for p in self._model.parameters()]
        numbers = torch.tensor([_apart(parameters, averaged), _apart(averaged, self._anchor)], dtype=torch.float64)
        self._manager.allreduce(numbers).wait()
        if not self._manager.should_commit():
            return
        for parameter, mean in zip(parameters, averaged, strict=True):
            parameter.copy_(mean)
        self._anchor = averaged
        spread, movement = numbers.tolist()
        seen = Averaging(self._taken, self._progress(), self._lr(), spread, movement, math.nan, self._local_step)
        self.period.averaged(seen)
        self.history.append(seen)
        self._logs.tell({"local_steps": self._local_step, "spread": spread, "lr": seen.lr}, self._taken)

    def _lr(self) -> float:
        return max(learning_rates(self._local_optimizer))

    def _progress(self) -> float:
        return 0.0 if self.steps is None else min(1.0, self._taken / self.steps)

    def state_dict(self) -> State:
        """The period and how far the run is; part of the manager's state."""
        return {
            "kind": self.KIND,
            "version": self.VERSION,
            "taken": self._taken,
            "period": self.period.state_dict(),
            "anchor": [each.clone() for each in self._anchor],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on with what another replica knows."""
        own_state(state, self.KIND, self.VERSION)
        self._taken = int(state["taken"])
        self.period.load_state_dict(state["period"])
        self._anchor = [each.to(mine.device).clone() for each, mine in zip(state["anchor"], self._anchor, strict=True)]


def _apart(some: list[Tensor], others: list[Tensor]) -> float:
    """The squared distance of two lists of parameters."""
    return float(sum((a.double() - b.double()).square().sum() for a, b in zip(some, others, strict=True)))
