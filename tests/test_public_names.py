"""Public names are there, typed, and one's own loop needs torch and NumPy only."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hemiola

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", hemiola._PUBLIC)
def test_every_public_name_can_be_had(name):
    assert getattr(hemiola, name) is not None
    assert name in dir(hemiola)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Avarager'"):
        _ = hemiola.Avarager


def test_importing_hemiola_does_not_import_torch():
    code = "import sys, hemiola; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(hemiola.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: imported.module for imported in block.body for alias in imported.names}
    assert seen == hemiola._PUBLIC | dict.fromkeys(hemiola._ADAPTERS, "hemiola.adapters")


USER = """
from collections.abc import Sequence

import hemiola
import numpy as np
from torch import nn, optim


class Mine(hemiola.Order):
    def sequence(self, worker: int, epoch: int) -> np.ndarray:
        return np.arange(self.sizes[worker])

    def observe(self, visits: Sequence[hemiola.Visit]) -> None:
        reveal_type(visits[0].units)


class Steps(hemiola.Period):
    def length(self, lr: float, progress: float) -> int:
        return 2

    def averaged(self, seen: hemiola.Averaging) -> None:
        reveal_type(seen.spread)


class Few(hemiola.Pace):
    def k(self) -> int:
        return max(1, self.workers - 1)

    def updated(self, seen: hemiola.Arrivals) -> None:
        reveal_type(seen.losses)


class Wrong(hemiola.Period):
    def length(self, lr: float) -> int:
        return 2


class Incomplete(hemiola.Order):
    pass


model = nn.Linear(2, 2)
sampler = hemiola.OrderedSampler(range(10), order=Mine())
averager = hemiola.Averager(model, optim.SGD(model.parameters(), lr=0.1), period=Steps())
pace: hemiola.Pace = Few()
reveal_type(sampler)
reveal_type(hemiola.Constant(p=2))
hemiola.train(task="digits-logistic", order=Mine(), period=Steps(), pace=pace)
hemiola.Avarager
hemiola.Constant(p="two")
Incomplete()
"""


def test_mypy_sees_real_types_and_a_misspelt_name(tmp_path):
    user = tmp_path / "user.py"
    user.write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), str(user)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280).stdout
    assert 'Revealed type is "hemiola.loops.sampler.OrderedSampler"' in found
    assert 'Revealed type is "hemiola.period.schedules.Constant"' in found
    assert 'Revealed type is "float"' in found.replace("builtins.", "")
    assert "Sequence[float]" in found.replace("builtins.", "")
    assert "ndarray" in found
    assert 'Module has no attribute "Avarager"' in found
    assert 'has incompatible type "str"; expected "int"' in found
    assert 'Signature of "length" incompatible with supertype "hemiola.contracts.Period"' in found
    assert 'Cannot instantiate abstract class "Incomplete" with abstract attribute "sequence"' in found
    assert "Found 4 errors" in found, found


WITHOUT_THE_LAB = """
import sys

for absent in ("scipy", "sklearn", "vl_convert", "pydantic", "typer", "rich"):
    sys.modules[absent] = None
import hemiola, torch
from torch.utils.data import DataLoader, TensorDataset

dataset = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = hemiola.OrderedSampler(dataset)
averager = hemiola.Averager(model, optimizer, period=hemiola.Adaptive(start=2), steps=12)
with sampler.watch(model), averager:
    for epoch in range(2):
        for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
assert "herding" in sampler.telemetry() or sampler.epoch == 1, sampler.telemetry()
try:
    hemiola.train
except ImportError as error:
    print(error)
from hemiola.__main__ import main
main()
"""


def test_without_the_lab_ones_own_loop_works_and_the_rest_says_what_it_needs():
    done = subprocess.run([sys.executable, "-c", WITHOUT_THE_LAB], capture_output=True, text=True, timeout=120)
    said = r"hemiola.train needs \w+, which is not installed; pip install 'hemiola\[lab\]' brings it\n"
    assert re.fullmatch(said, done.stdout)
    assert done.stderr == (
        "hemiola: the command line needs typer, which is not installed; pip install 'hemiola[lab]' brings it\n"
    )
    assert done.returncode == 2
