"""The command as a user types it: exit codes, one-line errors, a quick --help."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def hemiola(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "hemiola", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=250)


def test_help_does_not_import_torch():
    code = "import sys, hemiola.cli as c\ntry: c.main(['--help'])\nfinally: assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for verb in ("run", "demo", "report", "tasks", "data", "predict"):
        assert verb in done.stdout


def test_version():
    assert hemiola("--version").stdout.startswith("hemiola ")


def test_run_writes_results_a_log_and_a_report_and_prints_a_table(tmp_path):
    (tmp_path / "experiment.toml").write_text(FILE)
    done = hemiola("run", "experiment.toml", "--out", "out", "--set", "seeds=[0, 1]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "balanced" in done.stdout
    assert "[4/4]" in done.stdout  # plain lines where there is no terminal
    assert "\x1b[" not in done.stdout
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 5
    assert json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[0])["updates"] == 0
    assert "<html" in (tmp_path / "out" / "report.html").read_text()
    figure = hemiola("report", "out", "--figure", "loss-vs-seconds.svg", cwd=tmp_path)
    assert figure.returncode == 0, figure.stderr
    again = hemiola("run", "experiment.toml", "--out", "out", cwd=tmp_path)
    assert again.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "absent.toml", "--out", "out"], "absent.toml: no such file"),
        (["run", "bad.toml", "--out", "out"], "not a TOML file"),
        (["run", "good.toml", "--out", "out", "--set", "wrokers=3"], "did you mean 'workers'"),
        (["run", "good.toml", "--out", "out", "--set", "nonsense"], "--set takes key=value"),
        (["run", "good.toml", "--out", "out", "--set", "task=cifar10-lenet"], "hemiola data fetch cifar10"),
        (["run", "good.toml", "--out", "good.toml"], "cannot be made a folder"),
        (["report", "nowhere"], "nowhere"),
        (["predict", "--workers", "8"], "give either --delay or --trace"),
        (["predict", "--workers", "8", "--delay", "pareto(2.5)"], "pareto takes 2 argument(s)"),
        (["data", "fetch", "imagenet", "--data", "d"], "imagenet"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_on_stderr_and_code_2(tmp_path, monkeypatch, arguments, said):
    monkeypatch.delenv("HEMIOLA_DATA", raising=False)
    (tmp_path / "good.toml").write_text(FILE)
    (tmp_path / "bad.toml").write_text("task =")
    done = hemiola(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stderr.startswith("hemiola: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out" / "results.csv").exists()


def test_tasks_and_data_are_listed(tmp_path):
    assert "digits-logistic" in hemiola("tasks").stdout
    listed = hemiola("data", "list", "--data", tmp_path)
    assert listed.returncode == 0
    assert "cifar10" in listed.stdout


def test_predict_prints_json():
    done = hemiola("predict", "--workers", "4", "--delay", "exponential(1)", "--k", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rows"]) >= 4
