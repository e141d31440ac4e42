"""What there is, listed; a schema for editors; a first experiment that runs as it is."""

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from hemiola.errors import InputError
from hemiola.lab.cli import app
from hemiola.lab.experiment import Experiment
from hemiola.lab.policies import FAMILIES, describe_policies
from hemiola.lab.scaffold import write_new
from hemiola.lab.schema import experiment_schema
from hemiola.options import default_options

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def shown(*arguments, width=80):
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": str(width), "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return done.stdout


# --------------------------------------------------------------------------------------------------------- policies


def test_every_policy_is_listed_and_every_option_says_what_it_does():
    found = {(entry.family, entry.name): entry for entry in describe_policies()}
    assert set(found) == {(family, name) for family, table in FAMILIES.items() for name in table}
    for entry in found.values():
        assert entry.does
        for option in (*entry.options, *entry.shared):
            assert option.does, (entry.name, option.name)
            assert "`" not in option.does


def test_defaults_are_those_of_the_constructor():
    (entry,) = describe_policies("adaptive")
    assert {option.name: option.default for option in entry.options} == default_options(FAMILIES["period"]["adaptive"])
    assert "wire" in {option.name for option in entry.shared}


def test_an_unknown_policy_names_the_nearest():
    with pytest.raises(InputError, match="unknown policy 'cdgrab'; did you mean 'cd-grab'"):
        describe_policies("cdgrab")


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize("arguments", [("tasks",), ("policies",), ("policies", "k-async")])
def test_no_word_is_broken_on_a_narrow_terminal(arguments, width):
    narrow, wide = shown(*arguments, width=width), shown(*arguments, width=400)
    assert max(map(len, narrow.splitlines()[:-1])) <= width
    assert narrow.split() == wide.split()
    assert "\x1b" not in narrow


def test_lists_are_json_too():
    records = json.loads(shown("policies", "--json"))
    assert {"family": "pace", "name": "k-async"}.items() <= records[-2].items()
    assert json.loads(shown("tasks", "--json"))[0]["name"] == "digits-logistic"
    assert all("present" in found for found in json.loads(shown("data", "list", "--json")))


def test_predict_keeps_its_first_columns_on_a_narrow_terminal():
    printed = shown("predict", "--workers", "4", "--delay", "exponential(1)", "--k", "2", width=60)
    header, first = [line.split() for line in printed.splitlines() if line.startswith(("pace", "k-sync"))]
    assert header[:4] == ["pace", "K", "theory", "simulated"]
    assert first[1] == "2"
    assert "…" not in printed


# ----------------------------------------------------------------------------------------------------------- schema


def test_the_schema_takes_every_experiment_of_the_project():
    schema = experiment_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    files = [*(ROOT / "experiments").glob("*.toml"), *(ROOT / "examples").glob("*.toml")]
    assert files
    for file in files:
        jsonschema.validate(tomllib.loads(file.read_text()), schema)


@pytest.mark.parametrize(
    "wrong",
    [
        {"task": "digits-logistics"},
        {"task": "digits-logistic", "workres": 3},
        {"task": "digits-logistic", "workers": 0},
        {"task": "digits-logistic", "order": "cdgrab"},
        {"task": "digits-logistic", "period": {"name": "adaptive", "strat": 4}},
        {"task": "digits-logistic", "pace": {"name": "k-async", "k": "adasink"}},
        {"task": "digits-logistic", "run": [{"nmae": "a"}]},
        {"task": "digits-logistic", "seeds": [0, 0]},
    ],
)
def test_the_schema_refuses_what_run_refuses(wrong):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, experiment_schema())
    with pytest.raises(InputError):
        Experiment(wrong).cells[0].task(None)


def test_the_schema_is_printed():
    assert json.loads(shown("schema")) == experiment_schema()


# -------------------------------------------------------------------------------------------------------------- new


def test_a_new_experiment_runs_as_it_is(tmp_path):
    assert "hemiola run" in shown("new", str(tmp_path / "mine"))
    given = tomllib.loads((tmp_path / "mine" / "experiment.toml").read_text())
    jsonschema.validate(given, experiment_schema())
    experiment = Experiment.load(tmp_path / "mine" / "experiment.toml", {"stop": {"updates": 2}, "seeds": [0]})
    assert experiment.runs == ["ordinary", "order", "period", "pace"]
    from hemiola.lab.execute import run_experiment

    outcome = run_experiment(experiment, tmp_path / "results", jobs=1)
    assert (outcome.finished, outcome.failed) == (4, [])


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "my_task.py").write_text("mine")
    with pytest.raises(InputError, match="already there; choose another folder"):
        write_new(tmp_path)
    assert (tmp_path / "my_task.py").read_text() == "mine"
    assert not (tmp_path / "experiment.toml").exists()
    with pytest.raises(InputError, match="cannot be written"):
        write_new(tmp_path / "my_task.py" / "inside")


def test_completion_is_switched_on():
    assert "--install-completion" in shown("--help", width=120)
