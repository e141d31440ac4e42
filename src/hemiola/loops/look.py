"""A look at how far the ranks are apart, for about a thousand numbers instead of a model; see `hemiola.period.fda`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hemiola.gradients.sketch import build_sketch, parse_sketch
from hemiola.peers import group_device

SKETCH = parse_sketch("fold:1024")  # its squared norm is off by sqrt(2 / 1024) = 4 % of the mean drift's


class Look:
    """Estimates the spread of the ranks' weights.

    Args:
        numbers: In a drift.
        group: The ranks.
    """

    def __init__(self, numbers: int, group: dist.ProcessGroup) -> None:
        self._group = group
        self._fold = build_sketch(SKETCH, numbers, 0)
        self._device = group_device(group)
        self._ranks = dist.get_world_size(group)

    def __call__(self, drift: Tensor | None, meet: bool) -> tuple[float, bool, int]:
        """All ranks must come.

        Args:
            drift: Of this rank's weights since the last averaging; None of a rank that takes no more steps.
            meet: Whether this rank asks for an exchange, however far apart they are.

        Returns:
            The spread of those that drift; whether any rank asks for an exchange; and the bytes this rank sent.
        """
        message = torch.zeros(3 + self._fold.width, device=self._device)
        message[0] = meet
        if drift is not None:
            message[1], message[2] = 1.0, drift.square().sum()
            message[3:] = self._fold.apply(drift.detach().float().unsqueeze(0))[0]
        dist.all_reduce(message, group=self._group)
        drifting = max(message[1].item(), 1.0)
        spread = message[2].item() / drifting - (message[3:] / drifting).square().sum().item()
        sent = 2 * (self._ranks - 1) * message.numel() * 4 // self._ranks
        return spread, message[0].item() > 0.0, sent
