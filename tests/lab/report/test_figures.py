"""Figures for papers and slides."""

import shutil
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from hemiola.errors import InputError
from hemiola.lab.report import write_figure
from hemiola.lab.report.charts import CHARTS

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


# What the folder has, and how many marks of which kind it makes at least.
DRAWN = {
    **{name: ("mark-line", 5) for name in CHARTS if "-vs-" in name},
    **dict.fromkeys(("time-to-target", "bytes-to-target", "epochs-to-target", "end"), ("mark-rect", 5)),
    **dict.fromkeys(("herding", "period-over-time", "spread-over-time"), ("mark-line", 2)),
    **dict.fromkeys(("staleness", "ledger"), ("mark-rect", 5)),
}
ELSEWHERE = {"sweep", "k-over-time", "lr-over-time", "timeline", "labels"}


def test_every_chart_is_tested():
    assert set(DRAWN) | ELSEWHERE == set(CHARTS)


@pytest.mark.parametrize("name", DRAWN)
def test_every_figure_is_drawn(folder, tmp_path, name):
    path = write_figure(folder, f"{name}.svg")
    assert path.absolute() == tmp_path / f"{name}.svg"  # where the user is, not where the run is
    kind, least = DRAWN[name]
    drawn = marks(path.read_text(), kind)
    assert len(drawn) >= least
    assert all(mark.get("d") and "NaN" not in mark.get("d") for mark in drawn)


def test_what_changes_over_time_and_what_workers_did(tmp_path, folders):
    log = [
        folders.line(
            "a",
            0,
            updates=at,
            epochs=at,
            seconds=10 * at,
            bytes_per_worker=at,
            lr=0.2 / (1 + at),
            train_loss=1 / (1 + at),
            pace={"k": 2 + at, "changes": [[10 * at, 2 + at]]},
            timeline={
                "computes": [[0, 10 * at, 10 * at + 4], [1, 10 * at, 10 * at + 9]],
                "sends": [[0, 10 * at + 4, 10 * at + 5]],
            },
            labels={"cat": {"examples": 2, "used": 6}, "dog": {"examples": 4, "used": 3, "dropped": 2}},
        )
        for at in range(3)
    ]
    done = [{"run": "a", "seed": 0, "status": "done", "train_loss": 1 / 3}]
    folder = folders.write(tmp_path / "b", folders.about({"a": {}}, convex=False), done, log)
    for name, kind, least in (
        ("k-over-time", "mark-line", 1),
        ("lr-over-time", "mark-line", 1),
        ("timeline", "mark-rect", 6),
        ("labels", "mark-rect", 3),
    ):
        drawn = marks(write_figure(folder, f"{name}.svg").read_text(), kind)
        assert len(drawn) >= least, name
        assert all("NaN" not in mark.get("d") for mark in drawn)


def test_a_sweep_is_a_figure(tmp_path, folders):
    folder = folders.realistic(tmp_path / "s", {"ordinary": {}, "b": {}}, seeds=2, epochs=3, sweep={"lr": [0.1, 0.2]})
    assert len(marks(write_figure(folder, "sweep.svg").read_text(), "mark-line")) == 2


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
        InputError, match=r"unknown figure 'loss-vs-second'; did you mean 'loss-vs-seconds'\? Known: time-to-target, "
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
    heavy = {"vl_convert", "torch", "numpy", "rich"}
    code = f"import sys, hemiola.lab.report; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
