"""What a training loop trained on, told by hooks on its model.

A batch counts when a gradient comes back through a forward pass; an evaluation pass, or a loss that is only looked at,
does not. Which examples a pass was given is the sampler's to say (`Trainee.claim`).

Rows come from one of two places. Ghosts, and whole gradients where a batch holds several units, come from **each
example**, by the hooks of ``ghost.py``. Where a batch lies within one unit, whole gradients come from the
**micro-batch**, taken as each parameter's gradient arrives, before it is accumulated and before
DistributedDataParallel averages it.

Losses are what the loop tells of each example (`Watch.tell`). Where a batch lies within one unit its mean loss will do,
and a model that returns it, as ``loss`` or as its one scalar, need not be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hemiola.errors import InputError
from hemiola.gradients.attribution import checking
from hemiola.gradients.ghost import Recorder, Recording, Share
from hemiola.gradients.hooks import Hook
from hemiola.gradients.layers import working_type
from hemiola.gradients.sketch import Exact, Fold, SketchSpec, build_sketch
from hemiola.loops.epoch import Claim
from hemiola.loops.tracking import tensors_in


@dataclass
class Seen:
    """What a watch saw in an epoch.

    Attributes:
        passes: Forward passes with gradients enabled.
        evaluations: Other forward passes.
        mute: Type of an output in which no tensor with a gradient was found.
        summed: Whether one backward pass carried several batches, whose gradients could not be told apart.
        unhooked: Whether a gradient came back through the model but to none of its layers.
        differentiated: Whether gradients were differentiated again, so that hooks could not tell the rows.
        versions: Of the parameters, when the epoch started.
    """

    passes: int = 0
    evaluations: int = 0
    mute: str = ""
    summed: bool = False
    unhooked: bool = False
    differentiated: bool = False
    versions: int = 0


class Scaler(Protocol):
    """What is needed of a `torch.amp.GradScaler`."""

    def get_scale(self) -> float: ...


class Trainee(Protocol):
    """Who wants to know; implemented by the sampler."""

    def claim(self, given: list[Tensor]) -> Claim:
        """A forward pass was given these tensors: which examples are they?"""

    def fits_units(self, claim: Claim) -> bool:
        """Whether these examples lie within one unit."""

    def wants_rows(self, claim: Claim) -> bool:
        """Whether these examples should come with rows."""

    def trained(self, claim: Claim, rows: Tensor | None) -> None:
        """These examples were trained on; their rows, or one row for all of them, or None."""

    def unused(self, claim: Claim) -> None:
        """No gradient came back through the forward pass of these examples."""


class _Pass:
    """One forward pass with gradients enabled."""

    def __init__(self, claim: Claim, scale: float, training: bool) -> None:
        self.claim, self.examples, self.scale, self.training = claim, claim.examples, scale, training
        self.reached = False
        self.blurred = False
        self.recording: Recording | None = None
        self.gradients: dict[int, Tensor] | None = None
        self.wanted = False
        self.losses: Tensor | None = None  # of each example, or one for all of them


class Watch:
    """Hooks on a model, from construction to ``close``.

    Args:
        model: The model, or its DistributedDataParallel wrapper.
        spec: How rows are sketched; None when rows are never wanted.
        seed: Of the fold.
        trainee: Told what was trained on.
        scaler: The loop's GradScaler, if it has one.
        share: Makes ghost directions common to all ranks.
        modes: The modes (training or not) in which the model was trained so far; added to.
        losses: Whether rows end with the loss of their example or unit.

    Attributes:
        width: k, numbers per row.
        dtype: Of the rows.
        seen: What happened since `refresh`, to name the cause if nothing was learnt.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: SketchSpec | None,
        seed: int,
        trainee: Trainee,
        scaler: Scaler | None,
        share: Share | None,
        modes: set[bool] | None = None,
        losses: bool = False,
    ) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise InputError("the watched model has no trainable parameters; there are no gradients to order by")
        self._model, self._spec, self._seed, self._trainee = model, spec, seed, trainee
        self._scaler, self._share = scaler, share
        self._parameters = parameters
        self._modes = set() if modes is None else modes
        self._losses = losses
        self._passes: list[_Pass] = []
        self._current: _Pass | None = None  # between its start and its end
        self._backward: list[_Pass] = []  # whose gradients the backward pass under way carries
        self._task = -1
        self.seen = Seen()
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
        self.width += losses
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
            thin = f" of {len(self.recorder.layers)} layers, thinned out" if self._spec.thin else ""
            ghosts = f"ghosts of each example ({self._spec.rank} directions{thin})"
            kind = "whole gradients of each example" if whole else ghosts
            return f"{kind}, from hooks in the backward pass{left}"
        if self._spec is None:
            return "losses"
        return None if self._fold is None else "the micro-batch gradient of each unit"

    def settle(self) -> None:
        """Report the passes that a gradient has come back through; those before them that none came to are dropped."""
        reached = [number for number, each in enumerate(self._passes) if each.reached]
        if not reached:
            return
        done, self._passes = self._passes[: reached[-1] + 1], self._passes[reached[-1] + 1 :]
        for each in done:
            if each.reached:
                self._modes.add(each.training)
                self._trainee.trained(each.claim, self._rows(each))
            else:
                self._trainee.unused(each.claim)

    @property
    def pending(self) -> int:
        """Examples of forward passes that may still get their backward pass."""
        return sum(each.examples for each in self._passes)

    def refresh(self, observed: bool) -> None:
        """An epoch starts: find new ghost directions if it is ``observed``."""
        self.seen = Seen(versions=self._versions())
        if self.recorder is not None and observed:
            self.recorder.refresh()

    def updated(self) -> bool:
        """Whether the model's parameters have changed since `refresh`."""
        return self._versions() != self.seen.versions

    def _versions(self) -> int:
        return sum(p._version for p in self._parameters)

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

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if checking():
            return
        self._current = None
        if self.recorder is not None:
            self.recorder.recording = None
        if self._task == _graph_task() != -1:
            return  # a checkpointed model computes itself again; the pass that its backward has reached is the one
        training = self._model.training
        # A model that is trained in eval mode, to freeze its statistics, has never been trained in the other mode.
        if not torch.is_grad_enabled() or (not training and True in self._modes):
            self.seen.evaluations += 1
            return
        self.settle()
        given = tensors_in((args, kwargs))
        if not given:
            raise InputError("the watched model was called without a tensor; its first one tells the batch size")
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        each = self._current = _Pass(self._trainee.claim(given), scale, training)
        self.seen.passes += 1
        self._passes.append(each)
        each.wanted = (self._spec is not None or self._losses) and self._trainee.wants_rows(each.claim)
        if self._spec is None or not each.wanted:
            return
        if self._spec.kind == "ghost" or not (self._trainee.fits_units(each.claim) or self._blurs(each.examples)):
            assert self.recorder is not None
            each.recording = self.recorder.start(each.examples)
        if self._spec.kind != "ghost" and not (each.recording is not None and self._verified):
            self._hook_parameters()
            each.gradients = {}

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if checking() or self._current is None:
            return
        each, self._current = self._current, None
        if self._losses and each.wanted:
            self._find_loss(each, output)

        def reached(_: Tensor) -> None:
            if checking():
                return
            each.reached = True
            if _graph_task() != self._task:
                self._task, self._backward = _graph_task(), []
            if each not in self._backward:
                self._backward.append(each)

        answers = {id(x): x for x in _objects(output) if isinstance(x, Tensor) and x.requires_grad}
        if not answers:
            self.seen.mute = type(output).__name__
        for answer in answers.values():
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
            if checking():
                return
            if len(self._backward) > 1:  # the gradient of a sum of losses: no pass has a share of its own
                for each in self._backward:
                    each.blurred = True
            for each in self._backward[:1]:
                found = each.gradients
                if found is not None:
                    found[number] = found[number] + gradient if number in found else gradient

        return arrived

    def tell(self, losses: Tensor) -> None:
        """The losses of the examples of the last forward pass."""
        if not self._passes or not self._passes[-1].wanted:
            return
        each, found = self._passes[-1], losses.detach().flatten()
        alone = len(found) == 1 and self._trainee.fits_units(each.claim)
        if len(found) != each.examples and not alone:
            raise InputError(
                f"the losses of {each.examples} examples were expected, one each, got {len(found)}; "
                "compute them with reduction='none'"
            )
        each.losses = found

    def _find_loss(self, each: _Pass, output: Any) -> None:
        """Take the mean loss from the model's output, if there is one and it is all that is needed."""
        if not self._trainee.fits_units(each.claim):
            return
        named = output.get("loss") if isinstance(output, Mapping) else None
        scalars = [x for x in _objects(output) if isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad]
        if isinstance(named, Tensor) and named.numel() == 1:
            each.losses = named.detach().flatten()
        elif len(scalars) == 1:
            each.losses = scalars[0].detach().flatten()

    def _rows(self, each: _Pass) -> Tensor | None:
        """What the order is told of a batch's examples: sketches, and losses where they are wanted."""
        sketches = None if self._spec is None else self._sketches(each)
        if not self._losses or not each.wanted or (self._spec is not None and sketches is None):
            return sketches
        if each.losses is None:
            raise InputError(
                "the order wants the loss of every example, and nobody has told it: call "
                "sampler.tell_losses(losses), one for each example of the batch, after the forward pass; or use "
                "unit = the batch size with a model that returns its loss"
            )
        losses = each.losses.to(self.dtype).unsqueeze(1)
        if sketches is None:
            return losses
        losses = losses.to(sketches.device)
        if len(sketches) != len(losses):
            losses = losses.mean(0, keepdim=True).expand(len(sketches), 1)
        return torch.cat([sketches, losses], 1)

    def _sketches(self, each: _Pass) -> Tensor | None:
        if each.recording is None or self.recorder is None:
            if each.blurred and each.gradients is not None:
                self.seen.summed = True
                return None
            gradient = self._gradient(each)
            return None if gradient is None else gradient.div_(each.scale)
        if not each.recording.reached:
            self.seen.unhooked = True
            self.seen.differentiated |= each.recording.differentiated
            return None
        rows = self.recorder.rows(each.recording)
        if not self._verified and not each.blurred:
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


def _graph_task() -> int:
    """The backward pass under way, or -1."""
    task: int = torch._C._current_graph_task_id()
    return task


def _objects(found: Any, depth: int = 0) -> Iterator[Any]:
    """What a model's output holds: containers, dataclasses and other objects, a few levels deep."""
    if isinstance(found, Tensor) or depth > 6:
        yield found
    elif isinstance(found, Mapping):
        for each in found.values():
            yield from _objects(each, depth + 1)
    elif isinstance(found, tuple | list):
        for each in found:
            yield from _objects(each, depth + 1)
    elif hasattr(found, "__dict__") and not isinstance(found, nn.Module | type):
        for each in vars(found).values():
            yield from _objects(each, depth + 1)
