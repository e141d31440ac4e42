"""Predictions: their rows, their words, and how far a short trace leads."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.console import Console

from hemiola.errors import InputError
from hemiola.pace import PACES
from hemiola.timing.delays import empirical_delay, parse_delay
from hemiola.timing.predict import VARIANTS, parse_slow, predict
from hemiola.timing.simulate import simulate_timing
from hemiola.timing.traces import Trace


@pytest.fixture(scope="module")
def shifted():
    return predict(8, parse_delay("shifted-exponential(1, 1)"))


def words(law, workers=8, **options):
    return "\n".join(predict(workers, parse_delay(law), **options).conclusions)


def test_a_row_for_every_variant_and_k(shifted):
    assert [(row.variant, row.k) for row in shifted.rows] == [(v, k) for v in VARIANTS for k in range(1, 9)]
    rows = {(row.variant, row.k): row for row in shifted.rows}
    known = {"k-sync": 1.6345, "k-batch-sync": 1.632, "k-async": 1.242, "k-batch-async": 1.0}  # methods/pace.md
    for variant, seconds in known.items():
        row = rows[variant, 4]
        assert row.update_seconds == pytest.approx(seconds, rel=0.015)
        assert abs(row.deviation) < 0.02
        assert row.updates_per_second == 1 / row.update_seconds
        assert row.reports_per_second == pytest.approx(4 / row.update_seconds)
    assert rows["k-async", 4].mean_staleness == 1.0
    assert rows["k-async", 4].simulated_staleness == pytest.approx(1.0, abs=0.005)
    assert rows["k-sync", 4].wasted_share == pytest.approx(0.5)
    assert rows["k-batch-async", 4].idle_share == 0


def test_a_single_k_and_many_workers():
    one = predict(8, parse_delay("exponential(1)"), k=3)
    assert [row.k for row in one.rows] == [3] * 4
    many = predict(300, parse_delay("shifted-exponential(1, 1)"), k=100)
    waiting = next(row for row in many.rows if row.variant == "k-async")
    assert waiting.theory_seconds is None
    assert waiting.deviation is None
    assert waiting.theory_low <= waiting.update_seconds <= waiting.theory_high
    assert sorted({row.k for row in predict(20, parse_delay("constant(1)")).rows}) == [1, 2, 4, 8, 16, 20]


def test_json_is_plain_and_the_table_prints(shifted):
    data = json.loads(json.dumps(shifted.as_json(), allow_nan=False))
    assert data["workers"] == 8
    assert len(data["rows"]) == 32
    assert data["conclusions"]
    console = Console(width=160)
    with console.capture() as captured:
        console.print(shifted.as_table())
    assert "k-batch-async" in captured.get()
    slow = predict(4, parse_delay("exponential(1)"), k=2, slow={3: 5.0})
    assert json.loads(json.dumps(slow.as_json(), allow_nan=False))["slow"] == {"3": 5.0}


def test_it_says_when_to_stay_synchronous():
    for law in ("constant(1)", "lognormal(1, 0.05)"):
        said = words(law)
        assert "Stay synchronous" in said
        assert "Letting" not in said
        assert "Warning" not in said
    for law in ("exponential(1)", "shifted-exponential(1, 1)", "pareto(2.5, 1)"):
        assert "Stay synchronous" not in words(law, k=4)


def test_it_warns_when_cancelling_wins(shifted):
    said = words("hyperexponential(0.9, 0.5, 5)", k=4)
    assert "Warning: cancelling beats waiting" in said
    assert "not new-longer-than-used" in said
    assert "Warning" not in "\n".join(shifted.conclusions)
    assert "keep going is faster than cancelling" in "\n".join(shifted.conclusions)
    assert "Warning" not in words("exponential(1)", k=4)  # memoryless: it makes no difference


@pytest.mark.parametrize("law", ["lognormal(1, 0.5)", "hyperexponential(0.9, 0.5, 5.5)"])
@pytest.mark.parametrize("workers", [5, 6])
def test_no_law_gives_nan(law, workers):
    prediction = predict(workers, law)
    assert "nan" not in "\n".join(prediction.conclusions)
    for row in prediction.rows:
        assert 0 < row.update_seconds < 1e3
    json.dumps(prediction.as_json(), allow_nan=False)


def test_a_law_may_be_a_string():
    assert predict(8, "shifted-exponential(1, 1)", k=4) == predict(8, parse_delay("shifted-exponential(1, 1)"), k=4)
    with pytest.raises(InputError, match="a delay is written like"):
        predict(8, "fast")


def test_a_slow_worker_of_a_log_is_no_straggler():
    # One of eight workers five times as slow: as a mixture, "cancelling beats waiting"; as what it is, it is said.
    times = parse_delay("lognormal(1, 0.1)").sample(np.random.default_rng(0), 800).reshape(100, 8)
    times[:, 3] *= 5
    owners = tuple(np.tile(np.arange(8), 100))
    said = "\n".join(predict(8, Trace(tuple(times.ravel())), k=4).conclusions)
    assert "does not say which worker took which step" in said
    known = predict(8, Trace(tuple(times.ravel()), owners), k=4)
    said = "\n".join(known.conclusions)
    assert known.slow == {3: pytest.approx(5.0, rel=0.1)}
    assert known.mean_step_seconds == pytest.approx(1.0, rel=0.05)
    assert "Worker 3 took" in said
    assert "a stint that has run for long has long to go" not in said
    assert "does not say" not in said
    few = predict(2, Trace(tuple(times.ravel()), owners), k=1)
    assert few.slow == {}
    assert "Worker 3 of the trace is not among the 2 workers" in "\n".join(few.conclusions)


def test_it_says_when_plain_synchronous_training_is_best():
    said = words("lognormal(1, 0.05)", k=8, exchange=0.01)
    assert "Stay synchronous" in said
    assert "1% of a synchronous update, and the steps are even: plain synchronous training is best here" in said
    assert "could gain up to that much" in words("constant(1)", k=8, exchange=1.0)
    assert "plain synchronous training is best" not in words("constant(1)", k=8, exchange=1.0)
    assert "would gain next to nothing" in words("exponential(1)", k=4, exchange=0.0)
    assert "not known here" in words("constant(1)", k=8)
    measured = predict(4, Trace((1.0, 1.01, 0.99, 1.0), (0, 1, 2, 3), (0.01, 0.02, 0.03)), k=4)
    assert measured.exchange_seconds == 0.02
    for bad in (-1.0, float("nan")):
        with pytest.raises(InputError, match="exchange must be a time in seconds, at least 0"):
            words("constant(1)", k=8, exchange=bad)


def test_a_slow_worker_is_seen():
    said = words("constant(1)", slow={3: 5.0})
    assert "an update takes 5 s, 3.33 times a mean step" in said  # (7 * 1 + 5) / 8 s
    assert "unequal" in said


LAWS = [
    "exponential(1)",
    "shifted-exponential(1, 1)",
    "pareto(2.5, 1)",
    "hyperexponential(0.9, 0.5, 5)",
    "lognormal(1, 1)",
]


@pytest.mark.parametrize("law", LAWS)
def test_two_hundred_timings_are_enough_for_fifteen_per_cent(law):
    delay = parse_delay(law)
    truth = {
        variant: simulate_timing(PACES[variant](k=4), 8, delay, 20_000, seed=99).mean_update_seconds
        for variant in VARIANTS
    }
    off = []
    for seed in range(6):
        trace = empirical_delay(delay.sample(np.random.default_rng(seed), 200), "trace(steps.txt)")
        rows = predict(8, trace, k=4).rows
        off.append(np.mean([abs(row.update_seconds / truth[row.variant] - 1) for row in rows]))
    assert np.mean(off) < 0.15


def test_a_trace_is_named_as_one():
    trace = empirical_delay([1.0, 2.0, 4.0], "trace(steps.txt)")
    assert "drawn from the trace" in "\n".join(predict(4, trace, k=2).conclusions)


def test_slow_workers_on_the_command_line():
    assert parse_slow("3=5,4=2") == {3: 5.0, 4: 2.0}
    assert parse_slow(" 3 = 1.5 ") == {3: 1.5}
    assert parse_slow("") == {}
    for bad in ("3", "3=", "=5", "a=1", "3:5"):
        with pytest.raises(InputError, match="written like '3=5,4=2', got"):
            parse_slow(bad)


def test_impossible_questions_are_refused():
    delay = parse_delay("exponential(1)")
    with pytest.raises(InputError, match="workers must be at least 2"):
        predict(1, delay)
    for k in (0, 9):
        with pytest.raises(InputError, match=f"k must be between 1 and the number of workers, 8, got {k}"):
            predict(8, delay, k=k)
    with pytest.raises(InputError, match="slow names worker 8"):
        predict(8, delay, slow={8: 2.0})


def test_rings_take_their_time_in_every_row():
    plain = {(row.variant, row.k): row for row in predict(4, "shifted-exponential(1, 1)").rows}
    rings = predict(4, "shifted-exponential(1, 1)", exchange=3.0, ring=True)
    for row in rings.rows:
        before = plain[row.variant, row.k]
        if row.variant in ("k-sync", "k-batch-sync") or (row.variant, row.k) == ("k-async", 4):  # all wait for it
            assert row.update_seconds == pytest.approx(before.update_seconds + 3.0)
            assert row.mean_staleness == before.mean_staleness
        else:
            assert row.theory_seconds is None
            assert row.simulated_seconds >= row.theory_low == max(3.0, row.k * 2.0 / 4)
    # Nobody waits in K-batch-async, so all workers' reports are merged, however slow the ring is.
    busy = next(row for row in rings.rows if (row.variant, row.k) == ("k-batch-async", 2))
    assert busy.reports_per_second == pytest.approx(4 / 2.0, rel=0.02)
    with pytest.raises(InputError, match="a ring takes time"):
        predict(4, "constant(1)", ring=True)


def test_a_grace_takes_more_reports_than_k():
    rows = {(row.variant, row.k): row for row in predict(4, "hyperexponential(0.9, 1, 30)", k=2, grace=3.0).rows}
    plain = {(row.variant, row.k): row for row in predict(4, "hyperexponential(0.9, 1, 30)", k=2).rows}
    sync = rows["k-sync", 2]
    assert sync.reports_per_second * sync.update_seconds > 2
    assert sync.theory_low <= sync.simulated_seconds <= sync.theory_high
    assert sync.theory_low == plain["k-sync", 2].update_seconds
    assert rows["k-batch-async", 2] == plain["k-batch-async", 2]
