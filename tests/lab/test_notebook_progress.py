"""Progress in a notebook: what is shown, by hand; and a real kernel that runs a real cell."""

import sys
from types import SimpleNamespace

import pytest

from hemiola.lab.experiment import Experiment
from hemiola.lab.notebook_progress import NotebookDisplay, in_notebook, progress_here
from hemiola.lab.progress import Display


class Handle:
    """Stands for IPython's handle: keeps what is shown."""

    def __init__(self):
        self.shown = []

    def display(self, content, raw, display_id):
        assert raw
        assert display_id
        self.shown.append(content)
        return self

    def update(self, content, raw):
        assert raw
        self.shown.append(content)


@pytest.fixture
def handle(monkeypatch):
    handle = Handle()
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=handle.display))
    return handle


def test_what_is_shown_is_rewritten_in_place(handle):
    cell, other = Experiment({"task": "digits-logistic", "seeds": [0, 1], "run": [{"name": "<b>"}]}).cells
    display = NotebookDisplay()
    with display:
        display.begin(2, 0)
        assert handle.shown[-1]["text/plain"] == "0 of 2 runs finished"
        display.started(cell)
        display._next = 0.0  # as if some time had passed
        display.heard(cell, {"progress": 0.5, "from": 0.0, "updates": 10, "loss": 0.25})
        lines = handle.shown[-1]["text/plain"].splitlines()
        assert lines[0].startswith("0 of 2 runs finished, about ")
        assert lines[1] == "<b> seed 0  50 %  loss 0.25"
        assert "&lt;b&gt; seed 0" in handle.shown[-1]["text/html"]
        assert '<progress value="0.250" max="1">' in handle.shown[-1]["text/html"]  # a quarter of everything
        before = len(handle.shown)
        display.heard(cell, {"progress": 0.6, "from": 0.0, "updates": 11, "loss": 0.2})
        assert len(handle.shown) == before  # too soon
        display.ended(cell, {"ended": "done"}, SimpleNamespace(row={"train_gap": 0.1}), 1.0)
        display.started(other)
        display.ended(other, {"ended": "failed", "error": "no memory"}, None, 1.0)
    assert handle.shown[-1]["text/plain"] == "1 of 2 runs finished\n<b> seed 1: FAILED: no memory"


def test_elsewhere_nothing_is_shown(monkeypatch):
    assert not in_notebook()
    assert type(progress_here()) is Display
    shell = SimpleNamespace(config={"TerminalIPythonApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert not in_notebook()
    shell.config = {"IPKernelApp": {}}
    assert isinstance(progress_here(), NotebookDisplay)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebook's own libraries
def test_a_real_notebook_shows_progress_and_then_results():
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    source = """
import hemiola
hemiola.train(task="digits-logistic", workers=2, batch=50, seeds=[0], stop={"epochs": 1}, run=[{"name": "here"}])
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    client.NotebookClient(notebook, timeout=280, kernel_name="python3").execute()
    progress, results = notebook.cells[0].outputs
    assert progress.data["text/plain"] == "1 of 1 runs finished"
    assert "<progress" in progress.data["text/html"]
    assert "here" in results.data["text/html"]
