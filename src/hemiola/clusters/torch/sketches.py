"""Sketches of all ranks on every rank: one exchange, as long as what the rank with most of them has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hemiola.clusters.stints import StintRunner
from hemiola.gradients.sketch import decode_rows, encode_rows
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
    units, dtype = runner.unit_gradients, runner.initial.dtype
    if units is None or not max(counts):
        return [torch.empty(0, 0) for _ in counts], 0
    message = torch.zeros(
        max(counts), units.dimension, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    )
    given = [rows for rows in mine if rows is not None]
    if given:
        torch.cat(given, out=message[: sum(len(rows) for rows in given)])
    message = (encode_rows(message) if units.spec.int8 else message).to(group_device(group))
    received = torch.empty(len(counts), *message.shape, dtype=message.dtype, device=message.device)
    dist.all_gather(list(received), message, group=group)
    sent = (len(counts) - 1) * message.numel() * message.element_size()
    rows = [decode_rows(one) if units.spec.int8 else one for one in received.cpu()]
    return [one[:count] for one, count in zip(rows, counts, strict=True)], sent
