"""Delay laws: what they say against what they draw; streams that depend on (seed, worker, number) only."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hemiola.errors import InputError
from hemiola.timing.delays import BLOCK, DelayStreams, empirical_delay, parse_delay
from hemiola.timing.traces import Trace, read_trace

MEANS = {
    "constant(2)": 2.0,
    "exponential(0.5)": 0.5,
    "shifted-exponential(1, 2)": 3.0,
    "shifted-exponential(0, 2)": 2.0,
    "pareto(2.5, 1)": 1.0,
    "lognormal(3, 0.5)": 3.0,
    "hyperexponential(0.9, 0.5, 5)": 0.95,
}


@pytest.mark.parametrize("law", MEANS)
def test_a_law_draws_what_it_says(law):
    delay = parse_delay(law)
    assert delay.mean == pytest.approx(MEANS[law])
    draws = delay.sample(np.random.default_rng(1), 20_000)
    assert draws.min() > 0
    if delay.name != "constant":  # Kolmogorov-Smirnov: one in a thousand of all seeds fails, this one does not
        assert stats.kstest(draws, delay.scipy.cdf).pvalue > 1e-3
    assert delay.scipy.ppf(0.3) == pytest.approx(np.quantile(draws, 0.3), rel=0.03)
    assert delay.scipy.cdf(delay.scipy.ppf(0.3)) == pytest.approx(0.3 if delay.name != "constant" else 1.0)


@pytest.mark.parametrize("law", MEANS)
def test_a_law_parses_back_and_its_draws_have_the_prefix_property(law):
    delay = parse_delay(law)
    again = parse_delay(f"  {delay.law} ")
    assert again.law == delay.law
    assert again.mean == delay.mean
    few, many = (again.sample(np.random.default_rng(7), n) for n in (5, 50))
    assert few.tolist() == many[:5].tolist()


def test_an_exponential_is_that_of_scipy():
    law, expected = parse_delay("shifted-exponential(1, 2)").scipy, stats.expon(loc=1, scale=2)
    assert (law.mean(), law.var()) == (expected.mean(), expected.var())
    times, shares = [-1.0, 0.5, 1.0, 1.5, 4.0, 90.0, np.inf], [0.0, 1e-300, 1e-9, 0.25, 0.5, 1.0]
    for name, at in (("cdf", times), ("sf", times), ("ppf", shares), ("isf", shares)):
        np.testing.assert_allclose(getattr(law, name)(at), getattr(expected, name)(at), rtol=1e-14, err_msg=name)


def test_a_lognormal_has_its_coefficient_of_variation():
    law = parse_delay("lognormal(3, 0.5)").scipy
    assert np.sqrt(law.var()) / law.mean() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exponental(1)", "unknown delay law 'exponental'; did you mean 'exponential'"),
        ("exponential", "written like"),
        ("exponential()", "takes 1 argument"),
        ("shifted-exponential(1)", r"takes 2 argument\(s\), shifted-exponential\(shift, mean\)"),
        ("exponential(0)", "mean of exponential must be above 0, got 0"),
        ("constant(-1)", "must be above 0"),
        ("exponential(inf)", "must be finite, got 'inf'"),
        ("exponential(nan)", "must be finite"),
        ("exponential(one)", "must be a number, got 'one'"),
        ("shifted-exponential(-1, 1)", "shift of shifted-exponential must be at least 0"),
        ("pareto(1, 1)", "alpha of pareto must be above 1.*no mean"),
        ("hyperexponential(1.5, 1, 2)", "p of hyperexponential must be between 0 and 1"),
        ("lognormal(1, 0)", "cv of lognormal must be above 0"),
        ("trace()", "name of a file"),
        ("trace(nowhere.txt)", "cannot read the trace"),
    ],
)
def test_a_bad_law_is_one_clear_line(text, message, tmp_path):
    with pytest.raises(InputError, match=message) as caught:
        parse_delay(text, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "1.5\n2.5\n",
        "# measured\n\n1.5\n2.5",
        "step_seconds\n1.5\n2.5\n",
        "took\n1.5\n2.5\n",
        "worker,step_seconds\n0,1.5\n1,2.5\n",
        '{"step_seconds": 1.5}\n{"step_seconds": 2.5, "worker": 3}\n',
        '{"update": 1}\n{"step_seconds": [1.5, 2.5]}\n',
        "[1.5, 2.5]\n",
        "\ufeff1.5\r\n2.5\r\n",
    ],
)
def test_a_trace_may_come_in_several_forms(text, tmp_path):
    (tmp_path / "steps.txt").write_text(text, encoding="utf-8")
    delay = parse_delay("trace(steps.txt)", tmp_path)
    assert delay.mean == 2.0
    assert set(delay.sample(np.random.default_rng(0), 50).tolist()) == {1.5, 2.5}
    assert parse_delay(delay.law).mean == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("1\n-2\n", "above 0, got '-2'"),
        ("1\n0\n", "above 0"),
        ("1\ninf\n", "finite"),
        ("1\nslow\n", "must hold step times in seconds, got 'slow'"),
        ("worker,seconds\n0,1\n", "no column 'step_seconds', only worker, seconds"),
        ("1,2\n", "2 columns and no header"),
        ("step_seconds\n", "no step times"),
        ('{"loss": 1}\n', "no line of the trace .* has 'step_seconds'"),
        ('{"step_seconds": null, "x": 1}\n{"step_seconds": "a"}', "got 'a'"),
        ("{broken\n", "not JSON"),
    ],
)
def test_a_bad_trace_is_one_clear_line(text, message, tmp_path):
    path = tmp_path / "steps.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_trace(path)


def test_a_trace_of_nine_numbers_written_as_json(tmp_path):
    values = [round(0.1 * i, 1) for i in range(1, 10)]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps({"step_seconds": value}) for value in values))
    assert read_trace(path).seconds == tuple(values)


@pytest.mark.parametrize(
    "text",
    [
        "worker,step_seconds\n0,1.5\n1,2.5\n",
        '{"step_seconds": 1.5, "worker": 0}\n{"step_seconds": 2.5, "worker": 1}\n',
        '{"step_seconds": [1.5, 2.5], "step_workers": [0, 1], "exchange_seconds": [0.1]}\n',
    ],
)
def test_a_trace_may_say_whose_steps_they_are(text, tmp_path):
    path = tmp_path / "steps.txt"
    path.write_text(text)
    trace = read_trace(path)
    assert trace.workers == (0, 1)
    assert trace.exchange_seconds == ((0.1,) if "exchange" in text else ())
    path.write_text(text.replace("1.5", "1.5").replace("worker", "who").replace("step_whos", "step_who"))
    assert read_trace(path).workers is None


def test_a_trace_whose_workers_do_not_fit_is_one_clear_line(tmp_path):
    path = tmp_path / "steps.txt"
    path.write_text('{"step_seconds": [1.5, 2.5], "step_workers": [0]}\n')
    with pytest.raises(InputError, match="has 2 step_seconds, but 1 step_workers"):
        read_trace(path)
    path.write_text("worker,step_seconds\nfirst,1.5\n")
    with pytest.raises(InputError, match="must be whole numbers, got 'first'"):
        read_trace(path)


@pytest.mark.parametrize("law", ["shifted-exponential(1, 1)", "hyperexponential(0.9, 0.5, 5)", "lognormal(1, 1)"])
def test_a_slow_worker_is_told_from_straggling_steps(law):
    delay = parse_delay(law)
    for seed in range(10):
        times = delay.sample(np.random.default_rng(seed), 8 * 60)
        owners = tuple(np.arange(len(times)) % 8)
        assert Trace(tuple(times), owners).factors() == {}
        slowed = tuple(np.where(np.equal(owners, 3), 5.0, 1.0) * times)
        found = Trace(slowed, owners).factors()
        assert list(found) == [3]
        assert found[3] == pytest.approx(5.0, rel=0.6)  # of medians of 60 draws from a heavy tail
        assert np.mean(Trace(slowed, owners).even()) == pytest.approx(np.mean(times), rel=0.15)
        assert Trace(slowed).factors() == {}


@pytest.mark.parametrize("law", ["exponential(1e-300)", "constant(1e13)", "lognormal(1, 1e200)"])
def test_times_that_no_clock_could_add_up_are_refused(law):
    with pytest.raises(InputError, match="must be between 1e-12 and 1e\\+12 seconds"):
        parse_delay(law)


@given(st.integers(0, 2**32), st.integers(0, 50), st.integers(0, 3 * BLOCK), st.integers(1, 20))
def test_a_draw_depends_on_seed_worker_and_number_only(seed, worker, number, count):
    delay = parse_delay("exponential(1)")
    streams = DelayStreams(delay, 51, seed)
    other = DelayStreams(delay, 60, seed, slow={59: 3.0})
    other.seconds(59, 5)
    other.seconds(worker, number + 2 * BLOCK)
    block, offset = divmod(number, BLOCK)
    assert streams.seconds(worker, number) == streams.block(worker, block)[offset] == other.seconds(worker, number)
    one_by_one = sum((streams.seconds(worker, i) for i in range(number, number + count)), 0.0)
    assert streams.seconds(worker, number, count) == one_by_one


def test_the_matrix_has_the_same_draws():
    streams = DelayStreams(parse_delay("pareto(2, 1)"), 4, 3, slow={2: 5.0})
    matrix = streams.matrix(BLOCK - 3, 2 * BLOCK)
    assert matrix.shape == (4, 2 * BLOCK)
    for worker, column in [(0, 0), (1, 3), (2, 2), (3, 2 * BLOCK - 1)]:
        assert matrix[worker, column] == streams.seconds(worker, BLOCK - 3 + column)


def test_streams_differ_and_a_slow_worker_is_slow():
    delay = parse_delay("exponential(1)")
    plain, slow, other = DelayStreams(delay, 2, 0), DelayStreams(delay, 2, 0, {1: 5.0}), DelayStreams(delay, 2, 1)
    first = [
        streams.block(worker, block).tolist() for streams in (plain, other) for worker in (0, 1) for block in (0, 1)
    ]
    assert len({tuple(draws) for draws in first}) == 8
    assert slow.block(1, 0).tolist() == (5.0 * plain.block(1, 0)).tolist()
    assert slow.block(0, 0).tolist() == plain.block(0, 0).tolist()


@pytest.mark.parametrize("slow", [{2: 1.0}, {-1: 1.0}, {0: 0.0}, {0: -2.0}, {0: float("inf")}])
def test_impossible_slow_factors_are_refused(slow):
    with pytest.raises(InputError, match="slow"):
        DelayStreams(parse_delay("exponential(1)"), 2, 0, slow)


def test_an_empirical_law():
    law = empirical_delay([3.0, 1.0, 1.0, 2.0], "trace(here)").scipy
    assert law.cdf([0.5, 1.0, 2.5, 3.0]).tolist() == [0.0, 0.5, 0.75, 1.0]
    assert law.sf(2.0) == 0.25
    assert law.ppf([0.0, 0.5, 0.51, 1.0]).tolist() == [1.0, 1.0, 2.0, 3.0]
    assert (law.mean(), law.var()) == (1.75, 0.6875)
