"""What each kind of layer adds to a unit's gradient, from its inputs and its back-propagated signal.

A linear layer's gradient for one example is b a^T: the signal b that comes back to its output times its input a, summed
over positions where there are several (a sequence, a convolution). Both are seen during one ordinary forward and
backward pass, so no per-example gradient has to be formed by a pass of its own. Every layer here can give

* the **whole** gradient of each example (``rank`` None), or
* a **ghost** of it: b whole, and a only along ``rank`` directions (``directions.py``), with the bias's gradient.

A layer's life: ``capture`` in the forward pass, with its input; ``blocks`` in the backward pass, with what was captured
and the signal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hemiola.gradients.directions import principal_directions, row_limit
from hemiola.streams import torch_stream


class Layer(ABC):
    """One layer whose part of every example's gradient can be told from hooks.

    Attributes:
        name: As in ``model.named_modules()``.
        module: The layer.
        rank: Input directions kept, or None for all of the gradient.
        parameters: Names of its parameters that are trained.
        widths: Numbers per example in each of ``blocks``: a block for each parameter when whole, else one block.
    """

    widths: list[int]

    def __init__(self, name: str, module: nn.Module, rank: int | None) -> None:
        self.name, self.module, self.rank = name, module, rank
        self.parameters = [key for key, p in module.named_parameters(recurse=False) if p.requires_grad]
        if rank is None:
            self.widths = [getattr(module, key).numel() for key in self.parameters]

    @abstractmethod
    def capture(self, a: Tensor, examples: int) -> Tensor:
        """Keep what ``blocks`` needs of the layer's input, a batch of ``examples``."""

    @abstractmethod
    def blocks(self, kept: Tensor, b: Tensor, examples: int) -> list[Tensor]:
        """Return one (examples, width) block for each of ``widths``."""

    def fits(self, a: Tensor, examples: int) -> bool:
        """Whether the input's first dimension is the batch, possibly with each example's positions folded into it."""
        return a.dim() >= 1 and a.shape[0] > 0 and a.shape[0] % examples == 0


class Projecting(Layer):
    """A layer that multiplies its input with a weight: the ghost is taken along principal input directions.

    Attributes:
        names: Of the weight and the bias among the module's parameters.
        groups: Parts of the layer that see different inputs.
        length: Of the vectors that each part's weight is multiplied with.
        outputs: Of all parts.
        directions: Kept per group; the bias comes on top.
        filters: (groups, directions, length), or None before the first batch.
        every: Of the outputs of a thin ghost one in so many is kept; 1 otherwise.
        positions: Of a thin ghost about so many are kept in each dimension; None for all.
    """

    groups = 1
    length: int
    outputs: int
    every = 1
    positions: int | None = None

    def __init__(self, name: str, module: nn.Module, rank: int | None) -> None:
        super().__init__(name, module, rank)
        self.parameters = [key for key in self.parameters if key in self.names]
        self.filters: Tensor | None = None
        if rank is None:
            self.widths = [getattr(module, key).numel() for key in self.parameters]
        else:
            self.widths = [self.outputs * (self.directions + self.trains_bias)]

    @property
    def names(self) -> tuple[str, str]:
        return "weight", "bias"

    @property
    def directions(self) -> int:
        return min(self.rank or 0, self.length) if self.trains_weight else 0

    @property
    def trains_weight(self) -> bool:
        return self.names[0] in self.parameters

    @property
    def trains_bias(self) -> bool:
        return self.names[1] in self.parameters

    def thin(self, outputs: int, positions: int) -> None:
        """Keep about this many outputs, and positions in each dimension where there are many (``thin.py``)."""
        self.every = max(1, self.outputs // outputs) if self.groups == 1 else 1
        self.positions = positions
        self.widths = [-(-self.outputs // self.every) * (self.directions + self.trains_bias)]

    def adopt(self, directions: Tensor) -> None:
        """Use these (groups, directions, length) directions from now on."""
        weight: Tensor = getattr(self.module, self.names[0])
        self.filters = directions.to(weight.device, working_type(weight))

    @abstractmethod
    def samples(self, a: Tensor) -> Tensor:
        """Return some of the (groups, rows, length) vectors the weight is multiplied with."""

    def estimate(self, a: Tensor) -> Tensor:
        """Return the principal directions of these inputs, (groups, directions, length)."""
        return principal_directions(self.samples(a), self.directions)


def working_type(weight: Tensor) -> torch.dtype:
    """Sketches are float32, or float64 for a float64 model; never half."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


class Dense(Projecting):
    """`nn.Linear`, on (batch, features) or with positions in between."""

    def __init__(self, name: str, module: nn.Module, rank: int | None) -> None:
        self.length, self.outputs = self.sizes(module)
        super().__init__(name, module, rank)
        self._constants: Tensor | None = None

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        """Lengths of what goes in and of the signal."""
        assert isinstance(module, nn.Linear)
        return module.in_features, module.out_features

    def whole(self, product: Tensor) -> Tensor:
        """The weight's (examples, outputs, inputs) gradients as the parameter has them, flat."""
        return product.flatten(1)

    def adopt(self, directions: Tensor) -> None:
        # The bias is one more direction, along which every input is 1: one product b [V a, 1]^T gives both.
        bias = self.trains_bias
        super().adopt(F.pad(directions, (0, 0, 0, 1)) if bias else directions)
        assert self.filters is not None
        self._constants = self.filters.new_tensor([0.0] * self.directions + [1.0] * bias)

    def samples(self, a: Tensor) -> Tensor:
        rows = a.reshape(-1, self.length)
        return rows[:: math.ceil(len(rows) / row_limit(self.length))].unsqueeze(0)

    def fits(self, a: Tensor, examples: int) -> bool:
        return a.dim() >= 2 and super().fits(a, examples)

    def capture(self, a: Tensor, examples: int) -> Tensor:
        if not self.trains_weight:
            return a.new_empty(0)  # the bias needs nothing of the input
        if self.filters is None:
            return a
        return F.linear(a.to(self.filters.dtype), self.filters[0], self._constants)

    def blocks(self, kept: Tensor, b: Tensor, examples: int) -> list[Tensor]:
        dtype = working_type(b)
        if self.every > 1:
            b = b[..., :: self.every] * math.sqrt(self.every)
        b = b.reshape(examples, -1, b.shape[-1]).to(dtype)
        if not self.trains_weight:
            return [b.sum(1)]
        kept = kept.reshape(examples, -1, kept.shape[-1]).to(dtype)
        product = _product(b, kept)
        if self.rank is not None:
            return [product.flatten(1)]
        weight, bias = self.names
        found = {weight: lambda: self.whole(product), bias: lambda: b.sum(1)}
        return [found[key]() for key in self.parameters]


def _product(b: Tensor, kept: Tensor) -> Tensor:
    """Sum over positions of b kept^T, for (examples, positions, .) tensors."""
    if b.shape[1] == 1:
        return b.transpose(1, 2) * kept
    if kept.shape[2] < b.shape[2]:  # the short factor first: the same product, up to seven times as fast
        return torch.bmm(kept.transpose(1, 2), b).transpose(1, 2)
    return torch.bmm(b.transpose(1, 2), kept)


class Convolution(Projecting):
    """`nn.Conv1d` and `nn.Conv2d`, with any stride, padding, dilation and groups."""

    def __init__(self, name: str, module: nn.Conv1d | nn.Conv2d, rank: int | None) -> None:
        self.conv = module
        self.groups, self.outputs = module.groups, module.out_channels
        self.shape = (module.in_channels // module.groups, *module.kernel_size)
        self.length = math.prod(self.shape)
        super().__init__(name, module, rank)
        self._both: tuple[Tensor, Tensor] | None = None

    @property
    def directions(self) -> int:
        # A projection that costs more than a third of the convolution is not worth it: this matters for the first
        # layer only, which has few channels and many positions, and whose inputs lie near few directions.
        return min(super().directions, max(1, self.outputs // self.groups // 3))

    @property
    def rides(self) -> bool:
        """Whether its projection is made at every position, so that it can ride on the convolution itself."""
        return self.directions > 0 and self.groups == 1 and self.positions is None

    @property
    def padding(self) -> tuple[int, ...]:
        """What the convolution itself pads; the rest is done by `padded`."""
        conv = self.conv
        if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
            return (0,) * len(conv.kernel_size)
        return tuple(conv.padding)

    def padded(self, a: Tensor) -> Tensor:
        """The input, padded where the module pads by a separate operation."""
        conv = self.conv
        if not isinstance(conv.padding, str) and conv.padding_mode == "zeros":
            return a
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        return F.pad(a, conv._reversed_padding_repeated_twice, mode)

    def convolve(self, a: Tensor, filters: Tensor, bias: Tensor | None) -> Tensor:
        """This layer's convolution of an already padded input, with other filters; at fewer positions if it is thin."""
        conv, zeros = self.conv, [0] * len(self.padding)
        sizes = zip(a.shape[2:], self.padding, conv.dilation, conv.kernel_size, conv.stride, strict=True)
        coarser = self.coarser([(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sizes])
        stride = [s * c for s, c in zip(conv.stride, coarser, strict=True)]
        return torch.convolution(a, filters, bias, stride, self.padding, conv.dilation, False, zeros, self.groups)

    def coarser(self, lengths: Sequence[int]) -> list[int]:
        """For outputs of these lengths, every how many-th position is kept in each dimension."""
        return [1 if self.positions is None else -(-length // self.positions) for length in lengths]

    def adopt(self, directions: Tensor) -> None:
        super().adopt(directions)
        assert self.filters is not None
        weight = self.conv.weight
        filters = torch.cat([weight.detach(), self.filters.view(-1, *self.shape).to(weight.dtype)])
        self._both = filters, filters.new_zeros(len(filters))

    def convolve_both(self, a: Tensor) -> Tensor:
        """This layer's convolution of an already padded input; the projections are the channels that follow."""
        assert self._both is not None
        filters, bias = self._both
        filters[: self.outputs] = self.conv.weight
        if self.conv.bias is not None:
            bias[: self.outputs] = self.conv.bias
        return self.convolve(a, filters, None if self.conv.bias is None else bias)

    def patches(self, a: Tensor, coarser: int = 1) -> Tensor:
        """The (batch, groups, length, positions) vectors that meet the weight, at every ``coarser``-th position."""
        conv = self.conv
        if any(self.padding):
            a = F.pad(a, [side for width in reversed(self.padding) for side in (width, width)])
        stride = [step * coarser for step in conv.stride]
        sizes = zip(a.shape[2:], conv.dilation, conv.kernel_size, stride, strict=True)
        positions = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in sizes]
        # A strided view that is copied once takes a third of the time of F.unfold.
        batch, channel, *steps = a.stride()
        across = [step * d for step, d in zip(steps, conv.dilation, strict=True)]
        along = [step * s for step, s in zip(steps, stride, strict=True)]
        shape = (*a.shape[:2], *conv.kernel_size, *positions)
        found = a.as_strided(shape, (batch, channel, *across, *along), a.storage_offset())
        return found.reshape(a.shape[0], self.groups, self.length, -1)

    def samples(self, a: Tensor) -> Tensor:
        a = self.padded(a)
        positions = a.shape[0] * math.prod(a.shape[2:]) / math.prod(self.conv.stride)
        coarser = max(1, math.ceil((positions / row_limit(self.length)) ** (1 / (a.dim() - 2))))
        found = self.patches(a, coarser).permute(1, 0, 3, 2).flatten(1, 2)
        return found[:, :: math.ceil(found.shape[1] / row_limit(self.length))]

    def capture(self, a: Tensor, examples: int) -> Tensor:
        if not self.trains_weight:
            return a.new_empty(0)  # the bias needs nothing of the input
        a = self.padded(a)
        if self.filters is None:
            return a
        return self.convolve(a.to(self.filters.dtype), self.filters.view(-1, *self.shape), None)

    def blocks(self, kept: Tensor, b: Tensor, examples: int) -> list[Tensor]:
        dtype = working_type(b)
        pieces = b.shape[0] // examples  # of one example, where a model folds a dimension into the batch
        if self.positions is not None:
            coarser = self.coarser(b.shape[2:])
            b = b[(slice(None), slice(None, None, self.every), *(slice(None, None, each) for each in coarser))]
            b = b * (math.sqrt(self.every) * math.prod(coarser))
        signal = b.to(dtype).reshape(b.shape[0], self.groups, b.shape[1] // self.groups, -1)
        found = []
        if self.trains_weight and self.rank is None:
            found.append((signal @ self.patches(kept.to(dtype)).transpose(2, 3)).flatten(1))
        elif self.trains_weight:
            # The short factor first: the product is the same and takes two thirds of the time.
            kept = kept.reshape(b.shape[0], self.groups, self.directions, -1).to(dtype)
            found.append((kept @ signal.transpose(2, 3)).flatten(1))
        if self.trains_bias:
            found.append(signal.sum(3).flatten(1))
        if self.rank is not None:
            found = [torch.cat(found, 1)]
        return [each.view(examples, pieces, -1).sum(1) for each in found] if pieces > 1 else found

    def fits(self, a: Tensor, examples: int) -> bool:
        return a.dim() == len(self.shape) + 1 and super().fits(a, examples)


class Lookup(Layer):
    """`nn.Embedding`. Its ghost puts tokens into buckets with random signs, short whatever the vocabulary."""

    BUCKETS = 32

    def __init__(self, name: str, module: nn.Embedding, rank: int | None, seed: int) -> None:
        super().__init__(name, module, rank)
        self.embedding = module
        tokens = module.num_embeddings
        self.buckets = tokens
        if rank is not None:
            random = torch_stream("ghost buckets", seed, name)
            self.buckets = min(tokens, max(rank, self.BUCKETS))
            self.bucket = torch.randint(self.buckets, (tokens,), generator=random)
            self.sign = torch.randint(2, (tokens,), generator=random) * 2 - 1
            self.widths = [self.buckets * module.embedding_dim]

    def capture(self, a: Tensor, examples: int) -> Tensor:
        return a

    def blocks(self, kept: Tensor, b: Tensor, examples: int) -> list[Tensor]:
        b = b.reshape(-1, b.shape[-1]).to(working_type(b))
        tokens = kept.reshape(-1)
        if self.embedding.padding_idx is not None:
            b = b * (tokens != self.embedding.padding_idx).unsqueeze(1)
        if self.rank is not None:
            self.bucket, self.sign = self.bucket.to(tokens.device), self.sign.to(tokens.device)
            b, tokens = b * self.sign[tokens].unsqueeze(1), self.bucket[tokens]
        example = torch.arange(examples, device=tokens.device).repeat_interleave(len(tokens) // examples)
        out = b.new_zeros(examples * self.buckets, b.shape[1])
        out.index_add_(0, example * self.buckets + tokens, b)
        return [out.view(examples, -1)]


class Scaling(Layer):
    """The scale and shift of a normalisation: LayerNorm, RMSNorm, GroupNorm, BatchNorm. Small enough to keep whole."""

    def __init__(self, name: str, module: nn.Module, rank: int | None) -> None:
        super().__init__(name, module, None)
        self.trailing = isinstance(module, nn.LayerNorm | nn.RMSNorm)
        if rank is not None:
            self.rank, self.widths = rank, [sum(self.widths)]

    def fits(self, a: Tensor, examples: int) -> bool:
        trailing = len(self.module.normalized_shape) if self.trailing else 1  # type: ignore[arg-type]
        return a.dim() > trailing and super().fits(a, examples)

    def capture(self, a: Tensor, examples: int) -> Tensor:
        module, a = self.module, a.to(working_type(a))
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(a, module.normalized_shape, eps=module.eps)
        if isinstance(module, nn.RMSNorm):
            return F.rms_norm(a, list(module.normalized_shape), eps=module.eps)
        if isinstance(module, nn.GroupNorm):
            return F.group_norm(a, module.num_groups, eps=module.eps)
        assert isinstance(module, nn.modules.batchnorm._BatchNorm)
        if module.training or module.running_mean is None:
            return F.batch_norm(a, None, None, training=True, eps=module.eps)
        return F.batch_norm(a, module.running_mean, module.running_var, eps=module.eps)

    def blocks(self, kept: Tensor, b: Tensor, examples: int) -> list[Tensor]:
        size = getattr(self.module, self.parameters[0]).numel()
        b = b.to(kept.dtype)

        def per_example(x: Tensor) -> Tensor:
            if self.trailing:
                return x.reshape(examples, -1, size).sum(1)
            return x.reshape(x.shape[0], size, -1).sum(2).reshape(examples, -1, size).sum(1)

        found = {"weight": lambda: per_example(b * kept), "bias": lambda: per_example(b)}
        blocks = [found[key]() for key in self.parameters]
        return blocks if self.rank is None else [torch.cat(blocks, 1)]
