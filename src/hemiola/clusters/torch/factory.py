"""The ``[cluster] name = "torch"`` table of an experiment file, and what it cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hemiola.clusters.shared_options import Delays, check_upkeep
from hemiola.contracts import Cluster, Pace, Period, Work
from hemiola.errors import InputError
from hemiola.plan import ClusterFactory, Plan
from hemiola.wire.exchange import Exchange


class TorchFactory(ClusterFactory):
    """torch.distributed: one process a worker, gloo on CPUs, NCCL on GPUs; every update waits for every worker.

    Args:
        base: Folder of the experiment file.
        workers: How many processes.
        backend: ``"auto"`` is NCCL for CUDA devices and gloo for CPUs.
        device: Where models run; ``"auto"`` is CUDA where there is one.
        timeout: Seconds after which a rank that has not come to an exchange is given up.
        checkpoint_every_updates: Write a checkpoint after every so many updates.
        checkpoint_every_seconds: Write a checkpoint when so much time has passed since the one before.
        max_restarts: How often ``hemiola run`` starts all processes again, from the last checkpoint, when one has died.
            Under torchrun, torchrun's own --max-restarts says that.
        elastic: Under torchrun, train with as many processes as it has started, instead of insisting on ``workers``.
        delay: Law of the least time of a local step, as on the simulated cluster: ranks sleep for what is left.
        slow: Factors on the delays of some workers, by number.
    """

    real = True

    def __init__(
        self,
        base: Path,
        workers: int,
        /,
        *,
        backend: Literal["auto", "gloo", "nccl"] = "auto",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        timeout: float = 600.0,
        checkpoint_every_updates: int | None = None,
        checkpoint_every_seconds: float = 20.0,
        max_restarts: int = 3,
        elastic: bool = False,
        delay: str | None = None,
        slow: dict[str, float] | None = None,
    ):
        check_upkeep(max_restarts, checkpoint_every_updates, checkpoint_every_seconds, timeout=timeout)
        self.workers = workers
        self.device = _device(device)
        self.backend = _backend(backend, self.device)
        self.timeout = timeout
        self.checkpoint_every_updates = checkpoint_every_updates
        self.checkpoint_every_seconds = checkpoint_every_seconds
        self.max_restarts = max_restarts
        self.elastic = elastic
        self.delays = Delays(base, workers, delay, slow)

    def check(self, period: Period, pace: Pace, exchange: Exchange) -> None:
        """Refuse what collectives cannot do."""
        cuts = pace.cancels and pace.idles and pace.late == "cut" and period.local
        if not (pace.lockstep or cuts):
            raise InputError(
                "cluster.name: 'torch' exchanges by collectives, which need every worker, so every update waits for "
                "all of them (k-sync or k-async with k = workers), or cuts the local steps of the late ones (k-sync "
                "with late = 'cut'); use 'ray' for other paces on real machines, or 'simulated'"
            )
        if exchange.overlap != 0:
            raise InputError(
                f"period.overlap: {exchange.overlap!r} is not for cluster 'torch', whose ranks all hold the same "
                "weights between updates; use overlap = 0, or hemiola.Averager in your own loop"
            )

    def __call__(self, plan: Plan, work: Work) -> Cluster:
        """Build this rank's cluster; the process must have joined its group."""
        import torch.distributed as dist

        from hemiola.clusters.stints import StintRunner
        from hemiola.clusters.torch.clocked import ClockedCollectiveCluster
        from hemiola.clusters.torch.cluster import CollectiveCluster

        if not dist.is_initialized():
            raise InputError(
                "cluster.name: 'torch' trains in several processes, and this one is alone; "
                "start it with `hemiola run`, `hemiola.train` or torchrun"
            )
        self.check(plan.period, plan.pace, plan.exchange)
        self.check_world(dist.get_world_size())
        device = f"cuda:{_current_cuda()}" if self.device == "cuda" else "cpu"
        runner, delays = StintRunner.of(plan, device), self.delays.streams(plan.seed)
        if plan.period.clock is not None:
            return ClockedCollectiveCluster(plan, plan.period.clock, work, runner, delays, self.timeout)
        return CollectiveCluster(plan, work, runner, delays)

    def claim_device(self, local_rank: int) -> None:
        """Give the process its GPU, if GPUs are used; before it joins its group."""
        if self.device == "cuda":
            import torch

            if local_rank >= torch.cuda.device_count():
                raise InputError(
                    f"device: 'cuda' needs a GPU for every process; this machine has {torch.cuda.device_count()}, "
                    f"and this is process {local_rank + 1}; start fewer here or use 'cpu'"
                )
            torch.cuda.set_device(local_rank)

    def check_world(self, world: int) -> None:
        """Refuse a group of another size than the experiment says."""
        if world != self.workers:
            raise InputError(
                f"workers = {self.workers}, but torchrun has started {world} processes; start {self.workers}, "
                f"add --set workers={world}, or set elastic = true in [cluster]"
            )


def _device(device: str) -> Literal["cpu", "cuda"]:
    if device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise InputError("device: 'cuda' is not available on this machine; use 'cpu' or 'auto'")
    return "cpu"


def _backend(backend: str, device: str) -> Literal["gloo", "nccl"]:
    if backend == "nccl" and device != "cuda":
        raise InputError("backend: 'nccl' needs device = 'cuda'; use 'gloo' or 'auto'")
    return "nccl" if backend == "nccl" or (backend == "auto" and device == "cuda") else "gloo"


def _current_cuda() -> int:
    import torch

    return int(torch.cuda.current_device())
