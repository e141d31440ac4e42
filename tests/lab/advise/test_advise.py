"""The advisor: arrivals and advice by hand, and a small race for real."""

import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import hemiola.lab.advise.race as race_module
from hemiola import InputError
from hemiola.lab.advise.advice import verdict
from hemiola.lab.advise.candidates import ORDINARY, candidates, own_loop, without_order
from hemiola.lab.advise.laps import Lap, LapPoint, LapTrace
from hemiola.lab.advise.measure import ClusterFacts, read_measured, read_times, write_measured
from hemiola.lab.advise.race import _climb, advise
from hemiola.lab.advise.verbs import _show
from hemiola.lab.cli import app
from hemiola.lab.experiment import Experiment
from hemiola.timing.delays import parse_delay
from hemiola.timing.traces import read_trace

pytestmark = pytest.mark.slow


def trace(losses, lr=0.1, seed=0, step=1.0):
    lap = Lap("any", {}, lr, seed, {}, "seconds", 1.0, 1.0, 0.0, 1.0, "wall", None, None)
    return LapTrace(lap, [LapPoint(step * i, 10.0 * i, 100.0 * i) for i in range(len(losses))], losses)


def test_who_arrives_stays():
    # The first touch does not count; from 2 to 0.9 the line crosses 1 after ten elevenths of the way.
    assert trace([3.0, 1.0, 2.0, 0.9, 0.8]).arrival(1.0) == pytest.approx((2 + 1 / 1.1, 20 + 10 / 1.1, 200 + 100 / 1.1))
    assert trace([3.0, 2.0]).arrival(1.0) is None
    assert trace([3.0, 2.0]).seconds_to(1.0) == math.inf
    assert trace([3.0, math.inf, 0.5]).arrival(1.0) == (2, 20, 200)  # no line from infinity
    assert trace([0.5, 0.4]).arrival(1.0) == (0, 0, 0)
    assert trace([3.0, 0.5, math.inf]).arrival(1.0) is None
    assert trace([1.0, math.inf]).end == math.inf
    assert trace([9.0] * 28 + [2.0, 1.0, 3.0]).end == 2.0
    assert trace([9.0] * 28 + [2.0, 1.0, 3.0]).settled == 3.0


def climbed(losses, base, tries=6, both=True):
    seen, order = {}, []
    for rates in _climb(base, seen, tries, both):
        order += rates
        seen.update({rate: losses(rate) for rate in rates})
    return order


def test_rates_are_tried_for_as_long_as_that_helps():
    assert climbed(lambda rate: abs(rate - 1), 1.0) == [0.5, 1.0, 2.0]
    assert climbed(lambda rate: abs(rate - 4), 1.0) == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert climbed(lambda rate: rate, 1.0, tries=5) == [0.5, 1.0, 2.0, 0.25, 0.125]
    assert climbed(lambda rate: rate, 1.0, tries=3, both=False) == [0.5, 1.0, 0.25]
    assert climbed(lambda rate: math.inf if rate > 0.01 else rate, 1.0, tries=5) == [0.5, 1.0, 2.0, 0.0625, 0.0078125]


def told(ordinary, other):
    """Advice from seconds to the target by seed; None where it is not reached in 100 seconds."""

    def laps(seconds):
        return {
            seed: trace([2.0, 2.0] if at is None else [2.0, 1.0], seed=seed, step=100.0 if at is None else float(at))
            for seed, at in enumerate(seconds)
        }

    table = {"period": {"name": "constant", "p": 16, "wire": "int8"}}
    entries = {ORDINARY: ({}, laps(ordinary)), "long period": (table, laps(other))}
    rates = {("long period", 0.05): 30.0, ("long period", 0.1): 25.0, ("long period", 0.2): math.inf}
    return verdict({"task": "digits-logistic"}, 1.0, entries, list(entries), rates, [], 1.0)


def test_the_advice_by_hand():
    clear = told([80, 90, 100], [20, 30, 25])
    assert clear.best.name == "long period"
    assert clear.best.speedup.mean == pytest.approx((4 * 3 * 4) ** (1 / 3))
    assert (clear.sure, clear.worst) == (1.0, 3.0)
    said = " ".join(clear.lines())
    assert "after 25 cluster seconds instead of 90" in said
    assert "10 epochs instead of 10, 100 MB sent by a worker instead of 100" in said
    assert "in seconds: 30 at lr 0.05, too long at lr 0.2" in said
    even = told([80, 90, 100], [79, 93, 98])
    assert even.stay
    assert "not surely worth a change" in " ".join(even.lines())


def test_ordinary_training_that_does_not_arrive_is_said():
    advice = told([80, None, None], [20, 30, 25])
    assert advice.ordinary.seconds == math.inf
    said = " ".join(advice.lines())
    assert "inf" not in said
    assert "at least 3.76 times" in said  # the cube root of 4 * 100/30 * 4
    assert "did not arrive within 100 cluster seconds in 2 of 3 seeds" in said
    assert math.isfinite(advice.experiment()["stop"]["seconds"])


def test_candidates_fit_the_cluster_and_the_optimizer():
    assert list(candidates(1)) == [ORDINARY, "order"]
    assert not {"int8", "int4"} & set(candidates(4, link=False))
    plain, adam = candidates(4), candidates(4, optimizer="AdamW")
    assert {"int8", "int4", "DiLoCo", "clocked, mix 0", "clocked, mix 0.5"} <= set(plain)
    assert [name for name in adam if "clocked" in name] == ["clocked, mix 1", "clocked, mix 1 + order"]
    for name, table in plain.items():
        assert ("order" in table) == (without_order(name) != name)
        assert without_order(name) in plain
    assert "outer='diloco'" in own_loop(plain["DiLoCo"], 0.1)[0]


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_every_candidate_is_a_good_run(workers):
    tables = candidates(workers)
    assert next(iter(tables)) == ORDINARY
    runs = [{"name": name, **table} for name, table in tables.items()]
    assert len(Experiment({"task": "digits-logistic", "workers": workers, "run": runs}).cells) == len(tables)
    assert all(own_loop(table, 0.1) for table in tables.values())


@pytest.fixture
def short(monkeypatch):
    """Few candidates, few seeds, few evaluations."""
    monkeypatch.setattr(race_module, "candidates", few)
    monkeypatch.setattr(race_module, "SEEDS", (0, 1, 2))
    monkeypatch.setattr(race_module, "EVALUATIONS", 20)


def few(workers, **options):
    chosen = (ORDINARY, "int8", "period")
    return {name: table for name, table in candidates(workers, **options).items() if name in chosen}


SLOW_LINK = {"bandwidth": "1 Mbit/s", "latency": "1 ms"}


def test_a_slow_link_asks_for_a_period(short):
    options = {"batch": 16, "epochs": 1.0, "minutes": 20.0, "jobs": 1}
    slow = advise("digits-logistic", 4, "constant(0.001)", SLOW_LINK, **options)
    assert slow.best.name == "period"
    assert slow.best.speedup.low > 1.5
    assert slow.worst > 1.5
    assert slow.best.megabytes < slow.ordinary.megabytes / 4
    assert not slow.stay
    assert "sooner" in slow.lines()[0]
    assert any("hemiola.Adaptive" in line for line in slow.code())
    assert len(Experiment(slow.experiment()).cells) == 5 * len(slow.experiment()["run"])


def test_a_rate_that_does_not_learn_with_another_seed_sets_no_target():
    """A lucky seed may end lowest at a rate whose other seed ends above its start: a target that is met before it."""

    def run(losses):
        race = race_module.CandidateRace(race_module.Question("digits-logistic"), 1.0, 1, lambda _: None, "wall")
        race._run = lambda laps, stage: [replace(trace(losses(lap.lr, lap.seed)), lap=lap) for lap in laps]
        return race._course(1.0), race.target

    assert run(lambda lr, seed: [2.0, 1.0 if lr == 1.0 and seed == 0 else 1.5 if lr != 1.0 else 2.1]) == (0.5, 1.5)
    with pytest.raises(
        InputError, match="does not settle below the training loss it begins with, 2: give more minutes"
    ):
        run(lambda lr, seed: [2.0, 2.1])


def test_what_was_not_given_is_said_first():
    stays = replace(told([80, 90, 100], [79, 93, 98]), assumed=["messages cost nothing, because no link was given"])
    assert stays.lines()[0] == "Assumed: messages cost nothing, because no link was given."
    assert "Stay with ordinary" in stays.lines()[1]
    race = race_module.CandidateRace(race_module.Question("digits-logistic"), 1.0, 1, print, "wall")
    assert race.assumed == ["messages cost nothing, because no link was given"]


def test_bad_input_is_one_clear_line(short, tmp_path):
    options = {"batch": 16, "epochs": 0.5, "minutes": 5.0, "jobs": 1}
    with pytest.raises(
        InputError, match=r"does not reach a training loss of 1e-05 in 0\.5 epochs, it comes to (0|1)\.\d+: give"
    ):
        advise("digits-logistic", 4, "constant(1)", target=1e-5, **options)
    with pytest.raises(InputError, match="diverges at every learning rate"):
        advise("digits-logistic", 4, "constant(1)", given={"optimizer": {"lr": 1e28}}, **options)
    with pytest.raises(InputError, match="minutes must be above 0"):
        advise("digits-logistic", minutes=0)
    with pytest.raises(InputError, match="epochs must be above 0"):
        advise("digits-logistic", epochs=0)
    steps = tmp_path / "steps.csv"
    steps.write_text("worker,step,step_seconds\n" + "".join(f"0,{step},0.1\n" for step in range(19)))
    for ask in (lambda: read_times(steps), lambda: advise("digits-logistic", 1, f"trace({steps})")):
        with pytest.raises(InputError, match="at least 20 steps of every worker are needed, worker 0 has 19"):
            ask()
    with pytest.raises(InputError, match="at least 20 steps"):
        advise("digits-logistic", 4, f"trace({steps}, pooled)")
    file = tmp_path / "short.json"
    write_measured(file, ClusterFacts([[0.1] * 30, [0.1] * 3]))
    with pytest.raises(InputError, match="at least 20 steps of every worker are needed, worker 1 has 3"):
        read_measured(file)
    file.write_text("[]")
    with pytest.raises(InputError, match="not a file that `hemiola measure` wrote"):
        read_measured(file)


def test_what_was_measured_comes_back(tmp_path):
    found = ClusterFacts([[0.1, 0.2] * 10, [0.3] * 20], bandwidth=1.25e6, latency=1e-3)
    write_measured(tmp_path / "measured.json", found)
    assert read_measured(tmp_path / "measured.json") == found
    assert found.link == {"bandwidth": "10 Mbit/s", "latency": "1000 us"}
    found.write_trace(tmp_path / "steps.csv")
    assert len(read_trace(tmp_path / "steps.csv").seconds) == 40


def test_step_times_come_from_the_log_of_a_real_run(tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [{"run": "a", "train_loss": 1.0}]
    lines += [{"step_seconds": [0.1, 0.2], "step_workers": [0, 1], "exchange_seconds": [0.01]} for _ in range(20)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_times(log).step_seconds == [[0.1] * 20, [0.2] * 20]
    asked = ["advise", "digits-logistic", "--times", str(log), "--delay", "constant(1)"]
    done = CliRunner().invoke(app, asked)
    assert "--delay and --times all say what a step takes" in str(done.exception)


def test_the_command_measures_and_advises(short, tmp_path):
    runner, measured, written = CliRunner(), tmp_path / "measured.json", tmp_path / "advice.toml"
    done = runner.invoke(app, ["measure", "digits-logistic", "--out", str(measured), "--batch", "16"])
    assert done.exit_code == 0, done.output
    assert "1 worker, mean step" in done.output
    arguments = [
        "--measured",
        str(measured),
        "--workers",
        "2",
        "--batch",
        "16",
        "--epochs",
        "0.3",
        "--jobs",
        "1",
        "--minutes",
        "9",
    ]
    done = runner.invoke(app, ["advise", "digits-logistic", *arguments, "--json", "--write", str(written)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["given"]["workers"] == 2
    checks = Experiment.load(written)
    assert {cell.seed for cell in checks.cells} == {100, 101, 102, 103, 104}
    assert "trace(advice.steps.csv, pooled)" in written.read_text()


def test_a_trace_is_found_again_from_the_folder_of_the_file_that_checks_the_advice(tmp_path, monkeypatch):
    (tmp_path / "steps.csv").write_text("step_seconds\n" + "0.1\n0.3\n" * 20)
    asked = []
    monkeypatch.setattr(race_module.CandidateRace, "run", lambda race: asked.append(race.given))
    advise("digits-logistic", 2, "trace(steps.csv, pooled)", base=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert parse_delay(asked[0]["cluster"]["delay"], elsewhere).mean == pytest.approx(0.2)


def test_the_command_shows_advice_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    _show(told([80, None, None], [20, 30, 25]))
    shown = capsys.readouterr().out
    assert "long period" in shown
    assert "In your own loop:" in shown
    assert "averager = hemiola.Averager(model, optimizer, period=hemiola.Constant(p=16), wire='int8')" in shown
