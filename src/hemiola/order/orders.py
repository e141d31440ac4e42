"""The orders: which unit each worker visits next.

Three are fixed by the seed alone; four balance what they are shown (machinery in ``balanced.py``, signs in
``balance.py``). Symbols of the papers: m = workers, n = units of a worker, s = running sum, g = a unit's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hemiola.contracts import Order, State, Visit
from hemiola.errors import InputError
from hemiola.order.balanced import VERSION, Balanced, check_begin, check_state
from hemiola.order.book import Book
from hemiola.order.buffer import Items
from hemiola.streams import stream

DRIFT = 16.0  # units apart at which workers balance alone; docs/order.md has the runs that set it
LONG_STINT = 8

# ----------------------------------------------------------------------------------------------- fixed by the seed


class RandomReshuffling(Order):
    """D-RR: a fresh, independent permutation for every worker and epoch.

    Args:
        unit: Examples per unit.
    """

    kind = "rr"

    def __init__(self, *, unit: int = 1) -> None:
        if unit < 1:
            raise InputError(f"unit must be at least 1, got {unit}")
        self.unit = unit

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        self._sizes, self._seed = check_begin(sizes), seed

    def sequence(self, worker: int, epoch: int) -> np.ndarray:
        return stream("order", self._seed, epoch, worker).permutation(self._sizes[worker])

    def state_dict(self) -> State:
        return {"kind": self.kind, "version": VERSION, **self._facts()}

    def load_state_dict(self, state: State) -> None:
        check_state(state, self.kind, self._facts())

    def _facts(self) -> State:
        return {"seed": self._seed, "sizes": self._sizes, "unit": self.unit}


class ShuffleOnce(RandomReshuffling):
    """The random permutation of epoch 0 in every epoch."""

    kind = "shuffle-once"

    def sequence(self, worker: int, epoch: int) -> np.ndarray:
        return super().sequence(worker, 0)


class InOrder(RandomReshuffling):
    """The units of a shard as they lie in it."""

    kind = "in-order"

    def sequence(self, worker: int, epoch: int) -> np.ndarray:
        return np.arange(self._sizes[worker])


# ------------------------------------------------------------------------------------------- mean balance (GraB)


class IDGraB(Balanced):
    """ID-GraB: every worker balances alone, each gradient centred with its mean over the last balanced epoch.

    GraB, algorithm 4, at every worker: ``s += sign * (g - mean)``, +1 to the front of the next order, -1 to the back;
    the mean is zero in the first epoch.
    """

    kind = "id-grab"
    paired = False
    shares = False

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        super().begin(sizes, seed, lockstep)
        self._means: dict[int, np.ndarray] = {}
        self._tallies: dict[tuple[int, int], tuple[np.ndarray, int]] = {}

    def _vectors(self, epoch: int, items: Items) -> np.ndarray:
        """Each gradient less its worker's last mean; on the way the finite ones are counted into the next mean."""
        vectors: np.ndarray = self._buffer.rows[items.first]
        for worker in np.unique(items.worker).tolist():
            mine = np.flatnonzero(items.worker == worker)
            rows = vectors[mine]
            rows = rows[np.isfinite(rows).all(1)]
            key = worker, epoch
            tally, count = self._tallies.get(key, (np.zeros(vectors.shape[1]), 0))
            self._tallies[key] = tally + rows.sum(0, dtype=np.float64), count + len(rows)
            if worker in self._means:
                vectors[mine] -= self._means[worker]
        return vectors

    def _settled(self, worker: int, book: Book) -> None:
        tally, count = self._tallies.get((worker, book.epoch), (None, 0))
        if tally is not None and count:
            self._means[worker] = tally / count
        self._tallies = {key: value for key, value in self._tallies.items() if key[0] != worker or key[1] > book.epoch}

    def state_dict(self) -> State:
        means = [[worker, torch.from_numpy(mean.copy())] for worker, mean in self._means.items()]
        tallies = [[*key, torch.from_numpy(tally.copy()), count] for key, (tally, count) in self._tallies.items()]
        return {**super().state_dict(), "means": means, "tallies": tallies}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._means = {int(worker): mean.numpy().copy() for worker, mean in state["means"]}
        self._tallies = {
            (int(worker), int(epoch)): (tally.numpy().copy(), int(count))
            for worker, epoch, tally, count in state["tallies"]
        }


class GraB(IDGraB):
    """GraB (algorithm 4 of the paper): mean balance for one worker."""

    kind = "grab"

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        if len(sizes) > 1:
            raise InputError(f"the order 'grab' is for 1 worker, got {len(sizes)}; use 'id-grab' or 'cd-grab'")
        super().begin(sizes, seed, lockstep)


# --------------------------------------------------------------------------------------------- pair balance (CD-GraB)


class IDPairGraB(Balanced):
    """ID-GraB with pairs: every worker balances the differences of its consecutive gradients against its own sum."""

    kind = "id-pair-grab"
    paired = True
    shares = False


class CDGraB(Balanced):
    """CD-GraB (algorithms 2 and 3 of the paper): pair balance of all workers against one shared sum.

    In lockstep, with at most `LONG_STINT` local steps, this is the paper's loop::

        s = 0;  l = 0;  r = n-1
        for t = 0, 2, 4, ...:
            for worker j = 0 .. m-1:
                c = g[j,t] - g[j,t+1]
                if <s,c> <= 0:  next[j,l] = order[j,t];   next[j,r] = order[j,t+1];  s += c
                else:           next[j,r] = order[j,t];   next[j,l] = order[j,t+1];  s -= c
            l += 1;  r -= 1

    Coordination needs lockstep. When workers are not at the same place of their epochs at the same time, a sum of
    theirs that is kept short by place is long in time, and balancing alone is better. So signs lean from s to the
    worker's own sum, by ``drift / DRIFT`` up to 1, where drift is how many units the other workers are away on
    average, and by at least a half (s plus own sum) in stints of more than `LONG_STINT` local steps.
    """

    kind = "cd-grab"
    paired = True
    shares = True

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        super().begin(sizes, seed, lockstep)
        self._entered = np.zeros(len(sizes), np.int64)
        self._used = np.zeros(len(sizes), np.int64)

    def _lean(self, visit: Visit) -> float:
        worker, units = visit.worker, len(visit.units)
        if visit.epoch > self._entered[worker]:
            self._entered[worker], self._used[worker] = visit.epoch, 0
        if visit.epoch == self._entered[worker]:
            self._used[worker] += units
        lean = 0.5 if visit.local_steps > LONG_STINT else 0.0
        if not self._lockstep:
            # Reports arrive one after the other, so even in step the others are up to a stint away.
            drift = max(0.0, self._drift(worker) - units * visit.local_steps)
            lean = max(lean, min(1.0, drift / DRIFT))
        return lean

    def _drift(self, worker: int) -> float:
        """How far the other workers are ahead or behind in their epochs, on average, counted in this worker's units."""
        if len(self._sizes) == 1:
            return 0.0
        mine, others = self._sizes[worker], len(self._sizes) - 1
        places = self._entered * mine + self._used * (mine / np.array(self._sizes))
        return float(np.abs(places - places[worker]).sum()) / others

    def state_dict(self) -> State:
        return {**super().state_dict(), "entered": self._entered.tolist(), "used": self._used.tolist()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._entered[:] = state["entered"]
        self._used[:] = state["used"]


def redeal(orders: Sequence[np.ndarray], workers: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Deal units again to another number of workers, each keeping about its place in the epoch.

    Args:
        orders: For every old worker, its global unit numbers in the order it would visit them next.
        workers: The new number.

    Returns:
        For every new worker its shard (sorted global unit numbers) and its order (places within that shard).
    """
    everyone = sum(len(order) for order in orders)
    if not 1 <= workers <= everyone:
        raise InputError(f"{everyone} units can be dealt to 1 to {everyone} workers, got {workers}")
    # Interleave by relative position, then deal like cards: neighbours in time go to different workers.
    places = np.concatenate([(np.arange(len(order)) + 0.5) / max(len(order), 1) for order in orders])
    deck = np.concatenate(orders)[np.argsort(places, kind="stable")]
    hands = [deck[worker::workers] for worker in range(workers)]
    shards = [np.sort(hand) for hand in hands]
    return shards, [np.searchsorted(shard, hand) for shard, hand in zip(shards, hands, strict=True)]
