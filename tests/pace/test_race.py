"""The rule of pace by hand: three workers, one event after the other."""

from __future__ import annotations

import pytest

from hemiola.pace import KAsync, KBatchAsync, KBatchSync, KSync
from hemiola.pace.race import CANCELLED, COUNTS, CUT, LATE, STALE, Race


def started(pace, workers=3):
    pace.begin(workers)
    race = Race(pace)
    for worker in range(workers):
        race.start(worker)
    return race


def next_version(race):
    cancelled = race.close()
    race.version += 1
    return cancelled


def test_k_sync_the_first_two_count_and_the_third_is_cancelled():
    race = started(KSync(k=2))
    assert race.finish(1) is COUNTS
    assert race.rests(COUNTS)
    assert not race.complete
    assert race.finish(2) is COUNTS
    assert race.complete
    assert next_version(race) == [0]
    assert race.running == {}
    assert not race.complete


def test_k_batch_sync_a_finisher_starts_again_and_may_count_twice():
    race = started(KBatchSync(k=2))
    assert race.finish(1) is COUNTS
    assert not race.rests(COUNTS)
    race.start(1)
    assert race.finish(1) is COUNTS
    assert race.complete
    assert race.rests(COUNTS)  # the update comes first
    assert next_version(race) == [0, 2]


def test_k_async_the_others_keep_their_old_weights():
    race = started(KAsync(k=1))
    assert race.finish(1) is COUNTS
    assert next_version(race) == []
    race.start(1)
    assert race.running == {0: 0, 2: 0, 1: 1}


def test_too_stale_reports_do_not_count_and_their_worker_goes_on():
    race = started(KBatchAsync(k=1, max_staleness=0))
    assert race.finish(1) is COUNTS
    next_version(race)
    assert race.finish(0) is STALE
    assert not race.rests(STALE)
    assert not race.complete
    race.start(0)
    assert race.finish(0) is COUNTS


def test_late_reports_are_those_that_an_update_has_passed_by():
    race = started(KSync(k=1, late="ignore"))
    assert race.finish(1) is COUNTS
    assert next_version(race) == []
    assert race.running == {0: 0, 2: 0}
    assert race.finish(0) is LATE
    assert not race.rests(LATE)
    race.start(0)
    assert race.finish(0) is COUNTS  # it read the new weights


def test_a_cut_takes_what_is_done_and_cancels_who_has_done_nothing():
    race = started(KSync(k=1, late="cut"))
    race.finish(1)
    assert race.close() == [0, 2]
    assert race.stopped(3) is CUT
    assert race.rests(CUT)
    assert race.stopped(0) is CANCELLED
    assert Race(KSync(k=1)).stopped(3) is CANCELLED


@pytest.mark.parametrize("late", ["cancel", "cut", "ignore"])
def test_a_lost_worker_starts_anew(late):
    race = started(KSync(k=1, late=late))
    race.finish(1)
    next_version(race)
    race.lose(0)
    race.start(0)
    assert race.finish(0) is COUNTS


def test_state_between_updates():
    race = started(KSync(k=1, late="ignore"))
    race.finish(1)
    next_version(race)
    again = Race(race.pace)
    again.load_state_dict(race.state_dict())
    assert again.version == 1
    assert again.finish(2) is LATE
