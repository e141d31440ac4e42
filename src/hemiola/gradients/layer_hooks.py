"""Hooks on one layer: what it is called with, and the signal that comes back to it.

Most layers get a forward hook. A convolution's projection, the one that would not be a small product, rides on the
convolution itself as a few more output channels (`_ProjectingConvolution`), which vectorised convolutions compute for
almost nothing. Whatever goes wrong in here, the layer is left out and training goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hemiola.gradients.attribution import checking
from hemiola.gradients.composites import ByFunction, Recurrent
from hemiola.gradients.hooks import Hook
from hemiola.gradients.layers import Convolution, Layer, working_type

if TYPE_CHECKING:
    from hemiola.gradients.ghost import Recorder, Recording

Undo = Callable[[], None]


def hook_layer(recorder: Recorder, layer: Layer, number: int) -> Undo:
    """Watch one layer; return what undoes it."""
    module = layer.module

    def watched(a: Tensor, output: Tensor) -> None:
        recording = recorder.recording
        if recording is None or checking() or not output.requires_grad or _transformed():
            return
        try:
            a = a.detach()
            recorder.prepare(number, a)
            recorder.note(number, a, output)
            if recorder.usable(number):
                kept = layer.capture(a, recording.examples)
                output.register_hook(  # type: ignore[no-untyped-call]
                    lambda b: recorder.deliver(number, recording, kept, b)
                )
        except Exception as error:
            recorder.leave_out(number, error)

    if isinstance(layer, ByFunction):
        return _catch_products(recorder, layer, watched)
    if isinstance(layer, Recurrent):
        return _watch_input(recorder, module, watched)
    if isinstance(layer, Convolution) and layer.rides and "forward" not in vars(module):
        plain = type(module).forward

        def fused(a: Tensor, recording: Recording) -> Tensor | None:
            try:
                recorder.prepare(number, a.detach())
                conv = layer.conv
                output: Tensor = _ProjectingConvolution.apply(  # type: ignore[no-untyped-call]
                    layer.padded(a),
                    conv.weight,
                    conv.bias,
                    layer,
                    lambda kept, b: recorder.deliver(number, recording, kept, b),
                )
                recorder.note(number, a, output)
                return output
            except Exception as error:
                recorder.leave_out(number, error)
                return None

        def forward(a: Tensor) -> Tensor:
            recording = recorder.recording
            if recording is not None and recorder.usable(number) and _fusable(layer, a, recording.examples):
                found = fused(a, recording)
                if found is not None:
                    return found
            output: Tensor = plain(module, a)
            watched(a, output)
            return output

        module.forward = Hook(forward, copied=(functools.partial, (plain, module)))
        return lambda: delattr(module, "forward")

    def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs:
            watched(inputs[0], output)

    # First, so that what others' hooks make of the output does not matter.
    handle: RemovableHandle = module.register_forward_hook(Hook(after), prepend=True)
    return handle.remove


def _catch_products(recorder: Recorder, layer: ByFunction, watched: Callable[[Tensor, Tensor], None]) -> Undo:
    """Watch the calls of ``linear`` with the layer's weight, which are time first, while its caller's ``forward`` runs.

    The function itself is replaced for that while: a mode of torch.overrides would see the attention as one operation.
    """
    weight: Tensor = getattr(layer.module, layer.names[0])
    plain: list[Any] = []

    def before(*_: Any) -> None:
        if recorder.recording is None or checking() or not torch.is_grad_enabled():
            return
        linear = F.linear
        plain.append(linear)

        def catching(a: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
            output = linear(a, w, bias)
            examples = 0 if recorder.recording is None else recorder.recording.examples
            if w is not weight or not examples or a[..., 0].numel() % examples:
                return output
            by_example = output.reshape(-1, examples, output.shape[-1]).transpose(0, 1)
            watched(a.reshape(-1, examples, a.shape[-1]).transpose(0, 1), by_example)
            return by_example.transpose(0, 1).reshape(output.shape)

        F.linear = catching  # type: ignore[assignment]

    def after(*_: Any) -> None:
        if plain:
            F.linear = plain.pop()

    # The other layers of this caller do the same; the last to replace the function is the first to put it back.
    handles = [
        layer.caller.register_forward_pre_hook(Hook(before)),
        layer.caller.register_forward_hook(Hook(after), always_call=True, prepend=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _watch_input(recorder: Recorder, module: nn.Module, watched: Callable[[Tensor, Tensor], None]) -> Undo:
    """Watch a recurrent layer's input, and the signal that comes back to it."""
    assert isinstance(module, nn.RNNBase)

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if recorder.recording is None or checking() or not torch.is_grad_enabled():
            return None
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor) or x.dim() != 3:
            return None  # a packed sequence: which of its rows are whose differs from batch to batch
        x = x if x.requires_grad else x.detach().requires_grad_()
        if module.batch_first:
            by_example = x.view_as(x)
            watched(by_example, by_example)
            return (by_example, *inputs[1:])
        by_example = x.transpose(0, 1)
        watched(by_example, by_example)
        return (by_example.transpose(0, 1), *inputs[1:])

    return module.register_forward_pre_hook(Hook(before)).remove


def _fusable(layer: Convolution, a: Tensor, examples: int) -> bool:
    """Whether the projection can ride on the convolution: same type, no autocast, something to train."""
    return (
        torch.is_grad_enabled()
        and not _transformed()
        and not torch.is_autocast_enabled(a.device.type)
        and a.dtype == layer.conv.weight.dtype == working_type(a)
        and layer.fits(a, examples)
    )


def _transformed() -> bool:
    """Whether this happens inside of torch.func, whose passes are none of the loop's own."""
    return bool(torch._C._are_functorch_transforms_active())


class _ProjectingConvolution(torch.autograd.Function):
    """A convolution that also applies the layer's projection filters, as more output channels of the same call."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, weight: Tensor, bias: Tensor | None, layer: Convolution, deliver: Callable[..., None]
    ) -> Tensor:
        channels = weight.shape[0]
        both = layer.convolve_both(a)
        ctx.save_for_backward(a, weight)
        ctx.kept, ctx.layer, ctx.deliver, ctx.has_bias = both[:, channels:], layer, deliver, bias is not None
        return both[:, :channels].contiguous()

    @staticmethod
    def backward(ctx: Any, b: Tensor) -> tuple[Tensor | None, ...]:
        a, weight = ctx.saved_tensors
        layer: Convolution = ctx.layer
        zeros = [0] * len(layer.padding)
        sizes = [weight.shape[0]] if ctx.has_bias else None
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.has_bias and ctx.needs_input_grad[2]]
        conv = layer.conv
        grads = torch.ops.aten.convolution_backward.default(
            b, a, weight, sizes, conv.stride, layer.padding, conv.dilation, False, zeros, 1, mask
        )
        ctx.deliver(ctx.kept, b)
        return (*grads, None, None)
