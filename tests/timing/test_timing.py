"""The timing-only simulation against a slow reference, the known numbers, and the counting identities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.errors import InputError
from hemiola.pace import PACES, KAsync, KBatchAsync, KBatchSync, KSync
from hemiola.timing import arrays, events
from hemiola.timing.delays import DelayStreams, empirical_delay, parse_delay
from hemiola.timing.simulate import batch_means_error, simulate_timing

LAWS = ["exponential(1)", "shifted-exponential(1, 1)", "pareto(2.5, 1)", "hyperexponential(0.9, 0.5, 5)", "constant(1)"]


def reference(pace, workers, delay, updates, seed, slow):
    """The rules of ``contracts.Pace``, one event at a time over plain dicts; only the draws are the package's."""
    pace.begin(workers)
    streams = DelayStreams(delay, workers, seed, slow)
    stints, given_out, order = {}, [0] * workers, 0  # worker -> (end, order, number, version)
    version, log, waiting = 0, [], []

    def begin(worker, now):
        nonlocal order
        end = now + streams.seconds(worker, given_out[worker])
        stints[worker] = (end, order, given_out[worker], version)
        given_out[worker] += 1
        order += 1

    for worker in range(workers):
        begin(worker, 0.0)
    merged, dropped, late = [], [], []
    while version < updates:
        worker = min(stints, key=lambda j: stints[j][:2])
        end, _, number, read = stints.pop(worker)
        staleness = version - read
        if pace.cancels and staleness:
            late.append((worker, number))
            begin(worker, end)
            continue
        if pace.max_staleness is not None and staleness > pace.max_staleness:
            dropped.append((worker, number))
            begin(worker, end)
            continue
        merged.append((worker, number, staleness))
        if len(merged) < pace.k():
            if pace.idles:
                waiting.append(worker)
            else:
                begin(worker, end)
            continue
        version += 1
        free, cancelled = [*waiting, worker], []
        waiting = []
        if pace.cancels and pace.late == "cancel":
            cancelled = [(j, stint[2]) for j, stint in stints.items()]
            free += list(stints)
            stints.clear()
        for j in sorted(free):
            begin(j, end)
        log.append((end, sorted(merged), sorted(cancelled), dropped, late))
        merged, dropped, late = [], [], []
        if pace.fixed_k is None:
            pace._progress = version / updates
    return log


def as_tuples(log):
    return [(u.seconds, u.merged, u.cancelled, u.dropped, u.late) for u in log]


@st.composite
def races(draw):
    name = draw(st.sampled_from(sorted(PACES)))
    workers = draw(st.integers(1, 9))
    most = workers if PACES[name].idles else 2 * workers
    options = {"k": draw(st.integers(1, most))}
    if draw(st.booleans()):
        options["k"] = [[0.0, options["k"]], [0.4, draw(st.integers(1, most))]]
    if PACES[name].cancels:
        options["late"] = draw(st.sampled_from(["cancel", "ignore"]))
    else:
        options["max_staleness"] = draw(st.sampled_from([None, 0, 1, 3]))
    slow = {draw(st.integers(0, workers - 1)): draw(st.sampled_from([0.5, 2.0, 5.0]))} if draw(st.booleans()) else {}
    law = draw(st.sampled_from([*LAWS, "few"]))
    delay = empirical_delay([1.0, 1.5, 2.0], "few") if law == "few" else parse_delay(law)  # few values: many ties
    return PACES[name](**options), workers, delay, draw(st.integers(1, 60)), draw(st.integers(0, 99)), slow


@settings(max_examples=150, deadline=None)
@given(races())
def test_every_log_is_that_of_the_reference(race):
    pace, workers, delay, updates, seed, slow = race
    expected = reference(pace, workers, delay, updates, seed, slow)
    result = simulate_timing(pace, workers, delay, updates, seed, slow, log=True)
    assert as_tuples(result.log) == expected
    assert result.completions == sum(len(merged) + len(dropped) + len(late) for _, merged, _, dropped, late in expected)


@settings(max_examples=80, deadline=None)
@given(races())
def test_the_fast_ways_give_what_the_log_gives(race):
    pace, workers, delay, updates, seed, slow = race
    logged = simulate_timing(pace, workers, delay, updates, seed, slow, log=True)
    fast = simulate_timing(pace, workers, delay, updates, seed, slow)
    same_outcome(fast, logged)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    ("name", "k"), [("k-sync", 300), ("k-batch-sync", 300), ("k-async", 300), ("k-batch-async", 900)]
)
def test_the_fast_ways_hold_for_many_workers_and_across_blocks(name, k, law):
    args = (PACES[name](k=k), 600, parse_delay(law), 40, 3, {5: 20.0, 7: 0.02})
    same_outcome(simulate_timing(*args), simulate_timing(*args, log=True))


def same_outcome(fast, slow):
    assert fast.seconds == slow.seconds
    assert fast.staleness.tolist() == slow.staleness.tolist()
    assert fast.completions == slow.completions
    assert fast.standard_error == pytest.approx(slow.standard_error, nan_ok=True)
    assert fast.idle_share == pytest.approx(slow.idle_share, abs=1e-9)
    assert fast.wasted_share == pytest.approx(slow.wasted_share, abs=1e-9)


def test_the_array_ways_are_really_taken():
    streams = DelayStreams(parse_delay("exponential(1)"), 20, 0)
    assert arrays.k_batch_sync(7, streams, 200) is not None
    assert arrays.k_batch_async(7, streams, 200) is not None
    assert (arrays.k_async(7, streams, 200).times == events.k_async(7, streams, 200).times).all()
    ties = DelayStreams(parse_delay("constant(1)"), 20, 0)
    assert arrays.k_batch_sync(7, ties, 200) is None
    assert arrays.k_batch_async(7, ties, 200) is None


def test_by_hand():
    # Worker 0 takes 1 second, worker 1 takes 3: K = 1, asynchronous. Worker 0 ends at 1, 2, 3, 4, worker 1 at 3 and 6.
    # At 3 worker 1's stint began first, so its report comes first: staleness 2 (updates at 1 and 2 came between).
    # Worker 0, which read at 2, then meets one more update: staleness 1.
    result = simulate_timing(KBatchAsync(k=1), 2, parse_delay("constant(1)"), 5, slow={1: 3.0}, log=True)
    assert as_tuples(result.log) == [
        (1.0, [(0, 0, 0)], [], [], []),
        (2.0, [(0, 1, 0)], [], [], []),
        (3.0, [(1, 0, 2)], [], [], []),
        (3.0, [(0, 2, 1)], [], [], []),
        (4.0, [(0, 3, 0)], [], [], []),
    ]
    assert result.mean_staleness == 3 / 5
    assert result.fresh_fraction == 3 / 5


def test_idle_and_wasted_by_hand():
    # Two workers, 1 and 3 seconds. K-sync, K = 1: the slow one is cancelled after 1 s each time: half of all work.
    cancelled = simulate_timing(KSync(k=1), 2, parse_delay("constant(1)"), 10, slow={1: 3.0})
    assert (cancelled.seconds, cancelled.wasted_share, cancelled.idle_share) == (10.0, 0.5, 0.0)
    # K = 2: the fast one waits 2 of every 3 seconds: a third of all worker-seconds.
    waiting = simulate_timing(KSync(k=2), 2, parse_delay("constant(1)"), 10, slow={1: 3.0})
    assert (waiting.seconds, waiting.wasted_share, waiting.idle_share) == (30.0, 0.0, pytest.approx(1 / 3))
    # Rennala, K = 1: the slow one's 3 s stints always come too late. Updates at 1, 2, ..., 9: it finished three.
    ignored = simulate_timing(KBatchSync(k=1, late="ignore"), 2, parse_delay("constant(1)"), 10, slow={1: 3.0})
    assert ignored.wasted_share == pytest.approx(9 / 20)
    assert ignored.completions == 13


@pytest.mark.parametrize("law", LAWS[:4])
@pytest.mark.parametrize("slow", [{}, {3: 5.0}])
def test_reductions_hold_bit_for_bit(law, slow):
    def log(pace):
        return as_tuples(simulate_timing(pace, 8, parse_delay(law), 200, 1, slow, log=True).log)

    def outcome(pace):
        cancelled_aside = [(seconds, merged) for seconds, merged, *_ in log(pace)]
        fast = simulate_timing(pace, 8, parse_delay(law), 200, 1, slow)
        return cancelled_aside, fast.seconds, fast.staleness.tolist()

    assert log(KAsync(k=8)) == log(KSync(k=8)) == log(KSync())
    assert log(KBatchSync(k=1)) == log(KSync(k=1))
    assert log(KBatchAsync(k=1)) == log(KAsync(k=1))
    assert outcome(KAsync(k=8)) == outcome(KSync(k=8))
    assert outcome(KBatchSync(k=1)) == outcome(KSync(k=1))
    assert outcome(KBatchAsync(k=1)) == outcome(KAsync(k=1))


KNOWN = {  # methods/pace.md, P = 8, K = 4: sync, batch-sync, async, batch-async; 60,000 updates there
    "exponential(1)": (0.6345, 0.5, 0.6345, 0.5),
    "shifted-exponential(1, 1)": (1.6345, 1.632, 1.242, 1.0),
    "pareto(2.5, 1)": (0.780, 0.780, 0.628, 0.500),
}


@pytest.mark.parametrize("law", KNOWN)
def test_the_known_times_per_update(law):
    for (name, make), known in zip(PACES.items(), KNOWN[law], strict=True):
        results = [simulate_timing(make(k=4), 8, parse_delay(law), 20_000, seed) for seed in range(3)]
        mean = np.mean([result.mean_update_seconds for result in results])
        error = np.sqrt(np.mean([result.standard_error**2 for result in results]) / 3)
        assert abs(mean - known) < 3.5 * error + 0.001, (name, mean, known, error)  # .001: the known values' own error


@pytest.mark.parametrize("slow", [{}, {3: 5.0}])
@pytest.mark.parametrize(("workers", "k"), [(8, 1), (8, 3), (8, 8), (64, 16), (64, 48)])
def test_mean_staleness_is_a_counting_identity(workers, k, slow):
    for law in LAWS[:4]:
        updates = (
            15_000 * workers // k // (1 if workers == 8 else 4)
        )  # the start and the end of a run are not in balance
        waiting = simulate_timing(KAsync(k=k), workers, parse_delay(law), updates, slow=slow)
        going = simulate_timing(KBatchAsync(k=k), workers, parse_delay(law), updates, slow=slow)
        assert abs(waiting.mean_staleness - (workers / k - 1)) < 0.005
        assert abs(going.mean_staleness - (workers - 1) / k) < 0.005


def test_max_staleness_is_a_limit():
    result = simulate_timing(KBatchAsync(k=1, max_staleness=3), 8, parse_delay("pareto(1.5, 1)"), 2000, slow={0: 10.0})
    assert len(result.staleness) == 4
    assert result.wasted_share > 0
    assert result.completions > 2000


def test_the_standard_error_sees_correlation():
    noise = np.random.default_rng(0).standard_normal(50_000)
    assert batch_means_error(noise) == pytest.approx(1 / np.sqrt(50_000), rel=0.35)
    sticky = np.repeat(noise[:500], 100)  # the same 500 numbers, each a hundred times
    assert batch_means_error(sticky) == pytest.approx(1 / np.sqrt(500), rel=0.35)
    assert np.isnan(batch_means_error(np.ones(1)))


def test_impossible_runs_are_refused():
    delay = parse_delay("exponential(1)")
    with pytest.raises(InputError, match="workers must be at least 1, got 0"):
        simulate_timing(KSync(), 0, delay, 10)
    with pytest.raises(InputError, match="updates must be at least 1, got 0"):
        simulate_timing(KSync(), 2, delay, 0)
    with pytest.raises(InputError, match="no losses"):
        simulate_timing(KAsync(k="adasync"), 4, delay, 10)
    with pytest.raises(InputError, match="between 1 and the number of workers, 4, in k-async, got 5"):
        simulate_timing(KAsync(k=5), 4, delay, 10)
    with pytest.raises(InputError, match="worker 9"):
        simulate_timing(KAsync(k=2), 4, delay, 10, slow={9: 2.0})
