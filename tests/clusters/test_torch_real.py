"""The torch cluster as users start it: by `hemiola run`, by torchrun, through deaths, mistakes and Ctrl-C.

Each of these starts several interpreters that import torch, so there are few of them, and each looks at many things.
"""

import csv
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from torch_ranks import FILE, TASKS, Job, jobs_plain, train_on_ranks

from hemiola.clusters.torch.launch import RanksFailed, launch
from hemiola.errors import FailedElsewhere
from hemiola.lab.cell_folder import CellFolder
from hemiola.lab.experiment import Experiment
from hemiola.lab.launching import run_ranks

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

GIVEN = {
    "task": f"{TASKS}:small",
    "workers": 2,
    "batch": 5,
    "stop": {"epochs": 4},
    "order": {"name": "cd-grab", "sketch": "fold:16"},
    "period": {"name": "adaptive", "start": 2},
    "optimizer": {"lr": 0.2, "momentum": 0.9},
    "cluster": {"name": "torch", "device": "cpu", "checkpoint_every_updates": 3},
}
TOML = f"""
task = "{TASKS}:small"
workers = 2
batch = 5
stop = {{ epochs = EPOCHS }}
order = {{ name = "cd-grab", sketch = "fold:16" }}
period = {{ name = "adaptive", start = 2 }}
optimizer = {{ lr = 0.2, momentum = 0.9 }}
[cluster]
name = "torch"
device = "cpu"
checkpoint_every_updates = 3
delay = "constant(DELAY)"
"""
ELASTIC = """
elastic = true
[[run]]
name = "a"
[[run]]
name = "b"
workers = 3
"""


LISTEN, LOOPBACK = "0A", "0100007F"  # of /proc/net/tcp: the state of a socket that listens, and 127.0.0.1


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of these tests, in every process that is started."""
    monkeypatch.setenv("PYTHONPATH", str(FILE.parent))


def descendants(pid: int) -> dict[int, str]:
    """Every process below this one, with its command."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
                commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # It has just ended.
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, frontier = {}, {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found |= {child: commands.get(child, "") for child in frontier}
    return found


def listening(pid: int) -> set[str]:
    """Addresses at which a process waits for connections, as the kernel writes them."""
    try:
        sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        tables = [Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    except OSError:
        return set()  # It has just ended.
    rows = [line.split() for table in tables for line in table]
    return {row[1].split(":")[0] for row in rows if row[3] == LISTEN and f"socket:[{row[9]}]" in sockets}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(what: Callable[[], bool], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_a_killed_rank_comes_back_and_the_weights_are_as_if_it_had_not_died(tmp_path: Path, importable: None) -> None:
    """The last rank kills itself in mid-epoch, after update 10 of 18, one update after a checkpoint."""
    rendezvous, folder = tmp_path / "rendezvous", tmp_path / "cell"
    rendezvous.mkdir()
    folder.mkdir()
    (rendezvous / "jobs").write_bytes(pickle.dumps(jobs_plain([Job(GIVEN, folder, kill_at=10)])))
    before = descendants(os.getpid())
    assert launch("torch_ranks", [str(rendezvous)], 2, 1, rendezvous)
    wait_until(lambda: set(descendants(os.getpid())) <= set(before))
    ranks = [torch.load(rendezvous / f"{rank}.pt", weights_only=True)[0] for rank in (0, 1)]
    ((first, second),) = train_on_ranks([Job(GIVEN)], 2, tmp_path / "uninterrupted")
    assert first.updates > 12
    for again, never_died in zip(ranks, (first, second), strict=True):
        assert torch.equal(again["weights"], never_died.weights)
        assert [line["train_loss"] for line in again["log"]] == never_died.curve()
        assert again["counts"] == never_died.counts
        assert all(torch.equal(a, b) for a, b in zip(again["memory"], never_died.memory, strict=True))


def test_a_rank_that_dies_for_good_and_a_mistake_are_told_apart(tmp_path: Path, importable: None) -> None:
    (tmp_path / "jobs").write_bytes(pickle.dumps(jobs_plain([Job(GIVEN, kill_at=2)])))
    before = descendants(os.getpid())
    with pytest.raises(RanksFailed, match="rank 1 was killed by SIGKILL, and max_restarts = 0 leaves no further try"):
        launch("torch_ranks", [str(tmp_path)], 2, 0, tmp_path)
    cell = Experiment(GIVEN | {"task": f"{TASKS}:broken"}).cells[0]
    notes: list[dict] = []
    (tmp_path / "cell").mkdir()
    cursed = r"rank \d: ZeroDivisionError: example 7 is cursed \(torch_ranks.py:\d+: raise ZeroDivisionError"
    with pytest.raises(FailedElsewhere, match=cursed) as caught:
        run_ranks(cell, CellFolder.of(cell, tmp_path / "cell"), None, notes.append, lambda: False)
    assert "in batch" in caught.value.trace
    assert not any("started again" in note.get("note", "") for note in notes)
    wait_until(lambda: set(descendants(os.getpid())) <= set(before))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_no_process_is_left_behind(number: int, code: int, tmp_path: Path, importable: None) -> None:
    """Whatever ends `hemiola run`; and there is a checkpoint to go on from."""
    file, out = tmp_path / "experiment.toml", tmp_path / "out"
    file.write_text(TOML.replace("EPOCHS", "100000").replace("DELAY", "0.01"))
    command = [sys.executable, "-m", "hemiola", "run", str(file), "--out", str(out)]
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    checkpoint = out / "cells" / "00-run-seed0" / "checkpoint.pt"
    wait_until(checkpoint.exists)
    family = descendants(process.pid)
    assert sum("rank_process" in command for command in family.values()) == 2
    assert {address for pid in family for address in listening(pid)} <= {LOOPBACK}
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # As a terminal does: everyone in the foreground gets it.
    else:
        process.send_signal(number)
    assert process.wait(200) == code
    wait_until(lambda: not any(alive(pid) for pid in family))
    state = torch.load(checkpoint, weights_only=True)
    assert state["weights"]["now"] >= 3
    if code == 130:
        assert "go on with: hemiola resume" in (tmp_path / "output").read_text()


def test_torchrun_goes_through_the_cells_together(tmp_path: Path, importable: None) -> None:
    file, out = tmp_path / "experiment.toml", tmp_path / "out"
    file.write_text(TOML.replace("EPOCHS", "2").replace("DELAY", "0.0001") + ELASTIC)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "hemiola", "run", str(file), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    with open(out / "results.csv") as rows:
        found = list(csv.DictReader(rows))
    assert [(row["run"], row["workers"], row["status"]) for row in found] == [("a", "2", "done"), ("b", "2", "done")]
    given = GIVEN | {"stop": {"epochs": 2}}
    ((here, _),) = train_on_ranks([Job(given)], 2, tmp_path / "rendezvous")
    assert [float(row["train_loss"]) for row in found] == [here.curve()[-1]] * 2
    assert (out / "report.html").exists()
    assert done.stdout.count("[2/2] b seed 0: done") == 1, "only rank 0 talks"
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert all(line["step_seconds"] for line in lines if line["updates"])


def test_torchrun_with_another_number_of_processes_is_one_clear_line(tmp_path: Path, importable: None) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(TOML.replace("EPOCHS", "2").replace("DELAY", "0.0001"))
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    command = [sys.executable, "-m", "hemiola", "run", str(file), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr == (
        "hemiola: workers = 2, but torchrun has started 3 processes; start 2, add --set workers=3, "
        "or set elastic = true in [cluster]\n"
    )
