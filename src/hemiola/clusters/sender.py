"""What arrives of the workers' changes when they pass the wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hemiola.contracts import State, Stint
from hemiola.streams import torch_stream
from hemiola.wire.codec import round_trip
from hemiola.wire.exchange import Exchange


class Sender:
    """The sending end of every worker: encodes changes, and keeps the residuals of rounding.

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
        self._residuals: dict[int, Tensor] = {}

    @property
    def exact(self) -> bool:
        """Whether changes arrive as they were sent, so that nobody needs to look at them one by one."""
        return self.exchange.codec.bits == 32

    def send(self, rows: Tensor, stints: Sequence[Stint]) -> Tensor:
        """Return what arrives of each stint's change."""
        if self.exact:
            return rows
        workers = [stint.worker for stint in stints]
        if self.exchange.codec.stochastic or len(set(workers)) < len(workers):
            return torch.stack([self._send(row, stint) for row, stint in zip(rows, stints, strict=True)])
        # Rounding to the nearest draws nothing, so everyone's change passes in one call.
        none = torch.zeros(self.numbers)
        residual = torch.stack([self._residuals.get(worker, none) for worker in workers])
        arrived, left, _ = round_trip(self.exchange.codec, rows, residual if self.exchange.feedback else None)
        if left is not None:
            self._residuals.update({worker: row.clone() for worker, row in zip(workers, left, strict=True)})
        return arrived

    def _send(self, row: Tensor, stint: Stint) -> Tensor:
        payload, decoded = self._pack(row, stint)
        return self.unpack(payload) if decoded is None else decoded

    def pack(self, row: Tensor, stint: Stint) -> Tensor:
        """The bytes of a stint's change; the change itself on an exact wire.

        Raises:
            FloatingPointError: A number is not finite and the wire cannot say so.
        """
        return row if self.exact else self._pack(row, stint)[0]

    def unpack(self, payload: Tensor) -> Tensor:
        """What arrives of a packed change."""
        return payload if self.exact else self.exchange.codec.decode(payload, self.numbers)

    def _pack(self, row: Tensor, stint: Stint) -> tuple[Tensor, Tensor | None]:
        """The bytes; and what they decode to, where that had to be found out for the residual."""
        codec = self.exchange.codec
        draws = torch_stream("wire", self.seed, stint.worker, stint.number) if codec.stochastic else None
        if not self.exchange.feedback:
            return codec.encode(row, draws), None
        residual = self._residuals.get(stint.worker)
        wanted = row if residual is None else row + residual
        payload = codec.encode(wanted, draws)
        decoded = codec.decode(payload, self.numbers)
        self._residuals[stint.worker] = wanted - decoded
        return payload, decoded

    def state_dict(self) -> State:
        return {"residuals": dict(self._residuals)}

    def load_state_dict(self, state: State) -> None:
        self._residuals = dict(state["residuals"])
