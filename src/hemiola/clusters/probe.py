"""A probe of how far workers are apart, for about a thousand numbers instead of a model; see `hemiola.period.fda`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hemiola.gradients.sketch import build_sketch, parse_sketch
from hemiola.peers import group_device

SKETCH = parse_sketch("fold:1024")  # its squared norm is off by sqrt(2 / 1024) = 4 % of the mean drift's


class DriftProbe:
    """Estimates the spread of weights from squares and sketches of drifts.

    Args:
        numbers: In a drift.

    Attributes:
        bytes: Of one worker's message.
    """

    def __init__(self, numbers: int) -> None:
        self._fold = build_sketch(SKETCH, numbers, 0)
        self.bytes = 4 * (3 + self._fold.width)

    def here(self, drifts: Tensor) -> float:
        """Of drifts that are all in this process, one row each."""
        return self._spread(sum((self._message(drift) for drift in drifts), torch.zeros(self.bytes // 4)))

    def between(self, drift: Tensor | None, meet: bool, group: dist.ProcessGroup | None = None) -> tuple[float, bool]:
        """Of the drifts of all ranks, who must all come.

        Args:
            drift: Of this rank's weights since the last averaging; None of a rank that takes no more steps.
            meet: Whether this rank asks for an exchange, however far apart they are.
            group: The ranks; None for all.

        Returns:
            The spread of those that drift, and whether any rank asks for an exchange.
        """
        message = torch.zeros(self.bytes // 4) if drift is None else self._message(drift)
        message[0] = meet
        message = message.to(group_device(group))
        dist.all_reduce(message, group=group)
        return self._spread(message), message[0].item() > 0.0

    def _message(self, drift: Tensor) -> Tensor:
        drift = drift.detach().float()
        known = drift.new_tensor([0.0, 1.0, 0.0])  # asks for nothing; one that drifts; so far
        known[2] = drift.square().sum()
        return torch.cat((known, self._fold.apply(drift[None])[0])).cpu()

    def _spread(self, total: Tensor) -> float:
        drifting = max(total[1].item(), 1.0)
        return total[2].item() / drifting - (total[3:] / drifting).square().sum().item()
