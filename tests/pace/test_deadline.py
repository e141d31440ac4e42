"""A deadline beside K: by hand, against a slow reference, and on both clocks alike."""

import math
import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hemiola.contracts import Arrivals
from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.pace import PACES, KAsync, KBatchAsync, KSync
from hemiola.pace.race import Race
from hemiola.timing.delays import DelayStreams, parse_delay
from hemiola.timing.simulate import simulate_timing
from hemiola.training import Training


def seen(waits):
    return Arrivals(1.0, 0.0, (), (), (), (), (), waits)


def test_the_deadline_is_learnt_from_arrivals():
    pace = KSync(k=2, grace=2.0)
    pace.begin(5)
    assert pace.deadline() == math.inf  # all are waited for, once
    pace.updated(seen([1.0, 2.0, 3.0, 4.0, 10.0]))
    assert pace.deadline() == 3.0 + 2.0 * 1.0  # the distances from the median are 2, 1, 0, 1, 7
    assert pace.telemetry()["deadline"] == 5.0
    pace.updated(seen([3.0, math.inf, math.inf, math.inf, math.inf]))
    assert pace.deadline() == 7.0 + 2.0 * 5.5  # between 4 and 10; 3, 3, 4, 4, 5, 6 and four that are infinite
    pace.updated(seen([math.inf] * 5))
    assert pace.deadline() == math.inf  # more than half were stopped: it has to be learnt again
    assert KSync(k=2).deadline() is None


def test_a_pace_with_a_grace_promises_no_k():
    for pace, k in ((KSync(k=2, grace=1.0), None), (KSync(grace=1.0), 3), (KAsync(k=3, grace=1.0), 3)):
        pace.begin(3)
        assert pace.fixed_k == k


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KBatchAsync(k=2, grace=3.0), "grace = 3.0 has no meaning in k-batch-async"),
        (lambda: KSync(k=2, grace=0.0), "grace must be above 0, got 0.0"),
        (lambda: KSync(k=2, grace=math.inf), "grace must be above 0, got inf"),
    ],
)
def test_impossible_graces_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_state_without_the_times_is_refused():
    graced, plain = KSync(k=2, grace=1.0), KSync(k=2)
    for pace in (graced, plain):
        pace.begin(3)
    with pytest.raises(InputError, match="has a grace, the other has not"):
        graced.load_state_dict(plain.state_dict())


class Fixed(KSync):
    """A deadline that is not learnt."""

    def deadline(self):
        return 5.0


def test_the_race_waits_for_the_deadline_or_for_all():
    pace = Fixed(k=1)
    pace.begin(3)
    race = Race(pace)
    for worker in range(3):
        race.start(worker)
    assert race.deadline is None  # K have not come
    race.finish(1)
    assert (race.complete, race.deadline) == (False, 5.0)
    race.finish(2)
    assert not race.complete
    race.expire()
    assert (race.complete, race.deadline) == (True, None)
    assert race.close() == [0]
    race.version += 1
    for worker in range(3):
        race.start(worker)
    race.finish(0)
    race.finish(1)
    race.finish(2)
    assert race.complete  # all have come


def test_who_is_not_listened_to_is_not_waited_for():
    pace = Fixed(k=1, late="ignore")
    pace.begin(2)
    race = Race(pace)
    race.start(0)
    race.start(1)
    race.finish(0)
    race.expire()
    race.close()
    race.version += 1
    race.start(0)
    race.finish(0)
    assert race.complete  # worker 1 is still busy with what an update has passed by


def training(**fields) -> Training:
    given = {"task": "digits-logistic", "batch": 4, "evaluate": {"every_updates": 10**6}, **fields}
    return Training(*Experiment(given).cells[0].plan(None))


def seen_updates(run):
    seen, collect = [], run.cluster.collect

    def watched():
        update = collect()
        seen.append((update.seconds, sorted(report.stint.worker for report in update.reports)))
        return update

    run.cluster.collect = watched
    run.run()
    return seen


def test_a_timeline_by_hand():
    """Steps of 1, 1.1, 1.2 and 9 seconds: from the second update on, only the outlier is not waited for."""
    run = training(
        workers=4,
        pace={"name": "k-sync", "k": 2, "grace": 3.0},
        stop={"updates": 3},
        cluster={"name": "simulated", "delay": "constant(1.0)", "slow": {"1": 1.1, "2": 1.2, "3": 9.0}},
    )
    # The first waits for all. Then the median is 1.15 and the median distance from it .1: open until 1.45 s.
    # Then of 1, 1.1, 1.2, 9, 1, 1.1, 1.2 and infinity the median is 1.15 again, and the distance .1 again.
    seen = seen_updates(run)
    assert [workers for _, workers in seen] == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert [seconds for seconds, _ in seen] == pytest.approx([9.0, 9.0 + 1.45, 9.0 + 2 * 1.45])


@pytest.mark.parametrize("late", ["cancel", "ignore"])
@pytest.mark.parametrize("name", ["k-sync", "k-async"])
def test_both_clocks_agree(name, late):
    if name == "k-async" and late == "ignore":
        return
    law, options = "shifted-exponential(1, 1)", {"k": 2, "grace": 1.5, "late": late}
    run = training(
        workers=5,
        pace={"name": name, **options},
        stop={"updates": 100},
        cluster={"name": "simulated", "delay": law, "slow": {"2": 4.0}},
    )
    timing = simulate_timing(PACES[name](**options), 5, parse_delay(law), 100, seed=0, slow={2: 4.0}, log=True)
    seen = seen_updates(run)
    assert [sorted(worker for worker, _, _ in update.merged) for update in timing.log] == [who for _, who in seen]
    assert [update.seconds for update in timing.log] == pytest.approx([seconds for seconds, _ in seen], rel=1e-12)
    assert timing.mean_reports == sum(len(who) for _, who in seen) / 100 > 2


@settings(max_examples=30, deadline=None)
@given(
    workers=st.integers(2, 6),
    grace=st.sampled_from([0.5, 1.0, 3.0]),
    data=st.data(),
    law=st.sampled_from(["exponential(1)", "shifted-exponential(1, 1)", "hyperexponential(0.8, 1, 20)"]),
)
def test_k_sync_is_that_of_a_slow_reference(workers, grace, data, law):
    """Round by round with nothing but the draws, lists and sorting."""
    k = data.draw(st.integers(1, workers - 1))
    timing = simulate_timing(KSync(k=k, grace=grace), workers, parse_delay(law), 30, seed=3, log=True)
    streams = DelayStreams(parse_delay(law), workers, 3)
    now, learnt = 0.0, []
    for number, update in enumerate(timing.log):
        draws = [streams.seconds(worker, number) for worker in range(workers)]
        deadline = math.inf
        if learnt:
            kept = learnt[-max(32, 4 * workers) :]
            middle = statistics.median(kept)
            if middle < math.inf:
                deadline = middle + grace * statistics.median(abs(wait - middle) for wait in kept)
        wait = min(max(sorted(draws)[k - 1], deadline), max(draws))
        came = [worker for worker in range(workers) if draws[worker] <= wait]
        assert [worker for worker, _, _ in update.merged] == came
        assert update.seconds == pytest.approx(now + wait)
        now = update.seconds
        learnt += sorted(draws[worker] for worker in came) + [math.inf] * (workers - len(came))
