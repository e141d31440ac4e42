"""The example runs, and the order it finds is better than a random one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "ordered_sampler.py"


def test_the_example_runs_and_cd_grab_ends_nearer_to_the_minimum() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=240, check=True)
    assert done.stderr == ""
    rows = [[float(x) for x in line.split()] for line in done.stdout.splitlines() if re.match(r" +\d", line)]
    assert len(rows) == 12
    random, ordered = (sum(row[column] for row in rows[-4:]) for column in (1, 2))
    assert random > 2 * ordered
