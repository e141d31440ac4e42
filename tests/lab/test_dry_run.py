"""``hemiola run --dry-run``, ``--json`` on run and report, and policies that show how they were made."""

import copy
import json
import pickle

import pytest
from typer.testing import CliRunner

import hemiola
from hemiola.lab import cli
from hemiola.lab.dry_run import dry_run
from hemiola.lab.experiment import Experiment

pytestmark = pytest.mark.slow

FILE = """
task = "digits-logistic"
workers = 4
batch = 25
seeds = [0, 1, 2]
stop = { epochs = 2 }
[sweep]
"optimizer.lr" = [0.5, 1.0]
[[run]]
name = "ordinary"
[[run]]
name = "local"
period = { name = "constant", p = 4 }
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(FILE)
    return path


def invoke(*arguments) -> str:
    result = CliRunner().invoke(cli.app, [str(one) for one in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_dry_run_counts_and_estimates_and_writes_nothing(file):
    text = invoke("run", file, "--dry-run", "--jobs", "2")
    assert "ordinary: 6 parts, about" in text
    assert "12 parts in all, about" in text
    told = json.loads(invoke("run", file, "--dry-run", "--json"))
    assert told["cells"] == 12
    assert [run["cells"] for run in told["runs"]] == [6, 6]
    assert all(0 < run["seconds"] < 600 for run in told["runs"])
    assert [path.name for path in file.parent.iterdir()] == ["experiment.toml"]


def test_a_real_cluster_is_not_probed():
    found = dry_run(Experiment({"task": "digits-logistic", "workers": 2, "cluster": "torch"}), None, 1)
    assert found.seconds is None
    assert found.runs[0].seconds is None


def test_without_a_folder_a_run_says_what_is_missing(file):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", str(file)])
    assert ended.value.code == 2


def test_json_of_a_run_is_what_report_says_again(file, tmp_path):
    told = json.loads(invoke("run", file, "--out", tmp_path / "out", "--json"))
    assert told == json.loads(invoke("report", tmp_path / "out", "--json"))
    assert [run["run"] for run in told["runs"]] == ["ordinary", "local"]
    assert told["runs"][0]["against"] is None
    against = told["runs"][1]["against"]
    assert against["reference"] == "ordinary"
    assert against["bytes_per_worker"]["kind"] == "ratio"
    assert against["bytes_per_worker"]["mean"] < 0.5
    assert told["runs"][0]["results"]["train_gap"]["mean"] > 0
    assert told["conclusions"]


def test_policies_show_how_they_were_made():
    order = hemiola.CDGraB(sketch="fold:64")
    assert repr(order) == "CDGraB(sketch='fold:64')"
    assert repr(hemiola.Constant(p=4)) == "Constant(p=4)"
    assert repr(copy.deepcopy(order)) == repr(pickle.loads(pickle.dumps(order))) == repr(order)

    class Mine(hemiola.Period):
        def length(self, lr, progress):
            return 1

    assert repr(Mine()) == "Mine()"
