"""The policies against the papers' loops, and their options."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.contracts import Order, Visit
from hemiola.errors import InputError
from hemiola.order import ORDERS, redeal

BALANCED = ["grab", "id-grab", "id-pair-grab", "cd-grab"]


def make(name, sizes, seed=0, lockstep=True, **options):
    order = ORDERS[name](**options)
    order.begin(sizes, seed, lockstep)
    return order


def gradients(sizes, d=5, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((size, d)) for size in sizes]


def run_epoch(order, epoch, rows, batch=1, local_steps=1):
    """One epoch in lockstep, ``local_steps`` batches of ``batch`` units an update; returns the orders that were run."""
    orders = [order.sequence(worker, epoch) for worker in range(len(rows))]
    for start in range(0, max(map(len, rows)), batch * local_steps):
        visits = []
        for worker, sequence in enumerate(orders):
            stint = sequence[start : start + batch * local_steps]
            for units in [stint[t : t + batch] for t in range(0, len(stint), batch)]:
                sketches = torch.from_numpy(rows[worker][units]) if order.wants(worker, epoch) else None
                visits.append(Visit(worker, epoch, units, sketches, local_steps))
        order.observe(visits)
    return orders


# ------------------------------------------------------------------------------------------- the papers' loops


def pair_loop(orders, rows, shared=True):
    """CD-GraB (or, not shared, ID-GraB with pairs): one pair a worker, step by step, with own l and r per worker."""
    sums = [np.zeros(rows[0].shape[1]) for _ in orders]
    if shared:
        sums = [sums[0]] * len(orders)
    following = [np.empty_like(order) for order in orders]
    for t in range(0, max(map(len, orders)), 2):
        for order, row, new, s in zip(orders, rows, following, sums, strict=True):
            if t + 1 < len(order):
                c = row[order[t]] - row[order[t + 1]]
                if s @ c <= 0:
                    new[t // 2], new[len(order) - 1 - t // 2] = order[t], order[t + 1]
                    s += c
                else:
                    new[t // 2], new[len(order) - 1 - t // 2] = order[t + 1], order[t]
                    s -= c
            elif t < len(order):
                new[t // 2] = order[t]
    return following


def mean_loop(order, rows, mean):
    """GraB."""
    s = np.zeros(rows.shape[1])
    following = np.empty_like(order)
    left, right = 0, len(order) - 1
    for unit in order:
        c = rows[unit] - mean
        if s @ c <= 0:
            following[left] = unit
            s += c
            left += 1
        else:
            following[right] = unit
            s -= c
            right -= 1
    return following


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 23), min_size=1, max_size=4),
    batch=st.sampled_from([1, 2, 3, 6]),
    local_steps=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
    name=st.sampled_from(["cd-grab", "id-pair-grab"]),
)
def test_pair_balance_is_the_papers_loop(sizes, batch, local_steps, seed, name):
    """Even and odd counts, even and uneven shards, and any number of units a batch and batches an update."""
    rows = gradients(sizes, seed=seed)
    order = make(name, sizes, seed)
    orders = run_epoch(order, 0, rows, batch, local_steps)
    for epoch in (1, 2, 3):
        expected = pair_loop(orders, rows, shared=name == "cd-grab")
        orders = run_epoch(order, epoch, rows, batch, local_steps)
        assert [o.tolist() for o in orders] == [o.tolist() for o in expected]


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 23), min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_mean_balance_is_the_papers_loop(sizes, seed):
    rows = gradients(sizes, seed=seed)
    order = make("grab" if len(sizes) == 1 else "id-grab", sizes, seed)
    orders = run_epoch(order, 0, rows)
    for epoch in (1, 2, 3):
        means = [0 * row.mean(0) if epoch == 1 else row.mean(0) for row in rows]
        expected = [mean_loop(*each) for each in zip(orders, rows, means, strict=True)]
        orders = run_epoch(order, epoch, rows)
        assert [o.tolist() for o in orders] == [o.tolist() for o in expected]


def test_by_hand():
    """Values 5,1: c = 4, a tie, +1, s = 4; then 3,2: c = 1, <s,c> > 0, -1: the 2 to the front, the 3 to the back."""
    order = make("cd-grab", [5])
    order.adopt(0, [np.array([4, 0, 2, 1, 3])])
    value = np.array([1.0, 2, 3, 9, 5])[:, None]
    run_epoch(order, 0, [value])
    assert order.sequence(0, 1).tolist() == [4, 1, 3, 2, 0]


def test_one_worker_coordinated_is_independent():
    rows = gradients([31])
    pair, coordinated = make("id-pair-grab", [31]), make("cd-grab", [31])
    for epoch in range(5):
        assert run_epoch(pair, epoch, rows)[0].tolist() == run_epoch(coordinated, epoch, rows)[0].tolist()


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 23), batch=st.integers(1, 4), seed=st.integers(0, 1000))
def test_pairs_are_places_in_whatever_order_their_rows_come(size, batch, seed):
    """One order that several workers deal among themselves: a pair is balanced when its second row is there."""
    (rows,) = gradients([size], seed=seed)
    order = make("cd-grab", [size], seed)
    for epoch in range(3):
        sequence = order.sequence(0, epoch)
        batches = [np.arange(t, min(t + batch, size)) for t in range(0, size, batch)]
        np.random.default_rng(seed + epoch).shuffle(batches)
        s, come, expected = np.zeros(5), set(), np.empty(size, int)
        for places in batches:
            order.observe([Visit(0, epoch, sequence[places], torch.from_numpy(rows[sequence[places]]), 1)])
            for place in places.tolist():
                come.add(place)
                if place ^ 1 in come:
                    front, back = sequence[place & ~1], sequence[place | 1]
                    c = rows[front] - rows[back]
                    plus = s @ c <= 0
                    s += c if plus else -c
                    expected[[place // 2, size - 1 - place // 2]] = (front, back) if plus else (back, front)
        if size % 2:
            expected[size // 2] = sequence[-1]
        assert order.sequence(0, epoch + 1).tolist() == expected.tolist()


# -------------------------------------------------------------------------------------------- options and errors


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_is_an_order(name):
    order = make(name, [6])
    assert isinstance(order, Order)
    assert order.sketch == ("ghost:4" if name in BALANCED else None)
    assert [order.wants(0, e) for e in range(3)] == [name in [*BALANCED, "scored"]] * 3


def test_fixed_orders():
    rr, once, straight = (make(name, [50, 50]) for name in ("rr", "shuffle-once", "in-order"))
    assert straight.sequence(1, 7).tolist() == list(range(50))
    assert once.sequence(0, 0).tolist() == once.sequence(0, 5).tolist() == rr.sequence(0, 0).tolist()
    different = {tuple(make("rr", [50, 50], seed).sequence(w, e)) for seed in (0, 1) for w in (0, 1) for e in (0, 1, 2)}
    assert len(different) == 12  # seed + epoch would collide
    assert rr.telemetry() == {}


@pytest.mark.parametrize("name", BALANCED)
def test_every_balances_every_nth_epoch(name):
    rows = gradients([30])
    often, seldom = make(name, [30]), make(name, [30], every=3)
    orders = [run_epoch(seldom, epoch, rows)[0].tolist() for epoch in range(7)]
    assert [seldom.wants(0, epoch) for epoch in range(7)] == [True, False, False, True, False, False, True]
    assert orders[1] == orders[2] == orders[3] != orders[4] == orders[5] == orders[6] != orders[0]
    assert [run_epoch(often, epoch, rows)[0].tolist() for epoch in range(3)] == [orders[0], orders[1], orders[4]]


def test_reverse_runs_the_new_order_backwards_on_odd_epochs():
    rows = gradients([30])
    plain, back = make("cd-grab", [30]), make("cd-grab", [30], reverse=True)
    a, b, c = (run_epoch(plain, epoch, rows)[0].tolist() for epoch in range(3))
    assert [back.wants(0, epoch) for epoch in range(5)] == [True, False, True, False, True]
    runs = [run_epoch(back, epoch, rows)[0].tolist() for epoch in range(5)]
    assert runs == [a, b[::-1], b, c[::-1], c]


def test_reverse_and_every_together():
    rows = gradients([30])
    order = make("cd-grab", [30], reverse=True, every=2)
    runs = [run_epoch(order, epoch, rows)[0].tolist() for epoch in range(5)]
    assert [order.wants(0, epoch) for epoch in range(5)] == [True, False, False, False, True]
    assert runs[1] == runs[2][::-1] == runs[3] != runs[0]


def test_probabilistic_signs_are_named_by_the_seed():
    rows = gradients([40, 40])

    def orders(seed, signs):
        order = make("cd-grab", [40, 40], seed, signs=signs)
        order.adopt(0, [np.arange(40)] * 2)
        run_epoch(order, 0, rows)
        return [order.sequence(w, 1).tolist() for w in (0, 1)]

    assert orders(1, "probabilistic") == orders(1, "probabilistic") != orders(2, "probabilistic")
    assert orders(1, "deterministic") == orders(2, "deterministic") != orders(1, "probabilistic")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rr", {"unit": 0}, "unit must be at least 1, got 0"),
        ("cd-grab", {"unit": -1}, "unit must be at least 1, got -1"),
        ("cd-grab", {"every": 0}, "every must be at least 1, got 0"),
        ("cd-grab", {"every": "never"}, "every must be a whole number of at least 1 or 'auto', got 'never'"),
        ("cd-grab", {"signs": "random"}, "signs must be 'deterministic' or 'probabilistic', got 'random'"),
        ("cd-grab", {"sketch": "fold:0"}, "K in sketch 'fold:0'"),
    ],
)
def test_impossible_options(name, options, message):
    with pytest.raises(InputError, match=message):
        ORDERS[name](**options)


def test_impossible_runs():
    with pytest.raises(InputError, match="'grab' is for 1 worker, got 2; use 'id-grab'"):
        make("grab", [3, 3])
    with pytest.raises(InputError, match="at least 1 worker"):
        make("cd-grab", [])
    with pytest.raises(InputError, match="worker 1 has 0"):
        make("rr", [3, 0])
    order = make("cd-grab", [4])
    with pytest.raises(InputError, match="permutation of its 4 units"):
        order.adopt(0, [np.array([0, 1, 2, 2])])
    order.sequence(0, 1)
    with pytest.raises(ValueError, match="epoch 0 is gone"):
        order.sequence(0, 0)


def test_sketches_that_change_their_length():
    order = make("cd-grab", [4])
    units = order.sequence(0, 0)
    order.observe([Visit(0, 0, units[:2], torch.zeros(2, 5), 1)])
    with pytest.raises(InputError, match="5 numbers so far, now 6"):
        order.observe([Visit(0, 0, units[2:], torch.zeros(2, 6), 1)])


# ------------------------------------------------------------------------------------------------------ skips


@pytest.mark.parametrize("name", BALANCED)
def test_a_non_finite_unit_is_counted_and_poisons_nothing(name):
    rows = gradients([20])
    rows[0][3] = np.nan
    order = make(name, [20])
    for epoch in range(3):
        run_epoch(order, epoch, rows)
        assert sorted(order.sequence(0, epoch + 1)) == list(range(20))
        assert order.telemetry()["skipped"] == epoch + 1
    assert np.isfinite(order.telemetry()["herding"])


def test_a_skipped_pair_goes_first_to_the_front_second_to_the_back():
    order = make("cd-grab", [6])
    order.adopt(0, [np.arange(6)])
    rows = gradients([6])
    rows[0][1] = np.inf
    run_epoch(order, 0, rows)
    following = order.sequence(0, 1).tolist()
    assert (following[0], following[-1]) == (0, 1)


# -------------------------------------------------------------------------------------------------- state, redeal


@pytest.mark.parametrize("name", ORDERS)
def test_state_is_plain_and_refuses_what_is_foreign(name):
    order = make(name, [9])
    run_epoch(order, 0, gradients([9]))
    file = io.BytesIO()
    torch.save(order.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert (state["kind"], state["version"]) == (name, 7)
    make(name, [9]).load_state_dict(state)
    with pytest.raises(InputError, match=f"not the state of a '{name}'"):
        make(name, [9]).load_state_dict({**state, "kind": "adaptive"})
    with pytest.raises(InputError, match="version 1, this hemiola reads 7"):
        make(name, [9]).load_state_dict({**state, "version": 1})
    with pytest.raises(InputError, match=r"sizes = \[9\], this run has \[8\]"):
        make(name, [8]).load_state_dict(state)
    with pytest.raises(InputError, match="seed = 0, this run has 1"):
        make(name, [9], seed=1).load_state_dict(state)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=5), workers=st.integers(1, 6), seed=st.integers(0, 99))
def test_redeal_keeps_every_unit_and_about_its_place(sizes, workers, seed):
    deck = np.random.default_rng(seed).permutation(sum(sizes))
    orders = np.split(deck, np.cumsum(sizes)[:-1])
    if sum(sizes) < workers:
        with pytest.raises(InputError, match=f"got {workers}"):
            redeal(orders, workers)
        return
    shards, places = redeal(orders, workers)
    assert sorted(np.concatenate(shards)) == list(range(sum(sizes)))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    old = {unit: (i + 0.5) / len(order) for order in orders for i, unit in enumerate(order.tolist())}
    for shard, place in zip(shards, places, strict=True):
        assert sorted(place) == list(range(len(shard)))
        times = [old[unit] for unit in shard[place].tolist()]
        assert times == sorted(times)


def test_redeal_by_hand():
    shards, places = redeal([np.array([7, 1, 4]), np.array([2, 0, 5])], 3)  # interleaved: 7 2 1 0 4 5
    assert [shard[place].tolist() for shard, place in zip(shards, places, strict=True)] == [[7, 0], [2, 4], [1, 5]]
