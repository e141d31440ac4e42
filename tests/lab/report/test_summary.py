"""The table, on numbers that can be checked by hand."""

import io
import json
import math

import pytest

from hemiola.lab.report import summary_of
from hemiola.lab.report.conclusion import sentences
from hemiola.lab.report.read import read_folder
from hemiola.lab.report.summary import summarise
from hemiola.lab.report.terminal import table, tell


def text(renderable):
    from rich.console import Console

    console = Console(width=120, file=io.StringIO())
    console.print(renderable)

    return console.file.getvalue()


BASE = [[(0, 0, 0, 1.0), (2, 40, 4000, 0.01)]]  # two decades in 40 s
FAST = [[(0, 0, 0, 1.0), (2, 10, 4000, 0.01)]]


def test_mean_and_sample_deviation_over_seeds(tmp_path, folders):
    seeds = [[(1, 1, 1, loss)] for loss in (1.0, 2.0, 3.0)]
    (run,) = summarise(read_folder(folders.small(tmp_path, {"a": seeds}))).runs
    assert run.best.cells["train_gap"].mean == pytest.approx(2.0)
    assert run.best.cells["train_gap"].deviation == pytest.approx(1.0)
    assert math.isnan(run.best.cells["test_metric"].mean)
    assert run.best.seeds == "3 seeds"


def test_one_seed_has_no_deviation(tmp_path, folders):
    (run,) = summarise(read_folder(folders.small(tmp_path, {"a": BASE}))).runs
    assert math.isnan(run.best.cells["train_gap"].deviation)


def test_the_objective_is_the_gap_only_where_there_is_one(tmp_path, folders):
    assert summarise(read_folder(folders.small(tmp_path, {"a": BASE}))).objective == "train_gap"
    assert summarise(read_folder(folders.small(tmp_path, {"a": BASE}, convex=False))).objective == "train_loss"


def best(folder, measure):
    return [run.name for run in summarise(read_folder(folder)).runs if run.best.cells[measure].best]


def test_the_best_is_marked_with_those_it_cannot_be_told_from(tmp_path, folders):
    def seeds(*losses):
        return [[(1, 1, 1, loss)] for loss in losses]

    # b is behind a by 0.05, 0.1 and -0.06: nothing is shown; c by about one at every seed.
    runs = {"a": seeds(1.0, 1.1, 0.9), "b": seeds(1.05, 1.2, 0.84), "c": seeds(2.0, 2.1, 1.9)}
    assert best(folders.small(tmp_path, runs), "train_gap") == ["a", "b"]


def test_a_difference_that_every_seed_shows_is_not_hidden_by_how_much_seeds_differ(tmp_path, folders):
    runs = {"a": [[(1, 1, 1, loss)] for loss in (1.0, 5.0, 9.0)], "b": [[(1, 1, 1, loss)] for loss in (1.2, 5.2, 9.2)]}
    assert best(folders.small(tmp_path, runs), "train_gap") == ["a"]


def test_nothing_is_best_below_three_seeds(tmp_path, folders):
    runs = {"a": [[(1, 1, 1, 1.0)]] * 2, "b": [[(1, 1, 1, 2.0)]] * 2}
    assert best(folders.small(tmp_path, runs), "train_gap") == []


def test_the_best_of_a_prediction_and_of_a_measurement_are_marked_apart(tmp_path, folders):
    def runs(*names):
        return {name: [[(1, 1, 1, loss)]] * 3 for name, loss in zip(names, (1.0, 2.0, 0.1, 0.2), strict=True)}

    folder = folders.small(tmp_path, runs("a", "b", "c", "d"))
    about = folders.about({"a": {}, "b": {}, "c": {"cluster": "ray"}, "d": {"cluster": {"name": "torch"}}})
    (folder / "experiment.json").write_text(json.dumps(about))
    assert best(folder, "train_gap") == ["a", "c"]


def test_nothing_is_best_where_all_are_the_same(tmp_path, folders):
    folder = folders.small(tmp_path, {"a": BASE * 3, "b": FAST * 3})
    assert best(folder, "train_gap") == []
    assert best(folder, "bytes_per_worker") == []
    assert best(folder, "seconds") == ["b"]


def test_what_the_experiment_fixed_is_not_a_contest(tmp_path, folders):
    folder = folders.small(tmp_path, {"a": BASE * 3, "b": FAST * 3}, stop={"seconds": 10, "epochs": None})
    assert best(folder, "seconds") == []


def test_a_run_that_lost_a_seed_is_never_best(tmp_path, folders):
    runs = {"a": [[(1, 1, 1, 1.0)]] * 3, "b": [[(1, 1, 1, 0.1)]] * 3, "c": [[(1, 1, 1, 2.0)]] * 3}
    folder = folders.small(tmp_path, runs, status={("b", 1): "diverged"})
    assert best(folder, "train_gap") == ["a"]
    summary = summarise(read_folder(folder))
    assert summary.runs[1].best.seeds == "2 seeds, 1 diverged"


def test_a_metric_counts_in_its_own_direction(tmp_path, folders):
    rows = [
        {"run": run, "seed": seed, "status": "done", "test_metric": value + seed, "train_loss": 1}
        for run, value in (("a", 5.0), ("b", 7.0))
        for seed in range(3)
    ]
    about = folders.about({"a": {}, "b": {}}, convex=False)
    assert best(folders.write(tmp_path, about, rows, []), "test_metric") == ["b"]
    about["task"]["higher_is_better"] = False
    assert best(folders.write(tmp_path, about, rows, []), "test_metric") == ["a"]


def swept(tmp_path, folders, finals, statuses=None):
    rows = [
        {
            "run": "a",
            "seed": seed,
            "status": (statuses or {}).get(lr, "done"),
            "train_gap": final,
            "train_loss": final,
            "optimizer.lr": lr,
        }
        for lr, final in finals.items()
        for seed in range(2)
    ]
    about = folders.about({"a": {}}, sweep={"optimizer.lr": list(finals)})
    return read_folder(folders.write(tmp_path, about, rows, []))


def test_each_run_is_shown_at_its_best_point(tmp_path, folders):
    (run,) = summarise(swept(tmp_path, folders, {0.05: 0.3, 0.1: 0.1, 0.2: 0.2})).runs
    assert [dict(ended.point)["optimizer.lr"] for ended in run.points] == ["0.1", "0.2", "0.05"]
    assert run.at_edge() == []


def test_a_point_that_diverged_comes_last_whatever_its_loss(tmp_path, folders):
    (run,) = summarise(swept(tmp_path, folders, {0.05: 0.3, 0.1: 0.2, 0.2: 0.001}, {0.2: "diverged"})).runs
    assert [dict(ended.point)["optimizer.lr"] for ended in run.points] == ["0.1", "0.05", "0.2"]
    assert run.at_edge() == []  # the neighbour beyond was tried: it diverged


def test_a_best_point_at_the_edge_of_the_sweep_is_said(tmp_path, folders):
    (run,) = summarise(swept(tmp_path, folders, {0.05: 0.3, 0.1: 0.2, 0.2: 0.1})).runs
    assert run.at_edge() == ["optimizer.lr"]


def test_a_folder_without_results_says_so(tmp_path, folders):
    folder = folders.write(tmp_path, folders.about({"a": {}}), [], [])
    assert sentences(summary_of(folder)) == ["No run has results yet."]
    assert text(table(summary_of(folder))).strip() == "run"


def test_the_terminal_table_marks_the_best(tmp_path, folders):
    shown = text(table(summary_of(folders.small(tmp_path, {"slow": BASE * 3, "fast": FAST * 3}))))
    assert "10*" in shown
    assert "40*" not in shown
    assert "cluster time (s)" in shown


def test_the_terminal_says_the_conclusion_and_how_sure_it_is(demo):
    from rich.console import Console

    console = Console(width=100, file=io.StringIO())
    summary = summary_of(demo)
    tell(summary, console)
    shown = " ".join(console.file.getvalue().split())
    assert "against ordinary" in shown
    assert " ".join(sentences(summary)[0].split()) in shown
    assert "95 % intervals" in shown
