"""The Ray cluster: the server beside a bare ``ray.wait`` loop, the int8 wire beside fp32, update times beside theory.

The server is timed with workers that answer at once with a vector they have ready, so that everything but the server
costs the same on both sides; the bare loop is what one would write by hand: put the weights, wait for K, add them up.
The wire is timed between two Ray nodes on this machine, which exchange objects over TCP as two machines would; within
one node a report is a piece of shared memory and has no wire to save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import count, product
from typing import Any

import numpy as np
import torch
from ratio import Ratio, Skip, seconds
from torch import Tensor, nn

from hemiola.clusters.ray.cluster import RayCluster
from hemiola.clusters.ray.engine import Engine
from hemiola.clusters.ray.factory import RayFactory
from hemiola.clusters.ray.roster import Roster
from hemiola.clusters.ray.worker import THREADS, Assignment, Setup, Worker
from hemiola.clusters.stints import Finished
from hemiola.contracts import Batch, Stint
from hemiola.lab.experiment import Experiment
from hemiola.lab.tasks.task import Task
from hemiola.optimizers import Optimizer
from hemiola.pace import KAsync, KSync
from hemiola.timing.delays import parse_delay
from hemiola.timing.theory import mean_staleness, update_time
from hemiola.training import Training
from hemiola.wire.exchange import Exchange

WORKERS, K = 4, 2
SIZES = {"1 k": (1_000, 50, ">= 0.8"), "1 M": (1_000_000, 10, ">= 0.9"), "10 M": (10_000_000, 3, ">= 0.9")}
DELAYS = ("exponential(0.08)", "shifted-exponential(0.04, 0.04)")
DELAY_WORKERS, DELAY_UPDATES = (4, 8), 400


def ratios() -> Iterator[Ratio]:
    try:
        import ray  # noqa: F401
    except ImportError:
        raise Skip("Ray is not installed: pip install 'hemiola[ray]'") from None
    logging.getLogger("hemiola").setLevel(logging.ERROR)
    engine = Engine(None, max(DELAY_WORKERS))
    try:
        for name, (floats, updates, bar) in SIZES.items():
            yield from throughput(engine, name, floats, updates, bar)
        yield from against_theory()
    finally:
        engine.close()
    yield from wire()


def best_of(baseline: Callable[[], None], call: Callable[[], None], rounds: int = 15) -> float:
    """Least time of the baseline over least time of the call: a busy machine only ever adds to either."""
    pairs = [(seconds(baseline), seconds(call)) for _ in range(rounds + 1)][1:]
    return min(pair[0] for pair in pairs) / min(pair[1] for pair in pairs)


# ---------------------------------------------------------------------------------------------------- the server


class Echo(Worker):
    """A worker that computes nothing: every change is the same vector."""

    def _compute(self, assignment: Assignment, start: Tensor, began: float) -> tuple[Tensor, Finished]:
        return self.runner.initial, Finished([1.0], [(None,)], [True])


class Bare:
    """An actor with a vector and nothing else."""

    def __init__(self, floats: int) -> None:
        self.vector = np.ones(floats, dtype=np.float32)

    def run(self, weights: np.ndarray) -> np.ndarray:
        return self.vector


class Endless:
    """Work that never ends, at weights that never change."""

    def __init__(self, floats: int) -> None:
        self.weights = torch.ones(floats)
        self.version = 0
        self._numbers = count()
        self._batch = (Batch(0, 0, np.zeros(1, dtype=np.int64)),)

    def assign(self, worker: int) -> Stint:
        return Stint(worker, next(self._numbers), self.version, self._batch, (0.1,))

    def give_back(self, stint: Stint) -> None:
        pass

    def read(self, version: int) -> Tensor:
        return self.weights

    def wants_sketches(self, stint: Stint) -> tuple[bool, ...]:
        return (False,)


def server(engine: Engine, floats: int, exchange: Exchange, k: int, **placement: Any) -> RayCluster:
    examples = (torch.ones(WORKERS, 1), torch.zeros(WORKERS, dtype=torch.int64))
    task = Task(name="echo", model=lambda: nn.Linear(1, floats, bias=False), train=examples, test=examples)
    shards = [np.array([worker]) for worker in range(WORKERS)]
    setup = Setup(task, shards, 1, None, Optimizer("SGD", 0.1), exchange, False, 0, "cpu", 1)
    make = engine.ray.remote(num_cpus=0, **THREADS, **placement)(Echo)
    roster = Roster(engine, [make.remote() for _ in range(WORKERS)], setup, 1, 0, 600.0)
    pace = KSync(k=k) if k == WORKERS else KAsync(k=k)
    pace.begin(WORKERS)
    return RayCluster(Endless(floats), engine, roster, setup, pace, None)


def updates_of(cluster: RayCluster, updates: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(updates):
            assert cluster.collect().change is not None
            cluster.work.version += 1  # type: ignore[attr-defined]
            cluster.publish()

    return run


def bare_loop(engine: Engine, floats: int, updates: int) -> tuple[Callable[[], None], list[Any]]:
    ray, weights = engine.ray, np.ones(floats, dtype=np.float32)
    actors = [ray.remote(num_cpus=0)(Bare).remote(floats) for _ in range(WORKERS)]
    pending: dict[Any, Any] = {}
    free = list(actors)

    def run() -> None:
        for _ in range(updates):
            published = ray.put(weights)
            while free:
                actor = free.pop()
                pending[actor.run.remote(published)] = actor
            ready, _ = ray.wait(list(pending), num_returns=K)
            total = np.zeros(floats, dtype=np.float32)
            for reference in ready:
                total += ray.get(reference) / K
                free.append(pending.pop(reference))

    return run, actors


def throughput(engine: Engine, name: str, floats: int, updates: int, bar: str) -> Iterator[Ratio]:
    cluster = server(engine, floats, Exchange(), K)
    bare, actors = bare_loop(engine, floats, updates)
    value = best_of(bare, updates_of(cluster, updates))
    cluster.roster.close()
    for actor in actors:
        engine.ray.kill(actor)
    yield Ratio(f"gradients/s, {name} floats", value, bar, f"over a bare ray.wait loop; P = {WORKERS}, K = {K}")


# -------------------------------------------------------------------------------------------------------- the wire


def wire() -> Iterator[Ratio]:
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes.add_node(num_cpus=WORKERS, resources={"far": WORKERS})
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        engine = Engine(None, WORKERS)
        floats, updates, _ = SIZES["10 M"]
        made = {
            name: server(engine, floats, Exchange(wire=name), WORKERS, resources={"far": 0.5})
            for name in ("fp32", "int8")
        }
        value = best_of(updates_of(made["fp32"], updates), updates_of(made["int8"], updates))
        yield Ratio("int8 wire, 10 M floats", value, ">= 1.5", "gradients/s over fp32; two Ray nodes over TCP loopback")
    finally:
        ray.shutdown()
        nodes.shutdown()


# ------------------------------------------------------------------------------------------------ time and staleness


def against_theory() -> Iterator[Ratio]:
    for workers, law in product(DELAY_WORKERS, DELAYS):
        k = workers // 2
        for variant in ("k-sync", "k-batch-sync", "k-async", "k-batch-async"):
            record = delayed_run(law, variant, workers, k)
            expected = update_time(variant, parse_delay(law), workers, k).value
            about = f"P = {workers}, K = {k}, {DELAY_UPDATES} updates, {law}"
            ratio = record["mean_update_seconds"] / expected
            yield Ratio(f"{variant}: update time over theory", ratio, "<= 1.2", about)
            off = abs(record["mean_staleness"] - mean_staleness(variant, workers, k))
            yield Ratio(f"{variant}: staleness off its law by", off, "<= 0.05", about)


def delayed_run(law: str, variant: str, workers: int, k: int) -> dict[str, Any]:
    experiment = {
        "task": "digits-logistic",
        "workers": workers,
        "batch": 4,
        "stop": {"updates": DELAY_UPDATES},
        "evaluate": {"every_updates": DELAY_UPDATES},
        "pace": {"name": variant, "k": k},
        "cluster": {"name": "ray", "delay": law, "device": "cpu"},
    }
    plan, make = Experiment(experiment).cells[0].plan(None)
    assert isinstance(make, RayFactory)
    training = Training(plan, make)
    try:
        training.run()
        return training.records[-1]
    finally:
        training.close()
