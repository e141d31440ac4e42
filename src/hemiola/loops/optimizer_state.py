"""Optimizer states that agree on every rank, for whoever goes on training one model.

With ``momentum="local"`` every rank ends with a state of its own. Equal weights are then not enough: a
DistributedDataParallel that continues from there averages gradients only, so that different momenta drive the ranks
apart without a word. One all-reduce at the end makes the states equal:

- tensors of floating-point numbers (momentum, second moments): the mean over the ranks that have them and whose
  numbers are finite;
- counters and other single numbers: those of the rank that has taken the most steps;
- a parameter with quantised state (integers that stand for numbers): all of it from that rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hemiola.errors import InputError
from hemiola.peers import everyone, group_device

log = logging.getLogger("hemiola.averager")


def unwrapped(optimizer: Any) -> Optimizer:
    """The torch optimizer inside the wrappers that Accelerate, Fabric and Lightning hand out."""
    while not hasattr(optimizer, "_optimizer_step_post_hooks") or not hasattr(optimizer, "param_groups"):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or inner is optimizer:
            raise InputError(
                f"the averager needs a torch.optim.Optimizer, or a wrapper that has one as its .optimizer, "
                f"got {type(optimizer).__name__}"
            )
        optimizer = inner
    found: Optimizer = optimizer
    return found


@dataclass(frozen=True)
class _Entry:
    """One tensor of the optimizer's state, as every rank lays it out.

    Attributes:
        parameter: Number of its parameter.
        key: Its name in the state.
        dtype: Of the tensor.
        shape: Of the tensor.
        shares: Weight of every rank's numbers in the result.
    """

    parameter: int
    key: str
    dtype: torch.dtype
    shape: list[int]
    shares: list[float]

    @property
    def numbers(self) -> int:
        return int(torch.Size(self.shape).numel())


def agree_on_state(optimizer: Optimizer, parameters: Sequence[Tensor], group: dist.ProcessGroup) -> int:
    """Make the optimizer's state the same on every rank of the group; returns the bytes this rank sent."""
    described = [
        {key: _describe(value) for key, value in optimizer.state.get(p, {}).items() if value is not None}
        for p in parameters
    ]
    ranks = everyone(described, group)
    me, world = dist.get_rank(group), dist.get_world_size(group)
    entries: list[_Entry] = []
    for index, parameter in enumerate(parameters):
        of_ranks = [rank[index] for rank in ranks]
        if any(of_ranks):
            entries += _common(index, parameter, of_ranks, optimizer.state[parameter])
    if not entries:
        return 0
    wide = any(entry.dtype in (torch.float64, torch.int32, torch.int64) for entry in entries)
    message = torch.zeros(sum(e.numbers for e in entries), dtype=torch.float64 if wide else torch.float32)
    message = message.to(group_device(group))
    sections = torch.split_with_sizes(message, [entry.numbers for entry in entries])
    with torch.no_grad():
        for entry, section in zip(entries, sections, strict=True):
            if entry.shares[me]:
                section.view(entry.shape).copy_(optimizer.state[parameters[entry.parameter]][entry.key])
                section.mul_(entry.shares[me])
        dist.all_reduce(message, group=group)
        for entry, section in zip(entries, sections, strict=True):
            parameter = parameters[entry.parameter]
            state = optimizer.state[parameter]
            if not isinstance(state.get(entry.key), Tensor):
                state[entry.key] = torch.empty(entry.shape, dtype=entry.dtype, device=parameter.device)
            state[entry.key].copy_(section.view(entry.shape))
    return 2 * (world - 1) * message.numel() * message.element_size() // world


def _describe(value: Any) -> dict[str, Any]:
    """What other ranks must know about an entry of the state."""
    if isinstance(value, Tensor) and value.dim() > 0:
        finite = not value.is_floating_point() or bool(value.isfinite().all())
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "finite": finite}
    if isinstance(value, Tensor):
        here = {"dtype": str(value.dtype).removeprefix("torch."), "on_cpu": value.device.type == "cpu"}
        return {"number": value.item(), **here}
    if isinstance(value, (int, float)):
        return {"number": value}
    return {"type": type(value).__name__}


def _common(index: int, parameter: Tensor, of_ranks: list[dict[str, Any]], state: dict[str, Any]) -> list[_Entry]:
    """Set the single numbers of one parameter's state here; return the tensors that must be exchanged."""
    leader = max(range(len(of_ranks)), key=lambda rank: (bool(of_ranks[rank]), _steps(of_ranks[rank])))
    tensors = [d for rank in of_ranks for d in rank.values() if "shape" in d]
    quantised = any(not getattr(torch, d["dtype"]).is_floating_point for d in tensors)
    entries = []
    for key in sorted({key for rank in of_ranks for key in rank}):
        found = [rank.get(key) for rank in of_ranks]
        known = [description for description in found if description is not None]
        first = found[leader] or known[0]
        if not all(_of_one_kind(description, first) for description in known):
            log.warning("the optimizer's state %r has different shapes on different ranks and is left as it is", key)
        elif "type" in first:
            log.warning("the optimizer's state %r (%s) cannot be made the same on all ranks", key, first["type"])
        elif "number" in first:
            state[key] = _number(first, parameter)
        else:
            shares = _shares(found, leader if quantised else None)
            entries.append(_Entry(index, key, getattr(torch, first["dtype"]), first["shape"], shares))
    return entries


def _shares(found: list[dict[str, Any] | None], only: int | None) -> list[float]:
    """What each rank's tensor counts in the mean: those that are finite alike, or one rank's alone."""
    counted = [
        described is not None and (described["finite"] if only is None else rank == only)
        for rank, described in enumerate(found)
    ]
    return [float(each) / max(1, sum(counted)) for each in counted]


def _of_one_kind(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() - {"finite"} == other.keys() - {"finite"} and one.get("shape") == other.get("shape")


def _number(described: dict[str, Any], parameter: Tensor) -> Any:
    """A single number as it was described: plain, or a tensor where the rank it comes from has it."""
    if "dtype" not in described:
        return described["number"]
    device = torch.device("cpu") if described["on_cpu"] else parameter.device
    return torch.tensor(described["number"], dtype=getattr(torch, described["dtype"]), device=device)


def _steps(described: dict[str, Any]) -> float:
    return float(described.get("step", {}).get("number", 0.0))
