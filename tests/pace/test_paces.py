"""The four paces: their fields, their K, their weights, and what they refuse."""

from __future__ import annotations

import io

import pytest
import torch

from hemiola.contracts import Arrivals, Pace
from hemiola.errors import InputError
from hemiola.pace import PACES, KAsync, KBatchAsync, KBatchSync, KSync


def arrivals(progress=0.0, seconds=1.0, losses=(), durations=(), censored=()):
    return Arrivals(seconds, progress, (0,) * len(losses), losses, durations, censored, (0,) * len(losses))


def test_the_table():
    assert {name: (pace.cancels, pace.idles) for name, pace in PACES.items()} == {
        "k-sync": (True, True),
        "k-batch-sync": (True, False),
        "k-async": (False, True),
        "k-batch-async": (False, False),
    }
    for make in PACES.values():
        assert isinstance(make(), Pace)


def test_k_is_the_number_of_workers_by_default():
    for make in PACES.values():
        pace = make()
        pace.begin(5)
        assert (pace.k(), pace.fixed_k, pace.telemetry()) == (5, 5, {"k": 5})


def test_a_schedule_follows_progress():
    pace = KAsync(k=[[0.0, 2], [0.5, 4]])
    pace.begin(8)
    seen = [pace.k()]
    for progress in (0.2, 0.499, 0.5, 0.9, 1.0):
        pace.updated(arrivals(progress))
        seen.append(pace.k())
    assert seen == [2, 2, 2, 4, 4, 4]
    assert pace.fixed_k is None
    pace.begin(8)
    assert pace.k() == 2


def test_lockstep():
    cases = [
        (KSync(), True),
        (KAsync(k=4), True),
        (KAsync(k=3), False),
        (KSync(k=[[0.0, 4], [0.5, 4]]), True),
        (KSync(k=[[0.0, 3], [0.5, 4]]), False),
        (KBatchSync(), False),
        (KBatchAsync(k=4), False),
        (KSync(k="adasync"), False),
    ]
    for pace, expected in cases:
        pace.begin(4)
        assert pace.lockstep is expected


def test_weights_by_hand():
    assert KAsync().weight(7, 9.0) == 1.0
    assert not KAsync().needs_distance
    delay = KAsync(stale_rate="delay", stale_constant=2.0)
    assert [delay.weight(tau, 0.0) for tau in (0, 1, 3, 9)] == [1.0, 1.0, 0.5, 0.2]
    distance = KAsync(stale_rate="distance", stale_constant=0.5)
    assert distance.needs_distance
    assert [distance.weight(3, d) for d in (0.0, 0.25, 0.5, 2.0)] == [1.0, 1.0, 1.0, 0.25]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KSync(k=0), "k must be a whole number of at least 1, got 0"),
        (lambda: KBatchAsync(k=-3), "at least 1, got -3"),
        (lambda: KSync(k=[[0.0, 2.5]]), "whole number of at least 1, got 2.5"),
        (lambda: KSync(k=[]), "must start at progress 0"),
        (lambda: KSync(k=[[0.1, 2]]), "must start at progress 0"),
        (lambda: KSync(k=[[0.0, 2], [0.0, 3]]), "must increase"),
        (lambda: KSync(k=[[0.0, 2], [1.5, 3]]), r"lie in \[0, 1\]"),
        (lambda: KSync(k=[[0.0, 2, 1]]), r"\(progress, K\) pairs, got the entry \[0.0, 2, 1\]"),
        (lambda: KSync(k=[3]), "pairs, got the entry 3"),
        (lambda: KSync(k="adasink"), "got 'adasink'"),
        (lambda: KAsync(max_staleness=-1), "max_staleness must be at least 0, got -1"),
        (lambda: KSync(late="wait"), "late must be one of cancel, cut, ignore, got 'wait'"),
        (lambda: KAsync(late="ignore"), "no meaning in k-async"),
        (lambda: KAsync(stale_rate="age"), "stale_rate must be"),
        (lambda: KAsync(stale_constant=0.0), "stale_constant must be above 0, got 0.0"),
        (lambda: KAsync(k="adasync", start=0), "start must be at least 1, got 0"),
        (lambda: KAsync(k="adasync", window=0.0), "window must be finite and above 0"),
        (lambda: KAsync(k="adasync", guard=["flor"]), "got 'flor'; did you mean 'floor'"),
    ],
)
def test_impossible_options_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("pace", "message"),
    [
        (KSync(k=9), "between 1 and the number of workers, 8, in k-sync, got 9"),
        (KAsync(k=[[0.0, 2], [0.5, 9]]), "got 9"),
        (KAsync(k="adasync", start=8), "start of adasync must be below the number of workers, 8, got 8"),
        (KBatchAsync(k="adasync", start=9), "below the number of workers, 8, got 9"),
    ],
)
def test_a_k_that_does_not_fit_the_workers_is_refused(pace, message):
    with pytest.raises(InputError, match=message):
        pace.begin(8)


def test_batches_may_outnumber_workers():
    for pace in (KBatchSync(k=20), KBatchAsync(k=20)):
        pace.begin(8)
        assert pace.k() == 20


def test_state_goes_through_a_file_and_refuses_strangers():
    pace = KAsync(k=[[0.0, 2], [0.5, 4]])
    pace.begin(8)
    pace.updated(arrivals(0.7))
    file = io.BytesIO()
    torch.save(pace.state_dict(), file)
    file.seek(0)
    again = KAsync(k=[[0.0, 2], [0.5, 4]])
    again.begin(8)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.k() == 4

    other = KSync(k=2)
    other.begin(8)
    with pytest.raises(InputError, match="not the state of a 'k-sync': its kind is 'k-async'"):
        other.load_state_dict(pace.state_dict())
    fewer = KAsync(k=2)
    fewer.begin(4)
    with pytest.raises(InputError, match="had 8 workers, this run has 4"):
        fewer.load_state_dict(pace.state_dict())
    adaptive = KAsync(k="adasync")
    adaptive.begin(8)
    with pytest.raises(InputError, match="adasync"):
        adaptive.load_state_dict(pace.state_dict())
