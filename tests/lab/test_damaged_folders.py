"""Nothing lost, nothing mixed up: damaged, swapped and foreign files in an experiment's folder."""

import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import damaged_folders
from damaged_folders import SHAPES, Templates, check, experiment, results, run, weights

from hemiola.errors import InputError
from hemiola.lab.store import Store, reopen

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> Templates:
    return Templates(tmp_path_factory.mktemp("templates"))


@pytest.fixture
def half(templates, tmp_path) -> Path:
    """Two cells are finished, one has a checkpoint, one has not begun."""
    shutil.copytree(templates.half, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def whole(templates, tmp_path) -> Path:
    """Everything is finished, so that only what was damaged is trained again."""
    shutil.copytree(templates.whole, tmp_path / "out")
    return tmp_path / "out"


def go_on(folder: Path, templates: Templates) -> list[str]:
    """Resume; what comes out must be right. Returns what was said."""
    said: list[str] = []
    run(Store(folder, experiment()), said)
    assert results(folder) == templates.results
    assert all(templates.weights[cell] == digest for cell, digest in weights(folder).items())
    return said


def test_undamaged_it_ends_as_if_never_interrupted(half, templates):
    assert go_on(half, templates) == []
    assert weights(half) == templates.weights


@pytest.mark.parametrize("number", range(36))
def test_whatever_happens_to_a_folder(templates, tmp_path, number):
    """`python tests/lab/damaged_folders.py 1000` does more of these."""
    chance = random.Random(10_000 + number)
    check(templates, tmp_path / "out", chance, 1 + number % 3)


@pytest.mark.parametrize("text", SHAPES, ids=lambda text: repr(text[:20]))
def test_a_result_of_the_wrong_shape_is_set_aside(whole, templates, text):
    result = whole / "cells" / "00-a-seed0" / "result.json"
    result.write_bytes(text)
    (line,) = go_on(whole, templates)
    assert line.startswith(f"{result}: is damaged")
    assert line.endswith("; kept as result.json.set-aside")
    assert (result.parent / "result.json.set-aside").read_bytes() == text


def test_a_changed_number_in_a_result_is_noticed(half, templates):
    result = half / "cells" / "00-a-seed0" / "result.json"
    text = result.read_text()
    result.write_text(text.replace('"updates": 9', '"updates": 8', 1))
    assert result.read_text() != text
    (line,) = go_on(half, templates)
    assert "result.json: is damaged: its checksum is wrong; kept as" in line


def test_one_flipped_bit_of_a_checkpoint_is_noticed(half, templates):
    """torch.load does not check the checksum of its archive: the old code went on from other weights."""
    (checkpoint,) = half.glob("cells/*/checkpoint.pt")
    content = bytearray(checkpoint.read_bytes())
    state = torch.load(checkpoint, weights_only=True)  # what follows the archive does not disturb torch
    held = state["weights"]["held"][state["weights"]["now"]].numpy().tobytes()
    content[content.index(held) + 7] ^= 0x40
    checkpoint.write_bytes(content)
    assert not torch.equal(
        torch.load(checkpoint, weights_only=True)["weights"]["held"][state["weights"]["now"]],
        state["weights"]["held"][state["weights"]["now"]],
    )
    (line,) = go_on(half, templates)
    assert line == (
        f"{checkpoint}: is damaged: its checksum is wrong; the part starts again; kept as checkpoint.pt.set-aside"
    )


def test_a_checkpoint_that_was_saved_again_is_no_checkpoint(half, templates):
    (checkpoint,) = half.glob("cells/*/checkpoint.pt")
    state = torch.load(checkpoint, weights_only=True)
    torch.save(state | {"status": "done"}, checkpoint)
    (line,) = go_on(half, templates)
    assert "checkpoint.pt: is damaged" in line


def test_another_cells_files_are_not_taken_over(half, templates):
    cells = half / "cells"
    (checkpoint,) = half.glob("cells/*/checkpoint.pt")
    (cells / "01-b-seed1").mkdir()
    shutil.copy(checkpoint, cells / "01-b-seed1")
    shutil.copy(cells / "00-a-seed0" / "result.json", cells / "00-a-seed1" / "result.json")
    said = go_on(half, templates)
    assert len(said) == 2
    assert "00-a-seed1/result.json: belongs to run 'a', seed 0; kept as" in said[0]
    assert "01-b-seed1/checkpoint.pt: belongs to run 'b', seed 0; the part starts again; kept as" in said[1]


def test_an_older_experiments_cells_are_not_taken_over(templates, tmp_path):
    """Its experiment.json is gone; the cells have the same names and other settings."""
    out = tmp_path / "out"
    shutil.copytree(templates.other, out)
    (out / "experiment.json").unlink()
    with pytest.raises(InputError, match=r"holds parts of an experiment, but no experiment.json; add --resume"):
        run(Store(out, experiment()), [], resume=False)
    said = go_on(out, templates)
    assert len(said) == 3
    assert all("with other settings" in line for line in said)


def test_without_experiment_json_good_cells_are_known(half, templates):
    (half / "experiment.json").unlink()
    assert go_on(half, templates) == []


@pytest.mark.parametrize("text", SHAPES, ids=lambda text: repr(text[:20]))
def test_a_damaged_experiment_json_is_set_aside(whole, templates, text):
    path = whole / "experiment.json"
    path.write_bytes(text)
    with pytest.raises(InputError, match=r"experiment.json: is damaged; run the experiment's file again with --resume"):
        reopen(whole)
    with pytest.raises(InputError, match=r"experiment.json: is damaged; add --resume"):
        run(Store(whole, experiment()), [], resume=False)
    (line,) = go_on(whole, templates)
    assert line == f"{path}: is damaged; kept as experiment.json.set-aside, and parts are known by what they hold"
    assert len(reopen(whole).experiment.cells) == 4


def test_a_changed_letter_in_experiment_json_is_no_other_experiment(half, templates):
    path = half / "experiment.json"
    path.write_text(path.read_text().replace("0.3", "0.4", 1))
    assert len(go_on(half, templates)) == 1


@pytest.mark.parametrize("name", ["result.json", "checkpoint.pt", "weights.pt"])
def test_a_folder_in_place_of_a_file_is_set_aside(half, templates, name):
    path = half / "cells" / ("01-b-seed0" if name == "checkpoint.pt" else "00-a-seed0") / name
    path.unlink()
    path.mkdir()
    (line,) = go_on(half, templates)
    assert f"{name}: is not a file" in line or "is missing" in line


def test_a_file_in_place_of_a_cells_folder_is_set_aside(half, templates):
    shutil.rmtree(half / "cells" / "00-a-seed0")
    (half / "cells" / "00-a-seed0").write_text("x")
    (line,) = go_on(half, templates)
    assert line.endswith("00-a-seed0: is not a folder; kept as 00-a-seed0.set-aside")


@pytest.mark.parametrize(("name", "said"), [(".lock", "cannot be opened: Is a directory"), ("results.csv", "written")])
def test_a_folder_where_only_a_file_can_be_is_one_line(half, name, said):
    (half / name).unlink()
    (half / name).mkdir()
    with pytest.raises(InputError, match=rf"{name}: .*{said}"):
        run(Store(half, experiment()), [])


def test_damaged_weights_are_not_loaded_and_the_result_stands(half, templates):
    path = half / "cells" / "00-a-seed0" / "weights.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    store = Store(half, experiment())
    with pytest.raises(
        InputError, match=r"weights.pt: is damaged: it is not what result.json says; to train this part"
    ):
        store.finished(store.experiment.cells[0]).model()
    (line,) = go_on(half, templates)
    assert line == (
        f"{path}: is damaged: it is not what result.json says; the result of this part stands; "
        "kept as weights.pt.set-aside"
    )


def test_a_checkpoint_of_another_hemiola_is_left_alone(half, monkeypatch):
    """It is good work: it is neither used nor moved."""
    (checkpoint,) = half.glob("cells/*/checkpoint.pt")
    before = checkpoint.read_bytes()
    monkeypatch.setattr("hemiola.training.loop.VERSION", 99)
    with pytest.raises(InputError, match=r"cannot go on from its checkpoint.pt: the state of 'hemiola-training'"):
        run(Store(half, experiment()), [])
    assert checkpoint.read_bytes() == before


def test_the_damage_is_real(templates, tmp_path):
    """The script must not be green because it changes nothing."""
    kinds = set()
    for number in range(100):
        shutil.copytree(templates.half, tmp_path / str(number))
        chance = random.Random(number)
        what = damaged_folders.damage(tmp_path / str(number), templates, chance)
        if damaged_folders.contents_of(tmp_path / str(number)) != damaged_folders.contents_of(templates.half):
            kinds.add(what.split()[0])
    assert {"flip", "truncate", "shape", "bytes", "gone", "swap", "foreign", "append", "edit"} <= kinds
