"""One rank of a torch cluster: trains the cells it is given together with the other ranks.

Two ways lead here. `hemiola run` starts the processes of one cell itself (`lab/launching.py`); they call `main`. Under
torchrun every process is a whole `hemiola run`, and goes through the experiment's cells in step with the others as a
`TorchrunGroup`. Rank 0 alone reads and writes files; what others need of them is sent.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hemiola.clusters.torch.clocked import ClockedCollectiveCluster
from hemiola.clusters.torch.cluster import CollectiveCluster, Wishes
from hemiola.clusters.torch.factory import TorchFactory
from hemiola.clusters.torch.group import Place, check_same, gather, join, leave, share
from hemiola.clusters.torch.launch import end_with_parent
from hemiola.contracts import State
from hemiola.errors import InputError, told
from hemiola.files import write_whole
from hemiola.lab.cell_folder import CellFolder
from hemiola.lab.experiment import Cell
from hemiola.lab.models import trained_by
from hemiola.lab.results import Result, result_of
from hemiola.lab.upkeep import Cadence
from hemiola.lab.worker import PROGRESS_SECONDS, go_on, progress_of
from hemiola.peers import RankLostError
from hemiola.training import Training
from hemiola.training.redeal import redeal

Tell = Callable[[dict[str, Any]], None]


def torch_factory(cell: Cell) -> TorchFactory | None:
    """The cell's cluster options; None for a cell of another cluster."""
    factory = cell.cluster()
    return factory if isinstance(factory, TorchFactory) else None


class RankWatch:
    """Called after every update: writes checkpoints when all ranks have agreed to, and says whether to go on.

    Args:
        folder: Of the cell; used by rank 0 only. None keeps no checkpoints.
        asked_to_stop: Whether this rank has been asked to.
        tell: Takes progress and notes, on rank 0.

    Attributes:
        cadence: How often to write them.
        start: Share of the run that was over when these processes took it on.
    """

    def __init__(self, folder: CellFolder | None, asked_to_stop: Callable[[], bool], tell: Tell):
        self.folder = folder
        self.asked_to_stop = asked_to_stop
        self.tell = tell
        self.cadence = Cadence(float("inf"), None)  # until the cell is known
        self.start = 0.0
        self._next_message = 0.0

    def __call__(self, training: Training) -> bool:
        cluster = _torch_cluster(training)
        if training.status != "running":
            return True
        due = cluster.granted.stop or cluster.granted.checkpoint or self.cadence.by_updates(training.version)
        if self.folder is not None and due and cluster.at_rest:
            check_agreement(training)
            state = training.state_dict()
            if cluster.rank == 0:
                self.folder.save_checkpoint(state)
            self.cadence.saved(training.version)
        if cluster.rank == 0:
            self._report(training)
        wanted = self.cadence.by_updates(training.version) or (cluster.rank == 0 and self.cadence.by_time())
        cluster.wishes = Wishes(stop=self.asked_to_stop(), checkpoint=self.folder is not None and wanted)
        return not cluster.granted.stop

    def load_checkpoint(self) -> State | None:
        """Where to go on from."""
        return None if self.folder is None else self.folder.load_checkpoint(lambda text: self.tell({"note": text}))

    def _report(self, training: Training) -> None:
        now = time.monotonic()
        if now >= self._next_message:
            self._next_message = now + PROGRESS_SECONDS
            self.tell(progress_of(training, self.start))


def _torch_cluster(training: Training) -> CollectiveCluster | ClockedCollectiveCluster:
    assert isinstance(training.cluster, CollectiveCluster | ClockedCollectiveCluster)
    return training.cluster


def check_agreement(training: Training) -> None:
    """Compare weights and orders of all ranks; all must call this.

    Every rank computes them by itself, from the same numbers. Machines of different make may round differently, and a
    run that went on with ranks apart would be worth nothing.
    """
    weights = training.versions[training.version]
    digest = zlib.crc32(weights.numpy().tobytes())
    for worker, epoch in enumerate(training.queues.epochs):
        digest = zlib.crc32(training.plan.order.sequence(worker, epoch).tobytes(), digest)
    everyone = share(gather(digest))
    apart = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if apart:
        who = ", ".join(map(str, apart))
        raise RuntimeError(
            f"at update {training.version} weights or orders of rank {who} differ from rank 0's; "
            "their machines round differently: use machines of one kind"
        )


def train_as_rank(cell: Cell, data: Path | None, watch: RankWatch) -> Result | None:
    """Train one cell together with the other ranks of the group; returns None when it was told to stop.

    Args:
        cell: The same on every rank, with as many workers as there are ranks.
        data: Folder of the data sets on this machine.
        watch: Called after every update; rank 0 goes on from the checkpoint of its folder, if there is one.
    """
    plan, make_cluster = cell.plan(data)
    training = Training(plan, make_cluster)
    cluster = _torch_cluster(training)
    first = cluster.rank == 0
    try:
        state = share(watch.load_checkpoint() if first else None)
        if state is not None:
            changed = state["cluster"]["workers"] != training.workers
            go_on(training, redeal(state, training) if changed else state)
        watch.cadence, watch.start = Cadence.of(make_cluster, training.version), training.progress
        status = training.run(watch)
        cluster.settle()
        if status == "running":
            return None
        return result_of(cell, training, trained_by(cell, data, training) if first else None)
    finally:
        training.close()


# ------------------------------------------------------------------------------- a process that `hemiola run` started


def main(rendezvous: Path) -> int:
    """Entry point of a started process.

    ``rendezvous`` is a folder that the launcher and its ranks share: ``cell`` says what to do, ``progress.json`` is
    rank 0's word to the launcher, ``stop`` the launcher's to rank 0, ``error-R.json`` says why rank R gave up, and
    ``lost-R.json`` how it noticed that another had died; ``waiting.json`` says for whom they have waited long.
    """
    end_with_parent()
    stopped = _stop_signals()
    place = Place.find()
    assert place is not None, "started by the launcher"
    try:
        cell, data, folder = pickle.loads((rendezvous / "cell").read_bytes())
        factory = torch_factory(cell)
        assert factory is not None
        factory.claim_device(place.local_rank)
        join(
            place,
            factory.backend,
            factory.timeout,
            rendezvous / f"group-{place.restarts}",
            lambda line: _write(rendezvous / "waiting.json", {"note": line}),
        )
        watch = RankWatch(
            folder,
            lambda: bool(stopped) or (place.rank == 0 and (rendezvous / "stop").exists()),
            lambda message: _tell(rendezvous, message, place.restarts),
        )
        result = train_as_rank(cell, data, watch)
        if result is not None and place.rank == 0:
            folder.save_result(result)
        leave()
    except RankLostError as error:
        _write(rendezvous / f"lost-{place.rank}.json", {"error": str(error)})
        # Where a rank has died, code 1 makes the launcher start everyone again; a mistake would only come again.
        return 0 if any(rendezvous.glob("error-*.json")) else 1
    except Exception as error:
        text = told(error) if isinstance(error, InputError) else f"rank {place.rank}: {told(error)}"
        _write(rendezvous / f"error-{place.rank}.json", {"error": text, "traceback": traceback.format_exc()})
    return 0


def _tell(rendezvous: Path, message: dict[str, Any], restarts: int) -> None:
    """Progress replaces the progress before it; a note is a line that the launcher finds in what ranks print."""
    if "note" in message:
        print(message["note"], flush=True)
    else:
        _write(rendezvous / "progress.json", message | {"restarts": restarts})


def _write(path: Path, message: dict[str, Any]) -> None:
    write_whole(path, json.dumps(message))


def _stop_signals() -> list[int]:
    """SIGTERM and SIGINT are noted; the update under way ends first."""
    seen: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: seen.append(number))
    return seen


# ----------------------------------------------------------------------------------------------------- under torchrun


class TorchrunGroup:
    """The ranks that torchrun has started, going through an experiment's cells together.

    Args:
        place: This process's.
        cells: All of the experiment's cells.
        facts: What must be the same on every machine.

    Attributes:
        first: Whether this is rank 0, which has the files and talks to the user.
    """

    def __init__(self, place: Place, cells: list[Cell], facts: dict[str, Any]):
        self.place = place
        self.first = place.rank == 0
        self._factories = {id(cell): self._factory(cell) for cell in cells}
        backends = {factory.backend for factory in self._factories.values()}
        if len(backends) > 1:
            raise InputError("cluster.backend: all runs of one torchrun share one group, got both 'gloo' and 'nccl'")
        for factory in self._factories.values():
            factory.claim_device(place.local_rank)
        join(place, backends.pop(), max(factory.timeout for factory in self._factories.values()))
        given = json.dumps(facts, sort_keys=True, default=str)
        check_same({"the experiment": hashlib.sha256(given.encode()).hexdigest()[:12]})

    def agree(self, decide: Callable[[], Any]) -> Any:
        """What rank 0 decides, on every rank; its `InputError` as well."""
        error, answer = None, None
        if self.first:
            try:
                answer = decide()
            except InputError as problem:
                error = str(problem)
        error, answer = share((error, answer))
        if error is not None:
            if self.first:
                raise InputError(error)
            sys.exit(2)  # One line from rank 0 is enough.
        return answer

    def train(
        self, cell: Cell, data: Path | None, folder: CellFolder, asked_to_stop: Callable[[], bool], tell: Tell
    ) -> Result | None:
        """Train one cell on all ranks."""
        here = replace(cell, settings=cell.settings.model_copy(update={"workers": self.place.world}))
        return train_as_rank(here, data, RankWatch(folder, asked_to_stop, tell))

    def _factory(self, cell: Cell) -> TorchFactory:
        factory = torch_factory(cell)
        if factory is None:
            raise InputError(
                f"run {cell.run!r}: torchrun is for cluster 'torch', got {cell.settings.cluster!r}; "
                "run it without torchrun"
            )
        if not factory.elastic:
            factory.check_world(self.place.world)
        return factory

    def close(self) -> None:
        """Leave the group."""
        leave()
