"""What a training loop trained on, told by hooks on its model.

A batch counts when a gradient comes back through a forward pass made in training mode with gradients enabled; an
evaluation pass, or a loss that is only looked at, does not. The DataLoader runs ahead of the loop, so what counts is
the order of these passes, not what the sampler has handed out.

Rows come from one of two places. Ghosts, and whole gradients where a batch holds several units, come from **each
example**, by the hooks of ``ghost.py``. Where a batch lies within one unit, whole gradients come from the
**micro-batch**, taken as each parameter's gradient arrives, before it is accumulated and before
DistributedDataParallel averages it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hemiola.errors import InputError
from hemiola.order.ghost import Recorder, Recording, Share
from hemiola.order.hooks import Hook
from hemiola.order.layers import working_type
from hemiola.order.sketch import Exact, Fold, SketchSpec, build_sketch


class Scaler(Protocol):
    """What is needed of a `torch.amp.GradScaler`."""

    def get_scale(self) -> float: ...


class Trainee(Protocol):
    """Who wants to know; implemented by the sampler."""

    def fits_units(self, examples: int) -> bool:
        """Whether the next batch, of this many examples, lies within one unit."""

    def wants_rows(self) -> bool:
        """Whether the next batch should come with rows."""

    def trained(self, examples: int, rows: Tensor | None) -> None:
        """The next ``examples`` were trained on; their rows, or one row for all of them, or None."""


class _Pass:
    """One forward pass in training mode."""

    def __init__(self, examples: int, scale: float) -> None:
        self.examples, self.scale = examples, scale
        self.reached = False
        self.recording: Recording | None = None
        self.gradients: dict[int, Tensor] | None = None


class Watch:
    """Hooks on a model, from construction to ``close``.

    Args:
        model: The model, or its DistributedDataParallel wrapper.
        spec: How rows are sketched; None when rows are never wanted.
        seed: Of the fold.
        trainee: Told what was trained on.
        scaler: The loop's GradScaler, if it has one.
        share: Makes ghost directions common to all ranks.

    Attributes:
        width: k, numbers per row.
        dtype: Of the rows.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: SketchSpec | None,
        seed: int,
        trainee: Trainee,
        scaler: Scaler | None,
        share: Share | None,
    ) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise InputError("the watched model has no trainable parameters; there are no gradients to order by")
        self._model, self._spec, self._seed, self._trainee = model, spec, seed, trainee
        self._scaler, self._share = scaler, share
        self._parameters = parameters
        self._passes: list[_Pass] = []
        self._fold: Exact | Fold | None = None
        self._verified = spec is not None and spec.kind == "ghost"
        self._told = False
        self.recorder: Recorder | None = None
        self.dtype = working_type(parameters[0])
        self.width = 0
        if spec is not None and spec.kind == "ghost":
            self.recorder = Recorder(model, spec, seed, share)
            if not self.recorder.layers:
                names = ", ".join(self.recorder.left_out)
                self.recorder.close()
                raise InputError(
                    f"no layer of the watched model can give ghost sketches ({names}); use unit = the batch size"
                )
            self.recorder.announce()
            self.width = self.recorder.dimension
        elif any(isinstance(p, UninitializedParameter) for p in parameters):
            raise InputError("the watched model has lazy layers without weights; run one batch through it before watch")
        elif spec is not None:
            self.width = build_sketch(spec, sum(p.numel() for p in parameters), seed).width
        self._remove: list[Callable[[], None]] = [
            model.register_forward_pre_hook(Hook(self._before), with_kwargs=True).remove,
            model.register_forward_hook(Hook(self._after)).remove,
        ]

    @property
    def method(self) -> str | None:
        """Where rows come from, in words; None before the first batch that wants them."""
        if self.recorder is not None:
            assert self._spec is not None
            whole = self._spec.kind != "ghost"
            left = f"; left out: {', '.join(self.recorder.left_out)}" if self.recorder.left_out else ""
            kind = (
                "whole gradients of each example" if whole else f"ghosts of each example ({self._spec.rank} directions)"
            )
            return f"{kind}, from hooks in the backward pass{left}"
        return None if self._fold is None else "the micro-batch gradient of each unit"

    def settle(self) -> None:
        """Report the passes that a gradient has come back through; those before them that none came to are dropped."""
        reached = [number for number, each in enumerate(self._passes) if each.reached]
        if not reached:
            return
        done, self._passes = self._passes[: reached[-1] + 1], self._passes[reached[-1] + 1 :]
        for each in done:
            if each.reached:
                self._trainee.trained(each.examples, self._rows(each))

    def refresh(self) -> None:
        """An epoch starts: find new ghost directions."""
        if self.recorder is not None:
            self.recorder.refresh()

    def directions(self) -> list[Tensor]:
        """The ghost directions in use; empty where there are none."""
        return [] if self.recorder is None else self.recorder.directions()

    def adopt(self, directions: list[Tensor]) -> None:
        """Use these directions until the next epoch starts."""
        if self.recorder is not None:
            self.recorder.adopt(directions)

    def forget(self) -> None:
        """Drop passes that are not reported yet."""
        self._passes = []
        if self.recorder is not None:
            self.recorder.recording = None

    def close(self) -> None:
        """Remove the hooks."""
        for remove in self._remove:
            remove()
        if self.recorder is not None:
            self.recorder.close()

    # ------------------------------------------------------------------------------------------------------- hooks

    @property
    def _training(self) -> bool:
        return self._model.training and torch.is_grad_enabled()

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.recording = None
        if not self._training:
            return
        self.settle()
        first = _first_tensor((args, kwargs), lambda x: x.dim() > 0)
        if first is None:
            raise InputError("the watched model was called without a tensor; its first one tells the batch size")
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        each = _Pass(len(first), scale)
        self._passes.append(each)
        if self._spec is None or not self._trainee.wants_rows():
            return
        if self._spec.kind == "ghost" or not (self._trainee.fits_units(each.examples) or self._blurs(each.examples)):
            assert self.recorder is not None
            each.recording = self.recorder.start(each.examples)
        if self._spec.kind != "ghost" and not (each.recording is not None and self._verified):
            self._hook_parameters()
            each.gradients = {}

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not (self._training and self._passes):
            return
        each = self._passes[-1]
        answer = _first_tensor(output, lambda x: x.requires_grad)
        if answer is not None:

            def reached(_: Tensor) -> None:
                each.reached = True

            answer.register_hook(reached)  # type: ignore[no-untyped-call]

    def _blurs(self, examples: int) -> bool:
        """Whether the units of a batch that holds several must share its gradient; otherwise there is a recorder."""
        assert self._spec is not None
        if self.recorder is None and not self._told:
            self.recorder = Recorder(self._model, self._spec, self._seed, self._share)
            if self.recorder.left_out:
                names = ", ".join(self.recorder.left_out)
                self.recorder.close()
                self.recorder = None
                if self._fold is None:
                    raise InputError(
                        f"a batch of {examples} examples holds several units and hooks cannot tell their whole "
                        f"gradients apart in {names}; use sketch = 'ghost:4', or unit = the batch size"
                    )
            self._told = True
        return self.recorder is None

    def _hook_parameters(self) -> None:
        if self._fold is None:
            assert self._spec is not None
            self._fold = build_sketch(self._spec, sum(p.numel() for p in self._parameters), self._seed)
            for number, p in enumerate(self._parameters):
                self._remove.append(p.register_hook(self._arrival(number)).remove)  # type: ignore[no-untyped-call]

    def _arrival(self, number: int) -> Callable[[Tensor], None]:
        def arrived(gradient: Tensor) -> None:
            found = self._passes[-1].gradients if self._passes else None
            if found is not None:
                found[number] = found[number] + gradient if number in found else gradient

        return arrived

    def _rows(self, each: _Pass) -> Tensor | None:
        if each.recording is None or self.recorder is None:
            gradient = self._gradient(each)
            return None if gradient is None else gradient.div_(each.scale)
        if not each.recording.reached:
            return None
        rows = self.recorder.rows(each.recording)
        if not self._verified:
            self._verify(rows, self._gradient(each))
        # The loss is a mean over the batch, so each signal is 1/N of what the example's own loss would send back.
        return rows.mul_(each.examples / each.scale)

    def _gradient(self, each: _Pass) -> Tensor | None:
        """The sketched gradient of a whole batch."""
        if not each.gradients or self._fold is None:
            return None
        parts = [
            each.gradients[number].reshape(1, -1) if number in each.gradients else p.new_zeros(1, p.numel())
            for number, p in enumerate(self._parameters)
        ]
        return self._fold.apply(torch.cat(parts, 1).to(self.dtype))

    def _verify(self, rows: Tensor, gradient: Tensor | None) -> None:
        """Once: do the examples' whole gradients add up to the batch's?"""
        if gradient is None or not bool(torch.isfinite(gradient).all()):
            return
        if (rows.sum(0) - gradient[0]).norm() > 1e-2 * rows.norm(dim=1).sum():
            assert self.recorder is not None
            raise InputError(
                "hooks cannot tell whole gradients of each example in the watched model: "
                f"{', '.join(self.recorder.left_out) or 'it uses weights outside of their layers'}; "
                "use sketch = 'ghost:4', or unit = the batch size"
            )
        self._verified = True


def _first_tensor(found: Any, good: Callable[[Tensor], bool]) -> Tensor | None:
    """The first good tensor in nested containers, in the order they are written."""
    if isinstance(found, Tensor):
        return found if good(found) else None
    inside: Iterable[Any] = ()
    if isinstance(found, Mapping):
        inside = found.values()
    elif isinstance(found, tuple | list):
        inside = found
    for each in inside:
        answer = _first_tensor(each, good)
        if answer is not None:
            return answer
    return None
