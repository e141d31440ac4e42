"""The words of the terminal and the report, from Python."""

from hemiola import Results, train
from hemiola.lab.report import summary_of
from hemiola.lab.report.conclusion import sentences

EXPERIMENT = {
    "task": "breast-cancer-logistic",
    "workers": 2,
    "batch": 8,
    "seeds": [0, 1, 2],
    "stop": {"epochs": 6},
    "run": [{"name": "ordinary"}, {"name": "CD-GraB", "order": "cd-grab"}, {"name": "[bold]", "batch": 16}],
}


def test_train_says_what_the_terminal_and_the_report_say(tmp_path):
    results = train(out=tmp_path / "out", **EXPERIMENT)
    assert isinstance(results, Results)
    assert isinstance(results, list)
    assert results[0].row["run"] == "ordinary"
    assert results.conclusion() == sentences(summary_of(tmp_path / "out"))
    assert list(results.verdicts) == ["CD-GraB", "[bold]"]
    for name, verdict in results.verdicts.items():
        assert verdict.reference == "ordinary"
        assert verdict.seeds == 3
        assert any(name in line for line in results.conclusion())


def test_without_a_folder_the_words_are_the_same(tmp_path):
    # Nothing is written, so the conclusion comes from the results alone.
    small = {**EXPERIMENT, "seeds": [0], "stop": {"epochs": 1}}
    assert train(**small).conclusion() == train(out=tmp_path / "out", **small).conclusion()


def test_results_print_as_the_terminal_shows_them():
    results = train(**{**EXPERIMENT, "seeds": [0], "stop": {"epochs": 1}})
    shown = " ".join(str(results).split())
    assert shown.startswith("run gap")
    for line in results.conclusion():
        assert " ".join(line.split()) in shown
    assert repr(results) == "<3 results of ordinary, CD-GraB, [bold]; print() shows the comparison>"
