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

GHOST_WIDTH, THIN_WIDTH = 1024, 512


@dataclass(frozen=True)
class SketchSpec:
    """What a sketch option means.

    Attributes:
        kind: ``"exact"`` (the gradient itself), ``"fold"``, or ``"ghost"`` (``ghost.py``).
        width: Numbers a unit is folded to; None for ``"exact"``.
        rank: Principal input directions per layer; None unless ``"ghost"``.
        thin: Whether ghosts are made of a part of the model (``thin.py``).
        int8: Whether rows travel as whole numbers from -127 to 127 and a scale each, a quarter of the bytes.
    """

    kind: Literal["exact", "fold", "ghost"]
    width: int | None = None
    rank: int | None = None
    thin: bool = False
    int8: bool = False


def parse_sketch(text: str) -> SketchSpec:
    """Read ``"exact"``, ``"fold:K"``, ``"ghost:R"`` (folded to 1024), ``"ghost:R:K"``, ``"ghost:R:thin"``.

    All but the first may end with ``":int8"``.
    """
    whole, int8 = str(text), str(text).endswith(":int8") and not str(text).startswith("exact")
    kind, *numbers = (whole.removesuffix(":int8") if int8 else whole).split(":")
    thin = kind == "ghost" and numbers[1:] != [] and numbers[-1] == "thin"
    numbers = numbers[:-1] if thin else numbers
    if kind == "exact" and not numbers:
        return SketchSpec("exact")
    if kind == "fold" and len(numbers) == 1:
        return SketchSpec("fold", width=_count(text, "K", numbers[0]), int8=int8)
    if kind == "ghost" and len(numbers) in (1, 2):
        width = _count(text, "K", numbers[1]) if len(numbers) == 2 else THIN_WIDTH if thin else GHOST_WIDTH
        return SketchSpec("ghost", width=width, rank=_count(text, "R", numbers[0]), thin=thin, int8=int8)
    hint = nearest(kind, ["exact", "fold", "ghost"]) if kind not in ("exact", "fold", "ghost") else ""
    raise InputError(
        "sketch must be 'exact', 'fold:K', 'ghost:R', 'ghost:R:K' or 'ghost:R:thin', all but the first perhaps with "
        f"':int8' at the end, got {text!r}{hint}"
    )


LEVELS = 127


def encode_rows(rows: Tensor, whole: int = 0) -> Tensor:
    """(units, k) rows as bytes: whole numbers from -127 to 127, then as a float32 each the row's scale and its tail.

    A row that is not finite arrives as one. The last ``whole`` numbers of a row, its tail, are not rounded.
    """
    rows, tail = rows.detach().float().tensor_split([rows.shape[1] - whole], 1)
    scale = rows.abs().amax(1, keepdim=True)
    inverse = torch.where((scale > 1e-30) & scale.isfinite(), LEVELS / scale, 0.0)
    codes = torch.nan_to_num(rows * inverse, nan=0.0, posinf=0.0, neginf=0.0).round_().to(torch.int8)
    return torch.cat([codes.view(torch.uint8), torch.cat([scale, tail], 1).view(torch.uint8)], 1)


def decode_rows(payload: Tensor, whole: int = 0) -> Tensor:
    """The (units, k) rows of `encode_rows`'s bytes."""
    width = payload.shape[1] - 4 * (1 + whole)
    codes = payload[:, :width].contiguous().view(torch.int8)
    numbers = payload[:, width:].flatten().clone().view(torch.float32)  # a clone of one row keeps its odd stride
    scale, tail = numbers.view(len(payload), 1 + whole).tensor_split([1], 1)
    return torch.cat([torch.where(scale.isfinite(), codes * (scale / LEVELS), torch.nan), tail], 1)


def unpacked(rows: Tensor, losses: bool) -> Tensor:
    """Rows as they came, which are int8 sketches if they came as bytes; ``losses``: and each ends with a loss."""
    return decode_rows(rows, int(losses)) if rows.dtype == torch.uint8 else rows


def default_sketch(unit: int) -> str:
    """What is balanced on where nothing was said: the cheapest sketch for units of this many examples.

    Ghosts of single examples come out of one ordinary backward pass. A larger unit is usually the whole batch, whose
    gradient is there anyway, and only has to be folded.
    """
    return "ghost:4" if unit == 1 else "fold:1024"


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
        if rows.device.type != "cpu":
            out = torch.zeros(len(rows), self.width, dtype=dtype, device=rows.device)
            self.add_(out, 0, rows)
            return out
        # Called at every step, when a training step has emptied the caches: few calls count for more than few numbers.
        whole = self.dimension - self.dimension % self.width
        numbers, signs = rows.detach().to(dtype).numpy(), self._signs.numpy()
        folded = _sum_laps(numbers[:, :whole], signs[:whole].reshape(-1, self.width))
        if whole < self.dimension:
            folded[:, : self.dimension - whole] += numbers[:, whole:] * signs[whole:]
        return torch.from_numpy(folded)

    def add_(self, out: Tensor, offset: int, block: Tensor) -> None:
        """Add what coordinates ``offset ..`` of every unit contribute to ``out``, a (units, width) tensor.

        Calling this for every parameter in turn gives the same as ``apply`` on the concatenated gradient.
        """
        if self._signs.device != block.device:
            self._signs = self._signs.to(block.device)
        block, length = block.detach().to(out.dtype), block.shape[1]
        signs = self._signs[offset : offset + length].to(out.dtype)
        start = offset % self.width
        head = min(self.width - start, length) if start else 0
        laps = (length - head) // self.width
        body = head + laps * self.width
        if head:
            out[:, start : start + head].addcmul_(block[:, :head], signs[:head])
        if laps and out.device.type == "cpu":
            found = _sum_laps(block[:, head:body].numpy(), signs[head:body].view(laps, self.width).numpy())
            out += torch.from_numpy(found)
        elif laps:
            out += (block[:, head:body] * signs[head:body]).view(-1, laps, self.width).sum(1)
        if body < length:
            out[:, : length - body].addcmul_(block[:, body:], signs[body:])


def _sum_laps(block: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Sum of (units, laps * width) numbers over their laps, with (laps, width) signs: one pass, no signed copy."""
    found: np.ndarray = np.einsum("ulw,lw->uw", block.reshape(len(block), *signs.shape), signs)
    return found


def build_sketch(spec: SketchSpec, dimension: int, seed: int) -> Exact | Fold:
    """The map from ``dimension`` numbers to the sketch: a fold, or nothing to do where a fold would not be shorter."""
    if spec.width is None or spec.width >= dimension:
        return Exact(dimension)
    return Fold(spec.width, dimension, seed)
