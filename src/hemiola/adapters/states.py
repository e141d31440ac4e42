"""States of all ranks in one checkpoint, for frameworks that write what rank 0 holds."""

from __future__ import annotations

import torch.distributed as dist

from hemiola.clusters.torch.group import gather, share
from hemiola.contracts import State


def gather_states(own: State) -> list[State]:
    """Every rank's state, by rank, on every rank. All ranks must call this."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [own]
    found: list[State] = share(gather(own))
    return found


def pick_state(states: list[State], rank: int, ranks: int) -> State:
    """The state a rank goes on from: its own, or rank 0's where the number of ranks has changed."""
    return states[rank] if len(states) == ranks else states[0]
