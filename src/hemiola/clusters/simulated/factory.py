"""The ``[cluster] name = "simulated"`` table of an experiment file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hemiola.clusters.shared_options import Delays
from hemiola.clusters.simulated.machines import Machines
from hemiola.clusters.simulated.sketch_cost import LOSS_BYTES, Charge, charge_for, check_sketch_cost
from hemiola.contracts import Cluster, Work
from hemiola.options import check_options
from hemiola.plan import ClusterFactory, Plan
from hemiola.timing.link import Link

if TYPE_CHECKING:
    from hemiola.clusters.stints import StintRunner


class SimulatedFactory(ClusterFactory):
    """One process, a virtual clock, real gradients.

    Args:
        base: Folder of the experiment file.
        workers: How many.
        delay: Law of the seconds one local step takes.
        slow: Factors on the delays of some workers, by number.
        link: ``bandwidth`` and ``latency`` between machines; messages take no time without. With ``groups``, the
            workers of each, ``bandwidth`` is a matrix from each group to each. ``reports = "ring"``: where an update
            does not wait for all, reports go by ring all-reduces instead of over one server's link.
        sketch_cost: How many times as long a local step takes that makes the order's sketches: ``"usual"`` for the
            documented factors, ``"measured"`` for this task's own, a number, or numbers by kind of sketch.
    """

    def __init__(
        self,
        base: Path,
        workers: int,
        /,
        *,
        delay: str = "constant(1.0)",
        slow: dict[str, float] | None = None,
        link: dict[str, Any] | None = None,
        sketch_cost: float | str | dict[str, float] = "usual",
    ):
        check_sketch_cost(sketch_cost)
        self.sketch_cost = sketch_cost
        self.delays = Delays(base, workers, delay, slow)
        self.link = Link.parse(**check_options(Link.parse, link or {}, "link"))
        self.link.check(workers)

    def __call__(self, plan: Plan, work: Work) -> Cluster:
        """Build the cluster."""
        from hemiola.clusters.simulated.clocked import ClockedCluster
        from hemiola.clusters.simulated.cluster import SimulatedCluster
        from hemiola.clusters.simulated.probing import ProbingCluster
        from hemiola.clusters.stints import StintRunner

        runner = StintRunner.of(plan)
        if runner.unit_gradients is not None:
            runner.unit_gradients.rounds = True
        streams = self.delays.streams(plan.seed)
        assert streams is not None
        machines = Machines(streams, self.link, self._charge(plan, runner))
        if plan.period.clock is not None:
            return ClockedCluster(plan, plan.period.clock, work, runner, machines)
        if plan.period.probes:
            return ProbingCluster(plan, work, runner, machines)
        return SimulatedCluster(plan, work, runner, machines)

    def _charge(self, plan: Plan, runner: StintRunner) -> Charge:
        order, sketches = plan.order, runner.unit_gradients
        charge = charge_for(self.sketch_cost, plan.task, order.sketch, order.unit, plan.batch, sketches)
        return replace(charge, row_bytes=charge.row_bytes + LOSS_BYTES) if order.wants_losses else charge
