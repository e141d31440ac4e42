"""Sketches of all ranks on every rank: one exchange, as long as what the rank with most of them has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hemiola.clusters.stints import StintRunner
from hemiola.gradients.layers import working_type
from hemiola.gradients.sketch import unpacked
from hemiola.peers import group_device


def gather_sketches(
    runner: StintRunner, mine: Iterable[Tensor | None], counts: Sequence[int], group: dist.ProcessGroup | None = None
) -> tuple[list[Tensor], int]:
    """Every rank's rows, and the bytes that this one sent; nothing is sent where nobody has any.

    Args:
        runner: Makes the sketches, and knows how they travel.
        mine: This rank's, batch by batch.
        counts: How many rows each rank has; the same on every rank.
        group: The ranks; None for all.
    """
    if not runner.width or not max(counts):
        return [torch.empty(0, 0) for _ in counts], 0
    message = torch.zeros(max(counts), runner.width, dtype=working_type(runner.initial))
    given = [rows for rows in mine if rows is not None]
    if given:
        torch.cat(given, out=message[: sum(len(rows) for rows in given)])
    message = runner.packed(message).to(group_device(group))
    received = torch.empty(len(counts), *message.shape, dtype=message.dtype, device=message.device)
    dist.all_gather(list(received), message, group=group)
    sent = (len(counts) - 1) * message.numel() * message.element_size()
    rows = [unpacked(one, runner.tells_losses) for one in received.cpu()]
    return [one[:count] for one, count in zip(rows, counts, strict=True)], sent
