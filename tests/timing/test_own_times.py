"""Traces that say whose times they are: every worker draws its own, and slow workers are told from straggling steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hemiola.errors import InputError
from hemiola.pace import PACES
from hemiola.timing.delays import BLOCK, DelayStreams, OwnTimes, parse_delay
from hemiola.timing.predict import predict
from hemiola.timing.simulate import simulate_timing
from hemiola.timing.traces import Trace

TWO = "worker,step,step_seconds\n" + "".join(f"{w},{i},{10 * (w + 1) + i}\n" for w in (0, 1) for i in range(4))


@pytest.fixture
def trace(tmp_path):
    (tmp_path / "steps.csv").write_text(TWO)
    return lambda way="", workers=2, seed=0: DelayStreams(
        parse_delay(f"trace(steps.csv{way})", tmp_path), workers, seed
    )


def test_in_order_every_worker_replays_its_own_times(trace):
    streams = trace(", in-order")
    assert [streams.seconds(0, i) for i in range(6)] == [10, 11, 12, 13, 10, 11]
    assert streams.seconds(1, 2, 3) == 22 + 23 + 20
    assert streams.matrix(BLOCK - 1, 3)[1].tolist() == [20 + (BLOCK - 1) % 4, 20, 21]


def test_draws_of_one_number_come_from_one_place_of_everybodys_times(trace):
    for way in ("", ", blocks=3"):
        mine, other = trace(way).matrix(0, 2 * BLOCK)
        assert np.array_equal(mine + 10, other)
        assert set(mine) == {10, 11, 12, 13}
    assert not np.array_equal(trace().matrix(0, 50), trace(seed=1).matrix(0, 50))


def test_blocks_keep_what_follows_together(trace):
    draws = trace(", blocks=3").matrix(0, 3 * BLOCK)[0] - 10
    blocks = draws.reshape(-1, 3)
    assert np.array_equal((blocks[:, :1] + np.arange(3)) % 4, blocks)
    assert len({tuple(block) for block in blocks}) == 4


@given(st.integers(1, 40), st.integers(0, 5000), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_a_draw_depends_on_its_number_only(block, first, times):
    own = OwnTimes((np.array(times, float),), block, "memory")

    def uniforms(chunk: int) -> np.ndarray:
        return np.random.default_rng(chunk).random(BLOCK)

    expected = []
    for number in range(first, first + BLOCK):
        chunk, offset = divmod(number // block, BLOCK)
        expected.append(times[(int(uniforms(chunk)[offset] * len(times)) + number % block) % len(times)])
    assert own.draws(0, first, uniforms).tolist() == expected


def test_pooled_workers_draw_from_all_times(trace):
    mine, other = trace(", pooled", workers=3).matrix(0, 200)[:2]
    assert set(mine) == set(other) == {10, 11, 12, 13, 20, 21, 22, 23}


@pytest.mark.parametrize(
    ("way", "workers", "message"),
    [
        ("", 3, "has the times of 2 workers, and the run has 3; trace.*pooled"),
        (", blocks=0", 2, "must be a whole number of at least 1, got '0'"),
        (", blocks=x", 2, "must be a whole number of at least 1, got 'x'"),
    ],
)
def test_bad_traces_are_one_clear_line(trace, way, workers, message):
    with pytest.raises(InputError, match=message):
        trace(way, workers)


def test_whose_times_they_are_must_be_known_to_replay_them(tmp_path):
    (tmp_path / "steps.txt").write_text("1\n2\n")
    with pytest.raises(InputError, match="has no column 'worker'"):
        parse_delay("trace(steps.txt, in-order)", tmp_path)


def _trace(slow: float, noise: float) -> tuple[Trace, float]:
    """4 workers, the first slower by a factor, and what waiting for all of them costs in mean steps."""
    times = 20 + noise * np.random.default_rng(0).standard_exponential((4, 200))
    times[0] *= slow
    trace = Trace(tuple(times.ravel()), tuple(np.repeat(np.arange(4), 200).tolist()))
    return trace, float(times.max(0).mean() / times.mean())


@pytest.mark.parametrize(("slow", "noise"), [(2.25, 0.3), (1.0, 2.0)])
def test_predict_finds_the_traces_own_cost_of_waiting(slow, noise):
    trace, cost = _trace(slow, noise)
    prediction = predict(4, trace)
    said = "\n".join(prediction.conclusions)
    synchronous = next(row for row in prediction.rows if row.variant == "k-sync" and row.k == 4)
    mean = prediction.mean_step_seconds * sum(prediction.slow.get(worker, 1.0) for worker in range(4)) / 4
    assert synchronous.update_seconds / mean == pytest.approx(cost, rel=0.02)
    assert ("Worker 0 took" in said) == (slow > 1)
    assert ("% is persistent" in said) == (slow > 1)
    assert ("what waiting costs is transient" in said) == (slow == 1)


def test_the_clock_replays_the_trace(trace):
    streams = trace(", in-order")
    seen = simulate_timing(PACES["k-sync"](k=2), 2, streams.delay, 4)
    assert seen.mean_update_seconds == (20 + 21 + 22 + 23) / 4
    assert streams.delay.own.as_trace().workers == (0, 0, 0, 0, 1, 1, 1, 1)
    assert predict(2, streams.delay).rows == predict(2, streams.delay.own.as_trace()).rows
