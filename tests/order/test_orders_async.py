"""The balanced orders when reports come late, twice, never or after a restart."""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.contracts import Visit
from hemiola.order import ORDERS

BALANCED = ["id-grab", "id-pair-grab", "cd-grab"]
OPTIONS = [{}, {"every": 2}, {"every": "auto"}, {"reverse": True}, {"signs": "probabilistic"}]


def make(name, sizes, lockstep, **options):
    order = ORDERS[name](**options)
    order.begin(sizes, 0, lockstep)
    return order


def reloaded(order, name, sizes, lockstep, **options):
    """A new process: the state goes through a file."""
    file = io.BytesIO()
    torch.save(order.state_dict(), file)
    file.seek(0)
    new = make(name, sizes, lockstep, **options)
    new.load_state_dict(torch.load(file, weights_only=True))
    return new


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("name", "sizes"), [("grab", [7])] + [(name, [5, 7, 4]) for name in BALANCED])
def test_stop_at_every_step_and_resume(name, sizes, options):
    """A new process before every single visit, and one process for all of them, run the same orders."""
    rows = [np.random.default_rng(worker).standard_normal((size, 6)) for worker, size in enumerate(sizes)]

    def run(restarting):
        order = make(name, sizes, True, **options)
        orders = []
        for epoch in range(5):
            orders.append([order.sequence(worker, epoch).tolist() for worker in range(len(sizes))])
            for t in range(max(sizes)):
                for worker in range(len(sizes)):
                    if restarting:
                        order = reloaded(order, name, sizes, True, **options)
                        assert [order.sequence(w, epoch).tolist() for w in range(len(sizes))] == orders[-1]
                    units = np.array(orders[-1][worker][t : t + 1], int)
                    if len(units):
                        sketches = torch.from_numpy(rows[worker][units]) if order.wants(worker, epoch) else None
                        order.observe([Visit(worker, epoch, units, sketches, 1)])
        return orders, order.telemetry()

    assert run(restarting=True) == run(restarting=False)


class Room:
    """Workers with queues and stints under way, driven by drawn numbers: any pace, any accident."""

    def __init__(self, order, sizes, batch):
        self.order, self.sizes, self.batch = order, sizes, batch
        self.epoch = [-1] * len(sizes)
        self.queue = [[] for _ in sizes]
        self.under_way = []
        self.log = []

    def take(self, worker):
        if not self.queue[worker]:
            self.epoch[worker] += 1
            sequence = self.order.sequence(worker, self.epoch[worker])
            assert sorted(sequence.tolist()) == list(range(self.sizes[worker]))
            assert self.order.sequence(worker, self.epoch[worker]).tolist() == sequence.tolist()
            self.log.append((worker, self.epoch[worker], sequence.tolist()))
            self.queue[worker] = [(self.epoch[worker], unit) for unit in sequence.tolist()]
        first = self.queue[worker][0][0]
        batch = [(e, u) for e, u in self.queue[worker][: self.batch] if e == first]
        del self.queue[worker][: len(batch)]
        self.under_way.append((worker, batch))

    def end(self, which, fate, steps):
        worker, batch = self.under_way.pop(which % len(self.under_way))
        if fate == "cancelled":
            self.queue[worker] = batch + self.queue[worker]
        elif fate != "dropped":
            epoch, units = batch[0][0], np.array([unit for _, unit in batch])
            rows = np.random.default_rng([worker, epoch, *units]).standard_normal((len(units), 3)) + units[:, None]
            if fate == "nan":
                rows[0] = np.nan
            sketches = torch.from_numpy(rows) if self.order.wants(worker, epoch) and fate != "blind" else None
            for _ in range(2 if fate == "twice" else 1):
                self.order.observe([Visit(worker, epoch, units, sketches, steps)])


FATES = ["used"] * 8 + ["cancelled", "dropped", "nan", "blind", "twice"]


@settings(deadline=None, max_examples=120)
@given(
    name=st.sampled_from(BALANCED),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    batch=st.integers(1, 4),
    options=st.sampled_from(OPTIONS),
    moves=st.lists(st.tuples(st.integers(0, 11), st.sampled_from(FATES), st.sampled_from([1, 2, 20])), max_size=120),
    restarts=st.sets(st.integers(0, 119), max_size=4),
)
def test_every_epoch_is_a_permutation_and_restarts_do_not_show(name, sizes, batch, options, moves, restarts):
    """Odd counts, uneven shards, cancelled, dropped, refused, repeated and late reports, drift, restarts."""
    rooms = [Room(make(name, sizes, False, **options), sizes, batch) for _ in range(2)]
    for i, (choice, fate, steps) in enumerate(moves):
        if i in restarts:
            rooms[1].order = reloaded(rooms[1].order, name, sizes, False, **options)
        for room in rooms:
            if choice < 6 or not room.under_way:
                room.take(choice % len(sizes))
            else:
                room.end(choice, fate, steps)
    assert rooms[0].log == rooms[1].log
    assert rooms[0].order.telemetry() == rooms[1].order.telemetry()
    assert all(np.isfinite(value) for value in rooms[0].order.telemetry().values())


def visit(order, worker, epoch, units, rows):
    order.observe([Visit(worker, epoch, np.array(units), torch.from_numpy(rows[np.array(units)]), 1)])


def test_missing_units_meet_in_the_middle_and_late_ones_are_ignored():
    rows = np.random.default_rng(0).standard_normal((10, 4))
    order = make("id-pair-grab", [10], False)
    order.adopt(0, [np.arange(10)])
    order.sequence(0, 0)
    visit(order, 0, 0, [0, 1, 2, 3, 4, 5, 6], rows)
    following = order.sequence(0, 1).tolist()
    assert following[3:7] == [6, 7, 8, 9]
    untouched = copy.deepcopy(order)
    visit(order, 0, 0, [7, 8, 9], rows)
    assert order.sequence(0, 1).tolist() == following
    for each in (order, untouched):
        visit(each, 0, 1, following, rows)
    assert order.sequence(0, 2).tolist() == untouched.sequence(0, 2).tolist()


def test_a_stint_of_a_whole_epoch_gives_orders_one_epoch_late():
    """Nothing of epoch 0 is known when epoch 1 begins, all of it when epoch 2 does."""
    rows = np.random.default_rng(0).standard_normal((10, 4))
    late, prompt = make("id-pair-grab", [10], False), make("id-pair-grab", [10], False)
    first = late.sequence(0, 0).tolist()
    assert late.sequence(0, 1).tolist() == first
    visit(late, 0, 0, first, rows)
    prompt.sequence(0, 0)
    visit(prompt, 0, 0, first, rows)
    assert late.sequence(0, 2).tolist() == prompt.sequence(0, 1).tolist() != first


def test_workers_in_the_same_epoch_share_a_sum_however_far_others_are():
    """Worker 1 starts epoch 0 when worker 0 is through with epoch 1: its signs are against what epoch 0 left behind."""
    rows = [np.random.default_rng(worker).standard_normal((8, 4)) for worker in range(2)]
    order = make("cd-grab", [8, 8], True)  # in lockstep nothing is blended
    orders = [order.sequence(worker, 0) for worker in range(2)]
    visit(order, 0, 0, orders[0], rows[0])
    visit(order, 0, 1, order.sequence(0, 1), rows[0])
    order.sequence(0, 2)
    visit(order, 1, 0, orders[1], rows[1])

    s = np.zeros(4)
    for worker in (0, 1):
        expected = np.empty(8, int)
        for t in range(0, 8, 2):
            a, b = orders[worker][t : t + 2]
            c = rows[worker][a] - rows[worker][b]
            plus = s @ c <= 0
            s += c if plus else -c
            expected[[t // 2, 7 - t // 2]] = (a, b) if plus else (b, a)
    assert order.sequence(1, 1).tolist() == expected.tolist()


def test_sums_are_forgotten_when_everyone_is_past_them():
    order = make("cd-grab", [4, 4], False)
    for epoch in range(6):
        for worker in range(2):
            units = order.sequence(worker, epoch)
            visit(order, worker, epoch, units, np.random.default_rng(epoch).standard_normal((4, 3)))
    assert len({epoch for epoch, _ in order.state_dict()["sums"]}) <= 2
    assert order.state_dict()["monitor"]["traces"] == {}


def blended_loop(sequence, rows, visits, lockstep, local_steps):
    """CD-GraB for two workers with 60 units each, blended by how many units they are apart beyond a stint of theirs."""
    shared, own, used = np.zeros(3), np.zeros((2, 3)), [0, 0]
    blends, following = [], np.empty((2, 60), int)
    for worker, t in visits:
        used[worker] += 2
        drift = abs(used[0] - used[1]) - 2 * local_steps
        blend = max(0.5 if local_steps > 8 else 0.0, 0.0 if lockstep else min(1.0, drift / 16))
        front, back = sequence[worker][t : t + 2]
        c = rows[worker][front] - rows[worker][back]
        plus = ((1 - blend) * shared + blend * own[worker]) @ c <= 0
        shared += c if plus else -c
        own[worker] += c if plus else -c
        following[worker, [t // 2, 59 - t // 2]] = (front, back) if plus else (back, front)
        blends.append(blend)
    return following.tolist(), blends


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("local_steps", [1, 9])
@pytest.mark.parametrize("seed", range(5))
def test_cd_grab_blends_sums_as_workers_drift_apart(lockstep, local_steps, seed):
    """The second worker starts late, lags by up to 24 units and catches up in the end."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((2, 60, 3))
    visits = [(0, t) for t in range(0, 24, 2)]
    for t in range(0, 36, 2):
        visits += [(1, t), (0, t + 24)]
    visits += [(1, t) for t in range(36, 60, 2)]
    order = make("cd-grab", [60, 60], lockstep)
    sequence = [order.sequence(worker, 0) for worker in range(2)]
    for worker, t in visits:
        units = sequence[worker][t : t + 2]
        order.observe([Visit(worker, 0, units, torch.from_numpy(rows[worker][units]), local_steps)])
    expected, blends = blended_loop(sequence, rows, visits, lockstep, local_steps)
    assert [order.sequence(worker, 1).tolist() for worker in range(2)] == expected
    if not lockstep and local_steps == 1:
        assert 0.0 in blends
        assert 1.0 in blends


def test_workers_in_step_are_not_blended_whether_or_not_they_were_promised_to_be():
    rows = np.random.default_rng(0).standard_normal((2, 60, 3))
    orders = []
    for lockstep in (True, False):
        order = make("cd-grab", [60, 60], lockstep)
        sequence = [order.sequence(worker, 0) for worker in range(2)]
        for t in range(0, 60, 2):
            for worker in (0, 1):
                visit(order, worker, 0, sequence[worker][t : t + 2], rows[worker])
        orders.append([order.sequence(worker, 1).tolist() for worker in range(2)])
    assert orders[0] == orders[1]
