"""Folders of experiments, damaged in every way we could think of, and what must come of them.

``python tests/lab/damaged_folders.py 1000`` damages so many folders and resumes each. The rule, whatever was done:

* the run ends well, and then results and weights are those of a run that nothing happened to; or it is refused with one
  line that names a file;
* what was good is still where it was, and what was damaged is still somewhere;
* what `hemiola report` and `hemiola export` read afterwards is good, or refused with one line.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import tempfile
from multiprocessing import Pipe
from pathlib import Path

import torch

from hemiola.errors import InputError
from hemiola.lab import models
from hemiola.lab.experiment import Experiment
from hemiola.lab.report import summary_of
from hemiola.lab.results import COLUMNS
from hemiola.lab.store import Store, reopen
from hemiola.lab.worker import CellWatch, train_cell

HERE = Path(__file__).parent


def experiment(lr: float = 0.3) -> Experiment:
    return Experiment(
        {
            "task": "tiny_task:make",
            "workers": 2,
            "batch": 4,
            "stop": {"epochs": 3},
            "seeds": [0, 1],
            "optimizer": {"lr": lr, "momentum": 0.5},
            "run": [{"name": "a"}, {"name": "b", "order": "cd-grab"}],
        },
        HERE,
    )


class _StopsAt(CellWatch):
    """Stops a cell after so many updates; writes a checkpoint, as Ctrl-C would."""

    def __init__(self, folder, version):
        super().__init__(Pipe()[0], folder)
        self.version = version
        self.began_at = None

    def tell(self, message):
        pass

    def __call__(self, training):
        if self.began_at is None:
            self.began_at = training.version
        self.stopped = training.version >= self.version
        return super().__call__(training)


def run(store: Store, said: list[str], stop: dict[int, int] | None = None, resume: bool = True) -> dict[int, int]:
    """What `run_experiment` does, in this process; returns the first update of every cell that was trained."""
    first = {}
    store.open({}, resume, say=said.append)
    try:
        for number, cell in enumerate(store.experiment.cells):
            if store.finished(cell) is None and (stop is None or number in stop):
                folder = store.cell_folder(cell)
                watch = _StopsAt(folder, 10**9 if stop is None else stop[number])
                watch.note = said.append
                with folder.working():
                    result = train_cell(cell, None, folder, watch)
                    if result is not None:
                        folder.save_result(result)
                first[number] = watch.began_at
        store.assemble()
    finally:
        store.close()
    return first


def results(folder: Path) -> list[list[str]]:
    wall = COLUMNS.index("wall_seconds")
    lines = (folder / "results.csv").read_text().splitlines()
    return [[value for at, value in enumerate(line.split(",")) if at != wall] for line in lines]


def weights(folder: Path) -> dict[str, str]:
    """A digest of the numbers in every weights.pt."""
    found = {}
    for path in sorted(folder.glob("cells/*/weights.pt")):
        state = torch.load(path, weights_only=True)
        numbers = b"".join(value.numpy().tobytes() for value in state.values())
        found[path.parent.name] = hashlib.sha256(numbers).hexdigest()
    return found


class Templates:
    """A finished run, the same run half done, and half of another experiment in the same cells."""

    def __init__(self, root: Path):
        self.whole, self.half, self.other = root / "whole", root / "half", root / "other"
        everything, parts = 10**9, {0: 10**9, 1: 10**9, 2: 4}  # a finished pair, a checkpoint, and one not begun
        run(Store(self.whole, experiment()), [], dict.fromkeys(range(4), everything), resume=False)
        run(Store(self.half, experiment()), [], parts, resume=False)
        run(Store(self.other, experiment(lr=0.2)), [], parts, resume=False)
        self.results, self.weights = results(self.whole), weights(self.whole)
        assert len(list(self.half.glob("cells/*/result.json"))) == 2
        assert len(list(self.half.glob("cells/*/checkpoint.pt"))) == 1


SHAPES = [
    b"null",
    b"[]",
    b"3",
    b'"x"',
    b"NaN",
    b"{}",
    b"[" * 100_000,
    b'{"row": 1, "log": 2}',
    b'{"row": {}, "log": []}',
]
SHAPES += [b'{"given": null}', b'{"given": []}', b'{"given": "x"}', b'{"cell": null, "sha256": ""}', b"\xff\xfe", b""]
FILES = ["experiment.json", "results.csv", "log.jsonl", ".lock", "cells"]
ACTIONS = ["flip", "flip", "truncate", "shape", "bytes", "folder", "gone", "swap", "foreign", "append", "edit"]
CELL = ["result.json", "weights.pt", "checkpoint.pt", "error.txt", "."]


def damage(folder: Path, templates: Templates, chance: random.Random) -> str:
    """Do one thing to one file; returns what."""
    cells = [path for path in sorted(folder.glob("cells/*")) if path.is_dir()]
    places = [folder / name for name in FILES] + [cell / name for cell in cells for name in CELL] * 3
    what = chance.choice(ACTIONS)
    if what in ("flip", "truncate", "append", "edit"):
        places = [path for path in places if path.is_file() and path.stat().st_size]
    if not places:
        return "nothing is left"
    path = chance.choice(places)
    name = f"{what} {path.relative_to(folder)}"
    if what in ("flip", "truncate", "append", "edit"):
        path.write_bytes(_edited(bytearray(path.read_bytes()), what, chance))
    elif what in ("shape", "bytes", "folder", "gone"):
        _remove(path)
        if what == "folder":
            path.mkdir(parents=True)
            (path / "x").write_text("x")
        elif what != "gone":
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(chance.choice(SHAPES) if what == "shape" else chance.randbytes(chance.randrange(300)))
    elif what == "swap":
        donors = [other / path.name for other in cells if (other / path.name).is_file() and other != path.parent]
        if donors and path.parent in cells:
            donor = chance.choice(donors)
            mine, theirs = path.read_bytes() if path.is_file() else None, donor.read_bytes()
            _remove(path)
            path.write_bytes(theirs)
            if mine is not None:
                donor.write_bytes(mine)
    else:
        donors = [donor for donor in templates.other.rglob(path.name) if donor.is_file()]
        if donors:
            _remove(path)
            path.parent.mkdir(exist_ok=True, parents=True)
            shutil.copy(chance.choice(donors), path)
    return name


def _edited(content: bytearray, how: str, chance: random.Random) -> bytearray:
    if how == "flip":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif how == "truncate":
        content = content[: chance.randrange(len(content))]
    elif how == "append":
        content += chance.randbytes(chance.randrange(1, 40))
    else:  # one number becomes another
        digits = [at for at, byte in enumerate(content) if 48 <= byte <= 57]
        if digits:
            content[chance.choice(digits)] = 48 + chance.randrange(10)
    return content


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def contents_of(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check(templates: Templates, folder: Path, chance: random.Random, times: int) -> str:
    """Damage a copy of the half finished run, go on with it, and see that the rule holds; returns what came of it."""
    shutil.copytree(templates.half, folder)
    good = contents_of(folder)
    done = [damage(folder, templates, chance) for _ in range(times)]
    before = contents_of(folder)
    said: list[str] = []
    try:
        first = run(Store(folder, experiment()), said)
    except InputError as error:
        _one_line(str(error))
        outcome = f"refused: {error}"
    else:
        outcome = "right" if not said else "set aside"
        assert results(folder) == templates.results, (done, said)
        found = weights(folder)
        assert all(templates.weights[cell] == digest for cell, digest in found.items()), (done, said)
        for number, name in enumerate(sorted(templates.weights)):
            cell = Path("cells") / name
            if (cell / "weights.pt") in before and before[cell / "weights.pt"] == good.get(cell / "weights.pt"):
                assert name in found, (done, said)
            checkpoint, result = cell / "checkpoint.pt", cell / "result.json"
            if result in good and before.get(result) == good[result]:
                assert number not in first, (done, "a finished part was computed again")
            if (
                checkpoint in good
                and before.get(checkpoint) == good[checkpoint]
                and (cell / "result.json") not in before
            ):
                assert first[number] == 5, (done, "a good checkpoint was not gone on from", first, said)
    for line in said:
        _one_line(line)
    _kept(before, good, contents_of(folder), done)
    for read in (summary_of, lambda path: models.find(path, "a", 1, None).result.model(), reopen):
        try:
            read(folder)
        except InputError as error:
            _one_line(str(error))
    return outcome


def _one_line(text: str) -> None:
    assert text.strip()
    assert "\n" not in text, text
    assert len(text) < 600, text


def _kept(before: dict[Path, bytes], good: dict[Path, bytes], after: dict[Path, bytes], done: list[str]) -> None:
    """Nothing that was there is lost, but what is made anew from the cells, and checkpoints of cells that are done."""
    made_anew = {"results.csv", "log.jsonl", "experiment.json", ".lock", "error.txt", "checkpoint.pt", "weights.pt"}
    left = set(after.values())
    for path, content in before.items():
        if path.name in made_anew and good.get(path) == content:
            continue
        if path.name in {"results.csv", "log.jsonl", "error.txt", ".lock"}:
            continue
        superseded = path.name == "weights.pt" and (path.parent / "result.json") in after
        assert content in left or superseded, (done, f"{path} is lost")


def main(count: int) -> None:
    sys.path.insert(0, str(HERE))
    torch.set_num_threads(1)
    tally: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        templates = Templates(root)
        for number in range(count):
            chance = random.Random(number)
            outcome = check(templates, root / "damaged", chance, chance.choice([1, 1, 2, 4]))
            shutil.rmtree(root / "damaged")
            kind = outcome.partition(":")[0]
            tally[kind] = tally.get(kind, 0) + 1
    print(json.dumps({"folders": count, **tally}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
