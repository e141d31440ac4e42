"""What arrives of the workers' changes when they pass the wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hemiola.contracts import State, Stint
from hemiola.period.exchange import Exchange
from hemiola.period.wire import round_trip
from hemiola.streams import torch_stream


class Sender:
    """The sending end of every worker: encodes changes, and remembers what rounding still owes.

    Args:
        exchange: The wire and its options.
        numbers: Length of a change.
        seed: Names the streams of stochastic rounding, together with worker and stint.
    """

    def __init__(self, exchange: Exchange, numbers: int, seed: int):
        self.exchange = exchange
        self.numbers = numbers
        self.seed = seed
        self.message_bytes = exchange.codec.size(numbers)
        self._owed: dict[int, Tensor] = {}

    @property
    def exact(self) -> bool:
        """Whether changes arrive as they were sent, so that nobody needs to look at them one by one."""
        return self.exchange.codec.bits == 32

    def send(self, rows: Tensor, stints: Sequence[Stint]) -> Tensor:
        """Return what arrives of each stint's change."""
        if self.exact:
            return rows
        arrived = []
        for row, stint in zip(rows, stints, strict=True):
            owed = self._owed.get(stint.worker, torch.zeros_like(row)) if self.exchange.feedback else None
            codec = self.exchange.codec
            draws = torch_stream("wire", self.seed, stint.worker, stint.number) if codec.stochastic else None
            decoded, left, _ = round_trip(codec, row, owed, draws)
            if left is not None:
                self._owed[stint.worker] = left
            arrived.append(decoded)
        return torch.stack(arrived)

    def state_dict(self) -> State:
        return {"owed": dict(self._owed)}

    def load_state_dict(self, state: State) -> None:
        self._owed = dict(state["owed"])
