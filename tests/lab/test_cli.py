"""The command as a user types it: exit codes, one-line errors, a quick --help.

Most tests call the command in this process, where torch is imported already; cells run in processes of their own.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hemiola.lab.cli import main
from hemiola.lab.progress import Display

pytestmark = pytest.mark.slow

FILE = """
task = "digits-logistic"
workers = 4
batch = 25
stop = { epochs = 1 }
[[run]]
name = "ordinary"
[[run]]
name = "balanced"
order = { name = "cd-grab" }
"""

SMALL = 'task = "digits-logistic"\nworkers = 2\nbatch = 50\nstop = { updates = 2 }\n'

OWN = """
from pathlib import Path
import torch, hemiola

def make(data: Path | None = None, width: int = 2):
    x = torch.tensor([[float(n), 1.0] for n in (data / "numbers.txt").read_text().split()])
    y = (x[:, 0] > 0).long()
    return hemiola.Task(name="own", model=lambda: torch.nn.Linear(width, 2), train=(x, y), test=(x, y))
"""


@pytest.fixture
def hemiola(capfd, monkeypatch, tmp_path):
    """Calls the command in a fresh folder; gives its exit code, what it printed, and its errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("HEMIOLA_DATA", raising=False)
    loaded = set(sys.modules)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        printed = capfd.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    yield call
    for name in set(sys.modules) - loaded:
        if name.startswith("own_"):
            del sys.modules[name]


@pytest.fixture
def one_line(hemiola):
    """Calls the command with a mistake; gives the line that it is told with."""

    def call(*arguments: str | Path) -> str:
        code, _, errors = hemiola(*arguments)
        assert code == 2
        assert errors.startswith("hemiola: ")
        assert len(errors.strip().splitlines()) == 1
        return errors

    return call


def test_help_does_not_import_torch():
    code = "import sys, hemiola.lab.cli as c\ntry: c.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for verb in ("run", "resume", "demo", "report", "export", "tasks", "data", "predict"):
        assert verb in done.stdout


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "hemiola", "--version"], capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("hemiola ")


def test_run_writes_results_a_log_and_a_report_and_prints_a_table(hemiola, one_line, tmp_path):
    Path("experiment.toml").write_text(FILE)
    code, printed, errors = hemiola("run", "experiment.toml", "--out", "out", "--set", "seeds=[0, 1]")
    assert code == 0, errors
    assert "balanced" in printed
    assert "[4/4]" in printed  # plain lines where there is no terminal
    assert "\x1b[" not in printed
    assert len(Path("out/results.csv").read_text().splitlines()) == 5
    assert json.loads(Path("out/log.jsonl").read_text().splitlines()[0])["updates"] == 0
    assert "<html" in Path("out/report.html").read_text()
    Path("figures").mkdir()
    for name in ("loss-vs-seconds.svg", "figures/loss-vs-epochs.svg"):
        code, printed, errors = hemiola("report", "out", "--figure", name)
        assert code == 0, errors
        assert (tmp_path / name).exists()  # where the user said, not in the run's folder
    assert not list(Path("out").glob("*.svg"))
    assert "already holds this experiment" in one_line("run", "experiment.toml", "--out", "out", "--set", "seeds=[0,1]")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "absent.toml", "--out", "out"], "absent.toml: no such file"),
        (["run", "bad.toml", "--out", "out"], "not a TOML file"),
        (["run", "good.toml", "--out", "out", "--set", "wrokers=3"], "unknown key 'wrokers'; did you mean 'workers'?"),
        (["run", "good.toml", "--out", "out", "--set", "pace=zzz"], "good.toml: pace.name: unknown pace 'zzz'. Known"),
        (["run", "good.toml", "--out", "out", "--set", "nonsense"], "--set takes key=value"),
        (["run", "good.toml", "--out", "out", "--set", "task=cifar10-lenet"], "hemiola data fetch cifar10"),
        (["run", "good.toml", "--out", "good.toml"], "cannot be made a folder"),
        (["resume", "nowhere"], "holds no experiment"),
        (["report", "nowhere"], "nowhere"),
        (["predict", "--workers", "8"], "give either --delay or --trace"),
        (["predict", "--workers", "8", "--delay", "pareto(2.5)"], "pareto takes 2 argument(s)"),
        (["predict", "--workers", "8", "--delay", "zzz(1)"], "unknown delay law 'zzz'. Known: constant"),
        (["data", "fetch", "imagenet", "--data", "d"], "unknown data set 'imagenet'. Known: mnist"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_on_stderr_and_code_2(one_line, arguments, said):
    Path("good.toml").write_text(FILE)
    Path("bad.toml").write_text("task =")
    assert said in one_line(*arguments)
    assert not Path("out/results.csv").exists()


def test_the_name_of_a_run_is_printed_as_it_is(hemiola):
    names = ["lr [/2]", "[bold]x", ":tada: [red]", "a\\[b]"]
    Path("experiment.toml").write_text(SMALL + "".join(f"[[run]]\nname = {json.dumps(name)}\n" for name in names))
    code, printed, errors = hemiola("run", "experiment.toml", "--out", "out [/x]", "--jobs", "1")
    assert code == 0, errors
    lines = printed.splitlines()
    for number, name in enumerate(names, 1):
        assert any(line.startswith(f"[{number}/4] {name} seed 0: done") for line in lines)
        assert any(line.startswith(f"{name} ") for line in lines)  # of the table
    assert any(line.startswith("results: out [/x]") for line in lines)


def test_a_folder_is_enough_to_go_on(hemiola, monkeypatch, tmp_path):
    """Own task beside the file, its data, a changed value and the number of jobs: all are known to the folder."""
    project, data = tmp_path / "project", tmp_path / "numbers here"
    project.mkdir()
    data.mkdir()
    (project / "own_resumed.py").write_text(OWN)
    (data / "numbers.txt").write_text(" ".join(map(str, range(-20, 20))))
    (project / "experiment.toml").write_text(
        'task = "own_resumed:make"\nworkers = 2\nbatch = 5\nstop = { updates = 3 }\nseeds = [0, 1, 2]\n'
    )

    def stop_after_the_first(display, *how):
        ended(display, *how)
        signal.raise_signal(signal.SIGINT)

    ended = Display.ended
    monkeypatch.setattr(Display, "ended", stop_after_the_first)
    folder = ["--data", "numbers here", "--out", "out put"]
    code, _, errors = hemiola("run", "project/experiment.toml", *folder, "--set", "workers=4", "--jobs", "1")
    assert code == 130
    assert errors.endswith("stopped with 1 of 3 parts finished; go on with: hemiola resume 'out put'\n")
    monkeypatch.setattr(Display, "ended", ended)

    monkeypatch.chdir("/")
    code, printed, errors = hemiola("resume", tmp_path / "out put")
    assert code == 0, errors
    assert "1 of 3 parts were finished before" in printed
    rows = (tmp_path / "out put" / "results.csv").read_text().splitlines()
    assert [row.split(",")[2] for row in rows] == ["workers", "4", "4", "4"]
    started = json.loads((tmp_path / "out put" / "experiment.json").read_text())["started"]
    assert started["jobs"] == 1
    assert started["data"] == str(data)


def test_a_task_of_ones_own_lies_beside_the_file(hemiola, one_line, tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "numbers.txt").write_text("1 2 3 4")
    (tmp_path / "project" / "own_beside.py").write_text(OWN)
    file = tmp_path / "project" / "experiment.toml"
    file.write_text('task = "own_beside:make"\nworkers = 2\nbatch = 1\nstop = { updates = 3 }\n')
    code, _, errors = hemiola("run", "project/experiment.toml", "--out", "out", "--data", ".")
    assert code == 0, errors
    said = one_line("run", file, "--out", "out2", "--data", "/")
    assert "task 'own_beside:make' raised FileNotFoundError" in said
    assert said.endswith('.py:6: x = torch.tensor([[float(n), 1.0] for n in (data / "numbers.txt").read_text()...)\n')
    said = one_line("run", file, "--out", "out2", "--data", ".", "--set", 'task={name="own_beside:make",width=3}')
    assert "failed on its first 2 examples: RuntimeError" in said
    code, _, errors = hemiola("run", file, "--out", "out2", "--data", "/", "--debug")
    assert code == 2
    assert "Traceback" in errors
    assert f'File "{tmp_path}/project/own_beside.py", line 6, in make' in errors


def test_ctrl_c_outside_of_a_run_is_one_line(hemiola, monkeypatch):
    monkeypatch.setattr("hemiola.lab.tasks.describe_tasks", lambda: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    try:
        code, _, errors = hemiola("tasks")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, errors.strip()) == (130, "hemiola: stopped")


def test_tasks_and_data_are_listed(hemiola, tmp_path):
    code, printed, _ = hemiola("tasks")
    assert code == 0
    assert "digits-logistic" in printed
    code, printed, _ = hemiola("data", "list", "--data", tmp_path / "[bold]")
    assert code == 0
    assert "cifar10" in printed
    assert "[bold]" in printed


@pytest.mark.parametrize("delay", ["exponential(1)", "lognormal(1, 0.5)", "hyperexponential(0.9, 0.5, 5.5)"])
def test_predict_prints_json(hemiola, delay):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    code, printed, errors = hemiola("predict", "--workers", "5", "--delay", delay, "--k", "2", "--json")
    assert code == 0, errors
    assert len(json.loads(printed, parse_constant=refuse)["rows"]) == 4


def test_predict_takes_the_log_of_a_run(hemiola):
    lines = [{"step_seconds": [1.0, 1.1, 0.9, 1.0], "step_workers": [0, 1, 2, 3], "exchange_seconds": [0.001]}] * 20
    Path("log [x].jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, printed, errors = hemiola("predict", "--workers", "4", "--trace", "log [x].jsonl")
    assert code == 0, errors
    assert "trace(log [x].jsonl)" in printed
    assert "plain synchronous training is best here" in printed
