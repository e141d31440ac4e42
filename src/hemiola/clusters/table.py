"""The table of clusters: name in the experiment file -> what makes it.

A factory takes the experiment file's folder, the number of workers, and its options as keyword arguments, and checks
them at once. Adding a cluster is adding a folder and a row.
"""

from __future__ import annotations

from hemiola.clusters.ray.factory import RayFactory
from hemiola.clusters.simulated.factory import SimulatedFactory
from hemiola.clusters.torch.factory import TorchFactory
from hemiola.plan import ClusterFactory

CLUSTERS: dict[str, type[ClusterFactory]] = {
    "simulated": SimulatedFactory,
    "torch": TorchFactory,
    "ray": RayFactory,
}
