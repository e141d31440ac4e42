"""`OrderedLoader`: a DataLoader in an order that a policy chooses, whose batches know their examples."""

from __future__ import annotations

from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset

from hemiola.contracts import Order
from hemiola.errors import InputError
from hemiola.loops.sampler import OrderedSampler


class OrderedLoader(DataLoader[Any]):
    """A ``DataLoader`` with a tracked `OrderedSampler` inside; its batches are those of any DataLoader.

        loader = hemiola.OrderedLoader(dataset, batch_size=32, order="cd-grab", num_workers=4)
        with loader.sampler.watch(model):
            ...

    Args:
        dataset: With ``__getitem__`` and ``__len__``.
        batch_size: Examples per batch.
        order, unit, num_replicas, rank, seed, sketch, deal: As for `OrderedSampler`.
        options: As for ``DataLoader``, except ``sampler``, ``batch_sampler`` and ``shuffle``, which the order replaces.

    Attributes:
        sampler: The `OrderedSampler`: ``watch``, ``attach``, ``telemetry`` and the state are there.
    """

    sampler: OrderedSampler

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        order: str | Order = "cd-grab",
        unit: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        sketch: str | None = None,
        deal: Literal["shards", "deck"] = "shards",
        **options: Any,
    ) -> None:
        for name in ("sampler", "batch_sampler", "shuffle"):
            if options.get(name):
                raise InputError(
                    f"an OrderedLoader has an order of its own, got {name} = {options[name]!r}; to use another one, "
                    "make a DataLoader over an OrderedSampler and give it to sampler.track"
                )
            options.pop(name, None)
        sampler = OrderedSampler(dataset, order, unit, num_replicas, rank, seed, sketch=sketch, deal=deal)  # type: ignore[arg-type]
        super().__init__(dataset, batch_size, sampler=sampler, **options)
        sampler.track(self)
