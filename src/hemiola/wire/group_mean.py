"""The mean of a vector over all ranks, with its spread, in one exchange.

On the fp32 wire that is one all-reduce of [change, buffers, notes]. A narrower wire cannot be summed under way, and
gathering everything everywhere costs n times the bytes, so it is a quantised reduce-scatter and all-gather: every rank
sends each other rank its encoded part, the owner of a part decodes, averages and encodes the mean, and all ranks
collect the encoded means. All ranks decode the same bytes, so the result is bit-identical everywhere.

Error feedback works on both legs: each rank keeps what its own message rounded away, each owner what its mean did.

*Notes* are a few float64 numbers that every rank tells every other in the same message, unharmed by the wire. notes[0]
is the rank's weight: 0 for a rank that has nothing to add, or whose change is not finite.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hemiola.contracts import State
from hemiola.streams import torch_stream
from hemiola.wire.codec import Codec


@dataclass(frozen=True)
class Merged:
    """What an exchange gives, the same on every rank except for ``seconds``.

    Attributes:
        change: Weighted mean of the lossy vectors, float32.
        exact: Weighted mean of the exact vectors, float32.
        spread: Weighted mean of ||change_i - mean||^2 over the counted numbers.
        movement: ||mean||^2 over the counted numbers.
        notes: One row a rank.
        bytes: Sent by this rank.
        seconds: From start to end of the exchange on this rank.
    """

    change: Tensor
    exact: Tensor
    spread: float
    movement: float
    notes: np.ndarray
    bytes: int
    seconds: float


class GroupMean:
    """Averages vectors of fixed sizes over a process group; without a group, over this process alone.

    Args:
        group: The ranks; None for a single process.
        lossy: Numbers in the vector that goes through ``codec``.
        exact: Numbers in the vector that travels as float32.
        counted: How many leading numbers of the lossy vector count in the spread.
        codec: Number format.
        feedback: Whether to keep residuals.
        seed: Names the random streams of a stochastic codec.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        lossy: int,
        exact: int = 0,
        counted: int | None = None,
        codec: Codec,
        feedback: bool,
        seed: int = 0,
    ) -> None:
        self.group = group
        self.world = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.lossy, self.exact = lossy, exact
        self.counted = lossy if counted is None else counted
        self.codec = codec
        self.seed = seed
        self.count = 0
        whole_blocks = max(codec.block, 2)
        self._part = -(-lossy // (self.world * whole_blocks)) * whole_blocks
        self._exact_part = -(-exact // self.world)
        gloo = group is None or dist.get_backend(group) == "gloo"
        self.device = torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())
        keep = feedback and codec.bits < 32 and self.world > 1
        padded = self._part * self.world
        self.residual = torch.zeros(padded, device=self.device) if keep else None
        self.owner_residual = torch.zeros(self._part, device=self.device) if keep else None

    def __call__(self, change: Tensor, exact: Tensor, notes: list[float], *, remember: bool = True) -> Merged:
        """Exchange. Every rank of the group must call this the same number of times.

        Args:
            change: This rank's lossy vector.
            exact: This rank's exact vector.
            notes: This rank's notes, its weight first; the weight becomes 0 if the vectors are not finite.
            remember: Whether the residuals take part; not for a preview, which leaves no trace.
        """
        begin = time.perf_counter()
        change = change.to(self.device, torch.float32)
        exact = exact.to(self.device, torch.float32)
        squares = _squares(change[: self.counted])
        others = change[self.counted :].abs().sum() + exact.abs().sum()
        if not (np.isfinite(squares) and bool(others.isfinite())) or notes[0] == 0.0:
            change, exact, squares = torch.zeros_like(change), torch.zeros_like(exact), 0.0
            notes, remember = [0.0, *notes[1:]], False
        if self.world == 1:
            merged = (change, exact, 0.0, squares, np.array([notes]), 0)
        elif self.codec.bits == 32:
            merged = self._reduce(change, exact, squares, notes)
        else:
            merged = self._scatter_gather(change, exact, notes, remember)
        self.count += 1
        return Merged(*merged, seconds=time.perf_counter() - begin)

    # --------------------------------------------------------------------------------------------- fp32: one all-reduce

    def _reduce(
        self, change: Tensor, exact: Tensor, squares: float, notes: list[float]
    ) -> tuple[Tensor, Tensor, float, float, np.ndarray, int]:
        # A sum in which only one rank is not zero hands that rank's number to all; float64 passes through float32
        # unharmed in four pieces of 16 bits.
        mine = torch.from_numpy(np.array([*notes, squares]).view(np.uint16).astype(np.float32))
        table = torch.zeros(self.world, mine.numel(), device=self.device)
        table[self.rank] = mine
        vectors = torch.cat((change, exact))
        message = torch.cat((vectors if notes[0] == 1.0 else vectors * notes[0], table.flatten()))
        dist.all_reduce(message, group=self.group)
        vectors, pieces = torch.split_with_sizes(message, [self.lossy + self.exact, table.numel()])
        everyone = pieces.cpu().numpy().astype(np.uint16).view(np.float64).reshape(self.world, -1)
        weights, squared = everyone[:, 0], everyone[:, -1]
        total = weights.sum() or 1.0
        vectors.div_(total)
        mean, exact_mean = torch.split_with_sizes(vectors, [self.lossy, self.exact])
        movement = _squares(mean[: self.counted])
        spread = max(0.0, float(squared @ weights / total) - movement)
        sent = 2 * (self.world - 1) * message.numel() * 4 // self.world
        return mean, exact_mean, spread, movement, everyone[:, :-1], sent

    # ---------------------------------------------------------- narrower wires: quantised reduce-scatter, all-gather

    def _scatter_gather(
        self, change: Tensor, exact: Tensor, notes: list[float], remember: bool
    ) -> tuple[Tensor, Tensor, float, float, np.ndarray, int]:
        parts, rounded = self._encode(change, remember)
        notes = [*notes, rounded]
        exact_parts = _pad(exact, self._exact_part * self.world).view(self.world, -1).view(torch.uint8)
        told = torch.from_numpy(np.array(notes).view(np.uint8)).to(self.device).expand(self.world, -1)
        message = torch.cat((parts, exact_parts, told), 1)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=self.group)

        sizes = [parts.shape[1], exact_parts.shape[1], told.shape[1]]
        parts, exact_parts, told = torch.split_with_sizes(received, sizes, 1)
        everyone = told.cpu().contiguous().numpy().view(np.float64)
        shares = everyone[:, 0] / (everyone[:, 0].sum() or 1.0)
        weights = torch.from_numpy(shares).float().to(self.device)
        changes = self.codec.decode(parts, self._part)
        mean = weights @ changes
        exact_mean = weights @ exact_parts.contiguous().view(torch.float32)
        mine = max(0, min(self._part, self.counted - self.rank * self._part))
        moved = _squares(mean[:mine])
        total = sum(float(w) * _squares(row[:mine]) for w, row in zip(weights, changes, strict=True))
        sums = torch.tensor([total - moved, moved], dtype=torch.float64, device=self.device)

        answer = torch.cat((self._encode_mean(mean, remember), exact_mean.view(torch.uint8), sums.view(torch.uint8)))
        answers = torch.empty(self.world, answer.numel(), dtype=torch.uint8, device=self.device)
        dist.all_gather(list(answers.unbind(0)), answer, group=self.group)
        sizes = [self.codec.size(self._part), 4 * self._exact_part, 16]
        means, exact_means, all_sums = torch.split_with_sizes(answers, sizes, 1)
        apart_sum, movement = all_sums.contiguous().view(torch.float64).sum(0).tolist()
        # The decoded changes are apart by their roundings too, which are independent between ranks.
        spread = max(0.0, apart_sum - float((shares * (1.0 - shares)) @ everyone[:, -1]))
        result = self.codec.decode(means, self._part).flatten()[: self.lossy]
        exact_result = exact_means.contiguous().view(torch.float32).flatten()[: self.exact]
        sent = (self.world - 1) * (message.shape[1] + answer.numel())
        return result, exact_result, spread, movement, everyone[:, :-1], sent

    def _encode(self, change: Tensor, remember: bool) -> tuple[Tensor, float]:
        """The message, and the squared norm of what rounding did to it."""
        # In place where it can be: fresh memory of the size of a model costs as much as the arithmetic.
        residual = self.residual if remember else None
        wanted = change if residual is None else residual
        if residual is not None:
            residual[: self.lossy] += change
        parts = self.codec.encode(_pad(wanted, self._part * self.world).view(self.world, -1), self._stream("send"))
        decoded = self.codec.decode(parts, self._part).flatten()
        if residual is not None:
            residual -= decoded
        decoded[: self.lossy] -= change
        return parts, _squares(decoded[: self.counted])

    def _encode_mean(self, mean: Tensor, remember: bool) -> Tensor:
        residual = self.owner_residual if remember else None
        wanted = mean if residual is None else residual.add_(mean)
        answer = self.codec.encode(wanted, self._stream("answer"))
        if residual is not None:
            residual -= self.codec.decode(answer, self._part)
        return answer

    def _stream(self, leg: str) -> torch.Generator | None:
        return torch_stream("qsgd", leg, self.seed, self.rank, self.count) if self.codec.stochastic else None

    def state_dict(self) -> State:
        residuals = {"residual": self.residual, "owner_residual": self.owner_residual}
        return {"count": self.count, **{name: None if r is None else r.clone() for name, r in residuals.items()}}

    def load_state_dict(self, state: State) -> None:
        self.count = state["count"]
        if self.residual is not None:
            self.residual = state["residual"].to(self.device).clone()
            self.owner_residual = state["owner_residual"].to(self.device).clone()


def _pad(vector: Tensor, numbers: int) -> Tensor:
    return vector if vector.numel() == numbers else torch.nn.functional.pad(vector, (0, numbers - vector.numel()))


def _squares(vector: Tensor) -> float:
    """||vector||^2, summed in float64 over rows of 4096 float32 products: exact to about 1e-8, and fast."""
    whole = vector.numel() // 4096 * 4096
    rows = vector[:whole].view(-1, 1, 4096)
    return float(torch.bmm(rows, rows.mT).double().sum() + vector[whole:].double().square().sum())
