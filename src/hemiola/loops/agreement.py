"""What the ranks must agree on before the first step, and models that cannot be averaged at all."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hemiola import peers
from hemiola.errors import InputError
from hemiola.loops.layout import Layout


def refuse(model: nn.Module, ranks: list[int]) -> None:
    """Refuse models whose own communication collides with averaging over ``ranks``."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if _is_sharded(module):
            raise InputError(
                f"{where} is sharded by FSDP: no rank holds whole weights to average; use DDP or a bare module"
            )
        if isinstance(module, nn.SyncBatchNorm) and len(ranks) > 1:
            synced = ranks if module.process_group is None else dist.get_process_group_ranks(module.process_group)
            if set(synced) & set(ranks) - {dist.get_rank()}:
                raise InputError(
                    f"{where} is a SyncBatchNorm over the averaged ranks, which communicates at every step; "
                    "use BatchNorm, whose running statistics are averaged"
                )


def _is_sharded(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    # FSDP2 (fully_shard) adds a mixin class to the module and turns its parameters into DTensors.
    mixed_in = any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
    return isinstance(module, FullyShardedDataParallel) or mixed_in


def learning_rates(optimizer: Optimizer) -> list[float]:
    """One learning rate a parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def check_same(
    layout: Layout, optimizer: Optimizer, settings: str, group: dist.ProcessGroup, anchor: Tensor | None
) -> None:
    """Raise the same `InputError` on every rank if models, learning rates, settings or resumed anchors differ."""
    mine: dict[str, Any] = {
        "parameters": [(name, tuple(p.shape)) for name, p in zip(layout.names, layout.parameters, strict=True)],
        "buffers": [tuple(b.shape) for b in layout.buffers],
        "rates": learning_rates(optimizer),
        "settings": settings,
        "anchor": None if anchor is None else hashlib.sha256(anchor.cpu().numpy().tobytes()).hexdigest(),
    }
    peers.check_same(mine, _difference, group)


def _difference(first: dict[str, Any], other: dict[str, Any], rank0: int, rank: int) -> str:
    pairs = list(zip(first["parameters"], other["parameters"], strict=False))
    for (name, shape), (other_name, other_shape) in pairs:
        if (name, shape) != (other_name, other_shape):
            return (
                f"models differ between ranks: rank {rank0} has {name} of shape {list(shape)}, "
                f"rank {rank} has {other_name} of shape {list(other_shape)}"
            )
    counts = len(first["parameters"]), len(other["parameters"])
    if counts[0] != counts[1]:
        return (
            f"models differ between ranks: rank {rank0} trains {counts[0]} parameters, rank {rank} trains {counts[1]}"
        )
    if first["buffers"] != other["buffers"]:
        return f"models differ between ranks: rank {rank0} and rank {rank} have different buffers"
    if first["rates"] != other["rates"]:
        return f"learning rates differ between ranks: {first['rates']} on rank {rank0}, {other['rates']} on rank {rank}"
    if first["settings"] != other["settings"]:
        return (
            f"averagers differ between ranks: {first['settings']} on rank {rank0}, {other['settings']} on rank {rank}"
        )
    if first["anchor"] != other["anchor"]:
        return f"rank {rank0} and rank {rank} resume from different averagings; load states saved at the same step"
    return ""


def copy_from_first(model: nn.Module, layout: Layout, group: dist.ProcessGroup) -> None:
    """Give every rank the first rank's parameters and buffers, as DistributedDataParallel does."""
    source = dist.get_process_group_ranks(group)[0]
    known = {id(p) for p in model.parameters()}
    extra = [p for p in layout.parameters if id(p) not in known]
    with torch.no_grad():
        for tensor in [*model.parameters(), *extra, *model.buffers()]:
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, source, group=group)
            tensor.copy_(whole)
