"""Plain DistributedDataParallel: local steps, and gradients on a narrow wire, as communication hooks.

    state = hemiola.ddp.LocalSteps(ddp, optimizer, hemiola.Adaptive(start=4))
    ddp.register_comm_hook(state, hemiola.ddp.local_steps_hook)

in the idiom of torch's ``PostLocalSGDState`` and ``post_localSGD_hook``; the loop does not change. Or, to go on
exchanging gradients every step but in fewer bits,

    ddp.register_comm_hook(hemiola.ddp.GradientWire("int8"), hemiola.ddp.gradient_wire_hook)

A DistributedDataParallel takes one hook for life. ``torch.compile(ddp)`` works with both.
"""

# DDP checks the hooks' annotations at run time, so this file must not turn annotations into strings.

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hemiola.contracts import Period, State
from hemiola.errors import InputError
from hemiola.loops.averager import Averager
from hemiola.loops.hooks import switch_of
from hemiola.loops.telemetry import Log
from hemiola.options import one_of
from hemiola.peers import new_group
from hemiola.state import own_state
from hemiola.wire.codec import WIRES, quantiser
from hemiola.wire.group_mean import GroupMean

Wire = Literal["bf16", "int8", "int4", "qsgd8", "qsgd4"]


class LocalSteps:
    """The state of `local_steps_hook`: gradients stay on their rank, weights are averaged when a period says so.

    Make it on every rank, after DistributedDataParallel and before the loop: all ranks start from the same weights.
    Optimizer steps are counted, so accumulation with ``no_sync`` works. At the end call `close`, or use it as a
    ``with`` block around the loop: the weights are averaged a last time and the ranks end with one model.

    Args:
        model: The DistributedDataParallel.
        optimizer: Of its parameters.
        period: When to average; `Adaptive` by default.
        options: As for `Averager`.

    Attributes:
        averager: The averager, which has the history, `averaged`, and the state for checkpoints.
    """

    def __init__(
        self, model: DistributedDataParallel, optimizer: Optimizer, period: Period | None = None, **options: Any
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise InputError(f"LocalSteps takes the DistributedDataParallel model, got {type(model).__name__}")
        self._switch = switch_of(model)
        self.averager = Averager(model, optimizer, period=period, **options)
        self.averager.__enter__()
        self._open = True

    def averaged(self) -> AbstractContextManager[nn.Module]:
        """The averaged weights inside this block, for evaluation and checkpoints; every rank must enter it."""
        return self.averager.averaged()

    def log_to(self, log: Log) -> None:
        """As for `Averager`."""
        self.averager.log_to(log)

    def close(self) -> None:
        """Average a last time; from now on gradients are all-reduced again. Every rank must call this."""
        self.__exit__(None, None, None)

    def __enter__(self) -> "LocalSteps":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._open = False
            self.averager.__exit__(kind, error, trace)


def local_steps_hook(state: LocalSteps, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """For ``ddp.register_comm_hook``: leave gradients as they are while `LocalSteps` is open."""
    return state._switch.hook(bucket)


class GradientWire:
    """The state of `gradient_wire_hook`: gradients are averaged every step, in fewer bits.

    Each bucket is a quantised reduce-scatter and all-gather, so that all ranks get bit-identical gradients. Buckets are
    exchanged one after the other behind the backward pass, in a process group of their own. A gradient that is not
    finite on any rank arrives as NaN on all, so that a `GradScaler` or a guard of one's own sees it as it does without.
    DDP makes its buckets anew after the first step; what that one step rounded away is lost.

    Args:
        wire: ``"bf16"``, ``"int8"``, ``"int4"``, or QSGD's unbiased ``"qsgd8"`` and ``"qsgd4"``.
        error_feedback: Add what rounding took away to the next step's gradient; by default for all but QSGD.
        seed: Of QSGD's rounding.

    Attributes:
        bytes_sent: By this rank.
    """

    KIND, VERSION = "gradient-wire", 1

    def __init__(self, wire: Wire = "int8", *, error_feedback: bool | None = None, seed: int = 0) -> None:
        self.wire = one_of("wire", wire, list(get_args(Wire)))
        unbiased = self.wire.startswith("qsgd")
        self._codec = quantiser(int(self.wire[4:])) if unbiased else WIRES[self.wire]
        self._feedback = not unbiased if error_feedback is None else error_feedback
        self._seed = seed
        self._buckets: dict[int, GroupMean] = {}
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, "hemiola-gradient-wire")
        self._loaded: dict[int, State] = {}
        self.bytes_sent = 0

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Begin to average a bucket."""
        if self._group is None:
            self._group = new_group(backend="gloo" if bucket.buffer().device.type == "cpu" else None)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        buffer, mean = bucket.buffer(), self._mean(bucket.index(), bucket.buffer().numel())

        def work() -> None:
            try:
                merged = mean(buffer, buffer.new_empty(0), [1.0])
                self.bytes_sent += merged.bytes
                buffer.copy_(merged.change)
                if merged.notes[:, 0].min() == 0.0:
                    buffer.fill_(float("nan"))
                done.set_result(buffer)
            except Exception as error:  # DDP waits for the future; it hands the error to the loop
                done.set_exception(error)  # type: ignore[arg-type]

        self._thread.submit(work)
        return done

    def _mean(self, index: int, numbers: int) -> GroupMean:
        found = self._buckets.get(index)
        if found is None or found.lossy != numbers:  # DDP makes its buckets anew after the first step
            found = GroupMean(self._group, lossy=numbers, codec=self._codec, feedback=self._feedback, seed=self._seed)
            saved = self._loaded.pop(index, None)
            if saved is not None and saved["numbers"] == numbers:
                found.load_state_dict(saved["mean"])
            self._buckets[index] = found
        return found

    def state_dict(self) -> State:
        """This rank's residuals; each rank saves its own."""
        buckets = {index: {"numbers": each.lossy, "mean": each.state_dict()} for index, each in self._buckets.items()}
        return {"kind": self.KIND, "version": self.VERSION, "wire": self.wire, "buckets": buckets}

    def load_state_dict(self, state: State) -> None:
        """Restore residuals, where DDP's buckets are of the same sizes again; the others start from nothing."""
        own_state(state, self.KIND, self.VERSION, {"wire": self.wire})
        self._loaded = dict(state["buckets"])
        self._buckets = {}


def gradient_wire_hook(state: GradientWire, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """For ``ddp.register_comm_hook``: average gradients on a narrow wire."""
    return state.exchange(bucket)
