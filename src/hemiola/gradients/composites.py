"""Layers beyond torch's plain ones: projections inside attention, recurrent layers, and what other libraries define.

* ``nn.MultiheadAttention`` multiplies with its weights by function calls, which are caught while its ``forward`` runs
  (`ByFunction`; ``layer_hooks.py``).
* ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` are one fused operation, and the signal g at their gates is not to be had. What
  comes back to the input x is W^T g, W the input-to-hidden weights of the first layer. So sum_t (W^T g_t)(V x_t)^T is
  known, which is W^T G V^T for the example's gradient G of W: a linear image of it, the same for all examples.
* transformers' ``Conv1D`` is a linear layer with its weight transposed; RMSNorms of many libraries compute what
  ``nn.RMSNorm`` does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hemiola.gradients.layers import Dense, Scaling


class Transposed(Dense):
    """transformers' ``Conv1D``: y = x W + b, W of (inputs, outputs)."""

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        weight: Tensor = module.weight  # type: ignore[assignment]
        return weight.shape[0], weight.shape[1]

    def whole(self, product: Tensor) -> Tensor:
        return product.transpose(1, 2).flatten(1)


class ByFunction(Dense):
    """A product with a weight that is made by a function call, time first, inside another module's ``forward``.

    Attributes:
        caller: The module whose ``forward`` makes the call.
    """

    def __init__(self, name: str, module: nn.Module, rank: int | None, caller: nn.Module, prefix: str) -> None:
        self.caller, self.prefix = caller, prefix
        super().__init__(name, module, rank)

    @property
    def names(self) -> tuple[str, str]:
        return f"{self.prefix}weight", f"{self.prefix}bias"

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        weight: Tensor = getattr(module, self.names[0])
        return weight.shape[1], weight.shape[0]


def attention_layers(name: str, module: nn.MultiheadAttention, rank: int | None) -> tuple[list[Dense], str]:
    """The projections of self-attention, and what is left out of them in words."""
    if module.in_proj_weight is None or module.bias_k is not None:
        return [], "with keys or values of other sizes, or with biases as keys"
    found: list[Dense] = []
    if module.in_proj_weight.requires_grad:
        found.append(ByFunction(f"{name}.in_proj", module, rank, module, "in_proj_"))
    if module.out_proj.weight.requires_grad:
        found.append(ByFunction(f"{name}.out_proj", module.out_proj, rank, module, ""))
    return found, ""


class Recurrent(Dense):
    """The input-to-hidden weights of a recurrent layer's first layer and first direction; see the module's docstring.

    What is kept of the input meets the signal at the input, so there are as many "outputs" as inputs, and no bias.
    """

    @property
    def names(self) -> tuple[str, str]:
        return "weight_ih_l0", ""

    def sizes(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, nn.RNNBase)
        return module.input_size, module.input_size


class OtherRMSNorm(Scaling):
    """An RMSNorm of another library: one weight, and a number for stability; its first call shows that it is one."""

    def __init__(self, name: str, module: nn.Module, rank: int | None, eps: float) -> None:
        super().__init__(name, module, rank)
        self.trailing, self.eps, self._checked = True, eps, False

    def fits(self, a: Tensor, examples: int) -> bool:
        return a.dim() > 1 and a.shape[0] > 0 and a.shape[0] % examples == 0

    def capture(self, a: Tensor, examples: int) -> Tensor:
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        found = F.rms_norm(a.float(), [weight.numel()], eps=self.eps)
        if not self._checked:
            forward = type(self.module).forward
            with torch.no_grad():
                output = forward(self.module, a)
            if not torch.allclose(output.float(), weight.float() * found, rtol=1e-2, atol=1e-3):
                raise ValueError("it does not compute weight * x / rms(x)")
            self._checked = True
        return found


def other_library(name: str, module: nn.Module, rank: int | None) -> Transposed | OtherRMSNorm | None:
    """A layer that another library defines and that is known by what it looks like; no library is imported for it."""
    own = dict(module.named_parameters(recurse=False))
    kind = type(module).__name__
    if kind == "Conv1D" and hasattr(module, "nf") and set(own) == {"weight", "bias"} and own["weight"].dim() == 2:
        return Transposed(name, module, rank)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if kind.endswith("RMSNorm") and set(own) == {"weight"} and own["weight"].dim() == 1 and isinstance(eps, float):
        return OtherRMSNorm(name, module, rank, eps)
    return None
