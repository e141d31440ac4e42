"""Reading folders: whole ones, unfinished ones, damaged ones."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hemiola.errors import InputError
from hemiola.files import write_whole
from hemiola.lab.report import summary_of, write_report
from hemiola.lab.report.conclusion import sentences
from hemiola.lab.report.log import number, point_of
from hemiola.lab.report.read import read_folder, together


def test_a_whole_folder(demo):
    folder = read_folder(demo)
    assert folder.runs == ["ordinary", "CD-GraB", "ADPSGD", "AdaSync", "all three"]
    assert len(folder.rows) == 15
    assert {len(log) for log in folder.log.values()} == {31}
    assert folder.predicted["AdaSync"]["staleness"] == 1.0
    assert folder.shared["workers"] == 8
    assert "order" not in folder.shared


def test_settings_repeated_in_every_run_are_shared(tmp_path, folders):
    about = folders.about({"a": {"batch": 4, "lr": 1}, "b": {"batch": 4, "lr": 2}})
    folder = read_folder(folders.write(tmp_path, about, [], []))
    assert folder.shared["batch"] == 4
    assert "lr" not in folder.shared


def test_a_line_that_is_being_written_is_left_out(tmp_path, folders):
    folder = folders.small(tmp_path, {"a": [[(0, 0, 0, 1.0), (1, 1, 1, 0.5)]]})
    log = folder / "log.jsonl"
    log.write_text(log.read_text()[:-40])
    assert len(read_folder(folder).log["a", (), "0"]) == 1


def test_a_last_line_without_its_newline_counts(tmp_path, folders):
    folder = folders.small(tmp_path, {"a": [[(0, 0, 0, 1.0), (1, 1, 1, 0.5)]]})
    log = folder / "log.jsonl"
    log.write_text(log.read_text().rstrip("\n"))
    assert len(read_folder(folder).log["a", (), "0"]) == 2


def test_an_evaluation_made_again_after_a_resume_counts_once(tmp_path, folders):
    folder = folders.small(tmp_path, {"a": [[(0, 0, 0, 1.0), (1, 1, 1, 0.5)]]})
    with (folder / "log.jsonl").open("a") as log:
        log.write(json.dumps(folders.line("a", 0, updates=1, epochs=1, train_loss=0.25)) + "\n")
    log = read_folder(folder).log["a", (), "0"]
    assert log.numbers["train_loss"].tolist() == [1.0, 0.25]


def test_a_run_that_has_only_begun(tmp_path, folders):
    folder = folders.write(tmp_path, folders.about({"a": {}}), [], [])
    (folder / "results.csv").unlink()
    (folder / "log.jsonl").unlink()
    assert read_folder(folder).runs == ["a"]
    assert sentences(summary_of(folder)) == ["No run has results yet."]


def damaged(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        write_report(folder)
    assert not (folder / "report.html").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("experiment.json", b"{", "experiment.json is not JSON"),
        ("experiment.json", b"[" * 100_000, "experiment.json is not JSON"),
        ("experiment.json", b"3", "experiment.json must hold a JSON object, got int"),
        ("experiment.json", b"\xff\xfe", "experiment.json is not UTF-8"),
        ("results.csv", b"a,b\n1,2\n", "results.csv line 2 has no run or no status"),
        ("results.csv", b"\xff\xfe", "results.csv is not UTF-8"),
        ("log.jsonl", b"{}\n", "log.jsonl line 1 has no run"),
        ("log.jsonl", b"nonsense\n{}\n", "log.jsonl line 1 is not JSON"),
        ("log.jsonl", b"[1]\n", "log.jsonl line 1 must hold a JSON object, got list"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, folders, name, content, says):
    folder = folders.small(tmp_path, {"a": [[(0, 0, 0, 1.0)]]})
    assert says in damaged(folder, name, content)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="is not a folder; give the folder that `hemiola run --out` wrote"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"experiment\.json is missing"):
        read_folder(tmp_path)


def test_the_log_and_the_table_agree_on_a_point_of_the_sweep():
    assert point_of({"lr": "0.10", "on": "True", "seed": "12"}) == point_of({"seed": 12, "lr": 1e-1, "on": True})
    assert point_of({"steps": "[1, 2]"}) == point_of({"steps": [1, 2]})
    assert point_of({"a": 2**60}) != point_of({"a": 2**60 + 1})


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())))
def test_anything_is_a_number_or_nan(value):
    made = number(value)
    assert isinstance(made, float)
    if isinstance(value, bool | list | None):
        assert math.isnan(made)


def test_a_huge_integer_is_infinite_not_an_error():
    assert number(10**400) == math.inf


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path):
    target = tmp_path / "report.html"
    target.write_bytes(b"old")
    assert write_whole(target, b"new").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / "no" / "such" / "folder.svg", b"")


# ------------------------------------------------------------------------------------------------- several folders


def test_folders_together_name_runs_after_their_folder_where_they_must(tmp_path, folders):
    points = [[(0, 0, 0, 1.0), (1, 1, 1, 0.5)]]
    one = folders.small(tmp_path / "one", {"ordinary": points, "a": points})
    other = folders.small(tmp_path / "other", {"ordinary": points, "b": points}, workers=4)
    both = together([read_folder(one), read_folder(other)])
    assert both.runs == ["ordinary · one", "a", "ordinary · other", "b"]
    assert {row.run for row in both.rows} == {run for run, _, _ in both.log} == set(both.runs)
    assert both.settings("a")["workers"] == 8
    assert both.settings("b")["workers"] == 4
    assert both.shared["task"] == "digits-logistic"
    assert "workers" not in both.shared
    assert together([read_folder(one)]).runs == ["ordinary", "a"]


def test_folders_of_the_same_name_are_told_apart_by_more_of_their_path(tmp_path, folders):
    points = [[(0, 0, 0, 1.0), (1, 1, 1, 0.5)]]
    paths = [folders.small(tmp_path / name / "out", {"a": points}) for name in ("x", "y")]
    assert together([read_folder(path) for path in paths]).runs == ["a · x/out", "a · y/out"]
    with pytest.raises(InputError, match="is given twice"):
        together([read_folder(paths[0])] * 2)


def test_different_tasks_share_no_metric(tmp_path, folders):
    points = [[(0, 0, 0, 1.0), (1, 1, 1, 0.5)]]
    first = read_folder(folders.small(tmp_path / "one", {"a": points}))
    about = json.loads((tmp_path / "one" / "experiment.json").read_text())
    about["task"] |= {"name": "other", "metric": "perplexity", "convex": False}
    second = read_folder(folders.write(tmp_path / "two", about, [], []))
    assert together([first, second]).task == {
        "name": "digits-logistic and other",
        "higher_is_better": True,
        "examples": 1437,
        "parameters": 650,
    }
