"""What an update of the torch cluster costs beside a bare loop: the same stints, one bare all-reduce of the change.

Two ranks on this machine, gloo, one thread each; local SGD with p = 4. Both loops run in the same processes, in turn.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from ratio import Ratio

RANKS, ROUNDS, UPDATES = 2, 7, 8
SIZES = {"12 k": (80, ""), "1 M": (950, "<= 1.25")}  # widths of two hidden layers on digits, and the bar


def ratios() -> Iterator[Ratio]:
    for name, (width, bar) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            _start(Path(folder), width)
            found = json.loads((Path(folder) / "found.json").read_text())
        note = f"{name} floats: updates of the cluster / bare loop with the same stints and one all-reduce"
        yield Ratio(f"update, {name} floats", median(found), bar, note)


def _start(folder: Path, width: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hemiola.lab.ranks"])
    arguments = [(str(folder), width, rank) for rank in range(RANKS)]
    processes = [
        context.Process(target=runpy.run_path, args=(__file__, {"ARGUMENTS": one}, "__rank__")) for one in arguments
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a rank failed")


def _measure(folder: Path, width: int, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from hemiola.clusters.torch.group import Place, join, leave
    from hemiola.lab.experiment import Experiment
    from hemiola.training import Training

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    join(Place(rank, RANKS, rank, 0), "gloo", 300, folder / "group")
    given = {
        "task": {"name": "digits-mlp", "hidden": [width, width]},
        "workers": RANKS,
        "batch": 16,
        "stop": {"updates": 10**6},
        "evaluate": {"every_updates": 10**6, "train_examples": 1},
        "period": {"name": "constant", "p": 4},
        "cluster": {"name": "torch", "device": "cpu"},
    }
    plan, make_cluster = Experiment(given).cells[0].plan(None)
    training = Training(plan, make_cluster)
    runner = training.cluster.runner  # type: ignore[attr-defined]

    def of_the_cluster() -> None:
        target = training.version + UPDATES
        training.run(lambda now: now.version < target)

    def bare() -> None:
        weights = training.versions[training.version].clone()
        for _ in range(UPDATES):
            stint = training.assign(rank)
            assert stint is not None
            rows, _ = runner.changes([weights], [stint], [(False,) * len(stint.batches)])
            change = rows[0]
            dist.all_reduce(change)
            weights.add_(change, alpha=1 / RANKS)

    def timed(call: Any) -> float:
        dist.barrier()
        began = time.perf_counter()
        call()
        dist.barrier()
        return time.perf_counter() - began

    timed(of_the_cluster), timed(bare)
    found = [timed(of_the_cluster) / timed(bare) for _ in range(ROUNDS)]
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    leave()


if __name__ == "__rank__":
    _folder, _width, _rank = ARGUMENTS  # type: ignore[name-defined]  # noqa: F821 - given by _start
    _measure(Path(_folder), _width, _rank)
