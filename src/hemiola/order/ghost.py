"""Per-example gradient rows from hooks, during one ordinary forward and backward pass.

`Recorder` hooks the layers of ``layers.py``. While a `Recording` is open, every layer hands in its part of every
example's gradient as the backward pass reaches it, and the parts are folded together. The cost is a few small products
a layer; the convolution's projection, the one that would not be small, rides on the convolution itself as a few more
output channels (`_ProjectingConvolution`), which vectorised convolutions compute for almost nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from hemiola.errors import InputError
from hemiola.order.layers import Convolution, Layer, Projecting, find_layers, working_type
from hemiola.order.sketch import Exact, Fold, SketchSpec, build_sketch

# Numbers of a layer's whole per-example gradients that exist at a time.
WHOLE_AT_ONCE = 1 << 24

Share = Callable[[Tensor], Tensor]


class Recording:
    """The rows of one forward pass, filled in by the backward pass.

    Attributes:
        examples: How many the batch has.
        reached: Names of the layers that have handed in their part.
    """

    def __init__(self, examples: int, widths: list[int], sketch: Exact | Fold, whole: bool) -> None:
        self.examples = examples
        self.reached: set[str] = set()
        self._widths, self._sketch, self._whole = widths, sketch, whole
        self._out: Tensor | None = None
        self._blocks: dict[int, Tensor] = {}

    def add(self, layer: Layer, slots: list[int], kept: Tensor, b: Tensor) -> None:
        """Take a layer's part. A layer or a parameter that is used twice is added up."""
        self.reached.add(layer.name)
        if not self._whole:
            (slot,), (block,) = slots, layer.blocks(kept, b, self.examples)
            self._blocks[slot] = self._blocks[slot] + block if slot in self._blocks else block
            return
        if self._out is None:
            self._out = b.new_zeros(self.examples, self._sketch.width, dtype=working_type(b))
        step = max(1, WHOLE_AT_ONCE // max(layer.widths))
        pieces = b.shape[0] // self.examples
        for start in range(0, self.examples, step):
            stop = min(start + step, self.examples)
            part = slice(start * pieces, stop * pieces)
            for offset, block in zip(slots, layer.blocks(kept[part], b[part], stop - start), strict=True):
                self._sketch.add_(self._out[start:stop], offset, block)

    def rows(self) -> Tensor:
        """Return one (examples, k) row per example, scaled like the backward pass was."""
        if self._whole:
            assert self._out is not None
            return self._out
        like = next(iter(self._blocks.values()))
        blocks = [
            self._blocks[slot] if slot in self._blocks else like.new_zeros(self.examples, width)
            for slot, width in enumerate(self._widths)
        ]
        return self._sketch.apply(torch.cat(blocks, 1))


class Recorder:
    """Hooks on a model's layers that record per-example rows.

    Args:
        model: Whose layers.
        spec: ``ghost`` for ghosts folded to the spec's width; ``exact`` or ``fold`` for whole gradients, which are the
            examples' gradients only if no layer is left out (`UnitGradients` checks the sum).
        seed: Of the fold.
        share: Makes newly found directions common to all ranks; the identity where there is one rank.

    Attributes:
        layers: What is hooked.
        left_out: Names of trained layers that are not in the rows.
        dimension: k, numbers per row.
        recording: What layers hand their parts to; None when there is nothing to record.
    """

    def __init__(self, model: nn.Module, spec: SketchSpec, seed: int, share: Share | None = None) -> None:
        self._whole = spec.kind != "ghost"
        self.layers, self.left_out = find_layers(model, spec.rank, seed)
        if self._whole:
            at, offsets = 0, {}
            for p in model.parameters():
                if p.requires_grad:
                    offsets[p] = at
                    at += p.numel()
            self._slots = [[offsets[getattr(x.module, key)] for key in x.parameters] for x in self.layers]
            self._sketch = build_sketch(spec, at, seed)
        else:
            self._slots = [[slot] for slot in range(len(self.layers))]
            self._sketch = build_sketch(spec, sum(layer.widths[0] for layer in self.layers), seed)
        self._widths = [layer.widths[0] for layer in self.layers]
        self._share = share
        self._stale: set[int] = set()
        self._checked = False
        self.dimension = self._sketch.width
        self.recording: Recording | None = None
        self._remove = [
            _hook(self, layer, slots, number)
            for number, (layer, slots) in enumerate(zip(self.layers, self._slots, strict=True))
        ]
        self.refresh()

    def refresh(self) -> None:
        """Find new input directions from the next batch. Rows from before and after must not be balanced together."""
        if not self._whole:
            self._stale = {n for n, layer in enumerate(self.layers) if isinstance(layer, Projecting)}

    def start(self, examples: int) -> Recording:
        """Record the next forward pass, a batch of this many examples."""
        self.recording = Recording(examples, self._widths, self._sketch, self._whole)
        return self.recording

    def rows(self, recording: Recording) -> Tensor:
        """The rows of a recording whose backward pass is over."""
        if not recording.reached:
            raise InputError("no gradient came back to any layer of the model that is watched; was its output used?")
        if not self._checked:
            self._checked = True
            silent = [layer for layer in self.layers if layer.name not in recording.reached]
            self.left_out += [f"{x.name} ({type(x.module).__name__}, not reached)" for x in silent]
        return recording.rows()

    def close(self) -> None:
        """Remove the hooks."""
        self.recording = None
        for remove in self._remove:
            remove()
        self._remove = []

    def directions(self) -> list[Tensor]:
        """What `adopt` takes; empty before the first batch."""
        found = []
        for layer in self.layers:
            if isinstance(layer, Projecting) and layer.filters is not None:
                found.append(layer.filters[:, : layer.directions].clone())
        return found

    def adopt(self, directions: list[Tensor]) -> None:
        """Use these directions instead of finding them from the next batch."""
        projecting = [layer for layer in self.layers if isinstance(layer, Projecting)] if not self._whole else []
        expected = [(layer.groups, layer.directions, layer.length) for layer in projecting]
        if directions and [tuple(each.shape) for each in directions] != expected:
            raise InputError("the state's ghost directions belong to another model: layers or their sizes differ")
        if directions:
            for layer, each in zip(projecting, directions, strict=True):
                layer.adopt(each)
            self._stale = set()

    def prepare(self, number: int, a: Tensor) -> None:
        """Find the layer's directions if they are due."""
        if number in self._stale:
            self._stale.discard(number)
            layer = self.layers[number]
            assert isinstance(layer, Projecting)
            found = layer.estimate(a)
            layer.adopt(found if self._share is None else self._share(found))


def _hook(recorder: Recorder, layer: Layer, slots: list[int], number: int) -> Callable[[], None]:
    """Watch one layer; return what undoes it."""
    module = layer.module

    def watched(a: Tensor, output: Tensor) -> None:
        recording = recorder.recording
        if recording is None or not output.requires_grad or not layer.fits(a, recording.examples):
            return
        a = a.detach()
        recorder.prepare(number, a)
        kept = layer.capture(a, recording.examples)
        output.register_hook(lambda b: recording.add(layer, slots, kept, b))  # type: ignore[no-untyped-call]

    if isinstance(layer, Convolution) and layer.directions and layer.groups == 1:
        plain = type(module).forward

        def forward(a: Tensor) -> Tensor:
            recording = recorder.recording
            if recording is None or not _fusable(layer, a, recording.examples):
                output: Tensor = plain(module, a)
                watched(a, output)
                return output
            recorder.prepare(number, a.detach())

            def deliver(kept: Tensor, b: Tensor) -> None:
                recording.add(layer, slots, kept, b)

            conv = layer.conv
            fused: Tensor = _ProjectingConvolution.apply(  # type: ignore[no-untyped-call]
                layer.padded(a), conv.weight, conv.bias, layer, deliver
            )
            return fused

        module.forward = Hook(forward, copied=(functools.partial, (plain, module)))
        return lambda: delattr(module, "forward")

    def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs:
            watched(inputs[0], output)

    handle: RemovableHandle = module.register_forward_hook(Hook(after))
    return handle.remove


class Hook:
    """A function on a model that a copy of the model, or a pickled one, does without.

    Args:
        call: The function.
        copied: What a copy has instead, in the form of ``__reduce__``; by default something that does nothing.
    """

    def __init__(self, call: Callable[..., Any], copied: tuple[Any, ...] | None = None) -> None:
        self._call, self._copied = call, (_nothing, ()) if copied is None else copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._copied


def _nothing() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _fusable(layer: Convolution, a: Tensor, examples: int) -> bool:
    """Whether the projection can ride on the convolution: same type, no autocast, something to train."""
    return (
        torch.is_grad_enabled()
        and not torch.is_autocast_enabled(a.device.type)
        and a.dtype == layer.conv.weight.dtype == working_type(a)
        and layer.fits(a, examples)
    )


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
    @once_differentiable
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
