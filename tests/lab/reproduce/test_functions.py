"""Claims that are measured by a function: what it finds, keeps, draws and says."""

import io
import math
import os
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from hemiola.lab.progress import Display
from hemiola.lab.reproduce import pictures, run
from hemiola.lab.reproduce.folder import ClaimFolder
from hemiola.lab.reproduce.numbers import Measured
from hemiola.lab.reproduce.parts import Parts
from hemiola.lab.reproduce.table import (
    Picture,
    claim_named,
    claims,
)
from hemiola.lab.reproduce.verdict import Judged, in_minutes, in_words, judge, shown, with_deviation

pytestmark = pytest.mark.slow


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
    monkeypatch.syspath_prepend(Path(__file__).parents[1])  # of this process, and so of those of a pool
    from pool_calls import noted

    calls = {str(number): partial(noted, tmp_path / "calls", number) for number in range(3)}
    expected = {"0": [0.0], "1": [1.0], "2": [2.0]}
    shown = io.StringIO()
    parts = Parts(tmp_path / "parts", jobs=2, display=Display(Console(file=shown)))
    parts.once("1", calls["1"])
    assert parts.all(calls) == parts.all(calls) == expected
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
    assert (in_minutes(0.04), in_minutes(0.05), in_minutes(71.12)) == ("< 0.1", "0.1", "71.1")
    assert with_deviation(Measured(1.23456, 0.0123, 3)) == "1.235 ± 0.012"
    assert with_deviation(Measured(19.2, 3.4, 3)) == "19.2 ± 3.4"
    assert with_deviation(Measured(3.2e-6, 1e-6, 3)) == "3.2e-06 ± 1e-06"
    assert with_deviation(Measured(2.0)) == "2"
