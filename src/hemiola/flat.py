"""A model whose trainable parameters, gradients and floating buffers are views of flat vectors.

Everything that crosses a cluster is one vector: the parameters first, then the floating-point buffers (BatchNorm's
running statistics), which are averaged like parameters but have no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hemiola.errors import InputError


class FlatModel:
    """A module laid out in one vector.

    Attributes:
        module: The user's module; its parameters are views of `weights`.
        weights: Parameters followed by floating buffers.
        gradient: Gradient of the parameters; every ``parameter.grad`` is a view of it.
        size: Number of trainable parameters, the length of `gradient`.
        shapes: Name and shape of each trainable parameter, in the order of the vector.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not parameters:
            raise InputError("the task's model has no trainable parameters; nothing can be trained")
        dtype = parameters[0][1].dtype
        if any(p.dtype != dtype for _, p in parameters):
            raise InputError("the task's model mixes parameter types; all trainable parameters must have one dtype")
        buffers = [b for b in module.buffers() if b.is_floating_point()]
        self.shapes = [(name, p.shape) for name, p in parameters]
        self.size = sum(p.numel() for _, p in parameters)
        pieces = [p.detach().reshape(-1) for _, p in parameters] + [b.reshape(-1).to(dtype) for b in buffers]
        self.weights = torch.cat(pieces)
        self.gradient = torch.zeros(self.size, dtype=dtype, device=self.weights.device)
        at = 0
        for _, p in parameters:
            p.data = self.weights[at : at + p.numel()].view(p.shape)
            p.grad = self.gradient[at : at + p.numel()].view(p.shape)
            at += p.numel()
        for b in buffers:
            b.data = self.weights[at : at + b.numel()].view(b.shape)
            at += b.numel()

    @property
    def has_buffers(self) -> bool:
        return self.weights.numel() > self.size

    def load(self, weights: Tensor) -> None:
        """Make the module compute at these weights."""
        self.weights.copy_(weights)

    def split(self, stack: Tensor) -> dict[str, Tensor]:
        """View a (rows, size) stack of weight vectors as named parameters with a leading dimension."""
        named, at = {}, 0
        for name, shape in self.shapes:
            named[name] = stack[:, at : at + shape.numel()].view(-1, *shape)
            at += shape.numel()
        return named
