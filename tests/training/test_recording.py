"""What the log records for the report: windows of the time line, changes of K, and what became of each label."""

import itertools

import numpy as np
import pytest

from hemiola.contracts import FOLLOWED, Span
from hemiola.lab.experiment import Experiment
from hemiola.training import Training
from hemiola.training.ledger import FATES
from hemiola.training.windows import SPANS, Windows

SLOW = {"name": "simulated", "delay": "constant(1)", "slow": {"1": 3}, "link": {"latency": "500 ms"}}


def run(**fields) -> Training:
    experiment = Experiment({"task": "digits-logistic", "workers": 2, "batch": 50, "stop": {"epochs": 2}, **fields})
    (cell,) = experiment.cells
    plan, make_cluster = cell.plan(None)
    training = Training(plan, make_cluster)
    assert training.run() == "done"
    return training


def windows(training: Training) -> list[dict]:
    return [record["timeline"] for record in training.records if "timeline" in record]


def test_an_update_that_waits_for_all_by_hand():
    # A ring of two takes 2 x 500 ms; worker 0 waits for worker 1 from 1 to 3.
    first, last = windows(run(cluster=SLOW))
    assert first["computes"][:4] == [[0, 0, 1], [1, 0, 3], [0, 4, 5], [1, 4, 7]]
    assert first["exchanges"][:4] == [[0, 3, 4], [1, 3, 4], [0, 7, 8], [1, 7, 8]]
    assert last["exchanges"][-1] == [1, 119, 120]


def test_what_is_cancelled_and_what_the_servers_link_takes():
    # The weights take 500 ms to worker 0, its step 1 s, its report 500 ms; then worker 1 has computed 1.5 of 3 s.
    first = windows(run(cluster=SLOW, pace={"name": "k-sync", "k": 1}))[0]
    assert first["receives"][:2] == [[0, 0, 0.5], [1, 0, 0.5]]
    assert first["computes"][0] == [0, 0.5, 1.5]
    assert first["sends"][0] == [0, 1.5, 2]
    assert first["cancelled"][0] == [1, 0.5, 2]


def test_behind_a_clock_the_averaging_has_a_line_of_its_own():
    first = windows(run(cluster=SLOW, period={"name": "clocked"}))[0]
    assert first["exchanges"][0] == [-1, 1, 2]
    assert next(span for span in first["computes"] if span[0] == 1) == [1, 0, 3]


@pytest.mark.parametrize("pace", ["k-sync", "k-batch-sync", "k-async", "k-batch-async"])
def test_no_worker_does_two_things_at_once(pace):
    cluster = {"name": "simulated", "delay": "shifted-exponential(0.01, 0.01)", "link": {"bandwidth": "10 Mbit/s"}}
    training = run(cluster=cluster, workers=6, batch=5, pace={"name": pace, "k": 3}, shards={"deal": "deck"})
    for window in windows(training):
        for worker in range(6):
            spans = sorted(span[1:] for what in window.values() for span in what if span[0] == worker)
            assert all(one[1] <= two[0] + 1e-9 for one, two in itertools.pairwise(spans))


def test_windows_hold_whole_updates_and_go_on_from_a_state():
    whole, resumed = Windows(3), Windows(3)
    for update in range(100):
        spans = [Span(worker, "computes", float(update), update + 0.5) for worker in range(3)]
        whole.note(spans)
        resumed.note(spans)
        if update == 50:
            saved = resumed.state_dict()
            resumed = Windows(3)
            resumed.load_state_dict(saved)
    first, last = whole.take(ended=False), whole.take(ended=True)
    assert [span[1] for span in first["computes"]] == [update for update in range(SPANS) for _ in range(3)]
    assert [span[1] for span in last["computes"]] == [update for update in range(100 - SPANS, 100) for _ in range(3)]
    assert (resumed.take(ended=False), resumed.take(ended=True)) == (first, last)
    assert Windows(1000)._most == SPANS * FOLLOWED


def test_every_change_of_k_is_recorded_once():
    cluster = {"name": "simulated", "delay": "exponential(1)"}
    pace = {"name": "k-async", "k": "adasync", "start": 1}
    training = run(cluster=cluster, workers=8, batch=5, pace=pace, stop={"epochs": 6}, optimizer={"lr": 0.1})
    changes = [change for record in training.records for change in record["pace"]["changes"]]
    assert changes[0] == [0, 1]
    assert len(changes) > 1
    assert [when for when, _ in changes] == sorted(when for when, _ in changes)
    assert all(one[1] != two[1] for one, two in itertools.pairwise(changes))
    assert changes[-1][1] == training.records[-1]["pace"]["k"]


@pytest.mark.parametrize("shards", [{"split": "label-sorted"}, {"deal": "deck"}])
def test_labels_by_going_through_every_unit(shards):
    # Labels are only worth recording once some examples are lost: too stale ones here.
    cluster = {"name": "simulated", "delay": "exponential(1)", "slow": {"1": 4}}
    pace = {"name": "k-async", "k": 1, "max_staleness": 2}
    training = run(cluster=cluster, workers=4, batch=6, order={"name": "rr", "unit": 3}, pace=pace, shards=shards)
    assert training.ledger.total("dropped")
    labels, told = training.plan.task.train.labels(), training.records[-1]["labels"]
    slow = {str(label): dict.fromkeys(("examples", *FATES), 0) for label in range(10)}
    for holder, shard in enumerate(training.plan.shards[: len(training.sizes)]):
        for place, example in enumerate(shard):
            mine = slow[str(labels[example])]
            mine["examples"] += 1
            for fate in FATES:
                mine[fate] += int(training.ledger.counts[fate][holder][place // 3])
    assert told == slow
    assert sum(one["examples"] for one in told.values()) == len(np.concatenate(training.plan.shards[:1])) * len(
        training.sizes
    )
