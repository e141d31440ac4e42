"""Whole runs on Ray from the command line: stopped, killed, resumed; and nothing is left behind."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from hemiola.clusters.ray import engine
from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment

pytestmark = pytest.mark.real

FILE = """
task = "digits-logistic"
workers = 2
batch = 16
stop = { updates = 400 }
evaluate = { every_updates = 100 }
pace = { name = "k-async", k = 1 }
[cluster]
name = "ray"
delay = "exponential(0.05)"
checkpoint_every_updates = 1
"""


class Run:
    """A ``hemiola run`` whose processes can be found again by a mark in their environment."""

    def __init__(self, file: Path, out: Path, *options: str):
        self.mark = f"HEMIOLA_TEST_MARK={uuid.uuid4()}"
        name, value = self.mark.split("=")
        self.checkpoint = out / "cells" / "00-run-seed0" / "checkpoint.pt"
        command = [sys.executable, "-m", "hemiola", "run", str(file), "--out", str(out), *options]
        self.process = subprocess.Popen(
            command,
            env=os.environ | {name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def tree(self) -> dict[int, str]:
        """Every process of the run that is alive, and its command."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    if self.mark.encode() in (folder / "environ").read_bytes():
                        found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
        return found

    def reach(self, update: int) -> None:
        """Wait until a checkpoint of this update or a later one is there."""
        while self.process.poll() is None:
            if self.checkpoint.exists() and updates_in(self.checkpoint) >= update:
                return
            time.sleep(0.1)
        pytest.fail(f"the run ended too soon: {self.end()}")

    def end(self, patience: float = 60.0) -> tuple[int, str]:
        """Wait for the end; return exit code and output. Nothing may be left a little later."""
        output, _ = self.process.communicate()
        self.leaves_nothing(patience)
        return self.process.returncode, output

    def leaves_nothing(self, patience: float) -> None:
        """Wait so long until no process of the run is left."""
        deadline = time.monotonic() + patience
        while self.tree() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not self.tree(), f"left behind: {sorted(command.strip() for command in self.tree().values())}"


def updates_in(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=True)["weights"]["now"])


@pytest.mark.timeout(900)  # Ray starts four times
def test_a_run_is_stopped_killed_resumed_and_leaves_nothing_behind(tmp_path):
    """SIGTERM, then the driver killed in mid-run, then Ctrl-C, then the end: one run, whole epochs, no orphans."""
    file, out = tmp_path / "run.toml", tmp_path / "out"
    file.write_text(FILE)

    run = Run(file, out)
    run.reach(20)
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end()
    assert code != 0, output
    stopped = updates_in(run.checkpoint)
    assert 20 <= stopped < 400

    run = Run(file, out, "--resume")
    run.reach(stopped + 20)
    drivers = [pid for pid, command in run.tree().items() if "multiprocessing.forkserver" in command]
    assert drivers
    for pid in drivers:
        os.kill(pid, signal.SIGKILL)
    output, _ = run.process.communicate()
    assert run.process.returncode != 0, output
    killed_run = run
    killed = updates_in(run.checkpoint)
    assert stopped + 20 <= killed < 400

    run = Run(file, out, "--resume")
    run.reach(killed + 20)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does it
    code, output = run.end()
    assert code != 0, output
    assert updates_in(run.checkpoint) < 400

    run = Run(file, out, "--resume")
    code, output = run.end()
    assert code == 0, output
    (row,) = csv.DictReader((out / "results.csv").read_text().splitlines())
    assert row["status"] == "done"
    assert int(row["updates"]) == 400
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [record["updates"] for record in log] == [0, 100, 200, 300, 400]
    assert log[-1]["train_loss"] < 0.5 * log[0]["train_loss"]
    seconds = [record["seconds"] for record in log]
    assert seconds == sorted(seconds)
    # Ray's own agents spend a minute trying to tell a server that was killed that it is not there
    killed_run.leaves_nothing(240)
    # 400 reports of a batch were merged, none twice; what was under way at a stop came again
    assert sum(worker["used"] for worker in log[-1]["workers"]) == pytest.approx(400 * 16, rel=0.05)


def test_a_run_that_fails_says_why_and_leaves_nothing_behind(tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    file.write_text(FILE.replace('"digits-logistic"', '"broken:task"'))
    (tmp_path / "broken.py").write_text(
        "import torch\n"
        "from hemiola.lab.tasks.task import Task\n"
        "def losses(outputs, targets):\n"
        "    if torch.is_grad_enabled():\n"
        "        raise KeyError('no such class')\n"
        "    return torch.nn.functional.cross_entropy(outputs, targets, reduction='none')\n"
        "def task():\n"
        "    data = (torch.randn(64, 3), torch.zeros(64, dtype=torch.int64))\n"
        "    return Task(name='broken', model=lambda: torch.nn.Linear(3, 2), train=data, test=data, losses=losses)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, output = Run(file, tmp_path / "out").end()
    assert code != 0
    assert "a worker failed: KeyError: 'no such class'" in output


# -------------------------------------------------------------------------------------------------------- bad input


def experiment(**cluster):
    return Experiment({"task": "digits-logistic", "workers": 2, "cluster": {"name": "ray"} | cluster})


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'hemiola\[ray\]'"):
        experiment()


def test_with_ray_the_table_is_accepted(monkeypatch):
    monkeypatch.setattr(engine, "find_spec", lambda name: ModuleSpec(name, None))
    assert len(experiment().cells) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_restarts": -1}, "cluster: max_restarts must be at least 0, got -1"),
        ({"hang_seconds": 0.0}, "cluster: hang_seconds must be above 0 and finite, got 0.0"),
        ({"checkpoint_every_updates": 0}, "cluster: checkpoint_every_updates must be at least 1, got 0"),
        ({"checkpoint_every_seconds": 0.0}, "cluster: checkpoint_every_seconds must be above 0, got 0.0"),
        ({"slow": {"1": 2.0}}, r"cluster: slow = .* multiplies delays, and there are none"),
        ({"delay": "exponential(1)", "slow": {"5": 2.0}}, "slow names worker 5, but the workers are numbered 0 to 1"),
        ({"device": "gpu"}, "cluster.device: .*'auto', 'cpu' or 'cuda'"),
        ({"adress": "auto"}, "cluster: unknown option 'adress'; did you mean 'address'"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        experiment(**options)


def test_overlap_is_refused():
    period = {"name": "constant", "p": 2, "overlap": 1}
    with pytest.raises(InputError, match=r"period\.overlap: 1 is not for cluster 'ray'"):
        Experiment({"task": "digits-logistic", "cluster": "ray", "period": period})


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"no Ray cluster at '127.0.0.1:1'; start one with 'ray start --head', or leave address out"),
        ("ray://127.0.0.1:1", "no Ray cluster at 'ray://127.0.0.1:1'"),
        ("somewhere", "address must be 'auto', 'host:port' or 'ray://host:port', got 'somewhere'"),
    ],
)
def test_an_address_where_nobody_answers_is_refused(address, message):
    with pytest.raises(InputError, match=message):
        engine.Engine(address, 2)


def test_a_start_that_takes_too_long_is_tried_again_and_cleaned_up_after(monkeypatch):
    import ray

    started = []

    def slow_init(**options):
        started.append(subprocess.Popen(["sleep", "1000"]))
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(ray, "init", slow_init)
    with pytest.raises(RuntimeError, match=r"Ray did not start: The current node timed out during startup\."):
        engine._start_local(ray, 2)
    assert [process.wait(10) for process in started] == [-signal.SIGKILL] * 3


def test_auto_without_a_cluster_is_refused(tmp_path):
    """In a process of its own, since here Ray may be running; one that someone else runs on this machine is hidden."""
    script = (
        "from ray._private import services; services._find_address_from_flag = lambda flag: set(); "
        "from hemiola.clusters.ray.engine import Engine; Engine('auto', 2)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["RAY_TMPDIR"] = str(tmp_path)  # a cluster that died may have left its address in the usual place
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "InputError: address: no Ray cluster at 'auto'; start one with 'ray start --head'" in ended.stderr
