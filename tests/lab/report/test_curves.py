"""Means over seeds and thinning, on numbers that can be checked by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hemiola.lab.report.curves import STRETCHES, Curve, curve, over, spans_of, thin
from hemiola.lab.report.read import read_folder


def made(values, measure="train_loss"):
    column = {measure: np.array(values, dtype=float)}
    return Curve(column, column, column, 1)


def line(made, x, y):
    places = zip(made.mean[x].tolist(), made.mean[y].tolist(), strict=True)
    return [(at, value) for at, value in places if math.isfinite(at) and math.isfinite(value)]


def test_seeds_are_averaged_evaluation_by_evaluation(tmp_path, folders):
    seeds = [[(0, 0, 0, 1.0), (1, 10, 100, 0.5)], [(0, 0, 0, 3.0), (1, 14, 100, 0.1)]]
    found = curve(read_folder(folders.small(tmp_path, {"a": seeds})), "a", ())
    assert found.seeds == 2
    assert found.mean["train_loss"].tolist() == [2.0, pytest.approx(0.3)]
    assert (found.low["train_loss"].tolist(), found.high["train_loss"].tolist()) == ([1.0, 0.1], [3.0, 0.5])
    assert line(found, "seconds", "train_loss") == [(0, 2.0), (12, pytest.approx(0.3))]
    assert not found.has("herding")


def test_finished_seeds_of_unequal_length_still_meet_at_the_end(tmp_path, folders):
    seeds = [[(0, 0, 0, 1.0), (1, 1, 1, 0.5), (2, 2, 2, 0.2)], [(0, 0, 0, 1.0), (2, 2, 2, 0.4)]]
    found = curve(read_folder(folders.small(tmp_path, {"a": seeds})), "a", ())
    assert line(found, "epochs", "train_loss") == [(0, 1.0), (2, pytest.approx(0.3))]


def test_running_seeds_are_compared_only_where_all_have_been(tmp_path, folders):
    seeds = [[(0, 0, 0, 1.0), (1, 1, 1, 0.5), (2, 2, 2, 0.2)], [(0, 0, 0, 1.0), (1, 1, 1, 0.7)]]
    status = {("a", 0): "running", ("a", 1): "running"}
    found = curve(read_folder(folders.small(tmp_path, {"a": seeds}, status=status)), "a", ())
    assert line(found, "epochs", "train_loss") == [(0, 1.0), (1, pytest.approx(0.6))]


def test_a_diverged_seed_does_not_join_the_mean_of_the_others(tmp_path, folders):
    seeds = [[(0, 0, 0, 1.0), (1, 1, 1, 0.5)], [(0, 0, 0, 2.0), (1, 1, 1, math.inf)]]
    folder = read_folder(folders.small(tmp_path, {"a": seeds}, status={("a", 1): "diverged"}))
    assert line(curve(folder, "a", ()), "epochs", "train_loss") == [(0, 1.0), (1, 0.5)]


def test_a_run_that_only_diverged_is_drawn_as_far_as_it_is_finite(tmp_path, folders):
    seeds = [[(0, 0, 0, 2.0), (1, 1, 1, 9.0), (2, 2, 2, math.nan)]]
    folder = read_folder(folders.small(tmp_path, {"a": seeds}, status={("a", 0): "diverged"}))
    assert line(curve(folder, "a", ()), "epochs", "train_loss") == [(0, 2.0), (1, 9.0)]


def test_a_short_curve_is_not_thinned():
    found = made(range(2 * STRETCHES))
    assert thin(found, ["train_loss"]) is found


@given(st.integers(2 * STRETCHES + 1, 3000), st.integers(0, 2**32))
def test_thinning_keeps_the_ends_and_the_envelope(count, seed):
    values = [math.sin(i * (seed % 97 + 1)) + i for i in range(count)]
    kept = thin(made(values), ["train_loss"]).mean["train_loss"].tolist()
    assert len(kept) <= 2 * STRETCHES + 2
    assert kept[0] == values[0]
    assert kept[-1] == values[-1]
    for stretch in range(STRETCHES):
        inside = values[stretch * count // STRETCHES : (stretch + 1) * count // STRETCHES]
        assert min(inside) in kept
        assert max(inside) in kept


def test_thinning_leaves_no_hole_in_another_measure():
    columns = {"a": np.arange(1000.0), "b": np.where(np.arange(1000) % 2, np.nan, np.arange(1000.0))}
    kept = thin(Curve(columns, columns, columns, 1), ["a", "b"])
    assert np.isfinite(kept.mean["b"]).sum() >= 2 * STRETCHES


def test_what_happens_at_different_places_is_grouped_over_all_seeds():
    places = np.array([4.0, 100.0])
    assert over([(places, np.array([4.0, 4.0])), (places, np.array([4.0, 6.0]))]) == [(4, 4, 4, 4), (100, 5, 4, 6)]
    assert over([(places, np.array([0.1, 0.3])), (places, np.array([0.3, 0.5]))]) == [
        (4, pytest.approx(0.2), 0.1, 0.3),
        (100, pytest.approx(0.4), 0.3, 0.5),
    ]


def test_what_has_no_finite_place_or_value_is_left_out():
    assert over([(np.array([math.nan, 1.0]), np.array([1.0, math.inf]))]) == []
    assert over([]) == []


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=30), st.integers(1, 8))
def test_groups_lie_within_what_they_are_made_of(pairs, stretches):
    places, values = np.array(pairs).T
    found = over([(places, values)], stretches)
    assert len(found) <= stretches + 1
    assert min(one[2] for one in found) == values.min()
    assert max(one[3] for one in found) == values.max()
    for at, mean, low, high in found:
        assert places.min() - 1e-6 <= at <= places.max() + 1e-6
        assert low <= mean <= high


def test_history_is_collected_over_all_evaluations(demo):
    history = read_folder(demo).log["ADPSGD", (), "0"].history
    assert (np.diff(history["step"]) > 0).all()
    assert history["step"][-1] >= 30 * 180


@given(st.lists(st.floats(), min_size=1, max_size=8))
def test_a_mean_lies_between_its_ends_or_is_nan(values):
    mean, low, high = (one.item() for one in spans_of(np.array(values).reshape(-1, 1)))
    if all(map(math.isfinite, values)):
        assert low <= mean <= high
    else:
        assert math.isnan(mean)
