"""The process group of a torch cluster: joining, leaving, and plain values from rank 0 to all or from all to rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hemiola import __version__, peers
from hemiola.errors import InputError
from hemiola.peers import Attendance, group_device, pack, unpack

_attendance: Attendance | None = None


@dataclass(frozen=True)
class Place:
    """Where torchrun, or `hemiola.clusters.torch.launch`, has put this process.

    Attributes:
        rank: Number of this process, which is the number of its worker.
        world: How many there are.
        local_rank: Number of this process on its machine.
        restarts: How often the launcher has started everybody again.
    """

    rank: int
    world: int
    local_rank: int
    restarts: int

    @classmethod
    def find(cls) -> Place | None:
        """Read what the launcher has put into the environment; None if there is no launcher."""
        environment = os.environ
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
        values = {name: environment.get(name, "0") for name in names}
        for name, value in values.items():
            if not value.isdecimal():
                raise InputError(f"{name} in the environment must be a number, as torchrun sets it, got {value!r}")
        return cls(*(int(value) for value in values.values()))


def join(
    place: Place,
    backend: str,
    timeout: float,
    rendezvous: Path | None = None,
    say: Callable[[str], None] = peers.log.warning,
) -> None:
    """Join the default process group.

    Args:
        place: Where this process is.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: Seconds to wait for the others, here and in every exchange.
        rendezvous: A file that does not exist yet, through which processes of one machine find each other without a
            listening store; without it, through MASTER_ADDR and MASTER_PORT.
        say: Takes the line that says who is waited for.
    """
    global _attendance
    dist.init_process_group(
        backend,
        init_method="env://" if rendezvous is None else f"file://{rendezvous.absolute()}",
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=timeout),
    )
    assert dist.group.WORLD is not None
    _attendance = Attendance(dist.group.WORLD, say)


def leave() -> None:
    """Leave the group, if this process is in one."""
    global _attendance
    if _attendance is not None:
        _attendance.close()
        _attendance = None
    if dist.is_initialized():
        dist.destroy_process_group()


def exchange(where: str) -> AbstractContextManager[None]:
    """Around collectives: whatever a backend raises when a peer is gone becomes `RankLostError`."""
    assert _attendance is not None, "join() comes first"
    return _attendance.exchange(where)


def check_same(facts: dict[str, str]) -> None:
    """Raise the same `InputError` on every rank if these facts, or the versions of hemiola and torch, differ."""
    with exchange("the start"):
        peers.check_same({"hemiola": __version__, "torch": torch.__version__.partition("+")[0], **facts}, _difference)


def _difference(first: dict[str, Any], other: dict[str, Any], rank0: int, rank: int) -> str:
    for name, value in first.items():
        if other.get(name) != value:
            return (
                f"the machines differ in {name}: {value} on rank {rank0}, {other.get(name)} on rank {rank}; "
                "make them the same"
            )
    return ""


def gather(value: Any) -> list[Any] | None:
    """Every rank's plain value on rank 0, None elsewhere. All ranks must call this."""
    world, rank, device = dist.get_world_size(), dist.get_rank(), group_device()
    payload = pack(value).to(device)
    sizes = torch.empty(world, 1, dtype=torch.int64, device=device)
    with exchange("an exchange of plain values"):
        dist.all_gather(list(sizes), torch.tensor([payload.numel()], device=device))
        padded = torch.nn.functional.pad(payload, (0, int(sizes.max()) - payload.numel()))
        received = [torch.empty_like(padded) for _ in range(world)] if rank == 0 else None
        dist.gather(padded, received, dst=0)
    if received is None:
        return None
    return [unpack(part[:size].cpu()) for part, size in zip(received, sizes.flatten().tolist(), strict=True)]


def share(value: Any) -> Any:
    """Rank 0's plain value, on every rank. All ranks must call this; what the others give is not looked at."""
    device = group_device()
    payload = pack(value).to(device) if dist.get_rank() == 0 else torch.empty(0, dtype=torch.uint8, device=device)
    size = torch.tensor([payload.numel()], device=device)
    with exchange("an exchange of plain values"):
        dist.broadcast(size, 0)
        if dist.get_rank() != 0:
            payload = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(payload, 0)
    return unpack(payload.cpu())
