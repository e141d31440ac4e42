"""Sketches: short linear images of a unit's gradient, good enough to balance on.

Balancing uses inner products only, and a random fold keeps inner products: multiply every coordinate by a random sign,
then sum the coordinates whose index is the same modulo k. It is linear, costs one pass over the gradient, and can be
filled in parameter by parameter, so that the concatenated gradient never has to exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hemiola.errors import InputError, nearest
from hemiola.streams import stream

GHOST_WIDTH = 1024
LARGE_LAP = 2**14  # numbers from which one call per lap costs less than a signed copy of the whole block


@dataclass(frozen=True)
class SketchSpec:
    """What a sketch option means.

    Attributes:
        kind: ``"exact"`` (the gradient itself), ``"fold"``, or ``"ghost"`` (see ``order/gradients.py``).
        width: Numbers a unit is folded to; None for ``"exact"``.
        rank: Principal input directions per layer; None unless ``"ghost"``.
    """

    kind: Literal["exact", "fold", "ghost"]
    width: int | None = None
    rank: int | None = None


def parse_sketch(text: str) -> SketchSpec:
    """Read ``"exact"``, ``"fold:K"``, ``"ghost:R"`` (folded to 1024 numbers) or ``"ghost:R:K"``."""
    kind, *numbers = str(text).split(":")
    if kind == "exact" and not numbers:
        return SketchSpec("exact")
    if kind == "fold" and len(numbers) == 1:
        return SketchSpec("fold", width=_count(text, "K", numbers[0]))
    if kind == "ghost" and len(numbers) in (1, 2):
        width = _count(text, "K", numbers[1]) if len(numbers) == 2 else GHOST_WIDTH
        return SketchSpec("ghost", width=width, rank=_count(text, "R", numbers[0]))
    hint = nearest(kind, ["exact", "fold", "ghost"]) if kind not in ("exact", "fold", "ghost") else ""
    raise InputError(f"sketch must be 'exact', 'fold:K', 'ghost:R' or 'ghost:R:K', got {text!r}{hint}")


def _count(text: str, name: str, digits: str) -> int:
    if not digits.isascii() or not digits.isdigit() or int(digits) < 1:
        raise InputError(f"{name} in sketch {text!r} must be a whole number of at least 1, got {digits!r}")
    return int(digits)


class Exact:
    """The gradient itself, with the interface of `Fold`."""

    def __init__(self, dimension: int) -> None:
        self.dimension = self.width = dimension

    def apply(self, rows: Tensor) -> Tensor:
        """Return the (units, dimension) rows as they are."""
        return rows

    def add_(self, out: Tensor, offset: int, block: Tensor) -> None:
        """Add coordinates ``offset ..`` of every unit to ``out``."""
        out[:, offset : offset + block.shape[1]] += block


class Fold:
    """Random signs, then a sum over the coordinates with equal index modulo ``width``.

    Args:
        width: k, numbers per unit.
        dimension: Coordinates of a whole gradient.
        seed: Two folds with the same arguments are the same map, on every rank.
    """

    def __init__(self, width: int, dimension: int, seed: int) -> None:
        self.width, self.dimension = width, dimension
        bits = stream("fold", seed, width).integers(0, 2, dimension, dtype=np.int8)
        self._signs = torch.from_numpy(2 * bits - 1).to(torch.float32)

    def apply(self, rows: Tensor) -> Tensor:
        """Fold (units, dimension) rows to (units, width)."""
        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        out = torch.zeros(rows.shape[0], self.width, dtype=dtype, device=rows.device)
        self.add_(out, 0, rows)
        return out

    def add_(self, out: Tensor, offset: int, block: Tensor) -> None:
        """Add what coordinates ``offset ..`` of every unit contribute to ``out``, a (units, width) tensor.

        Calling this for every parameter in turn gives the same as ``apply`` on the concatenated gradient.
        """
        if self._signs.device != block.device:
            self._signs = self._signs.to(block.device)
        units, length = block.shape
        start = offset % self.width
        head = min(self.width - start, length) if start else 0
        laps = (length - head) // self.width
        body = head + laps * self.width
        self._add_lap(out, start, offset, block[:, :head])
        if units * self.width >= LARGE_LAP:
            for lap in range(head, body, self.width):
                self._add_lap(out, 0, offset + lap, block[:, lap : lap + self.width])
        elif laps:
            signed = block[:, head:body].to(out.dtype) * self._signs[offset + head : offset + body].to(out.dtype)
            out += signed.reshape(units, laps, self.width).sum(1)
        self._add_lap(out, 0, offset + body, block[:, body:])

    def _add_lap(self, out: Tensor, start: int, offset: int, block: Tensor) -> None:
        """Add at most one lap around ``out``, from its column ``start`` on."""
        length = block.shape[1]
        if length:
            signs = self._signs[offset : offset + length].to(out.dtype)
            out[:, start : start + length].addcmul_(block.to(out.dtype), signs)


def build_sketch(spec: SketchSpec, dimension: int, seed: int) -> Exact | Fold:
    """The map from ``dimension`` numbers to the sketch: a fold, or nothing to do where a fold would not be shorter."""
    if spec.width is None or spec.width >= dimension:
        return Exact(dimension)
    return Fold(spec.width, dimension, seed)
