"""Figures for papers and slides."""

import shutil
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from hemiola.errors import InputError
from hemiola.lab.report import write_figure
from hemiola.lab.report.figures import FIGURES

SVG = "{http://www.w3.org/2000/svg}"


def marks(svg, kind):
    root = ElementTree.fromstring(svg)
    return [
        mark for group in root.iter(f"{SVG}g") if kind in group.get("class", "") for mark in group.iter(f"{SVG}path")
    ]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """A bare file name is relative to the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(demo, tmp_path):
    return shutil.copytree(demo, tmp_path / "copy")


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn(folder, tmp_path, name):
    path = write_figure(folder, f"{name}.svg")
    assert path.absolute() == tmp_path / f"{name}.svg"  # where the user is, not where the run is
    kind = "mark-rect" if name in ("staleness", "ledger") else "mark-line"
    drawn = marks(path.read_text(), kind)
    assert len(drawn) >= {"herding": 2, "period-over-time": 2, "spread-over-time": 2}.get(name, 5)
    assert all(mark.get("d") and "NaN" not in mark.get("d") for mark in drawn)


def test_a_figure_names_its_runs_and_axes(folder):
    text = write_figure(folder, "gap-vs-seconds.svg").read_text()
    for word in ("ordinary", "CD-GraB", "all three", "cluster time (h)", "gap f − f*"):
        assert f">{word}</text>" in text


def test_formats_are_what_their_suffix_says(folder, tmp_path):
    png = write_figure(folder, tmp_path / "gap-vs-bytes.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">I", png[16:20])[0] >= 960
    assert write_figure(folder, "gap-vs-bytes.PDF").read_bytes().startswith(b"%PDF")


def test_an_unknown_figure_lists_what_there_is(folder):
    with pytest.raises(
        InputError, match=r"unknown figure 'loss-vs-second'; did you mean 'loss-vs-seconds'\? Known: gap-vs-epochs, "
    ):
        write_figure(folder, "loss-vs-second.svg")
    with pytest.raises(InputError, match=r"a figure must end in \.svg, \.png, \.pdf, got 'loss-vs-seconds\.gif'"):
        write_figure(folder, "loss-vs-seconds.gif")
    with pytest.raises(InputError, match="a figure must end in"):
        write_figure(folder, "loss-vs-seconds")


def test_a_figure_without_data_says_so(tmp_path, folders):
    folder = folders.small(tmp_path, {"a": [[(0, 0, 0, 1.0)]]})
    for name in ("herding", "period-over-time", "staleness", "metric-vs-epochs"):
        with pytest.raises(InputError, match=f"nothing to draw in {name}: no run logged it"):
            write_figure(folder, f"{name}.svg")


def test_importing_the_report_imports_nothing_heavy():
    heavy = {"altair", "vl_convert", "torch", "numpy", "rich"}
    code = f"import sys, hemiola.lab.report; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
