"""How long is left, from all cells: by hand."""

import io

import pytest
from rich.console import Console

from hemiola.lab.progress import Display, Estimate


@pytest.mark.parametrize(
    ("estimate", "running", "now", "left"),
    [
        (Estimate(total=4, done=1, began=100.0), 1.0, 110.0, 10.0),  # 2 cells in 10 s, 2 to go
        (Estimate(total=4, done=0, began=100.0), 0.5, 110.0, 70.0),  # half a cell in 10 s, 3.5 to go
        (Estimate(total=4, done=2, began=100.0, before=2.0), 0.5, 110.0, 30.0),  # resumed: two were there before
        (Estimate(total=4, done=2, began=100.0, before=2.5), 1.0, 110.0, 20.0),  # and half of the third
        (Estimate(total=4, done=4, began=100.0), 0.0, 110.0, 0.0),
    ],
)
def test_the_rest_takes_as_long_as_what_was_done_here(estimate, running, now, left):
    assert estimate.left(running, now) == pytest.approx(left)


def test_nothing_is_said_before_anything_was_done():
    assert Estimate(total=4, done=2, began=100.0, before=2.0).left(0.0, 110.0) is None
    assert Estimate(total=4, began=100.0).left(0.5, 100.0) is None


def test_without_a_terminal_there_are_lines_and_no_bars():
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=False))
    assert display._left() == ""
    assert "\x1b" not in out.getvalue()
