"""How every rank gets to know what every other rank's units looked like.

Every rank runs the same order policy and must show it the same rows in the same sequence, so that all end with the same
orders. An epoch of n units is cut into blocks of positions; when a rank has passed a block it starts an asynchronous
exchange of the block's rows and goes on training, and looks at the rows when the next block is due. The number of
blocks does not depend on what was trained on: a rank that leaves its epoch early hands in the rest as not visited. So
ranks never wait for an exchange that another rank does not start.

Two ways to exchange. Sketches are **gathered**: k numbers a unit to everyone. Whole gradients (``sketch = "exact"``)
are **sliced**: rank i gets every unit's i-th slice of the coordinates, about the bytes of an all-reduce, computes its
share of the inner products, and only those are added up over ranks (`Balanced.total`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hemiola.contracts import Order, State, Visit

BLOCK = 128  # units exchanged at a time, fewer where they are long
NUMBERS = 1 << 22  # the most numbers of a block
ALONE = 64  # units shown to the policy at a time where there is one rank


class Exchange:
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
        self._size = max(2, min(BLOCK, NUMBERS // width, units + units % 2) // 2 * 2)
        self._flying: deque[tuple[int, list[Any], Tensor, Tensor]] = deque()
        self._rows = torch.zeros(self._size, width, dtype=dtype)
        self._known = torch.zeros(self._size, 1, dtype=dtype)
        self.begin(0, [])
        if self._sliced:
            policy.total = self._total  # type: ignore[attr-defined]

    def begin(self, epoch: int, orders: list[np.ndarray]) -> None:
        """Start an epoch in which worker j visits its units in ``orders[j]``."""
        self._epoch, self._orders, self._start = epoch, orders, 0
        self._known.zero_()

    def put(self, position: int, rows: Tensor) -> None:
        """Take rows of this rank's units at consecutive places of its order; places never go back."""
        while len(rows):
            while position >= self._start + self._size:
                self._launch()
            at = position - self._start
            part, rows = rows[: self._size - at], rows[self._size - at :]
            self._rows[at : at + len(part)] = part
            self._known[at : at + len(part)] = 1
            position += len(part)
            if position == min(self._start + self._size, self._units):
                self._launch()

    def finish(self) -> None:
        """End the epoch: exchange what is left and show it to the policy. Every rank calls this."""
        while self._start < self._units:
            self._launch()
        self.collect()

    def collect(self) -> None:
        """Wait for what is under way and show it to the policy."""
        while self._flying:
            self._observe(*self._flying.popleft())

    def state_dict(self) -> State:
        """This rank's rows that are not exchanged yet; `collect` first."""
        return {"start": self._start, "rows": self._rows.clone(), "known": self._known.clone()}

    def load_state_dict(self, state: State, own: bool) -> None:
        """Go on in mid-epoch, after ``begin``; rows are used only if they are this rank's ``own``."""
        self._start = int(state["start"])
        if own and state["rows"].shape == self._rows.shape:
            self._rows, self._known = state["rows"].clone(), state["known"].clone()

    # ------------------------------------------------------------------------------------------------------ blocks

    def _launch(self) -> None:
        """Send this rank's block on its way, then look at the block before."""
        rows, known = self._rows, self._known
        if self._group is None:
            self._observe(self._start, [], rows.unsqueeze(0), known.unsqueeze(0))
        elif self._sliced:
            slice_width = -(-self._width // self._ranks)
            padded = torch.nn.functional.pad(rows, (0, slice_width * self._ranks - self._width))
            outgoing = padded.view(self._size, self._ranks, slice_width).transpose(0, 1).contiguous()
            incoming, all_known = torch.empty_like(outgoing), known.new_empty(self._ranks, *known.shape)
            works = [
                dist.all_to_all_single(incoming, outgoing, group=self._group, async_op=True),
                dist.all_gather(list(all_known.unbind(0)), known.clone(), group=self._group, async_op=True),
            ]
            self._flying.append((self._start, works, incoming, all_known))
        else:
            mine = torch.cat([rows, known], 1)
            everyone = mine.new_empty(self._ranks, *mine.shape)
            works = [dist.all_gather(list(everyone.unbind(0)), mine, group=self._group, async_op=True)]
            self._flying.append((self._start, works, everyone[..., :-1], everyone[..., -1:]))
        self._start += self._size
        self._known.zero_()
        if len(self._flying) > 1:
            self._observe(*self._flying.popleft())

    def _observe(self, start: int, works: list[Any], rows: Tensor, known: Tensor) -> None:
        """Show a block to the policy pair by pair, worker by worker: the loop of the CD-GraB paper."""
        for work in works:
            work.wait()
        stop = min(self._size, self._units - start)
        step = 2 if self._ranks > 1 else ALONE
        visited = known[:, :, 0].numpy() > 0
        for at in range(0, stop, step):
            for worker in range(self._ranks):
                part = slice(at, min(at + step, stop))
                units, found, seen = self._orders[worker][start:][part], rows[worker, part], visited[worker, part]
                if not seen.all():
                    units, found = units[seen], found[torch.from_numpy(seen)]
                if len(units):
                    self._policy.observe(Visit(worker, self._epoch, units, found, 1))

    def _total(self, products: np.ndarray) -> np.ndarray:
        summed = torch.from_numpy(np.array(products, np.float64))
        dist.all_reduce(summed, group=self._group)
        return summed.numpy()
