"""A few of the malformed experiment files of ``malformed_files.py``."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import malformed_files

from hemiola.errors import InputError

pytestmark = pytest.mark.slow


def test_malformed_files_run_or_are_refused_with_one_line(capsys):
    results = malformed_files.main(60)
    assert results["wrong"] == 0, capsys.readouterr().out
    assert results["refused"] > 30
    assert results["runs"] > 0


def test_the_check_finds_what_is_wrong(monkeypatch, tmp_path):
    def fail(self, data):
        raise KeyError("workers")

    monkeypatch.setattr("hemiola.lab.experiment.Cell.plan", fail)
    data = malformed_files.toml(malformed_files.BASE | {"run": malformed_files.RUNS[:1]}).encode()
    assert malformed_files.attempt(data, tmp_path) == "KeyError: 'workers'"
    monkeypatch.undo()
    assert malformed_files.attempt(data, tmp_path) == "runs"


@pytest.mark.parametrize("seed", range(3))
def test_files_are_the_same_for_the_same_seed(seed):
    assert malformed_files.malformed(random.Random(seed)) == malformed_files.malformed(random.Random(seed))


def test_a_value_that_is_too_long_to_read_is_shortened():
    said = str(InputError(f"task: {'x' * 5000!r} is not known; use {'y' * 150}"))
    assert said == f"task: '{'x' * 59}...{'x' * 19}' is not known; use {'y' * 150}"
