"""Experiments as a user runs them: interrupted, resumed, side by side, in a folder that belongs to them."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

import hemiola
from hemiola.errors import InputError
from hemiola.files import replacing
from hemiola.lab import execute, store
from hemiola.lab.cell_folder import CellFolder
from hemiola.lab.execute import run_experiment
from hemiola.lab.experiment import Experiment
from hemiola.lab.progress import Display
from hemiola.lab.results import COLUMNS

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
RAISES = '            raise RuntimeError("this task has had enough")'


def line_of(text: str) -> int:
    return next(at for at, line in enumerate((HERE / "tiny_task.py").read_text().splitlines(), 1) if text in line)


GIVEN = {
    "task": "tiny_task:make",
    "workers": 2,
    "batch": 4,
    "seeds": [0, 1],
    "stop": {"epochs": 40},
    "optimizer": {"lr": 0.1},
    "cluster": {"name": "simulated", "delay": "exponential(1.0)"},
    "run": [
        {"name": "ordinary"},
        {
            "name": "balanced, averaged, asynchronous",
            "order": {"name": "cd-grab", "sketch": "fold:64"},
            "period": {"name": "adaptive", "wire": "int8"},
            "pace": {"name": "k-async", "k": "adasync", "start": 1},
        },
    ],
}


def experiment(gate: Path | None = None, **changed: object) -> Experiment:
    """The experiment of these tests; with a gate, at which the third cell waits."""
    runs = [dict(run) for run in GIVEN["run"]]
    if gate is not None:
        runs[1]["task"] = {"name": "tiny_task:make", "gate": str(gate)}
    return Experiment({**GIVEN, "run": runs, **changed}, HERE)


def rows(folder: Path) -> list[dict[str, str]]:
    """results.csv without the one column that differs from run to run."""
    with open(folder / "results.csv") as file:
        return [{k: v for k, v in row.items() if k != "wall_seconds"} for row in csv.DictReader(file)]


def log(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "wall_seconds"} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted run with one job."""
    folder = tmp_path_factory.mktemp("whole")
    run_experiment(experiment(), folder / "out", jobs=1)
    return folder / "out"


def test_results_have_the_columns_of_the_design(whole):
    header = (whole / "results.csv").read_text().splitlines()[0]
    assert header.split(",") == list(COLUMNS)
    assert [(row["run"], row["seed"], row["status"]) for row in rows(whole)] == [
        ("ordinary", "0", "done"),
        ("ordinary", "1", "done"),
        ("balanced, averaged, asynchronous", "0", "done"),
        ("balanced, averaged, asynchronous", "1", "done"),
    ]
    assert float(rows(whole)[0]["train_loss"]) > 0


def test_two_jobs_give_what_one_gives(whole, tmp_path):
    run_experiment(experiment(), tmp_path / "out", jobs=2)
    assert rows(tmp_path / "out") == rows(whole)
    assert log(tmp_path / "out") == log(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_interrupted_and_resumed_it_ends_the_same(whole, tmp_path, monkeypatch, number):
    """The signal comes while the third cell stands still: two are finished, one is half done, one has not begun."""
    gate, out, of = tmp_path / "gate", tmp_path / "out", experiment(tmp_path / "gate")
    tell, read = execute._tell_to_stop, execute._read

    def read_and_interrupt(one, display):
        read(one, display)
        if Path(f"{gate}.reached").exists() and not gate.exists():
            signal.raise_signal(number)

    def tell_and_open(active):
        tell(active)
        gate.touch()

    monkeypatch.setattr(execute, "_read", read_and_interrupt)
    monkeypatch.setattr(execute, "_tell_to_stop", tell_and_open)
    outcome = run_experiment(of, out, jobs=1)
    assert (outcome.finished, outcome.interrupted, outcome.failed) == (2, True, [])
    (checkpoint,) = out.glob("cells/*/checkpoint.pt")
    state = CellFolder.of(of.cells[2], checkpoint.parent).load_checkpoint(print)
    assert state["status"] == "running"
    assert state["weights"]["now"] > 0
    assert not list(out.glob("cells/*/*.part"))
    kept = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/result.json")}
    _resume_and_compare(of, out, whole)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "a finished part was computed again"


def test_where_one_cell_alone_was_told_to_stop_the_experiment_was_interrupted(whole, tmp_path, monkeypatch):
    """As by somebody who ends its process, not ours: the others go on, and nobody takes three cells for all four."""
    gate, out, of, read = tmp_path / "gate", tmp_path / "out", experiment(tmp_path / "gate"), execute._read

    def read_and_end(one, display):
        read(one, display)
        if Path(f"{gate}.reached").exists() and not gate.exists():
            os.kill(one.process.pid, signal.SIGTERM)
            gate.touch()

    monkeypatch.setattr(execute, "_read", read_and_end)
    outcome = run_experiment(of, out, jobs=1)
    assert (outcome.finished, outcome.interrupted, outcome.failed) == (3, True, [])
    _resume_and_compare(of, out, whole)


def _resume_and_compare(of: Experiment, out: Path, whole: Path) -> None:
    assert run_experiment(of, out, jobs=2, resume=True).finished == 4
    assert rows(out) == rows(whole)
    assert log(out) == log(whole)


def until(happened: Callable[[], object], process: subprocess.Popen) -> None:
    """Wait for something that a process is to do; it may take as long as the machine needs."""
    while not happened():
        assert process.poll() is None, "it has ended"
        time.sleep(0.02)


def test_killed_and_resumed_it_ends_the_same(whole, tmp_path):
    """A cell notices that its parent is gone, writes a checkpoint and ends; whoever resumes waits for that."""
    gate, out = tmp_path / "gate", tmp_path / "out"
    file = tmp_path / "experiment.json"
    of = experiment(gate)
    file.write_text(json.dumps(of.given))
    code = (
        "import json, sys; from pathlib import Path; from hemiola.lab.execute import run_experiment;"
        "from hemiola.lab.experiment import Experiment;"
        f"run_experiment(Experiment(json.load(open({str(file)!r})), Path({str(HERE)!r})), Path({str(out)!r}), jobs=1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    until(Path(f"{gate}.reached").exists, process)
    process.kill()
    process.wait()
    gate.touch()
    _resume_and_compare(of, out, whole)
    assert not list(out.glob("cells/*/*.set-aside"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_stopped_while_the_first_cell_starts_it_is_one_line(tmp_path, number):
    """A terminal, and many a supervisor, signals every process, also the one that imports torch for the cells."""
    file = tmp_path / "experiment.toml"
    file.write_text('task = "digits-logistic"\nworkers = 2\nbatch = 5\nstop = { epochs = 1000 }\n')
    imports = tmp_path / "imports torch"
    (tmp_path / "sitecustomize.py").write_text(TELLS_OF_TORCH)
    process = subprocess.Popen(
        [sys.executable, "-m", "hemiola", "run", str(file), "--out", str(tmp_path / "out")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TELL_OF_TORCH": str(imports),
        },
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        until(imports.exists, process)
        os.killpg(process.pid, number)
        printed, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "go on with: hemiola resume" in errors
    assert "Traceback" not in errors
    assert "FAILED" not in printed


# Python loads a module of this name when it starts, also in the fork server, where nothing else of ours can speak.
TELLS_OF_TORCH = """
import os, sys

def tell(event, arguments):
    if event == "import" and arguments[0] == "torch":
        open(os.environ["TELL_OF_TORCH"], "w").close()

if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    sys.addaudithook(tell)
"""


def test_two_runs_in_one_folder_refuse_each_other(tmp_path):
    first, second = (store.Store(tmp_path / "out", experiment()) for _ in range(2))
    first.open({}, resume=False)
    with pytest.raises(InputError, match="another hemiola run is working in it"):
        second.open({}, resume=True)
    first.close()
    second.open({}, resume=True)
    second.close()


def test_a_folder_says_what_it_was_started_with(tmp_path, monkeypatch):
    changed = experiment(workers=3, sweep={"optimizer.lr": [0.1, 1e-3]})
    kept = store.Store(tmp_path / "out", changed, data=Path("sets"))
    monkeypatch.chdir(tmp_path)
    kept.open({}, resume=False, jobs=2)
    kept.close()
    monkeypatch.chdir("/")
    saved = store.reopen(tmp_path / "out")
    assert [vars(cell) for cell in saved.experiment.cells] == [vars(cell) for cell in changed.cells]
    assert (saved.data, saved.jobs, saved.directory) == (tmp_path / "sets", 2, tmp_path)


@pytest.mark.parametrize("text", ["", "null", "[]", '{"given": {}}', '{"given": null, "started": {}}', "[" * 10_000])
def test_a_folder_whose_experiment_cannot_be_read_back_is_one_line(tmp_path, text):
    (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(InputError, match=r"experiment.json: is damaged"):
        store.reopen(tmp_path)
    with pytest.raises(InputError, match="holds no experiment"):
        store.reopen(tmp_path / "elsewhere")


def test_a_folder_with_another_experiment_is_left_alone(tmp_path):
    small = {"stop": {"epochs": 1}, "seeds": [0]}
    run_experiment(experiment(**small), tmp_path / "out")
    before = (tmp_path / "out" / "results.csv").read_bytes()
    other = experiment(**{**small, "stop": {"epochs": 2}})
    with pytest.raises(InputError, match=r"holds another experiment \(different: stop\)"):
        run_experiment(other, tmp_path / "out", resume=True)
    with pytest.raises(InputError, match="add --resume"):
        run_experiment(experiment(**small), tmp_path / "out")
    assert (tmp_path / "out" / "results.csv").read_bytes() == before


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"holds other files \(thesis.tex\)"):
        run_experiment(experiment(), tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.is_file() and p.name != ".lock") == ["thesis.tex"]


def test_a_full_disk_is_one_line_and_keeps_what_was_there(tmp_path, monkeypatch):
    target = tmp_path / "results.csv"
    target.write_text("before")
    monkeypatch.setattr(os, "fsync", _disk_full)
    with pytest.raises(InputError, match="cannot be written: No space left on device"), replacing(target) as file:
        file.write(b"after")
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def _disk_full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_one_diverged_run_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.chdir(HERE)
    results = hemiola.train(
        task="tiny_task:make",
        workers=2,
        stop={"epochs": 1},
        batch=4,
        out=tmp_path / "out",
        sweep={"optimizer.lr": [0.1, 1e30]},
    )
    assert [(r.row["optimizer.lr"], r.row["status"]) for r in results] == [(0.1, "done"), (1e30, "diverged")]


def test_a_cell_that_fails_keeps_its_traceback_and_is_not_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(HERE)
    task = {"name": "tiny_task:make", "fail_at": 5}
    with pytest.raises(RuntimeError) as caught:
        hemiola.train(task=task, workers=1, batch=4, stop={"epochs": 3}, out=tmp_path / "out")
    (kept,) = tmp_path.glob("out/cells/*/error.txt")
    line = HERE.joinpath("tiny_task.py").read_text().splitlines().index(RAISES) + 1
    assert str(caught.value) == (
        "1 of 1 parts failed; first 'run', seed 0: RuntimeError: this task has had enough "
        f"(tiny_task.py:{line}: {RAISES.strip()}) (whole traceback: {kept})"
    )
    assert f'tiny_task.py", line {line}, in losses' in kept.read_text()
    assert "hemiola/training/loop.py" in kept.read_text()
    assert not list(tmp_path.glob("out/cells/*/result.json"))


def test_what_cells_print_and_warn_of_are_lines_of_the_display(tmp_path, monkeypatch):
    """Warnings of cells that run alike come once, and nothing passes the display by."""
    monkeypatch.chdir(HERE)
    console = Console(file=io.StringIO(), width=200)
    given = {"task": {"name": "tiny_task:make", "warn": True, "say": "a word"}, "workers": 1, "batch": 4}
    loud = Experiment({**given, "stop": {"epochs": 1}, "seeds": [0, 1]})
    outcome = run_experiment(loud, tmp_path / "out", jobs=1, display=Display(console))
    assert outcome.finished == 2
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if "warns" in line] == [
        f"run seed 0: UserWarning: this task warns (tiny_task.py:{line_of('warnings.warn')})"
    ]
    assert [line for line in lines if "a word" in line] == ["run seed 0: a word", "run seed 1: a word"]
    assert not list(tmp_path.glob("out/cells/*/output.txt"))


def test_train_without_a_folder_returns_plain_records():
    (result,) = hemiola.train(task="digits-logistic", workers=4, batch=25, stop={"epochs": 2}, order="shuffle-once")
    assert result.row["status"] == "done"
    assert [line["epochs"] for line in result.log] == [0.0, 1.0, 2.0]
    assert result.log[-1]["train_loss"] == result.row["train_loss"]
    json.dumps(result.log)


def test_a_script_without_a_main_guard_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import hemiola\n"
        "print('the script runs')\n"
        "results = hemiola.train(task='digits-logistic', workers=2, batch=50, stop={'updates': 2}, out='out', jobs=2,\n"
        "    run=[{'name': 'a'}, {'name': 'b', 'order': 'cd-grab'}])\n"
        "print('losses', len(results))\n"
    )
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("the script runs") == 1
    assert "losses 2" in ended.stdout
