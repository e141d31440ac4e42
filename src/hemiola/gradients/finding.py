"""Which modules of a model hooks can tell the examples' gradients of.

A module is understood only if it computes what torch's own class does: a subclass with another ``forward``, a weight
that is made from other parameters, or a layer without weights yet is left out and named.
"""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from hemiola.gradients.composites import Recurrent, attention_layers, other_library
from hemiola.gradients.hooks import Hook
from hemiola.gradients.layers import Convolution, Dense, Layer, Lookup, Scaling

LAZY = "no weights yet: run one batch through the model before watch"


def find_layers(model: nn.Module, rank: int | None, seed: int) -> tuple[list[Layer], list[str]]:
    """Return the trained layers whose gradients hooks can tell, and the names of the trained ones where they cannot."""
    layers: list[Layer] = []
    left_out: list[str] = []
    inside: str | None = None  # a module that uses its children's weights without calling them
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if isinstance(module, nn.MultiheadAttention) or is_parametrized(module):
            inside = f"{name}." if name else ""
        elif not any(p.requires_grad for p in module.parameters(recurse=False)):
            continue
        found, why = _understood(name, module, rank, seed)
        layers += found
        if why is not None:
            left_out.append(describe(name, module, why))
    return layers, left_out


def _understood(name: str, module: nn.Module, rank: int | None, seed: int) -> tuple[list[Layer], str | None]:
    """The layers of a module that hooks can tell; and, unless that is all of it, why ("" if its class tells)."""
    if isinstance(module, nn.MultiheadAttention) and _plain(module, nn.MultiheadAttention):
        found, why = attention_layers(name, module, rank)
        return list[Layer](found), why or None
    if isinstance(module, nn.RNNBase):
        known = rank is not None and any(_plain(module, kind) for kind in (nn.LSTM, nn.GRU, nn.RNN))
        why = "all but the first input-to-hidden weights" if rank else ""
        return [Recurrent(name, module, rank)] if known and rank is not None else [], why
    layer = _layer(name, module, rank, seed)
    if layer is not None:
        return [layer], None
    trained = any(p.requires_grad for p in module.parameters())
    return [], None if not trained else LAZY if _lazy(module) else ""


def describe(name: str, module: nn.Module, why: str = "") -> str:
    """A layer by name and class, with the reason why it is left out where the class does not tell."""
    return f"{name or 'the model itself'} ({type(module).__name__}{', ' if why else ''}{why})"


def _layer(name: str, module: nn.Module, rank: int | None, seed: int) -> Layer | None:
    if _lazy(module):
        return None
    if isinstance(module, nn.Linear) and _is(module, nn.Linear):
        return Dense(name, module, rank)
    if isinstance(module, nn.Conv1d | nn.Conv2d) and (_is(module, nn.Conv1d) or _is(module, nn.Conv2d)):
        return Convolution(name, module, rank)
    if isinstance(module, nn.Embedding) and _is(module, nn.Embedding):
        understood = not module.scale_grad_by_freq and module.max_norm is None
        return Lookup(name, module, rank, seed) if understood else None
    if any(_is(module, kind) for kind in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)):
        return Scaling(name, module, rank)
    return None if is_parametrized(module) or _patched(module) else other_library(name, module, rank)


def _plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module computes what this class does, from weights that are parameters."""
    return type(module).forward is kind.forward and not is_parametrized(module) and not _patched(module)


def _is(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module computes what this class of torch does, from weights of its own."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and getattr(type(module), "_conv_forward", None) is getattr(kind, "_conv_forward", None)
        and not is_parametrized(module)  # before its weight is looked at, which may change it (spectral_norm)
        and own <= {"weight", "bias"}
        and ("weight" in own or module.weight is None)
        and not _patched(module)
    )


def _patched(module: nn.Module) -> bool:
    """Whether somebody else than a recorder has given this one module another ``forward``."""
    forward = vars(module).get("forward")
    if forward is None or isinstance(forward, Hook):
        return False
    return not (isinstance(forward, functools.partial) and forward.func is type(module).forward)


def _lazy(module: nn.Module) -> bool:
    return any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False))
