"""`hemiola reproduce`: a claim from end to end, bad input, and the page of results."""

import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hemiola.errors import InputError
from hemiola.lab import cli
from hemiola.lab.reproduce import docs, run
from hemiola.lab.reproduce import table as tables
from hemiola.lab.reproduce.folder import ClaimFolder, Finding
from hemiola.lab.reproduce.numbers import Measured
from hemiola.lab.reproduce.run import reproduce
from hemiola.lab.reproduce.table import (
    claim_named,
    claims,
    load_experiment,
    table,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


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
    small = claim.model_copy(
        update={
            "options": {"workers": 3, "laws": ["exponential(1)"], "updates": 300},
            "quick_options": {"updates": 400},
        }
    )
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


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("hemiola.lab.reproduce.functions.herding", interrupted)
    code, text = hemiola("reproduce", "herding", "--quick", "--out", tmp_path)
    assert code == 130
    again = f"hemiola reproduce herding --out {tmp_path} --quick --resume"
    assert text.endswith(f"hemiola: stopped in herding; go on with: {again}\n")
    assert ClaimFolder(tmp_path, claim_named("herding"), quick=True).state == "stopped"


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
