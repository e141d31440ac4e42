"""``late = "cut"``: an update ends the stints under way and takes what is done; simulated, and on ranks of torch."""

import sys
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

sys.path.insert(0, str(Path(__file__).parent))

from torch_ranks import TASKS, Job, train_on_ranks

from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.timing.delays import DelayStreams, parse_delay
from hemiola.training import Training

LAW = "shifted-exponential(1, 1)"


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


def steps_of(stints):
    return [(stint.worker, len(stint.batches)) for stint in stints]


def test_by_hand():
    """Steps of 1, 1.5 and 10 seconds, four a stint. At 4 s worker 1 has done two of its four, and worker 2 none."""
    run = training(
        workers=3,
        pace={"name": "k-sync", "k": 1, "late": "cut"},
        period={"name": "constant", "p": 4},
        stop={"updates": 1},
        cluster={"name": "simulated", "delay": "constant(1.0)", "slow": {"1": 1.5, "2": 10.0}},
    )
    start = run.versions[0].clone()
    (update,) = updates_of(run)
    assert update.seconds == 4.0
    assert steps_of(report.stint for report in update.reports) == [(0, 4), (1, 2)]
    assert [report.compute for report in update.reports] == [4.0, 3.0]
    assert steps_of(update.cancelled) == [(2, 4), (1, 2)]
    assert update.wasted_seconds == 4.0 + 1.0
    assert update.censored == [1.0]
    assert [tuple(span) for span in update.spans] == [
        (0, "computes", 0.0, 4.0),
        (1, "computes", 0.0, 3.0),
        (1, "cut", 3.0, 4.0),
        (2, "cancelled", 0.0, 4.0),
    ]
    assert run.ledger.per_worker()[1] == {"used": 8, "cancelled": 8, "dropped": 0, "refused": 0}
    # Two of the six steps were worker 1's, so its change counts for a third.
    again = training(workers=3, period={"name": "constant", "p": 4}, stop={"updates": 1})
    stints = [again.assign(worker) for worker in (0, 1)]
    rows, _ = again.cluster.runner.changes(
        [start] * 2, [stints[0], update.reports[1].stint], [[False] * 4, [False] * 2]
    )
    torch.testing.assert_close(run.versions[1] - start, (2 * rows[0] + rows[1]) / 3)


def test_what_is_done_still_has_to_travel_to_the_server():
    """The update is made when the last report of a cut stint has come over the server's one link."""
    bits = 8 * 4 * 650  # digits-logistic: weights and reports of 650 numbers
    run = training(
        workers=3,
        pace={"name": "k-sync", "k": 1, "late": "cut"},
        period={"name": "constant", "p": 4},
        stop={"updates": 1},
        cluster={
            "name": "simulated",
            "delay": "constant(1.0)",
            "slow": {"1": 1.5, "2": 1.75},
            "link": {"bandwidth": f"{10 * bits} bit/s"},  # a tenth of a second each
        },
    )
    (update,) = updates_of(run)
    # Weights arrive at .1, .2 and .3 s; the first report at .1 + 4 + .1, the two others one after the other behind it.
    assert update.seconds == pytest.approx(4.4)
    assert steps_of(report.stint for report in update.reports) == [(0, 4), (1, 2), (2, 2)]
    assert [report.seconds for report in update.reports] == pytest.approx([4.1, 4.1, 4.1])
    assert update.idle_seconds == 0.0


@pytest.mark.parametrize("name", ["k-sync", "k-batch-sync"])
def test_with_one_step_a_stint_there_is_nothing_to_cut(name):
    """Then it is cancelling, to the last bit."""

    def last(late, **period):
        run = training(
            workers=5,
            pace={"name": name, "k": 3, "late": late},
            period=period,
            stop={"updates": 60},
            cluster={"name": "simulated", "delay": LAW},
        )
        run.run()
        return run.versions[run.version], run.cluster.now, run.ledger.per_worker()

    for period in ({"name": "constant", "p": 1, "weigh": "work"}, {"name": "full"}):
        cut, cancelled = last("cut", **period), last("cancel", **period)
        assert torch.equal(cut[0], cancelled[0])
        assert cut[1:] == cancelled[1:]


@settings(max_examples=25, deadline=None)
@given(
    workers=st.integers(2, 5),
    steps=st.integers(1, 5),
    data=st.data(),
    law=st.sampled_from([LAW, "constant(0.5)", "hyperexponential(0.8, 1, 9)"]),
)
def test_every_round_is_that_of_a_slow_reference(workers, steps, data, law):
    """Step by step, with nothing but the draws: who has done how much when the K-th stint ends."""
    k = data.draw(st.integers(1, workers))
    slow = {1: data.draw(st.sampled_from([1.0, 2.5]))}
    run = training(
        workers=workers,
        pace={"name": "k-sync", "k": k, "late": "cut"},
        period={"name": "constant", "p": steps},
        stop={"updates": 12},
        cluster={"name": "simulated", "delay": law, "slow": {"1": slow[1]}},
    )
    streams = DelayStreams(parse_delay(law), workers, 0, slow)
    now = 0.0
    for number, update in enumerate(updates_of(run)):
        ends = []
        for worker in range(workers):
            end = now
            ends.append([end := end + streams.seconds(worker, number * steps + step) for step in range(steps)])
        now = sorted(mine[-1] for mine in ends)[k - 1]
        done = [sum(end <= now + 1e-9 for end in mine) for mine in ends]
        assert update.seconds == pytest.approx(now)
        reported = dict(steps_of(report.stint for report in update.reports))
        if law.startswith("constant"):  # Rounding decides whether a step that ends at the same moment is over.
            assert all(abs(reported.get(worker, 0) - done[worker]) <= 1 for worker in range(workers))
        else:
            assert reported == {worker: count for worker, count in enumerate(done) if count}
        left = {worker: steps - reported.get(worker, 0) for worker in range(workers)}
        assert dict(steps_of(update.cancelled)) == {worker: count for worker, count in left.items() if count}


@pytest.mark.parametrize("deal", ["shards", "deck"])
@pytest.mark.parametrize("name", ["k-sync", "k-batch-sync"])
def test_nothing_is_lost_or_doubled(name, deal):
    run = training(
        workers=4,
        order={"name": "cd-grab", "sketch": "fold:16"},
        pace={"name": name, "k": 2, "late": "cut"},
        period={"name": "constant", "p": 3},
        shards={"deal": deal},
        stop={"epochs": 3},
        cluster={"name": "simulated", "delay": LAW, "slow": {"2": 2.0}},
    )
    visited = Counter(
        (0 if deal == "deck" else report.stint.worker, batch.epoch, unit)
        for update in updates_of(run)
        for report in update.reports
        for batch in report.stint.batches
        for unit in batch.units.tolist()
    )
    assert run.ledger.total("cancelled") > 0
    assert sum(visited.values()) == run.ledger.total("used")
    assert set(visited.values()) == {1}
    state = run.queues.state_dict()
    for holder, queue in enumerate(state.get("queues", [state])):
        due = {(holder, epoch, unit) for epoch in range(queue["epoch"]) for unit in range(run.sizes[holder])}
        waiting = {(holder, epoch, unit) for epoch, _, units in queue["returned"] for unit in units}
        assert due <= set(visited) | waiting
        assert not waiting & set(visited)


# ------------------------------------------------------------------------------------------------------ real ranks

RANKS = {
    "task": {"name": f"{TASKS}:small", "examples": 200},
    "workers": 2,
    "batch": 5,
    "stop": {"updates": 12},
    "optimizer": {"lr": 0.1, "momentum": 0.9},
    "order": {"name": "cd-grab", "sketch": "fold:16"},
    "shards": {"deal": "deck"},
    "period": {"name": "constant", "p": 4},
    "cluster": {"name": "torch", "device": "cpu", "delay": "constant(0.02)", "slow": {"1": 3.0}},
}


@pytest.mark.real
@pytest.mark.timeout(600)
def test_ranks_end_their_stints_where_the_update_does_not_wait_for_them(tmp_path):
    """Steps of 20 and 60 ms: when rank 0 is through with its four, rank 1 is not, and comes after its present one."""
    cut, graced, whole = train_on_ranks(
        [
            Job(RANKS | {"pace": {"name": "k-sync", "k": 1, "late": "cut"}}),
            Job(RANKS | {"pace": {"name": "k-sync", "k": 1, "late": "cut", "grace": 1000.0}}),
            Job(RANKS),
        ],
        2,
        tmp_path / "ranks",
    )
    for first, second in (cut, graced, whole):
        assert torch.equal(first.weights, second.weights)
        assert first.counts == second.counts
        assert first.updates == 12
    used, dropped = (sum(map(sum, cut[0].counts[fate])) for fate in ("used", "cancelled"))
    assert 12 * 20 < used < 12 * 40
    assert used + dropped == 12 * 40
    assert sum(map(sum, whole[0].counts["used"])) == 12 * 40
    assert sum(map(sum, graced[0].counts["used"])) == 12 * 40  # the deadline is a minute away


def test_other_paces_are_refused_on_torch():
    for pace in ({"name": "k-batch-sync", "k": 1, "late": "cut"}, {"name": "k-sync", "k": 1}):
        with pytest.raises(InputError, match=r"cuts the local steps of the late ones \(k-sync with late = 'cut'\)"):
            Experiment(RANKS | {"pace": pace})
    with pytest.raises(InputError, match="cuts the local steps"):
        Experiment(RANKS | {"pace": {"name": "k-sync", "k": 1, "late": "cut"}, "period": "full"})
