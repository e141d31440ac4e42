"""One seed's curve: its end, and what a target had cost, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hemiola.lab.report.seeds import SeedCurve, seed_curves


def curve(*values, at=None):
    places = tuple(map(float, range(len(values)))) if at is None else at
    return SeedCurve(tuple(map(float, values)), {"epochs": places, "seconds": places})


def test_the_end_is_the_mean_along_the_last_tenth_of_the_epochs():
    # Over the last of ten epochs it falls from 4 to 1: geometrically that is 2.
    assert curve(*[9] * 9, 4, 1).final == pytest.approx(2)
    assert curve(*[9] * 9, 4, -2).final == pytest.approx(1)
    assert curve(7).final == 7


@given(st.floats(0.1, 0.99), st.lists(st.floats(0.01, 9.99), min_size=1, max_size=20, unique=True))
def test_the_end_does_not_depend_on_when_a_geometric_fall_is_evaluated(rate, times):
    def evaluated(at):
        return curve(*(rate**time for time in at), at=tuple(at)).final

    assert evaluated([0, *sorted(times), 10]) == pytest.approx(evaluated([0, 10]), rel=1e-6)


def test_a_target_is_reached_by_interpolation_on_the_logarithm():
    # From 1 to 0.01 over 4 seconds: 0.1 is half way down the decades.
    assert curve(1, 0.01, at=(0, 4)).stays_below(0.1, "seconds") == pytest.approx(2)


def test_where_a_logarithm_is_impossible_the_interpolation_is_linear():
    assert curve(1, -1, at=(0, 4)).stays_below(0.5, "seconds") == pytest.approx(1)


@pytest.mark.parametrize(
    ("values", "target", "when"),
    [
        ((0.5, 0.4, 0.1), 0.6, 0),  # there from the start
        ((16, 8, 4, 2, 1), 4, 2),
        ((16, 8, 4, 8, 8, 4, 4, 4), 4, 5),  # a lucky touch at 2 does not count
        ((16, 8, 4, 4, 4, 9, 4, 4, 4), 4, 2),  # one unlucky evaluation at 5 does not either
        ((16, 8, 4, 4, 9, 9, 4, 4, 4), 4, 6),  # two in a row are no accident
        ((8, 7, 6, 5, 1), 2, math.nan),  # a last evaluation far below the trend is luck
        ((16, 8, 4, 4, 9), 4, 2),  # one far above it bad luck
        ((16, 8, 4, 2, 9), 2, math.nan),
        ((4, 4, 4), 2, math.nan),
    ],
)
def test_a_target_counts_when_the_curve_stays_below(values, target, when):
    assert curve(*values).stays_below(target, "seconds") == pytest.approx(when, nan_ok=True)


def test_an_evaluation_that_is_not_finite_is_above_every_target():
    assert curve(4, 2, math.inf, math.inf, 2, 1, 1).stays_below(2, "seconds") == pytest.approx(4)
    assert math.isnan(curve(4, 2, 1, math.inf, math.inf).stays_below(2, "seconds"))
    assert curve(4, 2, 1, math.inf).final == math.inf
    assert curve(4, math.inf, 2).final == 2


@given(st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=20))
def test_smoothing_leaves_a_falling_geometric_or_short_curve_as_it_is(values):
    falling = sorted(values, reverse=True)
    assert curve(*falling).smooth[:-1] == tuple(falling[:-1])
    assert curve(*falling[:2]).smooth == tuple(falling[:2])
    assert curve(8, 4, 2, 1).smooth == (8, 4, 2, 1)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=12), st.floats(-1e300, 1e300))
def test_a_target_lies_between_the_evaluations_around_it(values, target):
    made = curve(*values)
    when = made.stays_below(target, "seconds")
    above = [at for at, value in enumerate(made.smooth) if value > target]
    if not above:
        assert when == 0
    elif above[-1] == len(values) - 1:
        assert math.isnan(when)
    else:
        assert above[-1] <= when <= above[-1] + 1


def test_only_finished_seeds_count_and_a_row_without_a_log_is_its_own_end(tmp_path, folders):
    from hemiola.lab.report.read import read_folder

    points = [(0, 0, 0, 1.0), (1, 1, 1, 0.5)]
    folder = folders.small(tmp_path, {"a": [points] * 3}, status={("a", 1): "diverged"})
    found = seed_curves(read_folder(folder), "a", (), "train_gap")
    assert list(found) == ["0", "2"]
    assert found["0"].values == (1.0, 0.5)
    (folder / "log.jsonl").unlink()
    assert seed_curves(read_folder(folder), "a", (), "train_gap")["2"].values == (0.5,)
