"""The example of policies of one's own: it conforms, runs by path on real clusters too, and is what the page shows."""

import textwrap
from pathlib import Path

import pytest

from hemiola.lab.execute import run_experiment
from hemiola.lab.experiment import Experiment, parse_change
from hemiola.testing import check_order, check_pace, check_period

ROOT = Path(__file__).parents[1]
FILE = ROOT / "examples" / "own-policy.toml"
CHECKS = {"LargestFirst": check_order, "Patient": check_period, "Growing": check_pace}


@pytest.mark.parametrize("name", CHECKS)
def test_the_example_conforms(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import own_policy

    CHECKS[name](vars(own_policy)[name])


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize("changes", [[], ['cluster={name="torch", device="cpu"}', "pace=k-sync", "workers=2"]])
def test_the_experiment_file_runs_them_by_path(changes, tmp_path):
    experiment = Experiment.load(FILE, dict(parse_change(change) for change in changes))
    outcome = run_experiment(experiment, tmp_path / "out")
    assert (outcome.finished, outcome.failed) == (2, [])


def test_the_documentation_shows_the_example():
    page = (ROOT / "docs" / "own-policy.md").read_text(encoding="utf-8")
    for name in ("own_policy.py", "own-policy.toml"):
        text = (ROOT / "examples" / name).read_text(encoding="utf-8")
        assert textwrap.indent(text, "    ").rstrip() in page
