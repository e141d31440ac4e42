"""One suite that every cluster passes, and a differential test: whatever the cluster, the same run is the same run.

Adding a cluster is adding a row to ``CLUSTERS``. Every job is trained once per cluster; the tests look at what it gave.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "clusters"))

from torch_ranks import TASKS, Job, Trained, train_here, train_on_ranks

from hemiola.clusters.table import CLUSTERS as KNOWN
from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment

WORKERS = 2
REAL = [pytest.mark.real, pytest.mark.timeout(600)]
CLUSTERS = [
    "simulated",
    pytest.param("torch", marks=REAL),
    pytest.param("ray", marks=[*REAL, pytest.mark.skipif("ray" not in KNOWN, reason="no Ray cluster yet")]),
]

BASE = {
    "task": {"name": f"{TASKS}:small", "examples": 61},  # shards of 31 and 30: one worker rests once an epoch
    "workers": WORKERS,
    "batch": 5,
    "stop": {"epochs": 3},
    "optimizer": {"lr": 0.2, "momentum": 0.9},
}
BALANCED = {"order": {"name": "cd-grab", "sketch": "fold:16"}}
ADAPTIVE = {"period": {"name": "adaptive", "start": 2}}
WIDE = {"task": {"name": f"{TASKS}:small", "examples": 61, "hidden": 400}}
SPOILT = {
    "task": {"name": f"{TASKS}:small", "examples": 61, "spoilt": 1},
    "evaluate": {"every_epochs": 1, "train_examples": 60},
}
JOBS = {
    "synchronous": BASE,
    "balanced": BASE | BALANCED,
    "local": BASE | ADAPTIVE,
    "both": BASE | BALANCED | ADAPTIVE,
    "spoilt": BASE | BALANCED | ADAPTIVE | SPOILT,
    "int8": BASE | WIDE | {"period": {"name": "constant", "p": 2, "wire": "int8"}},
    "deck": BASE | BALANCED | {"shards": {"deal": "deck"}},
    "ghosts": BASE | {"order": {"name": "cd-grab", "sketch": "ghost:2"}},
    "ghosts, local": BASE | ADAPTIVE | {"order": {"name": "cd-grab", "sketch": "ghost:2"}},
    "outer": BASE | BALANCED | ADAPTIVE | {"outer": {"name": "diloco", "momentum": 0.5}},
    "fda": BASE | BALANCED | {"period": {"name": "fda", "most": 6}},
    "fp32": BASE | WIDE | {"period": {"name": "constant", "p": 2}},
}


def on(cluster: str, given: dict) -> dict:
    options = {"device": "cpu"} if cluster == "torch" else {}
    return given | {"cluster": {"name": cluster, **options}}


def train_all(cluster: str, folder: Path) -> dict[str, Trained]:
    """Every job, and one of them again with a stop and a checkpoint in its middle."""
    jobs = {name: Job(on(cluster, given)) for name, given in JOBS.items() if (cluster, name) != ("ray", "fda")}
    jobs["stopped"] = Job(on(cluster, JOBS["outer"]), folder, stop_at=4)
    jobs["resumed"] = Job(on(cluster, JOBS["outer"]), folder)
    folder.mkdir()
    if cluster == "torch":
        found = train_on_ranks(list(jobs.values()), WORKERS, folder / "rendezvous")
        for name, ranks in zip(jobs, found, strict=True):
            assert all(torch.equal(ranks[0].weights, other.weights) for other in ranks), name
        return {name: ranks[0] for name, ranks in zip(jobs, found, strict=True)}
    with one_ray() if cluster == "ray" else nullcontext():
        return {name: train_here(job) for name, job in jobs.items()}


@contextmanager
def one_ray() -> Iterator[None]:
    """A Ray and its actors for all jobs: starting them for each would take most of the time."""
    from hemiola.clusters.ray import roster
    from hemiola.clusters.ray.engine import Engine

    engine = Engine(None, WORKERS)
    try:
        actors = roster.start_actors(engine, WORKERS, "cpu")
        with (
            mock.patch.object(roster, "start_actors", return_value=actors),
            mock.patch.object(roster.Roster, "close"),
        ):
            yield
    finally:
        engine.close()


_trained: dict[str, dict[str, Trained]] = {}


@pytest.fixture
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Called with a cluster's name: everything it trained, computed once."""

    def get(cluster: str) -> dict[str, Trained]:
        if cluster not in _trained:
            _trained[cluster] = train_all(cluster, tmp_path_factory.mktemp(cluster) / "cell")
        return _trained[cluster]

    return get


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_epoch_visits_every_unit_once(cluster: str, trained) -> None:
    for name, run in trained(cluster).items():
        if name == "stopped":
            continue
        visits = [
            sum(fates)
            for used, refused in zip(run.counts["used"], run.counts["refused"], strict=True)
            for fates in zip(used, refused, strict=True)
        ]
        assert visits == [3] * 61, name


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_loss_falls_and_time_passes(cluster: str, trained) -> None:
    for name, run in trained(cluster).items():
        if name in ("stopped", "spoilt"):
            continue
        assert run.status == "done", name
        assert run.curve()[-1] < 0.9 * run.curve()[0], name
        seconds = run.curve("seconds")
        assert seconds[0] == 0, name
        assert all(a < b for a, b in pairwise(seconds)), name
        assert run.log[-1]["updates"] == run.updates, name
        assert run.log[-1]["bytes_per_worker"] > 0, name


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_report_that_is_not_finite_is_refused_and_counted(cluster: str, trained) -> None:
    run = trained(cluster)["spoilt"]
    assert bool(torch.isfinite(run.weights).all())
    refused = sum(sum(counts) for counts in run.counts["refused"])
    assert refused > 0
    assert run.log[-1]["units_dropped"] == refused
    assert sum(line["refused"] for line in run.log[-1]["workers"]) == refused


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(cluster: str, trained) -> None:
    runs = trained(cluster)
    assert runs["stopped"].status == "running"
    assert 4 <= runs["stopped"].updates < runs["outer"].updates
    assert torch.equal(runs["resumed"].weights, runs["outer"].weights)
    assert runs["resumed"].curve() == runs["outer"].curve()
    assert runs["resumed"].period == runs["outer"].period
    assert runs["resumed"].counts == runs["outer"].counts


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_narrow_wire_sends_less_and_trains_as_well(cluster: str, trained) -> None:
    runs = trained(cluster)
    assert runs["int8"].log[-1]["bytes_per_worker"] < runs["fp32"].log[-1]["bytes_per_worker"]
    assert runs["int8"].curve()[-1] == pytest.approx(runs["fp32"].curve()[-1], rel=0.05)


@pytest.mark.parametrize("cluster", CLUSTERS[1:])
@pytest.mark.parametrize("name", ["synchronous", "balanced", "local", "both", "spoilt", "deck", "outer", "fda", "fp32"])
def test_every_cluster_gives_what_the_simulated_one_gives(cluster: str, name: str, trained) -> None:
    if name not in trained(cluster):
        pytest.skip("workers that report to a server do not meet for a probe")
    real, simulated = trained(cluster)[name], trained("simulated")[name]
    assert real.updates == simulated.updates
    assert real.counts == simulated.counts
    torch.testing.assert_close(real.weights, simulated.weights, rtol=1e-4, atol=1e-5)
    for key in ("train_loss", "test_loss", "epochs", "weighted_spread"):
        for measured, expected in zip(real.curve(key), simulated.curve(key), strict=True):
            same = measured == expected or (measured is not None and math.isnan(measured) and math.isnan(expected))
            assert same or measured == pytest.approx(expected, rel=1e-3, abs=1e-6), key


@pytest.mark.parametrize("cluster", [pytest.param(name, marks=()) for name in ("simulated", "torch", "ray")])
def test_an_unknown_option_of_a_cluster_is_one_clear_line(cluster: str) -> None:
    if cluster not in KNOWN:
        pytest.skip("not there yet")
    with pytest.raises(InputError, match=r"cluster: unknown option 'dealy'; did you mean 'delay'\?"):
        Experiment(BASE | {"cluster": {"name": cluster, "dealy": "constant(1)"}})
