"""The fixed orders with ``reverse``: every second epoch is the one before it, backwards."""

import numpy as np
import pytest

from hemiola.errors import InputError
from hemiola.order import InOrder, RandomReshuffling, ShuffleOnce


@pytest.mark.parametrize("order", [RandomReshuffling, ShuffleOnce, InOrder])
def test_every_second_epoch_is_the_one_before_it_backwards(order):
    plain, flipped = order(), order(reverse=True)
    for each in (plain, flipped):
        each.begin([7, 6], seed=3, lockstep=True)
    for worker in (0, 1):
        for epoch in (0, 2, 4):
            forwards = plain.sequence(worker, epoch)
            assert np.array_equal(flipped.sequence(worker, epoch), forwards)
            assert np.array_equal(flipped.sequence(worker, epoch + 1), forwards[::-1])
    assert InOrder is not order or flipped.sequence(1, 1).tolist() == [5, 4, 3, 2, 1, 0]


def test_a_state_of_the_other_direction_is_refused():
    plain, flipped = RandomReshuffling(), RandomReshuffling(reverse=True)
    for each in (plain, flipped):
        each.begin([4], seed=0, lockstep=True)
    flipped.load_state_dict(flipped.state_dict())
    with pytest.raises(InputError, match="saved with reverse = True, this run has False"):
        plain.load_state_dict(flipped.state_dict())
