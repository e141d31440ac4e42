"""The ``[cluster] name = "ray"`` table of an experiment file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hemiola.clusters.ray.engine import require_ray
from hemiola.clusters.shared_options import Delays, check_upkeep
from hemiola.contracts import Cluster, Pace, Period, Work
from hemiola.errors import InputError
from hemiola.plan import ClusterFactory, Plan
from hemiola.wire.exchange import Exchange


class RayFactory(ClusterFactory):
    """Ray actors: every pace, on one machine or many; workers may die and come back.

    Args:
        base: Folder of the experiment file.
        workers: How many actors.
        address: Of a running Ray: ``"auto"``, ``"host:port"`` or ``"ray://host:port"``; None starts Ray here, for
            this run.
        device: Where the workers' models run; ``"auto"`` is CUDA where there is one.
        max_restarts: How often each worker may be started again.
        hang_seconds: The least time after which a worker that says nothing counts as late; after twice that as dead.
            The time grows with the slowest step measured.
        checkpoint_every_updates: Write a checkpoint after every so many updates.
        checkpoint_every_seconds: Write a checkpoint when so much time has passed since the one before.
        delay: Law of the least seconds of a local step; what the step itself does not need is slept away.
        slow: Factors on the delays of some workers, by number.
    """

    real = True

    def __init__(
        self,
        base: Path,
        workers: int,
        /,
        *,
        address: str | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        max_restarts: int = 3,
        hang_seconds: float = 60.0,
        checkpoint_every_updates: int | None = None,
        checkpoint_every_seconds: float = 20.0,
        delay: str | None = None,
        slow: dict[str, float] | None = None,
    ) -> None:
        require_ray()
        check_upkeep(max_restarts, checkpoint_every_updates, checkpoint_every_seconds, hang_seconds=hang_seconds)
        self.workers = workers
        self.address = address
        self.device = device
        self.max_restarts = max_restarts
        self.hang_seconds = hang_seconds
        self.checkpoint_every_updates = checkpoint_every_updates
        self.checkpoint_every_seconds = checkpoint_every_seconds
        self.delays = Delays(base, workers, delay, slow)

    def check(self, period: Period, pace: Pace, exchange: Exchange) -> None:
        """Refuse what this cluster cannot do."""
        if period.clock is not None:
            raise InputError(
                f"period.name: {period.kind!r} needs averagings among the workers, and those of cluster 'ray' report "
                "to a server; use pace = 'k-batch-async', whose workers do not wait either, or cluster 'torch' or "
                "'simulated'"
            )
        if period.probes:
            raise InputError(
                f"period.name: {period.kind!r} needs workers that meet after every stint, and those of cluster 'ray' "
                "report to a server; use period = 'adaptive', or cluster 'simulated' or 'torch'"
            )
        if exchange.overlap != 0:
            raise InputError(
                f"period.overlap: {exchange.overlap!r} is not for cluster 'ray', whose workers start from the newest "
                "weights; use overlap = 0, or hemiola.Averager in your own loop"
            )

    def __call__(self, plan: Plan, work: Work) -> Cluster:
        """Start or join Ray and start the workers."""
        from hemiola.clusters.ray.cluster import RayCluster
        from hemiola.clusters.ray.engine import Engine
        from hemiola.clusters.ray.roster import Roster, start_actors
        from hemiola.clusters.ray.worker import Setup

        self.check(plan.period, plan.pace, plan.exchange)
        engine = Engine(self.address, self.workers)
        try:
            setup = Setup(
                task=plan.task,
                shards=plan.shards,
                unit=plan.order.unit,
                sketch=plan.order.sketch,
                optimizer=plan.optimizer,
                exchange=plan.exchange,
                local=plan.period.local,
                seed=plan.seed,
                device=self.device,
                threads=max(1, engine.cpus // self.workers),
                deck=plan.deck,
                tells_losses=plan.order.wants_losses,
            )
            actors = start_actors(engine, self.workers, self.device)
            roster = Roster(engine, actors, setup, self.max_restarts, self.hang_seconds)
            return RayCluster(work, engine, roster, setup, plan.pace, self.delays.streams(plan.seed))
        except BaseException:
            engine.close()
            raise
