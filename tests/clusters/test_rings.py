"""Reports by ring all-reduces behind the computation, instead of over one server's link."""

from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.pace import PACES, KBatchAsync
from hemiola.pace.race import COUNTS, STALE, Race
from hemiola.timing.delays import DelayStreams, parse_delay
from hemiola.timing.simulate import simulate_timing
from hemiola.training import Training

LAW = "shifted-exponential(1, 1)"
BYTES = 4 * 650  # digits-logistic: a report of 650 numbers


def link(seconds, workers, **more):
    """On which a ring of all workers takes so long."""
    return {"bandwidth": f"{8 * 2 * (workers - 1) / workers * BYTES / seconds} bit/s", "reports": "ring", **more}


def training(**fields) -> Training:
    given = {"task": "digits-logistic", "batch": 4, "evaluate": {"every_updates": 10**6}, **fields}
    return Training(*Experiment(given).cells[0].plan(None))


def updates_of(run):
    seen, collect = [], run.cluster.collect

    def watched():
        seen.append(collect())
        return seen[-1]

    run.cluster.collect = watched
    run.run()
    return seen


def merged(update):
    return [(report.stint.worker, report.stint.number, report.staleness) for report in update.reports]


# ------------------------------------------------------------------------------------------------------- the rule


def test_what_comes_meanwhile_is_in_the_next():
    pace = PACES["k-async"](k=1)
    pace.begin(3)
    race = Race(pace, behind=True)
    for worker in range(3):
        race.start(worker)
    assert race.finish(1) is COUNTS
    assert race.complete
    race.depart()
    assert not race.complete
    assert race.finish(2) is COUNTS
    assert not race.complete  # one exchange at a time
    assert race.held == {2}
    assert race.close() == []
    race.version += 1
    assert race.complete  # the next can leave at once
    assert race.held == {2}  # and worker 2, whose report is in it, idles on
    race.depart()
    assert race.held == set()


def test_a_finisher_of_a_batch_pace_goes_on_even_if_it_was_the_last_of_k():
    pace = KBatchAsync(k=1)
    pace.begin(2)
    race = Race(pace, behind=True)
    race.start(0)
    assert race.finish(0) is COUNTS
    assert race.complete
    assert not race.rests(COUNTS)


def test_staleness_is_what_it_will_be_when_the_report_is_merged():
    pace = KBatchAsync(k=1, max_staleness=0)
    pace.begin(2)
    race = Race(pace, behind=True)
    race.start(0)
    race.start(1)
    race.finish(0)
    race.depart()
    assert race.finish(1) is STALE  # it has to wait for the next exchange, and is one update old by then


# ---------------------------------------------------------------------------------------------------- virtual time


def test_a_timeline_by_hand():
    """Steps of 1 and 1.75 seconds, a ring of 1.5, K = 1: nobody ever waits, and reports gather behind each ring."""
    run = training(
        workers=2,
        pace={"name": "k-batch-async", "k": 1},
        stop={"updates": 4},
        cluster={"name": "simulated", "delay": "constant(1.0)", "slow": {"1": 1.75}, "link": link(1.5, 2)},
    )
    seen = updates_of(run)
    # Ends: worker 0 at 1, 2, 3, ...; worker 1 at 1.75, 3.5, 5.25, ... Rings: 1 to 2.5, 2.5 to 4, 4 to 5.5, 5.5 to 7.
    # A step that ends as a ring lands (worker 0 at 4) is in the ring after the next, and its worker reads the new one.
    assert [update.seconds for update in seen] == pytest.approx([2.5, 4.0, 5.5, 7.0])
    assert [merged(update) for update in seen] == [
        [(0, 0, 0)],  # ended at 1
        [(0, 1, 1), (1, 0, 1)],  # at 2 and 1.75
        [(0, 2, 2), (1, 1, 2)],  # at 3 and 3.5, begun on version 0
        [(0, 3, 2), (0, 4, 1), (1, 2, 2)],  # at 4, 5 and 5.25, begun on versions 1, 2 and 1
    ]
    assert [update.idle_seconds for update in seen] == [0.0] * 4


def test_an_idler_waits_for_the_exchange_its_report_is_in():
    """K-async, K = 1, steps of 1 and 1.5 seconds, a ring of 2: worker 1 ends in the first ring and is in the second."""
    run = training(
        workers=2,
        pace={"name": "k-async", "k": 1},
        stop={"updates": 3},
        cluster={"name": "simulated", "delay": "constant(1.0)", "slow": {"1": 1.5}, "link": link(2.0, 2)},
    )
    seen = updates_of(run)
    # Rings: 1 to 3 (worker 0), 3 to 5 (worker 1; worker 0 ends at 4), 5 to 7 (worker 0).
    assert [update.seconds for update in seen] == pytest.approx([3.0, 5.0, 7.0])
    assert [merged(update) for update in seen] == [[(0, 0, 0)], [(1, 0, 1)], [(0, 1, 1)]]
    # Worker 0 idles from 1 to 3, worker 1 from 1.5 to 5; they are counted when they start again.
    assert [update.idle_seconds for update in seen] == pytest.approx([0.0, 2.0, 3.5])


def test_where_the_others_are_cancelled_all_wait_for_the_ring():
    run = training(
        workers=2,
        pace={"name": "k-sync", "k": 1},
        stop={"updates": 2},
        cluster={"name": "simulated", "delay": "constant(1.0)", "slow": {"1": 1.5}, "link": link(2.0, 2)},
    )
    assert [update.seconds for update in updates_of(run)] == pytest.approx([3.0, 6.0])


def reference(pace, workers, law, updates, exchange):
    """Independent and slow: the clock goes from one moment at which something happens to the next."""
    streams = DelayStreams(parse_delay(law), workers, 0)
    version, number = 0, [-1] * workers
    under_way, lands, waiting = [], None, []  # (worker, number, version read)
    ends, reads, seen = {}, {}, []
    now = 0.0

    def start(worker):
        number[worker] += 1
        ends[worker], reads[worker] = now + streams.seconds(worker, number[worker]), version

    for worker in range(workers):
        start(worker)
    while len(seen) < updates:
        if lands is None and len(waiting) >= pace.k():
            under_way, waiting, lands = waiting, [], now + exchange
        worker = min(ends, key=ends.get, default=None)
        if lands is not None and (worker is None or lands <= ends[worker]):
            now = lands
            seen.append((now, sorted((who, stint, version - read) for who, stint, read in under_way)))
            version, lands = version + 1, None
            if pace.idles:
                for who in sorted(who for who, _, _ in under_way):
                    start(who)
            continue
        now = ends.pop(worker)
        waiting.append((worker, number[worker], reads[worker]))
        if not pace.idles:
            start(worker)
    return seen


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["k-async", "k-batch-async"]),
    workers=st.integers(2, 6),
    data=st.data(),
    exchange=st.sampled_from([0.01, 0.7, 3.0]),
    law=st.sampled_from([LAW, "exponential(1)", "hyperexponential(0.8, 1, 9)"]),
)
def test_the_timing_is_that_of_a_slow_reference(name, workers, data, exchange, law):
    k = data.draw(st.integers(1, workers - 1 if name == "k-async" else 2 * workers))
    timing = simulate_timing(PACES[name](k=k), workers, parse_delay(law), 40, log=True, exchange=exchange)
    pace = PACES[name](k=k)
    pace.begin(workers)
    expected = reference(pace, workers, law, 40, exchange)
    assert [update.merged for update in timing.log] == [reports for _, reports in expected]
    assert [update.seconds for update in timing.log] == pytest.approx([seconds for seconds, _ in expected])


@pytest.mark.parametrize(("name", "k"), [("k-async", 2), ("k-batch-async", 5), ("k-sync", 3), ("k-batch-sync", 7)])
def test_both_clocks_agree(name, k):
    run = training(
        workers=5,
        pace={"name": name, "k": k},
        stop={"updates": 80},
        cluster={"name": "simulated", "delay": LAW, "slow": {"2": 3.0}, "link": link(1.7, 5)},
    )
    seen = updates_of(run)
    timing = simulate_timing(PACES[name](k=k), 5, parse_delay(LAW), 80, slow={2: 3.0}, log=True, exchange=1.7)
    assert [update.merged for update in timing.log] == [merged(update) for update in seen]
    assert [update.seconds for update in timing.log] == pytest.approx([update.seconds for update in seen], rel=1e-9)


# ------------------------------------------------------------------------------------------------------ whole runs


@pytest.mark.parametrize("period", [{"name": "full"}, {"name": "constant", "p": 3, "wire": "int8"}])
@pytest.mark.parametrize("name", PACES)
def test_on_a_free_link_a_ring_is_a_server(name, period):
    def last(**free):
        run = training(
            workers=4,
            pace={"name": name, "k": 2},
            period=period,
            stop={"updates": 40},
            cluster={"name": "simulated", "delay": LAW, "link": free},
        )
        run.run()
        return run.versions[run.version], run.cluster.now, run.ledger.per_worker(), dict(run.ledger.staleness)

    ring, server = last(reports="ring"), last()
    assert torch.equal(ring[0], server[0])
    assert ring[1:] == server[1:]


RUN = {
    "workers": 4,
    "order": {"name": "cd-grab", "sketch": "fold:16"},
    "period": {"name": "constant", "p": 2, "wire": "int8"},
    "optimizer": {"lr": 0.1, "momentum": 0.5},
    "cluster": {"name": "simulated", "delay": LAW, "slow": {"2": 2.0}, "link": link(3.0, 4, latency="1 ms")},
}


@pytest.mark.parametrize("deal", ["shards", "deck"])
@pytest.mark.parametrize(("name", "k"), [("k-async", 2), ("k-batch-async", 4)])
def test_nothing_is_lost_or_doubled_and_a_resumed_run_is_the_same(name, k, deal):
    given = RUN | {"pace": {"name": name, "k": k}, "shards": {"deal": deal}, "stop": {"epochs": 1}}
    whole = training(**given)
    visited = Counter(
        (0 if deal == "deck" else report.stint.worker, batch.epoch, unit)
        for update in updates_of(whole)
        for report in update.reports
        for batch in report.stint.batches
        for unit in batch.units.tolist()
    )
    assert set(visited.values()) == {1}
    assert sum(visited.values()) == whole.ledger.total("used") == whole.ledger.visited
    first = training(**given)
    first.run(lambda run: run.version < 5 or not run.cluster.clock.gathered)  # some reports wait for an exchange
    second = training(**given)
    second.load_state_dict(first.state_dict())
    second.run()
    assert torch.equal(second.versions[second.version], whole.versions[whole.version])
    assert second.cluster.now == whole.cluster.now


def test_what_else_reports_could_travel_by():
    with pytest.raises(InputError, match=r"link\.reports must be one of server, ring, got 'tree'"):
        training(workers=2, cluster={"name": "simulated", "link": {"reports": "tree"}})
