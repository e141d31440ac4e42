"""Numbers and settings for people."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hemiola.lab.report import words


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.001324, "0.00132"),
        (0.00001324, "1.32e-5"),
        (12.34, "12.3"),
        (30, "30"),
        (999.6, "1,000"),
        (1234.4, "1,234"),
        (1.5e9, "1.5e9"),
        (-0.5, "−0.500"),
        (math.nan, "–"),
        (math.inf, "∞"),
    ],
)
def test_three_digits(value, shown):
    assert words.figure(value) == shown


@given(st.floats())
def test_any_number_can_be_shown(value):
    assert words.figure(value)
    assert words.amount("seconds", value)
    assert words.amount("bytes_per_worker", value)


@given(st.floats(-1e300, 1e300).filter(lambda value: value == 0 or abs(value) > 1e-300))
def test_what_is_shown_is_the_value_to_three_digits(value):
    shown = float(words.figure(value).replace(",", "").replace("−", "-"))
    assert shown == pytest.approx(value, rel=0.006)


@pytest.mark.parametrize(
    ("measure", "value", "shown"),
    [
        ("seconds", 0.0005, "500 µs"),
        ("seconds", 90, "90 s"),
        ("seconds", 720, "12 min"),
        ("seconds", 43200, "12 h"),
        ("bytes_per_worker", 31.85e6, "31.9 MB"),
        ("bytes_per_worker", 0, "0 B"),
        ("epochs", 30, "30"),
    ],
)
def test_units(measure, value, shown):
    assert words.amount(measure, value) == shown


@pytest.mark.parametrize(
    ("mean", "deviation", "shown"),
    [
        (0.1112, 0.00114, ("0.1112", "0.0011")),
        (12.114, 0.052, ("12.114", "0.052")),
        (9.19e-5, 4e-6, ("9.19e-5", "0.40e-5")),
        (30.0, 0.0, ("30", "")),
        (30.0, math.nan, ("30", "")),
        (1.0, 2.0, ("1.0", "2.0")),
        (123.4, 45.1, ("123", "45")),
        (12345.0, 3456.0, ("12,300", "3,500")),
        (-0.5, 0.011, ("−0.500", "0.011")),
        (0.0, 5e-324, ("0", "")),
        (2.5e-308, 2.5e-308, ("2.5e-308", "2.5e-308")),
    ],
)
def test_a_mean_and_its_deviation_share_their_decimals(mean, deviation, shown):
    assert words.with_deviation(mean, deviation) == shown


@given(st.floats(), st.floats(min_value=0))
def test_any_mean_and_deviation_can_be_shown(mean, deviation):
    mean_text, _ = words.with_deviation(mean, deviation)
    assert mean_text


@pytest.mark.parametrize(
    ("low", "mean", "high", "shown"),
    [
        (1.84, 2.13, 2.47, ("1.8", "2.1", "2.5")),
        (1.0111, 1.0132, 1.0153, ("1.011", "1.013", "1.015")),
        (2.08, 2.2, 2.32, ("2.08", "2.20", "2.32")),
        (-0.008, -0.003, 0.002, ("−0.008", "−0.003", "0.002")),
        (14.0, 18.0, 22.0, ("14", "18", "22")),
        (math.nan, 2.13, math.nan, ("–", "2.13", "–")),
        (2.0, 2.0, 2.0, ("2", "2", "2")),
    ],
)
def test_an_interval_decides_how_many_digits_are_shown(low, mean, high, shown):
    assert words.ends(low, mean, high) == shown


def test_ratios_come_from_logarithms():
    assert words.ratios(*map(math.log, (1.84, 2.13, 2.47))) == ("1.8", "2.1x", "2.5")
    assert words.ratios(*map(math.log, (0.012, 0.34, 9.71))) == ("0.012", "0.34x", "9.7")
    assert words.ratios(math.nan, math.log(17.7), math.nan)[1] == "18x"


@given(st.floats(allow_nan=False), st.floats(min_value=0, allow_nan=False))
def test_any_interval_can_be_shown(mean, half):
    assert all(words.ends(mean - half, mean, mean + half))
    assert all(words.ratios(mean - half, mean, mean + half))


@pytest.mark.parametrize(
    ("kind", "settings", "shown"),
    [
        ("order", {}, "a fresh random order every epoch (rr)"),
        ("order", {"order": "in-order"}, "the order of the data (in-order)"),
        ("pace", {"workers": 8}, "wait for every worker (k-sync)"),
        ("pace", {"workers": 8, "pace": {"name": "k-sync", "k": 8}}, "wait for every worker (k-sync)"),
        (
            "pace",
            {"workers": 8, "pace": {"name": "k-sync", "k": 4}},
            "wait for the first K workers, cancel the others (k-sync, k 4)",
        ),
        (
            "period",
            {"period": {"name": "adaptive", "guard": False, "cap": None}},
            "ADPSGD: a period that follows the measured spread (adaptive, guard no)",
        ),
        ("order", {"order": {"name": "mine", "x": [1, 2]}}, "mine, x 1 / 2"),
    ],
)
def test_policies_in_words(kind, settings, shown):
    assert words.policy(kind, settings) == shown


def test_options_in_words():
    schedule = {"name": "MultiStepLR", "milestones": [0.5, 0.75], "gamma": 0.1}
    given = {"name": "SGD", "lr": 0.2, "schedule": schedule}
    assert words.options(given) == "SGD, lr 0.2, schedule (MultiStepLR, milestones 0.5 / 0.75, gamma 0.1)"


def test_lists_in_words():
    assert [words.listed(items) for items in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
