"""States of all ranks in one checkpoint, for frameworks that write what rank 0 holds."""

from __future__ import annotations

import io

import torch
import torch.distributed as dist

from hemiola.contracts import State


def gather_states(own: State) -> list[State]:
    """Every rank's state, by rank, on every rank. All ranks of the framework's group must call this."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [own]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    file = io.BytesIO()
    torch.save(own, file)
    payload = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(device)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([payload.numel()], device=device))
    longest = max(int(size) for size in sizes)
    received = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(received, torch.nn.functional.pad(payload, (0, longest - payload.numel())))
    return [
        torch.load(io.BytesIO(part[: int(size)].cpu().numpy().tobytes()), weights_only=True)
        for part, size in zip(received, sizes, strict=True)
    ]


def pick_state(states: list[State], rank: int, ranks: int) -> State:
    """The state a rank goes on from: its own, or rank 0's where the number of ranks has changed."""
    return states[rank] if len(states) == ranks else states[0]
