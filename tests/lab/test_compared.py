"""The words of the terminal and the report, from Python."""

import base64
import re
import sys
import xml.etree.ElementTree as ElementTree
from html import escape
from types import SimpleNamespace

import pytest

from hemiola import InputError, Results, train
from hemiola.lab.report import summary_of
from hemiola.lab.report.conclusion import sentences

pytestmark = pytest.mark.slow

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


def test_a_notebook_shows_the_conclusion_the_table_and_pictures():
    results = train(**{**EXPERIMENT, "stop": {"epochs": 4}})
    html = results._repr_html_()
    assert escape(results.conclusion()[0]) in html
    assert html.count("<tr>") == 4
    assert "[bold]" in html
    pictures = re.findall('src="data:image/svg.xml;base64,([^"]*)"', html)
    assert len(pictures) == 2
    for picture in pictures:
        assert ElementTree.fromstring(base64.b64decode(picture)).tag.endswith("svg")
    assert "<script" not in html


def test_a_frame_has_a_row_for_every_cell_or_says_what_it_needs(monkeypatch):
    results = train(**{**EXPERIMENT, "seeds": [0], "stop": {"epochs": 1}})
    frames = SimpleNamespace(DataFrame=list)
    monkeypatch.setitem(sys.modules, "pandas", frames)
    assert [row["run"] for row in results.to_frame()] == ["ordinary", "CD-GraB", "[bold]"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="to_frame needs pandas, which is not installed: pip install pandas"):
        results.to_frame()
