"""The table of clusters: name in the experiment file -> what builds it.

A builder takes the experiment file's folder, the number of workers, and its options as keyword arguments; it checks
them at once and returns a function that makes the cluster around a plan and the training loop that gives out the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hemiola.clusters.ray.factory import RayFactory, check_ray
from hemiola.clusters.simulated.factory import SimulatedFactory
from hemiola.clusters.torch.factory import TorchFactory, check_torch
from hemiola.contracts import Cluster, Pace, Work
from hemiola.wire.exchange import Exchange


def check_fit(name: str, pace: Pace, exchange: Exchange) -> None:
    """Refuse policies that a cluster cannot run; called before anything is computed."""
    if name == "torch":
        check_torch(pace, exchange)
    if name == "ray":
        check_ray(exchange)


CLUSTERS: dict[str, Callable[..., Callable[[Any, Work], Cluster]]] = {
    "simulated": SimulatedFactory,
    "torch": TorchFactory,
    "ray": RayFactory,
}

REAL = frozenset({"torch", "ray"})
"""Clusters whose seconds are measured; they want the machine to themselves."""
