"""Measured times in the log: every worker is in it, however many there were."""

from hemiola.clusters.step_times import LIMIT, MeasuredTimes, Sample


def test_thinning_leaves_no_worker_out():
    # Workers report in turn, as in lockstep: every n-th of all times would be the same few workers.
    measured = MeasuredTimes(8)
    for update in range(5000):
        for worker in range(8):
            measured.step(worker, 1.0 + worker + update * 1e-9)
        measured.exchange(0.5)
    taken = measured.take()
    assert LIMIT // 2 <= len(taken["step_seconds"]) <= LIMIT
    assert LIMIT // 2 <= len(taken["exchange_seconds"]) <= LIMIT
    assert {taken["step_workers"].count(worker) for worker in range(8)} == {len(taken["step_workers"]) // 8}
    assert all(int(s) == 1 + w for s, w in zip(taken["step_seconds"], taken["step_workers"], strict=True))
    assert measured.take() == {"step_seconds": [], "step_workers": [], "exchange_seconds": []}


def test_a_worker_of_thousands_is_in_the_log():
    measured = MeasuredTimes(3 * LIMIT)
    for worker in range(3 * LIMIT):
        measured.step(worker, 1e-9)
    assert measured.take()["step_workers"] == list(range(3 * LIMIT))


def test_a_long_sample_is_thinned_evenly() -> None:
    sample = Sample()
    for value in range(5 * LIMIT):
        sample.add(float(value))
    assert LIMIT / 2 <= len(sample.values) <= LIMIT
    gaps = {b - a for a, b in zip(sample.values, sample.values[1:], strict=False)}
    assert len(gaps) == 1
