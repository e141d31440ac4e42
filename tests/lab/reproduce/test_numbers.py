"""Numbers and curves of claims by hand; every check of a claim can pass and can fail."""

import math

import numpy as np
import pytest

from hemiola.lab.report.log import Log
from hemiola.lab.report.read import Folder
from hemiola.lab.reproduce.numbers import fit_slope, measure
from hemiola.lab.reproduce.pictures import curve_rows
from hemiola.lab.reproduce.run import measured
from hemiola.lab.reproduce.table import (
    Number,
    Picture,
    claim_named,
    claims,
    load_experiment,
)
from hemiola.lab.reproduce.verdict import judge

pytestmark = pytest.mark.slow

VERSIONS = pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
WITH_FILES = pytest.mark.parametrize("name", [claim.name for claim in claims().values() if claim.files])


def folder(logs, higher_is_better=True):
    """A results folder: by run (or run, point, seed) the evaluations as dicts of numbers."""
    log = {}
    for key, lines in logs.items():
        run_name, point, seed = key if isinstance(key, tuple) else (key, (), "0")
        columns = dict.fromkeys(["epochs", *(name for line in lines for name in line)])
        log[run_name, point, seed] = Log({c: np.array([line.get(c, math.nan) for line in lines]) for c in columns})
    return Folder((), "", {}, {}, {"higher_is_better": higher_is_better}, {}, {}, (), log)


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


def test_a_picture_leaves_out_what_comes_before_its_start():
    lines = [{"epochs": e, "train_loss": loss} for e, loss in ((0.0, 7.6), (5.0, 3.66), (10.0, 3.54))]
    there = folder({"a": lines})
    every = [row["x"] for row in curve_rows(Picture(file="f"), there)]
    assert every == [0.0, 5.0, 10.0]
    later = curve_rows(Picture(file="f", start=1), there)
    assert [(row["x"], row["mean"]) for row in later] == [(5.0, 3.66), (10.0, 3.54)]


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
