"""Which examples make a unit, and which units are whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hemiola.errors import InputError
from hemiola.order import redeal
from hemiola.streams import stream


@dataclass(frozen=True)
class Deal:
    """A data set cut into units and dealt to ranks, the same number of examples to each.

    Attributes:
        units: (all units, unit) example numbers; each unit's examples stay together.
        shards: (ranks, n) unit numbers, sorted.
        rests: (ranks, c) example numbers that come unordered at the end of every epoch: what is left over when every
            rank has equally many whole units. Some come twice where they do not go round; c is 0 with ``drop_last``.
    """

    units: np.ndarray
    shards: np.ndarray
    rests: np.ndarray

    @property
    def ranks(self) -> int:
        return len(self.shards)

    @property
    def ordered(self) -> int:
        """How many examples of each rank are in units."""
        return int(self.shards.shape[1] * self.units.shape[1])

    @property
    def length(self) -> int:
        """Examples of each rank in an epoch."""
        return int(self.ordered + self.rests.shape[1])

    def examples(self, rank: int, order: np.ndarray) -> np.ndarray:
        """The rank's epoch when its units come in this order."""
        return np.concatenate([self.units[self.shards[rank][order]].ravel(), self.rests[rank]])

    def again(
        self, examples: int, ranks: int, orders: Sequence[np.ndarray], drop_last: bool
    ) -> tuple[Deal, list[np.ndarray]]:
        """Deal the same units to another number of ranks.

        Args:
            examples: In the data set.
            ranks: The new number.
            orders: For every old rank, the order its units would be visited in next.
            drop_last: As for `deal`.

        Returns:
            The new deal, and for every new rank the order in which to visit its units next.
        """
        _check_ranks(len(self.units), ranks, self.units.shape[1])
        visits = [shard[order] for shard, order in zip(self.shards, orders, strict=True)]
        undealt = np.setdiff1d(np.arange(len(self.units)), self.shards)
        visits[0] = np.concatenate([visits[0], undealt])
        shards, places = redeal(visits, ranks)
        size = len(self.units) // ranks
        hands = [shard[place][:size] for shard, place in zip(shards, places, strict=True)]
        dealt = np.stack([np.sort(hand) for hand in hands])
        order = [np.searchsorted(shard, hand) for shard, hand in zip(dealt, hands, strict=True)]
        return Deal(self.units, dealt, _rests(self.units, dealt, examples, drop_last)), order


def deal(examples: int, unit: int, ranks: int, seed: int, drop_last: bool) -> Deal:
    """Cut a data set into units of random examples and deal them at random.

    Args:
        examples: In the data set.
        unit: Examples per unit.
        ranks: How many.
        seed: Of the deal.
        drop_last: Leave out the examples that do not make the same number of units for every rank.
    """
    count = examples // unit
    _check_ranks(count, ranks, unit)
    random = stream("deal", seed)
    units = np.sort(random.permutation(examples)[: count * unit].reshape(count, unit), axis=1)
    units = units[np.argsort(units[:, 0])]
    size = count // ranks
    shards = np.sort(random.permutation(count)[: size * ranks].reshape(ranks, size), axis=1)
    return Deal(units, shards, _rests(units, shards, examples, drop_last))


def deal_left(sequences: np.ndarray, ranks: int, drop_last: bool) -> np.ndarray:
    """Deal what (old ranks, c) sequences of examples have left to other ranks, each keeping about its place."""
    return _deal_evenly(sequences.T.ravel(), ranks, drop_last)


def _rests(units: np.ndarray, shards: np.ndarray, examples: int, drop_last: bool) -> np.ndarray:
    if drop_last:
        return np.zeros((len(shards), 0), np.int64)
    return _deal_evenly(np.setdiff1d(np.arange(examples), units[shards.ravel()]), len(shards), drop_last)


def _deal_evenly(deck: np.ndarray, ranks: int, drop_last: bool) -> np.ndarray:
    """(ranks, c): every rank as many, by dropping some or by repeating some."""
    each = len(deck) // ranks if drop_last else -(-len(deck) // ranks)
    return np.resize(deck, each * ranks).reshape(each, ranks).T if each else np.zeros((ranks, 0), np.int64)


def _check_ranks(count: int, ranks: int, unit: int) -> None:
    if ranks > count:
        raise InputError(
            f"the data set has {count} whole units of {unit} examples, too few for {ranks} replicas; "
            f"use at most {count} replicas or smaller units"
        )
