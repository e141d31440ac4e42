"""Where unit gradients come from: one row per unit, beside the gradient training needs anyway.

In words, cheapest first; `UnitGradients.method` says which one is used:

* **micro-batch**: the batch is one unit, so the row is the batch's own gradient. Free.
* **ghost**: hooks during one ordinary backward pass, projected (``ghost.py``). ``sketch = "ghost:R"``.
* **layer by layer**: the same hooks, whole gradients. Used where hooks can tell every layer's gradient.
* **vectorised**: `torch.func.vmap` of the gradient. For models with layers that the hooks do not know.
* **unit by unit**: one backward pass per unit. For models that cannot be vectorised either, such as `nn.LSTM`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from hemiola.errors import InputError
from hemiola.gradients.ghost import WHOLE_AT_ONCE, Recorder
from hemiola.gradients.layers import working_type
from hemiola.gradients.sketch import build_sketch, decode_rows, encode_rows, parse_sketch

Losses = Callable[[Tensor, Tensor], Tensor]


class UnitGradients:
    """Gradients of a model and, beside them, one sketched gradient per unit.

    Args:
        model: Evaluated at its current parameters.
        losses: Maps outputs and targets to one loss per example.
        sketch: ``"exact"``, ``"fold:K"``, ``"ghost:R"`` or ``"ghost:R:K"``, perhaps with ``:int8``.
        seed: Of the fold; rows of two objects can be balanced together only if seed and sketch are the same (and, for
            ghosts, the directions: see `adopt`).

    Attributes:
        dimension: k, numbers per row.
        rounds: Whether int8 rows are returned as they would arrive; set where nothing is sent.
    """

    def __init__(self, model: nn.Module, losses: Losses, sketch: str, seed: int) -> None:
        self.model, self.losses = model, losses
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._named:
            raise InputError("the model has no trainable parameters; there are no gradients to order by")
        self._parameters = list(self._named.values())
        self.spec = parse_sketch(sketch)
        self.rounds = False
        size = sum(p.numel() for p in self._parameters)
        self._fold = build_sketch(self.spec, size, seed)
        self._recorder: Recorder | None = Recorder(model, self.spec, seed)
        self._coupled = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
        self._checked = self.spec.kind == "ghost"
        self._vectorises: bool | None = None
        if not self._recorder.layers or (self._recorder.left_out and self.spec.kind != "ghost"):
            self._drop_recorder()
        self.dimension = self._fold.width if self._recorder is None else self._recorder.dimension

    @property
    def method(self) -> str:
        """Where rows come from, in words."""
        if self._recorder is not None and self.spec.kind == "ghost":
            return f"ghosts along {self.spec.rank} input directions, from hooks in one backward pass"
        if self._recorder is not None:
            return "the batch's own gradient where it is one unit, else layer by layer from hooks in one backward pass"
        if self._vectorises is not False:
            return "the batch's own gradient where it is one unit, else vectorised over units (torch.func)"
        return "the batch's own gradient where it is one unit, else one backward pass per unit"

    @property
    def kind(self) -> Literal["exact", "fold", "ghost"]:
        """What rows are: what was asked for, but folded gradients where ghosts see no layer of the model."""
        return "fold" if self.spec.kind == "ghost" and self._recorder is None else self.spec.kind

    @property
    def left_out(self) -> list[str]:
        """Trained layers that ghosts know nothing of; empty for every other method."""
        return list(self._recorder.left_out) if self._recorder is not None and self.spec.kind == "ghost" else []

    def compute(
        self, inputs: Tensor, targets: Tensor, weights: Tensor, rows: Tensor | np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Add the batch's gradient to every ``parameter.grad``, in place, and return a row per unit.

        Args:
            inputs: Of the N examples.
            targets: Of the N examples.
            weights: (N,) what each example's loss counts in the gradient; none may be zero.
            rows: (N,) which unit each example belongs to; units are 0 .. U - 1 and none is empty.

        Returns:
            The (N,) losses, and the (U, k) sketched mean gradient of each unit's examples, not weighted.
        """
        losses, found = self._found(inputs, targets, weights, rows)
        return losses, self._rounded(found)

    def _found(
        self, inputs: Tensor, targets: Tensor, weights: Tensor, rows: Tensor | np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """What `compute` returns, by the cheapest way, before rounding."""
        rows = torch.as_tensor(rows, device=weights.device)
        units = int(rows.max()) + 1
        ghost = self.spec.kind == "ghost" and self._recorder is not None
        if units == 1 and not ghost and bool((weights == weights[0]).all()):
            return self._whole_batch(inputs, targets, weights)
        if self._recorder is not None:
            found = self._hooked(inputs, targets, weights, rows, units)
            if found is not None:
                return found
        if self._vectorises is None:
            self._vectorises = not self._coupled and self._can_vectorise(inputs, targets)
        if self._vectorises:
            return self._vectorised(inputs, targets, weights, rows, units)
        return self._unit_by_unit(inputs, targets, weights, rows, units)

    def sketched(self, gradients: Tensor) -> Tensor:
        """The (U, k) rows of units whose (U, d) mean gradients are known already; not for ghosts, which need layers."""
        return self._rounded(self._fold.apply(gradients))

    def _rounded(self, rows: Tensor) -> Tensor:
        return decode_rows(encode_rows(rows)) if self.rounds and self.spec.int8 else rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on its way."""
        if self.spec.int8:
            return self.dimension + 4
        return self.dimension * (8 if self._parameters[0].dtype == torch.float64 else 4)

    def refresh(self) -> None:
        """Find new ghost directions from the next batch; call it when an epoch starts. Nothing for other sketches."""
        if self._recorder is not None:
            self._recorder.refresh()

    def directions(self) -> list[Tensor]:
        """The ghost directions in use; empty before the first batch, and for other sketches."""
        return self._recorder.directions() if self._recorder is not None else []

    def adopt(self, directions: list[Tensor]) -> None:
        """Use these directions of another `UnitGradients` of the same model and sketch: all rows need the same ones."""
        if self._recorder is not None:
            self._recorder.adopt(directions)

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._drop_recorder()

    # ------------------------------------------------------------------------------------------------ the methods

    def _whole_batch(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        losses = self.losses(self.model(inputs), targets)
        found = torch.autograd.grad(losses.mean(), self._parameters, allow_unused=True)
        row = losses.new_zeros(1, self.dimension, dtype=working_type(losses))
        self._add_up(row, found)
        self._accumulate([None if each is None else each * (weights[0] * len(losses)) for each in found])
        return losses.detach(), row

    def _hooked(
        self, inputs: Tensor, targets: Tensor, weights: Tensor, rows: Tensor, units: int
    ) -> tuple[Tensor, Tensor] | None:
        """One ordinary backward pass under the recorder; None if its rows turn out not to add up to the gradient."""
        assert self._recorder is not None
        recording = self._recorder.start(len(weights))
        losses = self.losses(self.model(inputs), targets)
        if self._checked:
            torch.autograd.backward((losses * weights).sum())
            self._recorder.recording = None
            return losses.detach(), self._mean_rows(self._recorder.rows(recording), weights, rows, units)
        found = torch.autograd.grad((losses * weights).sum(), self._parameters, allow_unused=True)
        self._recorder.recording = None
        total = losses.new_zeros(1, self.dimension, dtype=working_type(losses))
        self._add_up(total, found)
        if recording.reached:
            examples = self._recorder.rows(recording)
            error, scale = (examples.sum(0) - total[0]).norm(), examples.norm(dim=1).sum()
            if not error > 1e-3 * scale:  # not <=: a non-finite batch says nothing either way
                self._checked = bool(torch.isfinite(error))
                self._accumulate(found)
                return losses.detach(), self._mean_rows(examples, weights, rows, units)
        self._drop_recorder()
        return None

    def _vectorised(
        self, inputs: Tensor, targets: Tensor, weights: Tensor, rows: Tensor, units: int
    ) -> tuple[Tensor, Tensor]:
        """`vmap` over units where they are alike and lie side by side, else over examples."""
        count = len(weights)
        size = count // units
        alike = count == units * size and bool(
            (rows == torch.arange(units, device=rows.device).repeat_interleave(size)).all()
        )
        if not alike or bool((weights.view(units, size) != weights.view(units, size)[:, :1]).any()):
            size = 1
        groups = count // size
        inputs = inputs.reshape(groups, size, *inputs.shape[1:])
        targets = targets.reshape(groups, size, *targets.shape[1:])
        share = weights.view(groups, size)[:, 0] * size
        out = weights.new_zeros(groups, self.dimension, dtype=working_type(self._parameters[0]))
        all_losses = []
        one = vmap(grad(self._mean_loss, has_aux=True), in_dims=(None, 0, 0), randomness="different")
        values = {name: p.detach() for name, p in self._named.items()}
        step = max(1, WHOLE_AT_ONCE // sum(p.numel() for p in self._parameters))
        for start in range(0, groups, step):
            part = slice(start, start + step)
            found, losses = one(values, inputs[part], targets[part])
            at = 0
            for each in found.values():
                flat = each.flatten(1)
                self._fold.add_(out[part], at, flat)
                at += flat.shape[1]
            self._accumulate([torch.tensordot(share[part].to(each.dtype), each, 1) for each in found.values()])
            all_losses.append(losses.flatten())
        ones = torch.ones_like(weights)
        return torch.cat(all_losses), out if size > 1 else self._mean_rows(out, ones, rows, units)

    def _unit_by_unit(
        self, inputs: Tensor, targets: Tensor, weights: Tensor, rows: Tensor, units: int
    ) -> tuple[Tensor, Tensor]:
        """One backward pass per unit; where examples are coupled (BatchNorm), all through one forward pass."""
        out = weights.new_zeros(units, self.dimension, dtype=working_type(self._parameters[0]))
        together = self.losses(self.model(inputs), targets) if self._coupled else None
        all_losses = weights.new_zeros(len(weights), dtype=self._parameters[0].dtype)
        for unit in range(units):
            members = (rows == unit).nonzero().flatten()
            losses = (
                self.losses(self.model(inputs[members]), targets[members]) if together is None else together[members]
            )
            found = torch.autograd.grad(losses.mean(), self._parameters, allow_unused=True, retain_graph=True)
            self._add_up(out[unit : unit + 1], found)
            shares = weights[members]
            if bool((shares == shares[0]).all()):
                factor = shares[0] * len(members)
                self._accumulate([None if each is None else each * factor for each in found])
            else:
                self._accumulate(torch.autograd.grad((losses * shares).sum(), self._parameters, allow_unused=True))
            all_losses[members] = losses.detach()
        return all_losses, out

    # ---------------------------------------------------------------------------------------------------- pieces

    def _mean_loss(self, values: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = self.losses(functional_call(self.model, values, (inputs,)), targets)
        return losses.mean(), losses.detach()

    def _can_vectorise(self, inputs: Tensor, targets: Tensor) -> bool:
        """Try, on two examples: what `vmap` cannot do raises; what it does by a loop warns."""
        values = {name: p.detach() for name, p in self._named.items()}
        one = vmap(grad(self._mean_loss, has_aux=True), in_dims=(None, 0, 0), randomness="different")
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                one(values, inputs[:2].unsqueeze(1), targets[:2].unsqueeze(1))
            except (RuntimeError, ValueError, UserWarning):
                return False
        return True

    def _mean_rows(self, examples: Tensor, weights: Tensor, rows: Tensor, units: int) -> Tensor:
        """Mean of the examples' rows over each unit, after taking their weights out."""
        weights = weights.to(examples.dtype)
        if units == len(rows):
            return (examples / weights.unsqueeze(1))[rows.argsort()]
        counts = torch.bincount(rows, minlength=units).to(examples.dtype)
        scaled = examples / (weights * counts[rows]).unsqueeze(1)
        return examples.new_zeros(units, examples.shape[1]).index_add_(0, rows, scaled)

    def _add_up(self, out: Tensor, found: tuple[Tensor | None, ...]) -> None:
        at = 0
        for p, each in zip(self._parameters, found, strict=True):
            if each is not None:
                self._fold.add_(out, at, each.reshape(1, -1))
            at += p.numel()

    def _accumulate(self, found: list[Tensor | None] | list[Tensor] | tuple[Tensor | None, ...]) -> None:
        for p, each in zip(self._parameters, found, strict=True):
            if each is None:
                continue
            if p.grad is None:
                p.grad = each.clone()
            else:
                p.grad += each

    def _drop_recorder(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
