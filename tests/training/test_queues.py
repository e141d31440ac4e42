"""Queues: every epoch of every worker is its order, whatever is given back and wherever it is resumed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hemiola.order import RandomReshuffling
from hemiola.training.queues import Queues


def queues(sizes, units_per_batch=2, lockstep=False, epochs=None):
    order = RandomReshuffling()
    order.begin(sizes, seed=0, lockstep=lockstep)
    return Queues(order, sizes, units_per_batch, lockstep, epochs)


@given(
    size=st.integers(1, 9),
    units_per_batch=st.integers(1, 4),
    moves=st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), max_size=40),
)
def test_what_is_used_is_the_order_epoch_after_epoch(size, units_per_batch, moves):
    queue = queues([size], units_per_batch)
    used: list[int] = []
    for steps, cancelled, resumed in moves:
        if resumed:
            state = queue.state_dict()
            queue = queues([size], units_per_batch)
            queue.load_state_dict(state)
        batches = queue.take(0, steps)
        assert len(batches) == steps
        if cancelled:
            queue.give_back(0, batches)
        else:
            used += [unit for batch in batches for unit in batch.units]
    expected = np.concatenate([queue.order.sequence(0, epoch) for epoch in range(len(used) // size + 1)])
    assert used == list(expected[: len(used)])


def test_in_lockstep_the_smaller_shard_rests_at_the_end_of_each_epoch():
    queue = queues([3, 2], units_per_batch=1, lockstep=True, epochs=2)
    taken = [[len(queue.take(worker, 1)) for _ in range(7)] for worker in (0, 1)]
    assert taken == [[1, 1, 1, 1, 1, 1, 0], [1, 1, 0, 1, 1, 0, 0]]


def test_who_rested_is_told_once_an_update_and_survives_a_checkpoint():
    queue = queues([3, 2, 2], units_per_batch=1, lockstep=True, epochs=2)
    resting = []
    for _ in range(6):
        for worker in range(3):
            queue.take(worker, 1)
        again = queues([3, 2, 2], units_per_batch=1, lockstep=True, epochs=2)
        again.load_state_dict(queue.state_dict())
        resting.append((again.wake(), queue.wake(), queue.wake()))
    nobody, two = set(), {1, 2}
    assert resting == [(nobody, nobody, nobody), (nobody, nobody, nobody), (two, two, nobody)] * 2


def test_a_stint_is_cut_where_the_run_ends():
    queue = queues([5], units_per_batch=1, lockstep=True, epochs=1)
    assert [len(queue.take(0, 4)), len(queue.take(0, 4))] == [4, 1]


def test_the_last_batch_of_an_epoch_is_short_and_never_reaches_into_the_next():
    queue = queues([5], units_per_batch=2)
    batches = queue.take(0, 6)
    assert [(batch.epoch, batch.position, len(batch.units)) for batch in batches] == [
        (0, 0, 2),
        (0, 2, 2),
        (0, 4, 1),
        (1, 0, 2),
        (1, 2, 2),
        (1, 4, 1),
    ]


def test_off_lockstep_stints_get_shorter_towards_the_end_of_the_run():
    """16 units for 2 workers: each stint is at most half of what nobody was given, and at least one batch."""
    queue = queues([8, 8], units_per_batch=1, epochs=1)
    taken = [len(queue.take(worker, 100)) for worker in (0, 1, 0, 1, 0, 1)]
    assert taken == [8, 4, 2, 1, 1, 1]


def test_what_comes_back_is_given_again_and_a_resumed_queue_cuts_alike():
    queue = queues([8, 8], units_per_batch=1, epochs=1)
    queue.take(0, 100)
    queue.give_back(0, queue.take(1, 100))
    again = queues([8, 8], units_per_batch=1, epochs=1)
    again.load_state_dict(queue.state_dict())
    assert [len(one.take(1, 100)) for one in (queue, again)] == [4, 4]


@pytest.mark.parametrize(("epochs", "slots"), [(0.04, 1), (0.2, 1), (0.3, 2), (1.0, 5), (1.04, 6), (3.0, 15)])
def test_a_run_has_as_many_slots_as_cover_its_epochs(epochs, slots):
    queue = queues([5, 5], units_per_batch=1, lockstep=True, epochs=epochs)
    assert len(queue.take(0, 100)) == slots
