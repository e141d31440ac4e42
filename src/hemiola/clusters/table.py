"""The table of clusters: name in the experiment file -> what builds it.

A builder takes the experiment file's folder, the number of workers, and its options as keyword arguments; it checks
them at once and returns a function that makes the cluster around a plan and the training loop that gives out the work.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hemiola.clusters.collective_factory import TorchFactory, check_torch
from hemiola.clusters.link import Link
from hemiola.clusters.ray_factory import RayFactory, check_ray
from hemiola.clusters.shared_options import Delays
from hemiola.contracts import Cluster, Pace, Work
from hemiola.options import check_options
from hemiola.period.exchange import Exchange

if TYPE_CHECKING:
    from hemiola.plan import Plan


def simulated(
    base: Path,
    workers: int,
    /,
    *,
    delay: str = "constant(1.0)",
    slow: dict[str, float] | None = None,
    link: dict[str, str] | None = None,
) -> Callable[[Any, Work], Cluster]:
    """One process, a virtual clock, real gradients.

    Args:
        base: Folder of the experiment file.
        workers: How many.
        delay: Law of the seconds one local step takes.
        slow: Factors on the delays of some workers, by number.
        link: ``bandwidth`` and ``latency`` between machines; messages take no time without.
    """
    delays = Delays(base, workers, delay, slow)
    wire = Link.parse(**check_options(Link.parse, link or {}, "link"))

    def make(plan: Plan, work: Work) -> Cluster:
        from hemiola.clusters.simulated import SimulatedCluster
        from hemiola.clusters.stints import StintRunner

        runner = StintRunner(plan.task, plan.shards, plan.order.unit, plan.order.sketch, plan.optimizer, plan.seed)
        streams = delays.streams(plan.seed)
        assert streams is not None
        return SimulatedCluster(work, runner, plan.pace, plan.period, plan.exchange, streams, wire, plan.seed)

    return make


def check_fit(name: str, pace: Pace, exchange: Exchange) -> None:
    """Refuse policies that a cluster cannot run; called before anything is computed."""
    if name == "torch":
        check_torch(pace, exchange)
    if name == "ray":
        check_ray(exchange)


CLUSTERS: dict[str, Callable[..., Callable[[Any, Work], Cluster]]] = {
    "simulated": simulated,
    "torch": TorchFactory,
    "ray": RayFactory,
}

REAL = frozenset({"torch", "ray"})
"""Clusters whose seconds are measured; they want the machine to themselves."""
