"""`hemiola reproduce`: the table is complete, every check can pass and can fail, and a claim runs from end to end."""

import io
import json
import math
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from hemiola.errors import InputError
from hemiola.lab import cli
from hemiola.lab.progress import Display
from hemiola.lab.report.log import Log
from hemiola.lab.report.read import Folder
from hemiola.lab.reproduce import docs, pictures, run
from hemiola.lab.reproduce import table as tables
from hemiola.lab.reproduce.folder import ClaimFolder, Finding
from hemiola.lab.reproduce.numbers import Measured, fit_slope, measure
from hemiola.lab.reproduce.parts import Parts
from hemiola.lab.reproduce.pictures import curve_rows
from hemiola.lab.reproduce.run import FUNCTIONS, measured, reproduce
from hemiola.lab.reproduce.table import (
    Check,
    Number,
    Picture,
    claim_named,
    claims,
    experiment_path,
    load_experiment,
    table,
)
from hemiola.lab.reproduce.verdict import Judged, in_words, judge, shown, with_deviation
from hemiola.lab.tasks import TASKS
from hemiola.lab.tasks.files import SETS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VERSIONS = pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
EVERY = pytest.mark.parametrize("name", list(claims()))
WITH_FILES = pytest.mark.parametrize("name", [claim.name for claim in claims().values() if claim.files])


def folder(logs, higher_is_better=True):
    """A results folder: by run (or run, point, seed) the evaluations as dicts of numbers."""
    log = {}
    for key, lines in logs.items():
        run_name, point, seed = key if isinstance(key, tuple) else (key, (), "0")
        columns = dict.fromkeys(["epochs", *(name for line in lines for name in line)])
        log[run_name, point, seed] = Log({c: np.array([line.get(c, math.nan) for line in lines]) for c in columns})
    return Folder((), "", {}, {}, {"higher_is_better": higher_is_better}, {}, {}, (), log)


# --------------------------------------------------------------------------------------------------------- the table


def test_the_papers_claims_are_there():
    by_paper = {paper: [c.name for c in claims().values() if c.paper == paper] for paper in table().papers}
    assert {paper: len(names) for paper, names in by_paper.items() if paper != "Ours"} == {
        "CD-GraB": 12,  # its convex claim is three here: digits and a9a, HMDA, SST-2
        "ADPSGD": 6,  # its accuracy claim is two here: LeNet and a VGG
        "Slow and Stale Gradients": 6,
    }
    assert len(claims()) == len(table().claims)


@EVERY
def test_a_claim_has_all_its_parts(name):
    claim = claim_named(name)
    assert re.fullmatch(r"[a-z0-9-]+", name)
    assert claim.paper in table().papers
    assert all((claim.claim, claim.reports, claim.task, claim.quick, claim.panels))
    assert claim.claim.endswith(".")
    assert len({number.name for number in claim.numbers}) == len(claim.numbers)
    for quick in (False, True):
        names = {number.name for number in claim.measured(quick)}
        asked = [check for check in claim.checks if check.bound(quick) is not None]
        assert asked, "nothing can fail"
        assert claim.function or {check.number for check in asked} <= names
    assert not claim.function or claim.function in FUNCTIONS


@WITH_FILES
@VERSIONS
def test_numbers_and_pictures_read_runs_that_there_are(name, quick):
    claim = claim_named(name)
    for file in claim.files_of(quick):
        experiment = load_experiment(file, quick)
        for number in claim.measured(quick):
            assert number.file in claim.files
            assert number.file != file or set(number.runs) <= set(experiment.runs), number.name
        for panel in claim.panels:
            assert quick or panel.file != file or set(panel.runs) <= set(experiment.runs)
    if not quick:
        assert claim.files_of(quick) == claim.files


@WITH_FILES
@VERSIONS
def test_a_claim_names_the_data_it_needs(name, quick):
    claim = claim_named(name)
    needed = set()
    for file in claim.files_of(quick):
        for cell in load_experiment(file, quick).cells:
            task = cell.settings.task if isinstance(cell.settings.task, dict) else {"name": cell.settings.task}
            needed |= {task["task"], "minilm"} if "task" in task else set(TASKS[task["name"]].data)
    assert set(claim.data_of(quick)) == needed
    assert needed <= set(SETS)


def test_every_experiment_file_is_of_some_claim():
    there = {path.stem for path in experiment_path("x").parent.glob("*.toml")}
    assert there == {file for claim in claims().values() for file in claim.files}
    assert set(table().quick) <= there


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": "a", "slope": {"b": 1.0}}, "either run or slope"),
        ({}, "either run or slope"),
        ({"run": "a", "over": "b", "minus": "c"}, "one of over, minus and way"),
        ({"run": "a", "way": ["b"]}, "from one run to another"),
        ({"run": "a", "at": {"epochs": 1.0}, "reach": 2.0}, "one of at, last, reach and until"),
        ({"run": "a", "until": "b", "reach": 2.0}, "one of at, last, reach and until"),
    ],
)
def test_a_number_that_means_nothing_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Number(name="n", file="f", measure="train_loss", **given)
    with pytest.raises(ValueError, match="either least or most"):
        Check(number="n")


# ----------------------------------------------------------------------------------------------------------- numbers


def number(**given):
    return Number(**{"name": "n", "file": "f", "measure": "train_loss", "run": "a", **given})


def lines(*values, column="train_loss"):
    return [{"epochs": 10.0 * i, "seconds": 5.0 * i, "updates": 100.0 * i, column: y} for i, y in enumerate(values)]


def test_the_end_a_place_and_the_last_part():
    found = folder({"a": lines(8.0, 4.0, 2.0, 1.0)})
    assert measure(number(), found).value == 1.0
    assert measure(number(at={"epochs": 10.0}), found).value == 4.0
    assert measure(number(at={"seconds": 10.1}), found).value == 2.0
    assert math.isnan(measure(number(at={"epochs": 14.0}), found).value)  # nothing was evaluated there
    assert measure(number(last=0.5), found).value == 1.5
    assert measure(number(times=100.0), found).value == 100.0
    assert math.isnan(measure(number(run="b"), found).value)


def test_ratios_and_differences_pair_seeds():
    found = folder(
        {("a", (), "0"): lines(4.0), ("a", (), "1"): lines(8.0), ("b", (), "0"): lines(2.0), ("b", (), "1"): lines(2.0)}
    )
    ratio = measure(number(over="b"), found)
    assert (ratio.value, ratio.seeds) == (3.0, 2)
    assert ratio.deviation == pytest.approx(math.sqrt(2))  # of 2 and 4
    assert measure(number(minus="b"), found).value == 4.0


def test_every_run_is_read_at_its_own_best_point():
    one, other = (("lr", "0.1"),), (("lr", "0.2"),)
    found = folder(
        {
            ("a", one, "0"): lines(3.0),
            ("a", other, "0"): lines(1.0),
            ("b", one, "0"): lines(2.0),
            ("b", other, "0"): lines(5.0),
        }
    )
    assert measure(number(), found).value == 1.0
    assert measure(number(over="b"), found).value == 0.5
    # Another column is read where the training loss is best.
    logs = {
        ("a", one, "0"): [{"train_loss": 3.0, "averagings": 10.0}],
        ("a", other, "0"): [{"train_loss": 1.0, "averagings": 90.0}],
    }
    assert measure(number(measure="averagings"), folder(logs)).value == 90.0
    metric = folder(
        {("a", one, "0"): lines(0.7, column="test_metric"), ("a", other, "0"): lines(0.9, column="test_metric")}
    )
    assert measure(number(measure="test_metric"), metric).value == 0.9


def test_several_runs_stand_for_the_best_of_them():
    found = folder({"a": lines(3.0), "b": lines(2.0), "c": lines(math.nan)})
    assert measure(number(run=["a", "b", "c"]), found).value == 2.0


def test_reaching_by_the_mean_curve_and_seed_by_seed():
    found = folder({("a", (), "0"): lines(8.0, 1.0, 1.0), ("a", (), "1"): lines(8.0, 7.0, 1.0)})
    assert measure(number(reach=4.0, cost="epochs"), found).value == 10.0  # the mean is 4 there
    assert measure(number(reach=4.0, curve="seeds"), found).value == 7.5  # 5 and 10 seconds
    assert measure(number(reach=0.5), found).value == math.inf
    both = folder({"a": lines(2.0, 0.1), "b": lines(2.0, 2.0)})
    assert measure(number(run="b", over="a", reach=0.5), both).value == math.inf
    assert math.isnan(measure(number(run="b", over="b", reach=0.5), both).value)


def test_until_another_run_ends():
    found = folder(
        {
            ("a", (), "0"): lines(8.0, 5.0, 4.0),
            ("a", (), "1"): lines(8.0, 5.0, 2.0),
            ("b", (), "0"): lines(4.0, 3.0, 1.0),  # where a ends: at once
            ("b", (), "1"): lines(8.0, 3.0, 1.0),  # in the end
        }
    )
    sooner = number(run="a", over="b", until="a", curve="seeds")
    assert measure(number(run="b", until="a", curve="seeds"), found).value == 5.0  # 0 and 10 seconds
    assert measure(number(run="a", until="a", curve="seeds"), found).value == 10.0
    assert measure(sooner, found).value == 2.0
    assert measure(number(run="b", until="a"), found).value == 5.0  # the mean is 3 there, as where a ends
    assert sooner.label == "n (to where 'a' ends)"
    assert sooner.runs == ["a", "b", "a"]


def test_the_share_of_a_way():
    found = folder({"far": lines(4.0), "near": lines(2.0), "a": lines(3.5)})
    assert measure(number(way=["far", "near"]), found).value == 0.25
    assert measure(number(run="near", way=["far", "near"]), found).value == 1.0
    assert math.isnan(measure(number(way=["far", "nobody"]), found).value)


def test_a_diverged_seed_is_infinitely_bad():
    found = folder({("a", (), "0"): lines(1.0), ("a", (), "1"): lines(math.nan)})
    assert measure(number(), found).value == math.inf


def test_slopes():
    found = folder({f"{m}": lines(5.0 / m**2) for m in (1, 2, 4)})
    slope = number(run="", slope={"1": 1.0, "2": 2.0, "4": 4.0})
    assert measure(slope, found).value == pytest.approx(-2.0)
    assert math.isnan(fit_slope([1, 2], [1.0, math.inf]))
    assert math.isnan(fit_slope([1, 2], [1.0, 0.0]))


def test_the_quick_version_of_a_number():
    there = number(at={"epochs": 30.0}, quick={"at": {"epochs": 10.0}})
    assert there.version(quick=False).at == {"epochs": 30.0}
    assert there.version(quick=True).at == {"epochs": 10.0}
    assert there.label == "n (epochs 30)"
    assert number(reach=0.5).label == "n (to 0.5)"
    assert number(quick=False).version(quick=True) is None


# -------------------------------------------------------------------------------------------- checks pass and fail


def random_folder(experiment, random):
    """Made-up results of an experiment: each run falls from its own height, at its own speed, to its own floor."""
    logs, deep = {}, random.choice([-2, -10])
    for name in experiment.runs:
        height, fast = np.exp(random.normal(1, 0.5)), np.exp(random.normal(0, 1.5))
        floor = np.exp(random.normal(deep, 2))
        ends = {key: np.exp(random.normal(0, 1)) for key in ("averagings", "bytes_per_worker", "weighted_spread")}
        ends |= {"mean_update_seconds": np.exp(random.normal(0, 1)), "test_metric": random.random()}
        pace = np.exp(random.normal(0, 1))
        logs[name] = []
        for epoch in range(61):
            value = float(floor + height * np.exp(-fast * epoch))
            places = {"epochs": float(epoch), "seconds": float(epoch * pace), "updates": epoch * pace}
            logs[name].append({**places, **ends, "train_loss": value, "train_gap": value, "test_loss": value})
    return folder(logs)


@WITH_FILES
@VERSIONS
def test_every_check_passes_on_some_results_and_fails_on_others(name, quick):
    claim = claim_named(name)
    experiments = {file: load_experiment(file, quick) for file in claim.files_of(quick)}
    seen = {}
    for seed in range(400):
        random = np.random.default_rng(seed)
        folders = {file: random_folder(experiment, random) for file, experiment in experiments.items()}
        judged = judge(claim, measured(claim, folders, quick).numbers, quick)
        for one in judged:
            seen.setdefault(one.check.number, set()).add(one.holds)
        if all(outcomes == {True, False} for outcomes in seen.values()):
            return
    raise AssertionError({number: outcomes for number, outcomes in seen.items() if len(outcomes) < 2})


SMALL = {
    "herding": {"workers": [2, 4, 8], "units": 60, "dimension": 4, "rounds": 4, "seeds": [0]},
    "update-times": {"workers": 3, "laws": ["exponential(1)", "pareto(2.5, 1)"], "updates": 300},
    "staleness": {"workers": 3, "laws": ["exponential(1)"], "updates": 300},
    "log-speedup": {"workers": [2, 8], "law": "exponential(1)", "updates": 30, "seeds": [0, 1]},
    "gradient-norm": {
        "horizons": [1, 2],
        "seeds": [0],
        "tasks": {
            "perceptron on digits": {
                "task": {"name": "digits-mlp", "examples": 60},
                "workers": 4,
                "batch": 2,
                "rate": 0.1,
            }
        },
    },
}


@pytest.mark.parametrize("name", [claim.name for claim in claims().values() if claim.function])
def test_functions_give_the_numbers_that_are_checked_and_the_pictures(name, tmp_path):
    claim = claim_named(name)
    small = claim.model_copy(update={"options": {**claim.options, **SMALL[name]}})
    there = ClaimFolder(tmp_path, small, quick=False)
    found = run._call(small, there, None, 2, Display.silent())
    needed = {check.number for check in claim.checks} if name != "gradient-norm" else {claim.checks[0].number}
    assert needed <= set(found.numbers)
    assert any(found.rows.get(panel.title) or "workers" in panel.title for panel in claim.panels)
    for check in claim.checks:
        bound = check.bound(quick=False)
        good, bad = (bound * 0.9, bound * 1.1) if check.least is None else (bound * 1.1, bound * 0.9)
        if bound < 0:
            good, bad = bad, good
        assert Judged(check, good, bound).holds
        assert not Judged(check, bad, bound).holds
        assert not Judged(check, math.nan, bound).holds


def test_a_picture_leaves_out_what_comes_before_its_start():
    lines = [{"epochs": e, "train_loss": loss} for e, loss in ((0.0, 7.6), (5.0, 3.66), (10.0, 3.54))]
    there = folder({"a": lines})
    every = [row["x"] for row in curve_rows(Picture(file="f"), there)]
    assert every == [0.0, 5.0, 10.0]
    later = curve_rows(Picture(file="f", start=1), there)
    assert [(row["x"], row["mean"]) for row in later] == [(5.0, 3.66), (10.0, 3.54)]


def test_a_logarithmic_axis_keeps_what_has_a_place_on_it():
    points = [(2.0, 1.5), (5.0, -0.3), (-1.0, -2.0), (math.inf, 1.0), (3.0, 2.0)]
    rows = [{"line": "a", "x": x, "mean": mean, "low": low, "high": 9.0} for x, (mean, low) in enumerate(points)]
    assert [row["x"] for row in pictures._shown(Picture(file="f"), rows)] == [0, 1, 2, 4]
    assert [row["low"] for row in pictures._shown(Picture(file="f", log_y=True), rows)] == [1.5, 1.5, 2.0]
    assert [row["x"] for row in pictures._shown(Picture(file="f", log_x=True), rows)] == [1, 2, 4]


def test_parts_are_computed_once(tmp_path):
    parts, calls = Parts(tmp_path / "parts"), []
    compute = lambda: calls.append(1) or [1.0, 2.0]  # noqa: E731
    assert parts.once("a", compute) == parts.once("a", compute) == [1.0, 2.0]
    assert len(calls) == 1
    (tmp_path / "parts/a.json").write_text("[1.0, ")
    assert parts.once("a", compute) == [1.0, 2.0]
    assert len(calls) == 2


def test_parts_side_by_side_are_computed_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)  # of this process, and so of those of a pool
    from pool_calls import noted

    calls = {str(number): partial(noted, tmp_path / "calls", number) for number in range(3)}
    expected = {"0": [0.0], "1": [1.0], "2": [2.0]}
    shown = io.StringIO()
    parts = Parts(tmp_path / "parts", jobs=2, display=Display(Console(file=shown)))
    parts.once("1", calls["1"])
    assert parts.all(calls, preload="hemiola") == parts.all(calls, preload="hemiola") == expected
    said = shown.getvalue().splitlines()
    assert said[0] == "1 of 3 parts were finished before"
    assert [line.split()[0] for line in said[1:]] == ["[2/3]", "[3/3]"]
    assert {line.split()[1] for line in said[1:]} == {"0:", "2:"}
    first, *others = (tmp_path / "calls").read_text().split()
    here = str(os.getpid())
    assert first == here
    assert len(others) == 2
    assert here not in others


def test_verdicts_in_words():
    claim = claim_named("staleness")
    first, second = (check.number for check in claim.checks)
    kept = judge(claim, {first: Measured(0.001), second: Measured(0.01)}, quick=False)
    assert in_words(kept).startswith(
        "Reproduced. largest distance of the mean staleness from its law: 0.001, at most 0.01"
    )
    missed = judge(claim, {first: Measured(0.5), second: Measured(0.01)}, quick=False)
    assert in_words(missed).startswith(
        f"Not reproduced: 1 of 2 checks hold. Missed: {first}: 0.5, at most 0.01 was asked."
    )
    assert "not measured" in in_words(judge(claim, {}, quick=False))
    assert (shown(math.inf), shown(1234.5)) == ("never", "1234")
    assert with_deviation(Measured(1.23456, 0.0123, 3)) == "1.235 ± 0.012"
    assert with_deviation(Measured(19.2, 3.4, 3)) == "19.2 ± 3.4"
    assert with_deviation(Measured(3.2e-6, 1e-6, 3)) == "3.2e-06 ± 1e-06"
    assert with_deviation(Measured(2.0)) == "2"


# --------------------------------------------------------------------------------------------------------- end to end


def hemiola(*arguments):
    """Exit code and output of the command line, a user's mistake included."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if isinstance(result.exception, InputError):
        return 2, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def smaller(file, quick):
    """Every experiment in a minute version: few epochs, one seed."""
    experiment = load_experiment(file, quick)
    given = {**experiment.given, "seeds": [0, 1], "stop": {"epochs": 2}, "evaluate": {"every_epochs": 1}}
    return type(experiment)(given, experiment.base)


def test_a_claim_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "load_experiment", smaller)
    claim = claim_named("measuring")
    there = ClaimFolder(tmp_path, claim, quick=True)
    assert there.state == "not run"
    outcome = reproduce(claim, tmp_path, quick=True, jobs=2)
    assert there.state == ("reproduced" if outcome.reproduced else "not reproduced")
    assert set(outcome.numbers) == {number.name for number in claim.measured(quick=True)}
    assert all(found.seeds == 2 and math.isfinite(found.value) for found in outcome.numbers.values())
    page = (there.path / "page.html").read_text()
    for part in (claim.claim, claim.reports, "hemiola reproduce measuring --out DIR --quick", "<svg", "quick version"):
        assert part in page
    assert there.outcome() == outcome

    code, text = hemiola("reproduce", "--out", tmp_path, "--quick")
    assert code == 0
    assert re.search(r"measuring .*reproduced", text.replace("\n", " "))
    with pytest.raises(InputError, match="already holds this claim; add --resume"):
        reproduce(claim, tmp_path, quick=True)
    again = reproduce(claim, tmp_path, quick=True, resume=True)
    assert again.numbers == outcome.numbers

    # Doctored results: the two runs change places, so what was better is worse.
    log = tmp_path / "quick/runs/period-digits-sorted/log.jsonl"
    runs = {"QSR, fewer averagings": "ADPSGD (the paper's rule)", "ADPSGD (the paper's rule)": "QSR, fewer averagings"}
    records = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps({**each, "run": runs.get(each["run"], each["run"])}) + "\n" for each in records))
    monkeypatch.setattr(run, "run_experiment", lambda *given: type("Done", (), {"interrupted": False, "failed": []}))
    swapped = reproduce(claim, tmp_path, quick=True, resume=True)
    assert swapped.reproduced != outcome.reproduced


def test_a_function_s_claim_on_the_command_line(tmp_path, monkeypatch):
    claim = claim_named("staleness")
    small = claim.model_copy(update={"options": SMALL["staleness"], "quick_options": {"updates": 400}})
    monkeypatch.setattr("hemiola.lab.reproduce.table.claim_named", lambda name: small)
    code, text = hemiola("reproduce", "staleness", "--out", tmp_path, "--quick")
    assert code == 0
    assert "eproduced" in text
    assert (tmp_path / "quick/staleness/picture.svg").read_text().startswith("<svg")


def test_the_list_says_paper_claim_task_and_state(tmp_path):
    code, text = hemiola("reproduce", "--out", tmp_path)
    assert code == 0
    assert text.count("not run") == len(claims())
    assert "CD-GraB" in text


# ----------------------------------------------------------------------------------------------------------- bad input


def test_an_unknown_claim(tmp_path):
    code, text = hemiola("reproduce", "hreding", "--out", tmp_path)
    assert code == 2
    assert text.startswith("unknown claim 'hreding'; did you mean 'herding'? Known: herding, convex,")


def test_missing_data(tmp_path, monkeypatch):
    monkeypatch.delenv("HEMIOLA_DATA", raising=False)
    code, text = hemiola("reproduce", "workers", "--out", tmp_path / "out", "--data", tmp_path)
    assert code == 2
    assert text.startswith(
        f"claim 'workers': data set 'cifar10' is not complete: looked in {tmp_path} and did not find"
    )
    assert f"hemiola data fetch cifar10 --data {tmp_path}" in text
    assert "\n" not in text
    assert not (tmp_path / "out").exists()
    code, text = hemiola("reproduce", "workers", "--out", tmp_path / "out")
    assert code == 2
    assert "HEMIOLA_DATA" in text


def test_a_folder_of_another_claim(tmp_path):
    claim = claim_named("herding")
    (tmp_path / "herding").mkdir()
    (tmp_path / "herding/claim.json").write_text('{"claim": "convex"}')
    with pytest.raises(InputError, match="is the folder of another claim, 'convex'; choose another --out"):
        reproduce(claim, tmp_path)
    with pytest.raises(InputError, match="herding: is the folder of the claim 'convex'; choose another --out"):
        reproduce(claim, tmp_path / "herding")
    with pytest.raises(InputError, match="is the folder of the claim 'convex'"):
        reproduce(claim, tmp_path / "herding", quick=True)
    (tmp_path / "herding/claim.json").write_text("{")
    with pytest.raises(InputError, match=r"claim\.json: is damaged"):
        reproduce(claim, tmp_path)
    (tmp_path / "herding/claim.json").unlink()
    (tmp_path / "herding/mine.txt").write_text("")
    with pytest.raises(InputError, match="holds other files"):
        reproduce(claim, tmp_path)


def test_states_of_a_folder(tmp_path):
    claim = claim_named("herding")
    there = ClaimFolder(tmp_path, claim, quick=False)
    with there.opened(resume=False):
        assert there.state == "running"
        with pytest.raises(InputError, match="another hemiola reproduce is working in it"), there.opened(resume=True):
            pass
    assert there.state == "stopped"
    there.save(Finding({"a": Measured(math.inf, math.nan, 3)}, False, "No.", 1.0, "0", "d"))
    assert there.state == "not reproduced"
    saved = there.outcome().numbers["a"]
    assert (saved.value, saved.seeds) == (math.inf, 3)
    (there.path / "numbers.json").write_text("[]")
    with pytest.raises(InputError, match=r"numbers\.json: is damaged"):
        there.outcome()


# --------------------------------------------------------------------------------------------------------------- docs


def test_the_page_of_results_is_what_the_command_writes():
    """docs/results.md is made from claims.toml and measured.json; whoever changes one of them runs --docs again."""
    if not docs.measured_path().exists():
        pytest.skip("no claim has been gathered yet")
    assert (ROOT / "docs/results.md").read_text(encoding="utf-8") == docs.results_page()


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("hemiola.lab.reproduce.functions.herding", interrupted)
    code, text = hemiola("reproduce", "herding", "--quick", "--out", tmp_path)
    assert code == 130
    again = f"hemiola reproduce herding --out {tmp_path} --quick --resume"
    assert text.endswith(f"hemiola: stopped in herding; go on with: {again}\n")
    assert ClaimFolder(tmp_path, claim_named("herding"), quick=True).state == "stopped"


def test_a_result_belongs_to_what_was_run(monkeypatch):
    claim = claim_named("adasync")
    full, quick = claim.definition(quick=False), claim.definition(quick=True)
    assert full != quick
    first = claim.numbers[0]
    farther = claim.model_copy(update={"numbers": [first.model_copy(update={"reach": 0.5}), *claim.numbers[1:]]})
    assert farther.definition(quick=False) != full
    told = claim.model_copy(update={"remark": "Said otherwise.", "checks": claim.checks[:1]})
    assert told.definition(quick=False) == full  # checks are judged anew wherever they are shown
    given = tables._given
    monkeypatch.setattr(tables, "_given", lambda *which: given(*which) | {"workers": 9})
    assert claim.definition(quick=False) != full


def test_every_measured_claim_has_its_picture():
    for name in docs._measured():
        assert (ROOT / f"docs/results/{name}.svg").is_file()


def test_the_list_of_claims_as_json(tmp_path):
    code, text = hemiola("reproduce", "--json", "--out", tmp_path)
    rows = json.loads(text)
    assert code == 0
    assert [row["name"] for row in rows] == list(claims())
    assert all(row["paper"] in table().papers and row["state"] == "not run" for row in rows)
    code, text = hemiola("reproduce", "herding", "--json", "--out", tmp_path)
    assert (code, "--json is for the list of claims" in text) == (2, True)


def test_writing_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "measured_path", lambda: tmp_path / "measured.json")
    docs._measured.cache_clear()
    try:
        monkeypatch.chdir(tmp_path)
        code, text = hemiola("reproduce", "--docs", "--out", tmp_path / "out")
        assert code == 2
        assert text.startswith("docs/results.md is not there; --docs is for a checkout")
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs/results.md").write_text("")
        code, text = hemiola("reproduce", "--docs", "--out", tmp_path / "out")
        assert (code, "no claim has run to its end there" in text) == (2, True)
        there = ClaimFolder(tmp_path / "out", claim_named("herding"), quick=True)
        with there.opened(resume=False):
            there.write("picture.svg", "<svg/>")
            number = claim_named("herding").checks[0].number
            definition = claim_named("herding").definition(quick=True)
            there.save(Finding({number: Measured(17.25, 0.5, 3)}, True, "Reproduced. Yes.", 0.25, "0", definition))
        code, text = hemiola("reproduce", "--docs", "--out", tmp_path / "out")
        assert code == 0
        page = (tmp_path / "docs/results.md").read_text()
        assert f"| {number} | 17.25 ± 0.50 | at least 8: holds |" in page
        assert "Only the quick version has run to its end" in page
        assert "| [herding](#herding) | not run |  | reproduced | 0.2 |" in page
        assert (tmp_path / "docs/results/herding.svg").read_text() == "<svg/>"
        assert docs.known_minutes("herding", quick=True) == 0.25
        assert hemiola("reproduce", "herding", "--docs")[0] == 2
        with there.opened(resume=True):
            there.save(
                Finding({number: Measured(17.25, 0.5, 3)}, True, "Reproduced. Yes.", 0.25, "0", "of another one")
            )
        assert hemiola("reproduce", "--docs", "--out", tmp_path / "out")[0] == 0
        page = (tmp_path / "docs/results.md").read_text()
        assert "| [herding](#herding) | not run |  | not run |  |" in page
        assert "17.25" not in page
    finally:
        docs._measured.cache_clear()
