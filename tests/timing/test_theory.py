"""Theory against values computed by hand, against other formulas, and against the timing-only simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from hemiola.errors import InputError
from hemiola.pace import PACES
from hemiola.pace.laws import Empirical
from hemiola.pace.spacings import fit_delays, mean_spacings, order_statistic_mean
from hemiola.timing.delays import empirical_delay, parse_delay
from hemiola.timing.simulate import simulate_timing
from hemiola.timing.theory import (
    Problem,
    error_bound,
    fresh_fraction,
    gradient_bound,
    harmonic,
    kth_fastest,
    mean_staleness,
    new_against_used,
    speedup,
    update_time,
)

EXPONENTIAL = parse_delay("exponential(1)")
SHIFTED = parse_delay("shifted-exponential(1, 1)")
PARETO = parse_delay("pareto(2.5, 1)")
HYPER = parse_delay("hyperexponential(0.9, 0.5, 5)")
VARIANTS = ["k-sync", "k-batch-sync", "k-async", "k-batch-async"]


def test_closed_forms_by_hand():
    # H_8 - H_4 = 1/5 + 1/6 + 1/7 + 1/8
    assert update_time("k-sync", EXPONENTIAL, 8, 4).value == pytest.approx(1 / 5 + 1 / 6 + 1 / 7 + 1 / 8)
    assert update_time("k-async", EXPONENTIAL, 8, 4).value == pytest.approx(1 / 5 + 1 / 6 + 1 / 7 + 1 / 8)
    assert update_time("k-sync", SHIFTED, 8, 4).value == pytest.approx(1.6345238)
    assert update_time("k-batch-sync", EXPONENTIAL, 8, 4).value == 0.5
    assert update_time("k-batch-async", SHIFTED, 8, 4).value == 1.0
    assert update_time("k-sync", PARETO, 8, 4).value == pytest.approx(0.780, abs=5e-4)
    assert harmonic(0) == 0
    assert harmonic(4) == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4)
    assert speedup(EXPONENTIAL, 8) == pytest.approx(21.74, abs=0.005)
    # Worker 3 five times as slow: 7 + 1/5 stints a second.
    assert update_time("k-batch-async", EXPONENTIAL, 8, 4, {3: 5.0}).value == pytest.approx(4 / 7.2)
    assert update_time("k-batch-async", EXPONENTIAL, 4, 40).value == 10.0


@pytest.mark.parametrize("law", ["exponential(2)", "shifted-exponential(1, 2)", "pareto(2.5, 1)", "pareto(1.2, 1)"])
@pytest.mark.parametrize(("workers", "k"), [(1, 1), (8, 1), (8, 4), (8, 8), (64, 60), (1000, 999)])
def test_quadrature_agrees_with_the_closed_forms(law, workers, k):
    delay = parse_delay(law)
    assert order_statistic_mean(delay.scipy, k, workers) == pytest.approx(kth_fastest(delay, workers, k), rel=1e-8)


@pytest.mark.parametrize("law", ["lognormal(1, 0.5)", "hyperexponential(0.9, 0.5, 5)"])
def test_quadrature_agrees_with_the_integral_of_the_survival_function(law):
    delay = parse_delay(law)
    for k in (1, 4, 8):
        value, _ = integrate.quad(lambda x, k=k: stats.binom.cdf(k - 1, 8, delay.scipy.cdf(x)), 0, np.inf, limit=200)
        assert order_statistic_mean(delay.scipy, k, 8) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("law", ["lognormal(1, 0.5)", "lognormal(1, 2)", "hyperexponential(0.9, 0.5, 5.5)"])
def test_no_number_of_workers_has_no_answer(law):
    # Once NaN, and called exact, at (5, 2), (5, 3) and (6, 3). The reference integrates P(X_{K:P} > x) over log x by
    # Simpson's rule; all order statistics of P draws add up to P means.
    delay = parse_delay(law)
    grid = np.linspace(np.log(1e-9), np.log(1e4), 4001)
    x = np.exp(grid)
    share = delay.scipy.cdf(x)
    for workers in (2, 3, 4, 5, 6, 7, 8, 17, 64):
        means = [update_time("k-sync", delay, workers, k) for k in range(1, workers + 1)]
        assert all(mean.exact for mean in means)
        assert sum(mean.value for mean in means) == pytest.approx(workers * delay.mean, rel=1e-9)
        for k in {1, 2, 3, workers // 2, workers - 1, workers} & set(range(1, workers + 1)):
            expected = x[0] + integrate.simpson(stats.binom.cdf(k - 1, workers, share) * x, x=grid)
            assert means[k - 1].value == pytest.approx(expected, rel=1e-6), (workers, k)


def test_every_number_of_workers_up_to_64_has_an_answer():
    delay = parse_delay("lognormal(1, 1)")
    for workers in range(1, 65):
        means = [kth_fastest(delay, workers, k) for k in range(1, workers + 1)]
        assert sum(means) == pytest.approx(workers, rel=1e-9)
        assert means == sorted(means)


def test_order_statistics_of_a_trace_by_hand():
    # Two draws from {1, 2}: the smaller is 2 only if both are (1/4), the larger is 1 only if both are.
    law = Empirical([1.0, 2.0])
    assert order_statistic_mean(law, 1, 2) == pytest.approx(1.25)
    assert order_statistic_mean(law, 2, 2) == pytest.approx(1.75)
    assert mean_spacings(law, 2) == pytest.approx([0.5])
    whole = Empirical(np.random.default_rng(0).exponential(size=50))
    steps = np.diff([order_statistic_mean(whole, k, 8) for k in range(1, 9)])
    assert mean_spacings(whole, 8) == pytest.approx(steps)


@pytest.mark.parametrize("workers", [2, 16, 1000])
def test_spacings_of_any_number_of_workers(workers):
    law = Empirical(np.random.default_rng(0).exponential(size=50))
    counts, shares = np.arange(1, workers)[:, None], law.cdf(law.values)[:-1]
    expected = stats.binom.pmf(counts, workers, shares) @ np.diff(law.values)
    np.testing.assert_allclose(mean_spacings(law, workers), expected, rtol=1e-11)


def test_cancelled_delays_are_not_forgotten():
    # K-sync with K = 4 of 8 and true mean 2: the finished delays alone are far too short.
    draws = np.sort(parse_delay("exponential(2)").sample(np.random.default_rng(0), 8 * 400).reshape(400, 8), axis=1)
    finished, censored = draws[:, :4].ravel(), np.repeat(draws[:, 3], 4)
    assert finished.mean() < 0.8
    fitted = fit_delays(finished, censored)
    assert fitted.mean() == pytest.approx(2.0, rel=0.1)
    assert order_statistic_mean(fitted, 6, 8) == pytest.approx(2 * (harmonic(8) - harmonic(2)), rel=0.1)
    assert fit_delays([1.0, 3.0], []).mean() == 2.0
    # By hand: deaths at 1 and 3, one cut short at 2: S(1) = 2/3, S(3) = 0.
    assert fit_delays([1.0, 3.0], [2.0]).mean() == pytest.approx(1 / 3 * 1 + 2 / 3 * 3)


@pytest.mark.parametrize("delay", [EXPONENTIAL, SHIFTED, PARETO, HYPER], ids=lambda delay: delay.name)
@pytest.mark.parametrize(("workers", "ks"), [(8, (1, 3, 8)), (64, (8, 48))])
def test_simulation_agrees_with_theory(delay, workers, ks):
    for variant in VARIANTS:
        for k in ks:
            theory = update_time(variant, delay, workers, k)
            updates = 12_000 if workers == 8 else 2_000
            result = simulate_timing(PACES[variant](k=k), workers, delay, updates, seed=2)
            measured, error = result.mean_update_seconds, result.standard_error
            if theory.exact:
                # The run starts with fresh workers, which costs the asynchronous variants up to one stint in all.
                start = delay.mean / updates if "async" in variant else 0.0
                assert abs(measured - theory.value) < 3 * error + start, (variant, k, measured, theory)
            else:
                assert theory.low - 3 * error < measured < theory.high + 3 * error, (variant, k, measured, theory)
                assert abs(measured - theory.value) < 4 * math.hypot(error, theory.error), (
                    variant,
                    k,
                    measured,
                    theory,
                )
            assert theory.low <= theory.value <= theory.high or theory.error > 0


@pytest.mark.parametrize("variant", ["k-sync", "k-batch-sync", "k-async"])
def test_unequal_workers_are_simulated(variant):
    slow = {0: 5.0, 3: 2.0}
    theory = update_time(variant, SHIFTED, 8, 5, slow)
    result = simulate_timing(PACES[variant](k=5), 8, SHIFTED, 20_000, slow=slow)
    assert not theory.exact
    assert abs(theory.value - result.mean_update_seconds) < 4 * math.hypot(theory.error, result.standard_error)
    assert theory.low < theory.value


def test_which_values_are_exact():
    exact = {(v, k): update_time(v, SHIFTED, 8, k).exact for v in VARIANTS for k in (1, 4, 8)}
    assert [key for key, known in exact.items() if not known] == [
        ("k-batch-sync", 4),
        ("k-batch-sync", 8),
        ("k-async", 4),
    ]


def test_the_ranking_turns_round():
    # Delays that age the wrong way: cancelling beats waiting; with a shift it is the other way round.
    assert update_time("k-sync", HYPER, 8, 4).value < update_time("k-async", HYPER, 8, 4).value
    assert update_time("k-sync", SHIFTED, 8, 4).value > update_time("k-async", SHIFTED, 8, 4).value


def test_staleness_and_freshness():
    assert mean_staleness("k-async", 8, 4) == 1
    assert mean_staleness("k-batch-async", 8, 4) == 7 / 4
    assert mean_staleness("k-sync", 8, 4) == mean_staleness("k-batch-sync", 8, 4) == 0
    assert fresh_fraction("k-async", EXPONENTIAL, 8, 4) == 0.5
    assert fresh_fraction("k-batch-async", EXPONENTIAL, 8, 1) == pytest.approx(1 / 8)
    assert fresh_fraction("k-async", SHIFTED, 8, 8) == 1
    assert fresh_fraction("k-sync", SHIFTED, 8, 4) == 1
    assert fresh_fraction("k-async", SHIFTED, 8, 4) is None
    for variant in ("k-async", "k-batch-async"):
        result = simulate_timing(PACES[variant](k=3), 8, EXPONENTIAL, 20_000)
        assert result.fresh_fraction == pytest.approx(fresh_fraction(variant, EXPONENTIAL, 8, 3), abs=0.01)


def test_new_against_used():
    assert new_against_used(EXPONENTIAL) == "same"
    assert new_against_used(SHIFTED) == "longer"
    assert new_against_used(HYPER) == "shorter"
    assert new_against_used(PARETO) == "mixed"  # a shift first, then ever slower
    assert new_against_used(parse_delay("constant(1)")) == "longer"


@pytest.mark.parametrize(("delay", "expected"), [(SHIFTED, "longer"), (HYPER, "shorter"), (EXPONENTIAL, "mixed")])
def test_new_against_used_from_a_trace(delay, expected):
    verdicts = []
    for seed in range(10):
        trace = empirical_delay(delay.sample(np.random.default_rng(seed), 1000), "trace(x)")
        verdicts.append(new_against_used(trace))
    assert verdicts.count(expected) >= 8
    assert new_against_used(empirical_delay([1.0, 2.0], "trace(x)")) == "mixed"


PROBLEM = Problem(gap=2.0, smoothness=1.0, variance=4.0, batch=2, rate=0.1, strength=0.5, drift=0.2)


def test_error_bounds_by_hand():
    seconds = np.array([0.0, 2.0, 1e6])
    # K = 4: noise = 1 * .1 * 4 / (4 * 2) = .05; floor = .05 / (2 * .5) = .05; decay .95 an update of 2 s.
    assert error_bound(PROBLEM, 4, 2.0, seconds) == pytest.approx([2.0, 0.05 + 0.95 * 1.95, 0.05])
    # Asynchronous with p_0 = .5: gamma' = 1 - .2 + .25 = 1.05.
    assert error_bound(PROBLEM, 4, 2.0, seconds, fresh=0.5)[2] == pytest.approx(0.05 / 1.05)
    # 2 * 2 * 2 / (10 * .1) + .05
    assert gradient_bound(PROBLEM, 4, 2.0, np.array([10.0])) == pytest.approx([8.05])
    with pytest.raises(InputError, match="strength must be above 0"):
        error_bound(Problem(1.0, 1.0, 1.0, 1, 0.1), 2, 1.0, seconds)
    with pytest.raises(InputError, match=r"at most smoothness = 1\.0"):
        error_bound(Problem(1.0, 1.0, 1.0, 1, 0.1, strength=2.0), 2, 1.0, seconds)


def test_rates_at_which_training_diverges_are_refused():
    # F(w) = (L/2) w^2 with L = c = 1: gradient descent at rate 3 doubles w at every step.
    def problem(rate, **others):
        return Problem(gap=1.0, smoothness=1.0, variance=1.0, batch=1, rate=rate, strength=1.0, **others)

    times = np.array([1.0])
    for bound in (error_bound, gradient_bound):
        assert np.isfinite(bound(problem(1.0), 2, 1.0, times)).all()
        assert np.isfinite(bound(problem(0.5), 2, 1.0, times, fresh=0.5)).all()
        for rate in (0.0, -0.1, 1.01, 3.0, math.nan):
            with pytest.raises(InputError, match="at most 1 / smoothness = 1 for the bound to hold, got"):
                bound(problem(rate), 2, 1.0, times)
        with pytest.raises(InputError, match=r"with stale reports = 0\.5 for the bound to hold, got 0\.6"):
            bound(problem(0.6), 2, 1.0, times, fresh=0.5)
        with pytest.raises(InputError, match=r"drift must be between 0 and 1, got 1\.5"):
            bound(problem(0.1, drift=1.5), 2, 1.0, times)
        with pytest.raises(InputError, match="drift must be below 1"):
            bound(problem(0.1, drift=1.0), 2, 1.0, times, fresh=0.0)
        with pytest.raises(InputError, match="smoothness must be above 0"):
            bound(Problem(1.0, 0.0, 1.0, 1, 0.1, strength=1.0), 2, 1.0, times)


def test_small_k_is_ahead_first_and_large_k_at_the_end():
    times = np.array([1.0, 1e4])
    small, large = (error_bound(PROBLEM, k, update_time("k-sync", EXPONENTIAL, 8, k).value, times) for k in (1, 8))
    assert small[0] < large[0]
    assert small[1] > large[1]


def test_impossible_k_is_refused():
    with pytest.raises(InputError, match="in k-sync at most the number of workers, 4, got 5"):
        update_time("k-sync", EXPONENTIAL, 4, 5)
    with pytest.raises(InputError, match="at least 1"):
        update_time("k-batch-async", EXPONENTIAL, 4, 0)
