"""How every rank gets to know what every other rank's units looked like.

Every rank runs the same order policy and must show it the same rows in the same sequence, so that all end with the same
orders. Rows are collected in the order in which units were visited, whatever their places in the epoch, and exchanged
in blocks: when the loop is through with another block's worth of units, a rank starts an asynchronous exchange of the
rows it has and goes on training, and looks at them when the next block is due. When a block is due, and how many there
are in an epoch, does not depend on what was learnt: where examples were skipped a block is sent with gaps, and a rank
that leaves its epoch early sends the rest empty. So ranks never wait for an exchange that another rank does not start.

Two ways to exchange. Sketches are **gathered**: k numbers a unit to everyone. Whole gradients (``sketch = "exact"``)
are **sliced**: rank i gets every unit's i-th slice of the coordinates, about the bytes of an all-reduce, computes its
share of the inner products, and only those are added up over ranks (`Order.total`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hemiola.contracts import Order, State, Visit
from hemiola.peers import new_group

BLOCK = 128  # units exchanged at a time, fewer where they are long
NUMBERS = 1 << 22  # the most numbers of a block
GAP = -1  # instead of a unit's number where a block has no row


class RowExchange:
    """Collects this rank's rows, exchanges them in blocks and shows all ranks' rows to the policy.

    Args:
        policy: Observes; not needed for anything else here.
        ranks: How many.
        units: n, units per rank.
        width: k, numbers per row.
        dtype: Of the rows.
        group: What to exchange on; None where there is one rank.
        sliced: Whether rows are exchanged in slices.
    """

    def __init__(
        self,
        policy: Order,
        ranks: int,
        units: int,
        width: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        sliced: bool,
    ) -> None:
        self._policy, self._ranks, self._units, self._width = policy, ranks, units, width
        self._group, self._sliced = group, sliced and group is not None
        self._between: dist.ProcessGroup | None = None  # for what must not wait for blocks under way
        self._size = max(2, min(BLOCK, NUMBERS // width, units + units % 2) // 2 * 2)
        self._flying: deque[tuple[list[Any], Tensor, Tensor]] = deque()
        room = 0 if group is None else 2 * self._size
        self._rows = torch.zeros(room, width, dtype=dtype)
        self._visited = torch.full((room,), GAP)
        self.begin(0)
        if self._sliced:
            policy.total = self._total

    def begin(self, epoch: int) -> None:
        """Start an epoch."""
        self._epoch, self._sent, self._filled = epoch, 0, 0
        self._visited.fill_(GAP)

    def put(self, units: np.ndarray, rows: Tensor) -> None:
        """Take rows of this rank's units, in the order they were visited; no unit comes twice in an epoch."""
        if self._group is None:
            if len(units):
                self._policy.observe([self._visit(0, units, rows)])
            return
        stop = self._filled + len(units)
        if stop > len(self._rows):
            spare = 2 * stop - len(self._rows)
            self._rows = torch.cat([self._rows, self._rows.new_zeros(spare, self._width)])
            self._visited = torch.cat([self._visited, self._visited.new_full((spare,), GAP)])
        self._rows[self._filled : stop] = rows
        self._visited[self._filled : stop] = torch.from_numpy(units)
        self._filled = stop

    def advance(self, done: int) -> None:
        """The loop is through with so many of this rank's units: send the blocks that are due."""
        if self._group is not None:
            while self._sent < self._units and done >= min(self._sent + self._size, self._units):
                self._launch()

    def finish(self) -> None:
        """End the epoch: exchange what is left and show it to the policy. Every rank calls this."""
        self.advance(self._units)
        self.collect()

    def pause(self) -> None:
        """The watch ends, perhaps within an epoch. Every rank calls this, and may be a batch ahead of another one."""
        if self._group is not None:
            if self._between is None:
                self._between = new_group(backend="gloo")
            furthest = torch.tensor(self._sent)
            dist.all_reduce(furthest, dist.ReduceOp.MAX, group=self._between)
            while self._sent < int(furthest):
                self._launch()
        self.collect()

    def collect(self) -> None:
        """Wait for what is under way and show it to the policy."""
        while self._flying:
            self._observe(*self._flying.popleft())

    def state_dict(self) -> State:
        """This rank's rows that are not exchanged yet; `collect` first."""
        rows, visited = self._rows[: self._filled].clone(), self._visited[: self._filled].clone()
        return {"sent": self._sent, "rows": rows, "visited": visited}

    def load_state_dict(self, state: State, own: bool) -> None:
        """Go on in mid-epoch, after ``begin``; rows are used only if they are this rank's ``own``."""
        self._sent = int(state["sent"])
        if own and len(state["rows"]) and state["rows"].shape[1] == self._width:
            self.put(state["visited"].numpy(), state["rows"])

    # ------------------------------------------------------------------------------------------------------ blocks

    def _launch(self) -> None:
        """Send this rank's block on its way, then look at the block before."""
        rows, visited = self._rows[: self._size].clone(), self._visited[: self._size].clone()
        if self._sliced:
            slice_width = -(-self._width // self._ranks)
            padded = torch.nn.functional.pad(rows, (0, slice_width * self._ranks - self._width))
            outgoing = padded.view(self._size, self._ranks, slice_width).transpose(0, 1).contiguous()
            incoming, everyones = torch.empty_like(outgoing), visited.new_empty(self._ranks, self._size)
            works = [
                dist.all_to_all_single(incoming, outgoing, group=self._group, async_op=True),
                dist.all_gather(list(everyones.unbind(0)), visited, group=self._group, async_op=True),
            ]
            self._flying.append((works, incoming, everyones))
        else:
            # Unit numbers travel as the bits of one or two more columns: as numbers they might be rounded.
            mine = torch.cat([rows, visited.unsqueeze(1).view(rows.dtype)], 1)
            everyone = mine.new_empty(self._ranks, *mine.shape)
            works = [dist.all_gather(list(everyone.unbind(0)), mine, group=self._group, async_op=True)]
            self._flying.append((works, everyone, everyone.new_empty(0)))
        self._sent += self._size
        left = max(0, self._filled - self._size)
        self._rows[:left] = self._rows[self._size : self._filled].clone()
        self._visited[:left] = self._visited[self._size : self._filled].clone()
        self._visited[left:].fill_(GAP)
        self._filled = left
        if len(self._flying) > 1:
            self._observe(*self._flying.popleft())

    def _observe(self, works: list[Any], rows: Tensor, visited: Tensor) -> None:
        """Show a block of every rank to the policy."""
        for work in works:
            work.wait()
        if not self._sliced:
            visited = rows[..., self._width :].contiguous().view(torch.int64).squeeze(-1)
            rows = rows[..., : self._width]
        units, visits = visited.numpy(), []
        for worker in range(self._ranks):
            count = int(np.count_nonzero(units[worker] != GAP))  # gaps come last
            if count:
                visits.append(self._visit(worker, units[worker, :count], rows[worker, :count]))
        self._policy.observe(visits)

    def _visit(self, worker: int, units: np.ndarray, rows: Tensor) -> Visit:
        return Visit.of_rows(worker, self._epoch, units, rows, 1, self._policy.wants_losses)

    def _total(self, products: np.ndarray) -> np.ndarray:
        summed = torch.from_numpy(np.array(products, np.float64))
        dist.all_reduce(summed, group=self._group)
        return summed.numpy()
