"""AdaSync: the formulas by hand, the guards one by one, and whole runs of arrivals."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hemiola.contracts import Arrivals
from hemiola.errors import InputError
from hemiola.pace.adasync import AdaSync, batch_rule, exponential_rule, falls, loss_floor, spacing_rule
from hemiola.pace.spacings import mean_spacings
from hemiola.timing.theory import harmonic


def test_the_rules_by_hand():
    assert batch_rule(2, 4.0) == 4.0
    # P = 8, K_0 = 2, ratio 4: c = 4/6 * 4 = 8/3; K^2 + c K - 8 c = 0.
    k = exponential_rule(2, 8, 4.0)
    assert k**2 / (8 - k) == pytest.approx(8 / 3)
    assert k == pytest.approx((-8 / 3 + math.sqrt(64 / 9 + 256 / 3)) / 2)
    # Spacings 1, 1, 1, 1: costs 1, 4, 9, 16 for K = 1 .. 4 of 5 workers.
    even = np.ones(4)
    assert [spacing_rule(1, even, ratio) for ratio in (0.5, 1.0, 2.5, 4.0, 5.0, 16.0, 32.0)] == pytest.approx(
        [1, 1, 1.5, 2, 2.2, 4, 4.5]
    )
    # Constant delays: one worker more costs nothing, so all of them.
    assert spacing_rule(1, np.zeros(4), 1.0) == 5


@given(st.integers(1, 7), st.floats(1.0, 100.0))
def test_the_rules_start_at_the_start_and_grow(start, ratio):
    assert batch_rule(start, 1.0) == start
    assert exponential_rule(start, 8, 1.0) == pytest.approx(start)
    assert start <= exponential_rule(start, 8, ratio) * (1 + 1e-9) <= 8 * (1 + 1e-9)
    exponential = 1 / (8 - np.arange(1, 8))  # E[X_{K+1:P}] - E[X_{K:P}], mean 1
    assert spacing_rule(start, exponential, 1.0) == pytest.approx(start)
    assert spacing_rule(start, exponential, ratio) == pytest.approx(exponential_rule(start, 8, ratio), abs=0.25)


def test_spacings_of_exponential_delays_are_harmonic():
    from hemiola.pace.laws import Empirical

    even = Empirical(-np.log1p(-(np.arange(4000) + 0.5) / 4000))
    expected = np.diff([harmonic(8) - harmonic(8 - k) for k in range(1, 9)])
    assert mean_spacings(even, 8)[:-1] == pytest.approx(expected[:-1], rel=0.01)


def play(policy, losses, k_reports=4, seconds=1.0, durations=(1.0,) * 4, start=0.0):
    """Updates a second apart, each with the same loss in every report; the K after each."""
    ks, now = [], start
    for loss in losses:
        now += seconds
        policy.updated(Arrivals(now, 0.0, (0,) * k_reports, (loss,) * k_reports, durations, (), (0,) * k_reports))
        ks.append(policy.k)
    return ks


def test_the_exact_rule_by_hand():
    # Batches count: K = round(2 sqrt(F_0 / F_t)). F_0 is the mean of the first P = 8 reports, two updates of four.
    policy = AdaSync(start=2, window=2.0, guard=False)
    policy.begin(8, counts_workers=False)
    assert play(policy, [4.0, 4.0, 1.0, 1.0, 0.25, 0.25, 4.0, 4.0]) == [2, 2, 2, 4, 4, 8, 8, 2]
    assert policy.telemetry()["adasync_ratio"] == 1.0


def test_the_exact_rule_where_workers_count():
    policy = AdaSync(start=2, window=2.0, guard=False)
    policy.begin(8, counts_workers=True)
    assert play(policy, [4.0, 4.0, 1.0, 1.0])[-1] == round(exponential_rule(2, 8, 4.0))


def test_measured_delays_replace_the_exponential_ones():
    # Seven fast workers and one slow: waiting for any but the last costs next to nothing.
    policy = AdaSync(start=2, window=2.0, guard=["delays"])
    policy.begin(8, counts_workers=True)
    durations = (*np.linspace(1.0, 1.01, 7), 50.0)
    for now in range(1, 200):
        policy.updated(Arrivals(float(now * 10), 0.0, (0,), (1.0 if now < 9 else 0.5,), durations, (), (0,)))
    exact = AdaSync(start=2, window=2.0, guard=False)
    exact.begin(8, counts_workers=True)
    for now in range(1, 200):
        exact.updated(Arrivals(float(now * 10), 0.0, (0,), (1.0 if now < 9 else 0.5,), durations, (), (0,)))
    assert exact.k == round(exponential_rule(2, 8, 2.0)) == 3
    expected = round(spacing_rule(2, mean_spacings(policy._delays.law(), 8), 2.0))
    assert policy.k == expected


def test_the_window_is_in_mean_step_times():
    for scale in (1.0, 2.0**-10):
        policy = AdaSync(start=2, window=10.0, guard=False)
        policy.begin(8, counts_workers=False)
        losses = [4.0] * 10 + [1.0] * 10
        ks = play(policy, losses, seconds=scale, durations=(scale,) * 4)
        assert ks == [2] * 19 + [4]


def test_the_window_counts_steps_that_were_cut_short():
    # The first of eight finishes after an eighth of a mean step, and cancels seven: 8/8 of a second lived through for
    # one that finished. A window of 10 is 10 s then, 80 updates, not 10 mean times of those that finished.
    policy = AdaSync(start=1, window=10.0, guard=False)
    policy.begin(8, counts_workers=True)
    ks = []
    for update in range(1, 200):
        loss = 4.0 if update <= 80 else 0.1
        policy.updated(Arrivals(update / 8, 0.0, (0,), (loss,), (0.125,), (0.125,) * 7, (0,)))
        ks.append(policy.k)
    assert ks[:159] == [1] * 159
    assert ks[159] == round(exponential_rule(1, 8, 40.0)) == 4


def test_the_floor_guard_sees_a_noise_floor():
    # Loss 0.5 + 1.5 * 0.8^n, 4 reports a window, so F_0 = (2 + 1.7) / 2 = 1.85. The paper's ratio ends at 1.85 / 0.5,
    # so K = 2 sqrt(3.7) = 3.8. With a floor of 0.7 * 0.5 it ends at (1.85 - 0.35) / (0.5 - 0.35), K = 2 sqrt(10) = 6.3.
    losses = [0.5 + 1.5 * 0.8**n for n in range(60)]
    ends = {}
    for guard in ([], ["floor"]):
        policy = AdaSync(start=2, window=1.0, guard=guard)
        policy.begin(8, counts_workers=False)
        ends[len(guard)] = play(policy, losses)[-1]
    assert ends == {0: 4, 1: 6}


def test_the_floor_of_a_geometric_decay_is_exact():
    def floor(*means):
        return loss_floor(means, [0.0] * len(means))

    assert floor(1.5, 1.0, 0.75) == pytest.approx(0.5)
    assert floor(*[0.5 + 0.8**n for n in range(6)]) == pytest.approx(0.5)
    assert floor(1.0, 0.5) == 0.0
    assert floor(3.0, 2.0, 1.0) == 0.0  # no sign of slowing down
    assert floor(2.0, 1.0, 1.0) == 0.7  # stopped: the floor is where the loss is, but never quite
    assert floor(1.0, 1.1, 1.2) == 0.0  # rising: nothing known


def test_a_floor_must_be_clear_of_the_noise():
    # 1.5, 1.0, 0.75 slow down by 0.25; with an error e of each mean that has a standard error of e sqrt(1 + 4 + 1).
    clear = 0.25 / 2 / math.sqrt(6)
    assert loss_floor([1.5, 1.0, 0.75], [clear * 0.99] * 3) == pytest.approx(0.5)
    assert loss_floor([1.5, 1.0, 0.75], [clear * 1.01] * 3) == 0.0
    # The mean of two windows has an error smaller by sqrt(2).
    twice = [1.5, 1.5, 1.0, 1.0, 0.75, 0.75]
    assert loss_floor(twice, [clear * 0.99 * math.sqrt(2)] * 6) == pytest.approx(0.5)
    assert loss_floor(twice, [clear * 1.01 * math.sqrt(2)] * 6) == 0.0


def test_the_stuck_guard():
    # The loss never falls: the paper's rule stays at K_0 for ever.
    stuck, exact = AdaSync(start=2, window=1.0, guard=["stuck"]), AdaSync(start=2, window=1.0, guard=False)
    for policy in (stuck, exact):
        policy.begin(8, counts_workers=False)
    losses = [2.0, 2.0, 2.5, 2.4, 2.6, 2.5]
    assert play(exact, losses)[-1] == 2
    assert play(stuck, losses) == [2, 3, 4, 6, 8, 8]


def test_the_stuck_guard_is_not_fooled_by_noise():
    generator = np.random.default_rng(0)
    raised = 0
    for _ in range(20):
        policy = AdaSync(start=2, window=1.0, guard=["stuck"])
        policy.begin(8, counts_workers=False)
        play(policy, [4.0], k_reports=8)
        for now in range(2, 22):  # twenty windows of 32 noisy losses, no trend
            losses = tuple(2.0 + 0.5 * generator.standard_normal(32))
            policy.updated(Arrivals(float(now), 0.0, (0,) * 32, losses, (1.0,), (), (0,) * 32))
        raised += policy._least > 1
    assert raised <= 4  # one window in 740 is three standard errors above the one before


def test_the_plateau_guard():
    # F_0 / F_t is 4 / 2.6 at the most, so the paper's rule stays at K_0 = 2 although K_0 holds the loss up at 2.6.
    # Twelve windows at the present K, the last four not below the first four: K grows by half; twelve more, and again.
    losses = [4.0, 4.0, 3.8, 3.6, 3.4, 3.2, 3.0, 2.8] + [2.6] * 40
    guarded, exact = AdaSync(start=2, window=1.0, guard=["plateau"]), AdaSync(start=2, window=1.0, guard=False)
    for policy in (guarded, exact):
        policy.begin(8, counts_workers=False)
    assert play(exact, losses) == [2] * 48
    assert play(guarded, losses) == [2] * 19 + [3] * 12 + [4] * 12 + [6] * 5


def test_a_plateau_takes_as_many_updates_as_the_first_two_windows():
    # A window is eight updates long at K_0, so there must be sixteen at each K. Then an update takes as long as a
    # window: sixteen windows pass.
    policy = AdaSync(start=2, window=8.0, guard=["plateau"])
    policy.begin(8, counts_workers=False)
    assert play(policy, [2.0] * 96) == [2] * 95 + [3]
    assert play(policy, [2.0] * 16, seconds=8.0, start=96.0) == [3] * 15 + [4]


def test_a_fall_is_seen_through_noise():
    # The mean of two windows of error e has e / sqrt(2), the difference of two such means e: 3 e is clear.
    fall = [1.3, 1.3, 1.2, 1.1, 1.0, 1.0]
    assert falls(fall, [0.099] * 6)
    assert not falls(fall, [0.101] * 6)
    assert not falls(fall[::-1], [0.0] * 6)


def test_losses_that_are_not_finite_raise_k_and_poison_nothing():
    policy = AdaSync(start=2, window=1.0, guard=["stuck"])
    policy.begin(8, counts_workers=False)
    play(policy, [4.0, 4.0, 1.0])
    assert policy.k == 4
    now = 4.0
    policy.updated(Arrivals(now, 0.0, (0, 1), (math.nan, 1.0), (1.0, math.inf), (math.nan,), (0, 0)))
    assert policy.k == 6
    assert all(math.isfinite(value) for value in policy.telemetry().values())
    assert play(policy, [1.0], start=now) == [6]


def test_hysteresis_waits_for_a_second_opinion():
    policy = AdaSync(start=2, window=1.0, guard=["hysteresis"])
    policy.begin(8, counts_workers=False)
    # Asked for: 2 2 | 4 | 2 | 4 | 8 | 2 2
    assert play(policy, [4.0, 4.0, 1.0, 4.0, 1.0, 0.25, 4.0, 4.0]) == [2, 2, 2, 2, 2, 4, 4, 2]


def test_a_run_goes_on_exactly_after_a_restart():
    generator = np.random.default_rng(1)
    seen = []
    for now in range(1, 400):
        losses = tuple(0.4 + 2 * math.exp(-now / 80) + 0.1 * generator.standard_normal(3))
        seen.append(
            Arrivals(now * 0.7, 0.0, (0,) * 3, losses, tuple(generator.exponential(size=3)), (0.3, 0.2), (0,) * 3)
        )
    whole, first, second = (AdaSync(start=2, window=5.0) for _ in range(3))
    for policy in (whole, first, second):
        policy.begin(8, counts_workers=True)
    ks = []
    for arrival in seen:
        whole.updated(arrival)
        ks.append(whole.k)
    for arrival in seen[:200]:
        first.updated(arrival)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    rest = []
    for arrival in seen[200:]:
        second.updated(arrival)
        rest.append(second.k)
    assert rest == ks[200:]
    assert len(set(ks)) > 2
    assert len(whole._delays.finished) + len(whole._delays.censored) <= 2048


def test_foreign_state_is_refused():
    policy = AdaSync(start=2)
    policy.begin(8, counts_workers=True)
    with pytest.raises(InputError, match="not the state of a 'adasync'"):
        policy.load_state_dict({"kind": "k-async", "version": 1})
    other = AdaSync(start=3)
    other.begin(8, counts_workers=True)
    with pytest.raises(InputError, match="start = 2, this one has 3"):
        other.load_state_dict(policy.state_dict())
