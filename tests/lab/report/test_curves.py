"""Means over seeds and thinning, on numbers that can be checked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hemiola.lab.report.curves import STRETCHES, Curve, Span, averagings, curve, over_steps, thin
from hemiola.lab.report.read import Averaged, read_folder


def made(values, measure="train_loss"):
    return Curve(tuple({measure: Span(value, value, value)} for value in values), 1)


def test_seeds_are_averaged_evaluation_by_evaluation(tmp_path, folders):
    seeds = [[(0, 0, 0, 1.0), (1, 10, 100, 0.5)], [(0, 0, 0, 3.0), (1, 14, 100, 0.1)]]
    line = curve(read_folder(folders.small(tmp_path, {"a": seeds})), "a", ())
    assert line.seeds == 2
    assert [step["train_loss"] for step in line.steps] == [Span(2.0, 1.0, 3.0), Span(pytest.approx(0.3), 0.1, 0.5)]
    assert line.line("seconds", "train_loss") == [(0, 2.0), (12, pytest.approx(0.3))]


def test_finished_seeds_of_unequal_length_still_meet_at_the_end(tmp_path, folders):
    seeds = [[(0, 0, 0, 1.0), (1, 1, 1, 0.5), (2, 2, 2, 0.2)], [(0, 0, 0, 1.0), (2, 2, 2, 0.4)]]
    line = curve(read_folder(folders.small(tmp_path, {"a": seeds})), "a", ())
    assert line.line("epochs", "train_loss") == [(0, 1.0), (2, pytest.approx(0.3))]


def test_running_seeds_are_compared_only_where_all_have_been(tmp_path, folders):
    seeds = [[(0, 0, 0, 1.0), (1, 1, 1, 0.5), (2, 2, 2, 0.2)], [(0, 0, 0, 1.0), (1, 1, 1, 0.7)]]
    status = {("a", 0): "running", ("a", 1): "running"}
    line = curve(read_folder(folders.small(tmp_path, {"a": seeds}, status=status)), "a", ())
    assert line.line("epochs", "train_loss") == [(0, 1.0), (1, pytest.approx(0.6))]


def test_a_diverged_seed_does_not_join_the_mean_of_the_others(tmp_path, folders):
    seeds = [[(0, 0, 0, 1.0), (1, 1, 1, 0.5)], [(0, 0, 0, 2.0), (1, 1, 1, math.inf)]]
    folder = read_folder(folders.small(tmp_path, {"a": seeds}, status={("a", 1): "diverged"}))
    assert curve(folder, "a", ()).line("epochs", "train_loss") == [(0, 1.0), (1, 0.5)]


def test_a_run_that_only_diverged_is_drawn_as_far_as_it_is_finite(tmp_path, folders):
    seeds = [[(0, 0, 0, 2.0), (1, 1, 1, 9.0), (2, 2, 2, math.nan)]]
    folder = read_folder(folders.small(tmp_path, {"a": seeds}, status={("a", 0): "diverged"}))
    assert curve(folder, "a", ()).line("epochs", "train_loss") == [(0, 2.0), (1, 9.0)]


def test_a_short_curve_is_not_thinned():
    line = made(range(2 * STRETCHES))
    assert thin(line, ["train_loss"]) is line


@given(st.integers(2 * STRETCHES + 1, 3000), st.integers(0, 2**32))
def test_thinning_keeps_the_ends_and_the_envelope(count, seed):
    values = [math.sin(i * (seed % 97 + 1)) + i for i in range(count)]
    kept = [step["train_loss"].mean for step in thin(made(values), ["train_loss"]).steps]
    assert len(kept) <= 2 * STRETCHES + 2
    assert kept[0] == values[0]
    assert kept[-1] == values[-1]
    for stretch in range(STRETCHES):
        inside = values[stretch * count // STRETCHES : (stretch + 1) * count // STRETCHES]
        assert min(inside) in kept
        assert max(inside) in kept


def test_thinning_leaves_no_hole_in_another_measure():
    steps = tuple({"a": Span(i, i, i), "b": Span(math.nan if i % 2 else i, 0, 0)} for i in range(1000))
    kept = thin(Curve(steps, 1), ["a", "b"]).steps
    assert sum(math.isfinite(step["b"].mean) for step in kept) >= 2 * STRETCHES


def test_averagings_are_grouped_by_step_over_all_seeds():
    histories = [[Averaged(4, 4, 0.1, 1), Averaged(100, 4, 0.3, 1)], [Averaged(4, 4, 0.3, 1), Averaged(100, 6, 0.5, 1)]]
    assert over_steps(histories, "period") == [(4, Span(4, 4, 4)), (100, Span(5, 4, 6))]
    assert over_steps(histories, "spread") == [
        (4, Span(pytest.approx(0.2), 0.1, 0.3)),
        (100, Span(pytest.approx(0.4), 0.3, 0.5)),
    ]


def test_averagings_without_finite_numbers_are_left_out():
    assert over_steps([[Averaged(math.nan, 1, 1, 1), Averaged(1, 1, math.inf, 1)]], "spread") == []


def test_history_is_collected_over_all_evaluations(demo):
    (first, *_) = averagings(read_folder(demo), "ADPSGD", ())
    steps = [one.step for one in first]
    assert steps == sorted(steps)
    assert steps[-1] >= 30 * 180


@given(st.lists(st.floats(), max_size=8))
def test_a_mean_lies_between_its_ends_or_is_nan(values):
    span = Span.over(values)
    if values and all(map(math.isfinite, values)):
        assert span.low <= span.mean <= span.high
    else:
        assert math.isnan(span.mean)
