"""What is simulated: how long steps take, the link between machines, and what ordering costs on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hemiola.clusters.simulated.sketch_cost import Charge
from hemiola.timing.delays import DelayStreams
from hemiola.timing.link import Link


@dataclass(frozen=True)
class Machines:
    """The machines of a simulated cluster, one for each worker.

    Attributes:
        delays: Compute time of every local step.
        link: Between the machines.
        charge: What sketches cost.
    """

    delays: DelayStreams
    link: Link
    charge: Charge = field(default_factory=Charge)
