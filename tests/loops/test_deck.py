"""One deck for the ranks of one's own loop: every example once an epoch, whoever takes it."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hemiola.errors import InputError
from hemiola.loops.deck import DeckEpoch
from hemiola.loops.epoch import IndexIterator
from hemiola.loops.sampler import OrderedSampler


def counter():
    taken = [0]

    def take(count):
        taken[0] += count
        return taken[0] - count

    return take


@settings(max_examples=240)
@given(
    examples=st.integers(1, 300),
    unit=st.integers(1, 3),
    ranks=st.integers(1, 5),
    later_ranks=st.integers(1, 5),
    batch=st.integers(1, 20),
    turns=st.lists(st.integers(0, 4), max_size=40),
    held=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    seed=st.integers(0, 3),
)
def test_every_example_comes_once_whoever_takes_it_and_whoever_goes_on(
    examples, unit, ranks, later_ranks, batch, turns, held, seed
):
    """Ranks take batches in any order and hold some untrained; another number of ranks goes on from what is done."""
    sequence = np.random.default_rng(seed).permutation(examples)
    trained: list[int] = []

    def epochs(number, passed=None):
        take = counter()
        made = [DeckEpoch(0, sequence, take, number, unit) for _ in range(number)]
        for epoch in made if passed is not None else []:
            epoch.go_on(passed.copy(), 0, 0)
        return made, [IndexIterator(epoch, lambda drawing: True) for epoch in made]

    def visit(epoch, drawing, hold):
        drawn = list(islice(drawing, batch))
        new = drawn[: max(0, len(drawn) - hold)]  # the last ones are with the loader's workers
        epoch.pass_by(epoch.places(np.array(new, np.int64)))
        trained.extend(new)
        return len(drawn) > 0

    first, drawings = epochs(ranks)
    for turn in turns:
        visit(first[turn % ranks], drawings[turn % ranks], held[turn % ranks])
    passed = np.zeros(examples, bool)
    for epoch in first:
        passed |= epoch._passed
    assert sorted(trained) == sorted(sequence[passed].tolist())
    later, drawings = epochs(later_ranks, passed)
    working = True
    while working:
        working = sum(visit(epoch, drawing, 0) for epoch, drawing in zip(later, drawings, strict=True)) > 0
    assert sorted(trained) == list(range(examples))
    assert all(epoch.done == len(epoch) or epoch.empty for epoch in later)


def test_what_a_rank_has_drawn_and_not_trained_on_it_draws_again():
    epoch = DeckEpoch(0, np.arange(40), counter(), 2, 1)
    first = list(islice(IndexIterator(epoch, lambda d: True), 7))
    epoch.pass_by(epoch.places(np.array(first[:3])))
    again = list(IndexIterator(epoch, lambda d: True))
    assert again == list(range(3, 40))


def train(sampler, data, epochs=3, stop_after=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = sampler.track(DataLoader(data, batch_size=4, sampler=sampler))
    orders, state = [], None
    with sampler.watch(model):
        for _ in range(epochs):
            seen = []
            for x, y in loader:
                seen += x[:, 4].tolist()
                optimizer.zero_grad()
                (model(x[:, :4]) - y).square().mean().backward()
                optimizer.step()
                if stop_after is not None and len(orders) == 1 and len(seen) == stop_after:
                    state = sampler.state_dict()
            orders.append(seen)
    return orders, state


def data(examples=50):
    numbers = torch.randn(examples, 5, generator=torch.Generator().manual_seed(1))
    numbers[:, 4] = torch.arange(examples)
    return TensorDataset(numbers, numbers[:, :1].clone())


@pytest.mark.parametrize("order", ["rr", "cd-grab"])
@pytest.mark.parametrize("unit", [1, 3])
def test_one_ranks_deck_is_one_ranks_shard(order, unit):
    """The same examples in the same order in every epoch, so also the same gradients and balanced orders."""
    orders = [train(OrderedSampler(data(), order, unit, deal=deal), data())[0] for deal in ("shards", "deck")]
    assert orders[0] == orders[1]
    assert all(sorted(epoch) == list(range(50)) for epoch in orders[1])
    assert orders[1][0] != orders[1][1]


def test_one_rank_goes_on_in_the_middle_of_an_epoch():
    whole, state = train(OrderedSampler(data(), "rr", deal="deck"), data(), stop_after=24)
    again = OrderedSampler(data(), "rr", deal="deck")
    again.load_state_dict(state)
    assert list(again) == whole[1][24:]
    with pytest.raises(InputError, match="deal"):
        OrderedSampler(data(), "rr").load_state_dict(state)


def test_bad_input_is_one_line():
    with pytest.raises(InputError, match="deal must be one of shards, deck, got 'decks'"):
        OrderedSampler(data(), deal="decks")
    with pytest.raises(InputError, match=r"needs torch\.distributed, whose store says who takes what"):
        OrderedSampler(data(), num_replicas=2, rank=0, deal="deck")
    with pytest.raises(InputError, match="an iterator cannot be saved"):
        iter(OrderedSampler(data(), deal="deck")).state_dict()
