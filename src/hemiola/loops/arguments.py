"""The sampler's arguments, checked."""

from __future__ import annotations

from collections.abc import Sized

import torch.distributed as dist
from torch.utils.data import IterableDataset

from hemiola.contracts import Order
from hemiola.errors import InputError, unknown
from hemiola.order import ORDERS
from hemiola.order.balanced import Balanced
from hemiola.own import checked_policy
from hemiola.peers import check_started, new_group

THIN = "ghost:4:thin"


def dataset_size(dataset: Sized) -> int:
    """How many examples; refuses what cannot be ordered."""
    if isinstance(dataset, IterableDataset):
        raise InputError(
            "an IterableDataset cannot be ordered, because a sampler chooses examples by number; "
            "use a data set with __getitem__ and __len__"
        )
    try:
        size = len(dataset)
    except TypeError:
        raise InputError(f"the data set must have a length, got {type(dataset).__name__}") from None
    if size == 0:
        raise InputError("the data set is empty; there is nothing to order")
    return size


def place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Number of ranks and this rank; by default those of torch.distributed, else one."""
    if num_replicas is None:
        started = check_started("before making the sampler, or give num_replicas and rank")
        num_replicas = dist.get_world_size() if started else 1
    if rank is None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if num_replicas < 1:
        raise InputError(f"num_replicas must be at least 1, got {num_replicas}")
    if not 0 <= rank < num_replicas:
        raise InputError(f"rank must be from 0 to {num_replicas - 1}, got {rank}")
    return num_replicas, rank


def policy(order: str | Order, unit: int | None, sketch: str | None) -> Order:
    """The policy of this name, or the one that was given, which then has its own unit and sketch."""
    if not isinstance(order, str):
        own: Order = checked_policy(order, Order, "order")
        for name, value, its in (("unit", unit, own.unit), ("sketch", sketch, own.sketch)):
            if value is not None and value != its:
                raise InputError(
                    f"{name} = {value!r} was given, but the policy has {name} = {its!r}; give it to the policy only"
                )
        return own
    if order not in ORDERS:
        raise InputError(unknown("order", order, ORDERS))
    unit = 1 if unit is None else unit
    if not issubclass(ORDERS[order], Balanced):
        if sketch is not None:
            raise InputError(f"the order {order!r} uses no gradients, so sketch = {sketch!r} cannot be used")
        fixed: Order = ORDERS[order](unit=unit)
        return fixed
    # A loop pays for its ghosts, so where nothing was said they are thin; larger units have the policy's default.
    balanced: Order = ORDERS[order](unit=unit, sketch=THIN if sketch is None and unit == 1 else sketch)
    return balanced


def own_group(ranks: int) -> dist.ProcessGroup:
    """A process group of the sampler's own, so that its exchanges never mix with the loop's. Called on every rank."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            f"watching a model on {ranks} replicas needs torch.distributed; call init_process_group() first"
        )
    if dist.get_world_size() != ranks:
        raise InputError(
            f"the sampler has {ranks} replicas but torch.distributed has {dist.get_world_size()} ranks; they must agree"
        )
    # gloo, because rows are looked at on the CPU whatever the model is on.
    return new_group(backend="gloo")
