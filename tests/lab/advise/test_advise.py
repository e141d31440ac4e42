"""The advisor: arrivals and advice by hand, and a small race for real."""

import json
import math

import pytest
from typer.testing import CliRunner

import hemiola.lab.advise.race as race_module
from hemiola import InputError
from hemiola.lab.advise.candidates import ORDINARY, candidates, own_loop
from hemiola.lab.advise.measure import ClusterFacts, read_measured, write_measured
from hemiola.lab.advise.race import LapTrace, advise
from hemiola.lab.cli import app
from hemiola.lab.experiment import Experiment
from hemiola.timing.traces import read_trace

pytestmark = pytest.mark.slow


def trace(losses):
    count = len(losses)
    return LapTrace(None, [float(i) for i in range(count)], [0.0] * count, [0.0] * count, losses)


def test_who_arrives_stays():
    assert trace([3.0, 1.0, 2.0, 0.9, 0.8]).arrival(1.0) == 3  # the first touch does not count
    assert trace([3.0, 2.0]).arrival(1.0) is None
    assert trace([3.0, math.nan, 0.5]).arrival(1.0) == 2
    assert trace([3.0, 0.5, math.nan]).arrival(1.0) is None
    assert trace([1.0, math.inf]).end == math.inf


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_every_candidate_is_a_good_run(workers):
    tables = candidates(workers)
    assert next(iter(tables)) == ORDINARY
    runs = [{"name": name, **table} for name, table in tables.items()]
    assert len(Experiment({"task": "digits-logistic", "workers": workers, "run": runs}).cells) == len(tables)
    assert all(own_loop(table, 0.1) for table in tables.values())


def few(workers):
    return {name: table for name, table in candidates(workers).items() if name in (ORDINARY, "int8", "period")}


SLOW_LINK = {"bandwidth": "1 Mbit/s", "latency": "1 ms"}


def test_a_slow_link_asks_for_a_period_and_a_fast_one_for_nothing(monkeypatch):
    monkeypatch.setattr(race_module, "candidates", few)
    options = {"batch": 16, "epochs": 1.5, "minutes": 20.0, "jobs": 1}
    slow = advise("digits-logistic", 4, "constant(0.001)", SLOW_LINK, **options)
    assert slow.best.name == "period"
    assert slow.best.speedup.low > 1.5
    assert slow.worst > 1.5
    assert slow.best.megabytes < slow.ordinary.megabytes / 4
    assert not slow.stay
    assert "times sooner" in slow.lines()[0]
    assert any("hemiola.Adaptive" in line for line in slow.code())
    Experiment({"task": "digits-logistic", "workers": 4, **slow.experiment()})
    fast = advise("digits-logistic", 4, "constant(1)", **options)
    assert fast.stay
    assert fast.lines()[0] == "Assumed: messages cost nothing, because no link was given."
    assert "Stay with ordinary" in fast.lines()[1]


def test_bad_input_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setattr(race_module, "candidates", few)
    options = {"batch": 16, "epochs": 0.5, "minutes": 5.0, "jobs": 1}
    with pytest.raises(
        InputError, match=r"does not reach a training loss of 1e-05 in 0\.5 epochs, it comes to 0\.|1\."
    ):
        advise("digits-logistic", 4, "constant(1)", target=1e-5, **options)
    with pytest.raises(InputError, match="diverges at every learning rate"):
        advise("digits-logistic", 4, "constant(1)", given={"optimizer": {"lr": 1e28}}, **options)
    with pytest.raises(InputError, match="minutes must be above 0"):
        advise("digits-logistic", minutes=0)
    short = tmp_path / "short.json"
    write_measured(short, ClusterFacts([[0.1] * 30, [0.1] * 3]))
    with pytest.raises(InputError, match="at least 20 steps of every worker are needed, worker 1 has fewer"):
        read_measured(short)
    short.write_text("[]")
    with pytest.raises(InputError, match="not a file that `hemiola measure` wrote"):
        read_measured(short)


def test_what_was_measured_comes_back(tmp_path):
    found = ClusterFacts([[0.1, 0.2] * 10, [0.3] * 20], bandwidth=1.25e6, latency=1e-3)
    write_measured(tmp_path / "measured.json", found)
    assert read_measured(tmp_path / "measured.json") == found
    assert found.link == {"bandwidth": "10 Mbit/s", "latency": "1000 us"}
    found.write_trace(tmp_path / "steps.csv")
    assert len(read_trace(tmp_path / "steps.csv").seconds) == 40


def test_the_command_measures_and_advises(monkeypatch, tmp_path):
    monkeypatch.setattr(race_module, "candidates", few)
    runner, measured, written = CliRunner(), tmp_path / "measured.json", tmp_path / "advice.toml"
    done = runner.invoke(app, ["measure", "digits-logistic", "--out", str(measured), "--batch", "16"])
    assert done.exit_code == 0, done.output
    assert "1 worker, mean step" in done.output
    arguments = ["--measured", str(measured), "--workers", "2", "--batch", "16", "--epochs", "0.3", "--jobs", "1"]
    done = runner.invoke(app, ["advise", "digits-logistic", *arguments, "--minutes", "9", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["workers"] == 2
    done = runner.invoke(app, ["advise", "digits-logistic", *arguments, "--minutes", "9", "--write", str(written)])
    assert done.exit_code == 0, done.output
    assert "In your own loop:" in done.output
    assert written.exists()
