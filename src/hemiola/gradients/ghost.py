"""Per-example gradient rows from hooks, during one ordinary forward and backward pass.

`Recorder` hooks the layers of ``layers.py``. While a `Recording` is open, every layer hands in its part of every
example's gradient as the backward pass reaches it, and the parts are folded together. The cost is a few small products
a layer (``layer_hooks.py``).

A layer is in the rows only while it is known to go example by example (``attribution.py``), and nothing that goes wrong
in a hook reaches the training loop: the layer is left out, by name.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hemiola.errors import InputError, SamplerWarning
from hemiola.gradients.attribution import Call, by_shape, checking, judge, tensors
from hemiola.gradients.finding import describe, find_layers
from hemiola.gradients.hooks import Hook
from hemiola.gradients.layer_hooks import hook_layer
from hemiola.gradients.layers import Layer, Lookup, Projecting, working_type
from hemiola.gradients.sketch import Exact, Fold, SketchSpec, build_sketch
from hemiola.gradients.thin import thin_out

log = logging.getLogger("hemiola")

# Numbers of a layer's whole per-example gradients that exist at a time.
WHOLE_AT_ONCE = 1 << 24

# Above this share of the trained parameters, rows that know nothing of them are worth a warning.
MANY_UNSEEN = 0.25

Share = Callable[[Tensor], Tensor]


class Recording:
    """The rows of one forward pass, filled in by the backward pass.

    Attributes:
        examples: How many the batch has.
        reached: Names of the layers that have handed in their part.
        touched: Names of the layers that a gradient has come back to, whether their parts count or not.
        checks: Whether its calls are checked.
        calls: What is to be checked when the forward pass is over; None when nothing is, or is any more.
        differentiated: The gradient itself was differentiated, so nobody can tell the rows.
    """

    def __init__(self, examples: int, widths: list[int], sketch: Exact | Fold, whole: bool, checks: bool) -> None:
        self.examples = examples
        self.reached: set[str] = set()
        self.touched: set[str] = set()
        self.checks = checks
        self.calls: list[Call] | None = [] if checks else None
        self.differentiated = False
        self._widths, self._sketch, self._whole = widths, sketch, whole
        self._out: Tensor | None = None
        self._blocks: dict[int, Tensor] = {}

    def add(self, layer: Layer, slots: list[int], kept: Tensor, b: Tensor) -> None:
        """Take a layer's part. A layer or a parameter that is used twice is added up."""
        if not self._whole:
            (slot,), (block,) = slots, layer.blocks(kept, b, self.examples)
            self._blocks[slot] = self._blocks[slot] + block if slot in self._blocks else block
            self.reached.add(layer.name)
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
        self.reached.add(layer.name)

    def drop(self) -> None:
        """Forget everything; nothing counts any more."""
        self.differentiated = True
        self._out, self._blocks = None, {}
        self.reached.clear()

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
        self._model = model
        found, self.left_out = find_layers(model, spec.rank, seed)
        self.layers = thin_out(found) if spec.thin else found
        self._spared = {getattr(x.module, key) for x in found if x not in self.layers for key in x.parameters}
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
            self._sketch = build_sketch(spec, max(1, sum(layer.widths[0] for layer in self.layers)), seed)
        self._widths = [layer.widths[0] for layer in self.layers]
        self._share = share
        self._stale: set[int] = set()
        self._known: dict[int, bool] = {}  # whether a layer goes example by example; not there: nothing came back yet
        self._until_check, self._wait = 0, 1  # recordings until the next check, and between the one after it
        self._inputs: list[Tensor] = []
        self._named = self._warns = self._warned_of_many = self._warned_of_penalty = False
        self.dimension = self._sketch.width
        self.recording: Recording | None = None
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        # Each in front of those before it: a layer's hooks come before the model's, even where the layer is the model,
        # and the model's before those of the watch, which would take the check's derivatives for the loop's.
        self._remove: list[Callable[[], None]] = [
            inner.register_forward_pre_hook(Hook(self._before), with_kwargs=True).remove,
            inner.register_forward_hook(Hook(self._after), prepend=True).remove,
        ]
        self._remove += [hook_layer(self, layer, number) for number, layer in enumerate(self.layers)]
        self.refresh()

    def announce(self) -> None:
        """Warn, now or as soon as it is known, if much of what is trained is not in the rows."""
        self._warns = True
        self._warn_if_many()

    def refresh(self) -> None:
        """Find new input directions from the next batch. Rows from before and after must not be balanced together."""
        self._until_check, self._wait = 0, 1
        if not self._whole:
            self._stale = {
                n for n, layer in enumerate(self.layers) if isinstance(layer, Projecting) and layer.directions
            }

    def start(self, examples: int) -> Recording:
        """Record the next forward pass, a batch of this many examples."""
        checks = examples > 1 and self._due()
        self.recording = Recording(examples, self._widths, self._sketch, self._whole, checks)
        return self.recording

    def rows(self, recording: Recording) -> Tensor:
        """The rows of a recording whose backward pass is over."""
        if not recording.reached:
            raise InputError(
                "no gradient came back to any layer of the model that can tell its examples apart; was its output "
                f"used? Layers left out: {_listed(self.left_out) or 'none'}"
            )
        if not self._named:
            self._named = True
            silent = [layer for layer in self.layers if layer.name not in recording.touched]
            self.left_out += [describe(x.name, x.module, "not reached") for x in silent]
        return recording.rows()

    def close(self) -> None:
        """Remove the hooks."""
        self.recording = None
        for remove in self._remove:
            remove()
        self._remove = []

    def directions(self) -> list[Tensor]:
        """What `adopt` takes; empty before the first batch."""
        found = [layer for layer in self._projecting() if layer.filters is not None]
        return [layer.filters[:, : layer.directions].clone() for layer in found if layer.filters is not None]

    def adopt(self, directions: list[Tensor]) -> None:
        """Use these directions instead of finding them from the next batch."""
        projecting = self._projecting()
        expected = [(layer.groups, layer.directions, layer.length) for layer in projecting]
        if directions and [tuple(each.shape) for each in directions] != expected:
            raise InputError("the state's ghost directions belong to another model: layers or their sizes differ")
        if directions:
            for layer, each in zip(projecting, directions, strict=True):
                layer.adopt(each)
            self._stale = set()

    def _projecting(self) -> list[Projecting]:
        found = [] if self._whole else self.layers
        return [layer for layer in found if isinstance(layer, Projecting) and layer.directions]

    # ------------------------------------------------------------------------------------------ what the hooks do

    def prepare(self, number: int, a: Tensor) -> None:
        """Find the layer's directions if they are due. All ranks must come here, whatever their inputs are like."""
        if number not in self._stale:
            return
        self._stale.discard(number)
        layer = self.layers[number]
        assert isinstance(layer, Projecting)
        error: Exception | None = None
        try:
            found = layer.estimate(a)
        except Exception as caught:  # the others wait for what this rank shares
            found, error = torch.zeros(layer.groups, layer.directions, layer.length, dtype=torch.float64), caught
        layer.adopt(found if self._share is None else self._share(found))
        if error is not None:
            raise error

    def note(self, number: int, a: Tensor, output: Tensor) -> None:
        """A layer was called; see whether its call can be one for each example, and keep it for the check."""
        recording = self.recording
        if recording is None or checking():
            return
        layer, examples = self.layers[number], recording.examples
        if not layer.fits(a, examples):
            self.leave_out(number, "its input is not a batch")
        elif recording.checks and (recording.calls is not None or number not in self._known):
            direct = len(a) == examples and any(_same(a, given) for given in self._inputs)
            shared = isinstance(layer, Lookup) and a.dim() == 1
            call = Call(number, output, direct, len(a) == examples, shared)
            if recording.calls is not None:
                recording.calls.append(call)
            else:  # in the backward pass, from within a reentrant checkpoint
                self._settle(by_shape([call]))

    def deliver(self, number: int, recording: Recording, kept: Tensor, b: Tensor) -> None:
        """The signal has come back to a layer."""
        if checking() or recording.differentiated:
            return
        if torch.is_grad_enabled():
            self._refuse_penalty(recording)
            return
        layer = self.layers[number]
        recording.touched.add(layer.name)
        if recording.examples > 1 and not self._known.get(number, False):
            return
        try:
            recording.add(layer, self._slots[number], kept, b)
        except Exception as error:
            self.leave_out(number, error)

    def leave_out(self, number: int, why: str | Exception) -> None:
        """From now on this layer is not in the rows; an exception is worth a warning of its own."""
        if self._known.get(number) is False:
            return
        self._known[number] = False
        layer = self.layers[number]
        name = describe(layer.name, layer.module, why if isinstance(why, str) else _short(why))
        self.left_out.append(name)
        log.info("order: left out of the rows: %s", name)
        if isinstance(why, Exception):
            warnings.warn(f"the order cannot learn from a layer and leaves it out: {name}", SamplerWarning, 2)
        self._warn_if_many()

    def usable(self, number: int) -> bool:
        """Whether the layer is not left out."""
        return self._known.get(number, True)

    # --------------------------------------------------------------------------------------------------- the check

    def _due(self) -> bool:
        """At the start of an epoch; and ever more rarely while some layer has not shown a gradient yet."""
        self._until_check -= 1
        if self._until_check >= 0 or (self._wait > 1 and len(self._known) == len(self.layers)):
            return False
        self._until_check, self._wait = self._wait - 1, 2 * self._wait
        return True

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not checking():
            self._inputs = list(tensors((args, kwargs)))

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The forward pass is over: check the calls that it made."""
        self._inputs = []
        if self.recording is None or not self.recording.calls or checking():
            return
        calls, self.recording.calls = self.recording.calls, None
        norms = nn.modules.batchnorm._BatchNorm
        coupled = any(isinstance(m, norms) and m.training for m in self._model.modules())
        try:
            found = judge(calls, output, self.recording.examples, coupled)
        except Exception as error:  # reentrant checkpoints and compiled models keep no graph that can be followed
            log.info("order: layers are told apart by their shapes only (%s)", _short(error))
            found = by_shape(calls)
        self._settle(found)

    def _settle(self, found: dict[int, bool]) -> None:
        for number, good in found.items():
            if not good:
                self.leave_out(number, "not one input for each example")
            elif self.usable(number):
                self._known[number] = True

    # ------------------------------------------------------------------------------------------------- what is told

    def _warn_if_many(self) -> None:
        seen = {
            getattr(layer.module, key)
            for number, layer in enumerate(self.layers)
            for key in layer.parameters
            if self.usable(number)
        } | self._spared
        trained = [p for p in self._model.parameters() if p.requires_grad]
        lazy = any(isinstance(p, UninitializedParameter) for p in trained)
        sizes = {p: 0 if isinstance(p, UninitializedParameter) else p.numel() for p in trained}
        share = sum(size for p, size in sizes.items() if p not in seen) / max(1, sum(sizes.values()))
        if not self._warns or self._warned_of_many or not (lazy or share > MANY_UNSEEN):
            return
        self._warned_of_many = True
        how_much = "an unknown share" if lazy else f"{100 * share:.0f} %"
        warnings.warn(
            f"the order knows nothing of {how_much} of the trained parameters: {_listed(self.left_out)}. The other "
            "layers still count; unit = the batch size learns from all of them",
            SamplerWarning,
            stacklevel=2,
        )

    def _refuse_penalty(self, recording: Recording) -> None:
        """What comes back now is differentiated again, and with it every layer's weights, in ways hooks do not see."""
        recording.drop()
        if not self._warned_of_penalty:
            self._warned_of_penalty = True
            warnings.warn(
                "the loop differentiates gradients (create_graph=True, e.g. a gradient penalty): the order does not "
                "learn from such batches; use unit = the batch size",
                SamplerWarning,
                stacklevel=2,
            )


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _short(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line[:100]}"


def _same(a: Tensor, given: Tensor) -> bool:
    """Whether one is the other, or the same numbers with the same first dimension in another shape."""
    return bool(a.dim() and given.dim()) and (
        a.data_ptr() == given.data_ptr() and a.shape[0] == given.shape[0] and a.stride(0) == given.stride(0)
    )
