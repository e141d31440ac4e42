"""Periods that are told: their lengths by hand."""

import math

import pytest

from hemiola.contracts import Averaging, Period
from hemiola.errors import InputError
from hemiola.period import PERIODS, QSR, Constant, Decreasing, Full, PostLocal


def averagings(period, steps=880, lr=lambda t: 0.1):
    """Averagings of a run of `steps`, the last stint cut short."""
    t, count = 0, 0
    while t < steps:
        t += period.length(lr(t), t / steps)
        count += 1
    return count


def drops(t):
    return 0.1 if t < 440 else 0.01 if t < 660 else 0.001


def test_every_name_is_a_period_with_defaults():
    names = ["full", "constant", "adaptive", "decreasing", "post-local", "qsr", "budget", "clocked", "fda"]
    assert list(PERIODS) == names
    for name, make in PERIODS.items():
        period = make()
        assert isinstance(period, Period)
        assert period.kind == name
        assert period.local == (name != "full")
        assert period.length(0.1, 0.0) >= 1


def test_counts_of_the_table_in_the_method():
    assert averagings(Full()) == 880
    assert [averagings(Constant(p=p)) for p in (4, 6, 8, 16)] == [220, 147, 110, 55]
    assert averagings(Decreasing(start=16, end=4)) == 28 + 108  # the 28th long stint ends at step 448
    assert averagings(PostLocal(switch=0.5, p=16)) == 440 + 28
    assert averagings(PostLocal(base=4, switch=0.5, p=16)) == 110 + 28
    assert averagings(QSR(base=4, alpha=0.2), lr=drops) == 110 + 2  # then 400 steps, then whatever is left


@pytest.mark.parametrize(("lr", "p"), [(0.2, 4), (0.1, 4), (0.05, 16), (0.01, 400), (0.03, 44), (0.0, 4)])
def test_qsr_squares_once_the_rate_falls(lr, p):
    period = QSR(base=4, alpha=0.2)
    period.length(0.4, 0.0)
    assert period.length(lr, 0.1) == p


def authors(lr, warm_up, steps, base, alpha):
    """The stints of the QSR authors' code: init_h until the warm-up is over, clipped to the steps left."""
    t, stints = 0, []
    while t < steps:
        h = base if t < warm_up else max(base, int(round((alpha / lr(t)) ** 2, 12)))
        stints.append(min(h, steps - t))
        t += stints[-1]
    return stints


def rising(t, by=1):
    return 0.4 * (0.01 + 0.99 * min(1.0, t // by * by / 200))


def cosine(t):
    return rising(t) if t < 200 else 0.2 * (1 + math.cos(math.pi * (t - 200) / 1800))


def two_steps(t):
    return rising(t) if t < 200 else 0.4 if t < 1100 else 0.04 if t < 1550 else 0.004


def epochs(t):
    return rising(t, by=50) if t < 200 else two_steps(t)


@pytest.mark.parametrize("lr", [cosine, two_steps, epochs])
@pytest.mark.parametrize("known", [True, False])
def test_qsr_with_a_warm_up_averages_as_its_authors_do(lr, known):
    period, t, stints = QSR(base=4, alpha=0.2), 0, []
    while t < 2000:
        stints.append(min(period.length(lr(t), t / 2000 if known else 0.0), 2000 - t))
        t += stints[-1]
    assert stints == authors(lr, 200, 2000, 4, 0.2)
    assert len(stints) == {cosine: 387}.get(lr, 275 + 18 + 1)


def test_qsr_waits_for_a_fall_and_for_workers_that_are_behind():
    period = QSR(base=4, alpha=0.2)
    assert [period.length(0.01, share) for share in (0.0, 0.3, 0.6)] == [4, 4, 4]  # constant, or a long plateau
    assert period.length(0.05, 0.7) == 4
    assert period.length(0.02, 0.65) == 4  # a slow worker, still in the warm-up
    assert period.length(0.02, 0.8) == 100
    assert period.length(0.2, 0.9) == 4  # a restart of the schedule


def test_qsr_resumes_in_the_warm_up():
    period, resumed = QSR(), QSR()
    period.length(0.3, 0.1)
    resumed.load_state_dict(period.state_dict())
    assert resumed.state_dict() == period.state_dict()
    assert resumed.length(0.05, 0.2) == period.length(0.05, 0.2) == 16


def test_nothing_measured_changes_a_schedule():
    for period in (Full(), Constant(p=3), Decreasing(), PostLocal(), QSR()):
        before = period.length(0.05, 0.7), period.state_dict()
        period.averaged(Averaging(7, 0.7, 0.05, 1e9, 1e-9, 3.0, 3))
        assert (period.length(0.05, 0.7), period.state_dict()) == before
        period.load_state_dict(before[1])


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Constant(p=0), "p must be at least 1, got 0"),
        (lambda: Constant(p=2.5), "p must be a whole number, got 2.5"),
        (lambda: Decreasing(start=4, end=8), "end must be at most start = 4, got 8"),
        (lambda: PostLocal(switch=1.5), "switch must be above 0 and below 1, got 1.5"),
        (lambda: PostLocal(p=0), "p must be at least 1, got 0"),
        (lambda: PostLocal(base=0), "base must be at least 1, got 0"),
        (lambda: QSR(base=0), "base must be at least 1, got 0"),
        (lambda: QSR(alpha=0.0), "alpha must be above 0 and below inf, got 0"),
    ],
)
def test_impossible_options(make, line):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == line


def test_foreign_state_is_refused():
    with pytest.raises(InputError, match="not the state of a 'qsr': its kind is 'constant'"):
        QSR().load_state_dict(Constant().state_dict())
    with pytest.raises(InputError, match="version 1, this hemiola reads 2"):
        QSR().load_state_dict({"kind": "qsr", "version": 1})
