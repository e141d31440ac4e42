"""Stop anywhere and go on: the rest of the epoch, and what follows from it, is the same."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hemiola.errors import InputError
from hemiola.loops.sampler import OrderedSampler
from hemiola.order import CDGraB

pytestmark = pytest.mark.slow

EXAMPLES = 21


def make(count: int = EXAMPLES) -> tuple[TensorDataset, nn.Module]:
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(count), torch.randn(count, 4), torch.randint(0, 3, (count,)))
    return data, nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def train(
    sampler: OrderedSampler, data: TensorDataset, model: nn.Module, batch: int, batches: int, saves: list | None = None
) -> list[int]:
    """Train for a number of batches, across epochs; with ``saves``, a copy of all state after each of them."""
    seen: list[int] = []
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    done = 0
    with sampler.watch(model):
        while done < batches:
            for numbers, x, y in loader:
                seen += numbers.tolist()
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                done += 1
                if saves is not None:
                    saves.append((len(seen), through_a_file(sampler.state_dict()), copy.deepcopy(model.state_dict())))
                if done == batches:
                    break
    return seen


def through_a_file(state: dict) -> dict:
    """As a checkpoint would: plain numbers and tensors, or this fails."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("sketch", ["ghost:2", "fold:8", "exact"])
@pytest.mark.parametrize(("unit", "batch"), [(1, 4), (3, 3), (4, 2), (2, 6)])
def test_resuming_after_any_step_gives_exactly_the_rest(sketch: str, unit: int, batch: int) -> None:
    data, model = make()
    start = copy.deepcopy(model.state_dict())
    batches = 3 * -(-EXAMPLES // batch)
    saves: list = []
    whole = train(OrderedSampler(data, unit=unit, sketch=sketch), data, model, batch, batches, saves)
    assert whole[:EXAMPLES] != whole[-EXAMPLES:]
    model.load_state_dict(start)
    assert (
        train(OrderedSampler(data, unit=unit, sketch=sketch), data, model, batch, batches) == whole
    )  # saving is no change
    for done, (position, state, weights) in enumerate(saves[:-1], 1):
        model.load_state_dict(weights)
        sampler = OrderedSampler(data, unit=unit, sketch=sketch)
        sampler.load_state_dict(state)
        assert train(sampler, data, model, batch, batches - done) == whole[position:], done


@settings(max_examples=40, deadline=None)
@given(
    order=st.sampled_from(["rr", "shuffle-once", "grab", "id-pair-grab", "cd-grab"]),
    examples=st.integers(3, 30),
    batch=st.integers(1, 7),
    reverse=st.booleans(),
    where=st.data(),
)
def test_resuming_anywhere_with_any_order(
    order: str, examples: int, batch: int, reverse: bool, where: st.DataObject
) -> None:
    data, model = make(examples)
    policy = CDGraB(reverse=True, sketch="ghost:1") if reverse else order
    batches = 3 * -(-examples // batch)
    stop = where.draw(st.integers(1, batches - 1))
    saves: list = []
    whole = train(OrderedSampler(data, policy), data, model, batch, batches, saves)
    position, state, weights = saves[stop - 1]
    model.load_state_dict(weights)
    sampler = OrderedSampler(data, CDGraB(reverse=True, sketch="ghost:1") if reverse else order)
    sampler.load_state_dict(state)
    rest = train(sampler, data, model, batch, batches - stop)
    assert rest == whole[position:]
    for epoch in range(3):
        assert sorted(whole[epoch * examples : (epoch + 1) * examples]) == list(range(examples))


def test_without_a_watch_the_rest_is_what_was_not_drawn() -> None:
    data, _ = make()
    sampler = OrderedSampler(data, "rr")
    list(sampler)
    drawing = iter(sampler)
    first = [next(drawing) for _ in range(8)]
    state = through_a_file(sampler.state_dict())
    other = OrderedSampler(data, "rr")
    other.load_state_dict(state)
    assert first + list(other) == first + list(drawing)
    assert list(other) == list(sampler)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("tracked", [False, True])
def test_looking_at_a_batch_after_loading_in_mid_epoch_loses_nothing(tracked: bool, watched: bool) -> None:
    """``next(iter(loader))`` is what people do to initialise lazy layers or to warm up torch.compile."""
    data, model = make(24)
    sampler = OrderedSampler(data)
    saves: list = []
    train(sampler, data, model, 4, 4, saves)
    _, state, _ = saves[-1]
    other, seen = OrderedSampler(data), []
    other.load_state_dict(state)
    loader = DataLoader(data, batch_size=4, sampler=other)
    if tracked:
        other.track(loader)
    expected = other._now.left().tolist()
    if not watched:
        next(iter(loader))
    with other.watch(model):
        if watched:
            next(iter(loader))
        for numbers, x, y in loader:
            seen += numbers.tolist()
            F.cross_entropy(model(x), y).backward()
    assert seen == expected
    assert len(seen) == 24 - 4 * 4
    assert (other.epoch, other.position) == (0, 24)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_goes_on_in_mid_epoch(workers: int) -> None:
    """With workers it asks for an iterator twice; its own state has the sampler's in it."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    data, model = make(24)

    def run(state: dict | None, stop: int | None) -> tuple[list[list[int]], dict | None]:
        sampler = OrderedSampler(data)
        loader = torchdata.StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)
        sampler.track(loader)
        if state is not None:
            loader.load_state_dict(state)
        epochs: list[list[int]] = []
        with sampler.watch(model):
            for _ in range(3):
                epochs.append([])
                for step, (numbers, x, y) in enumerate(loader):
                    epochs[-1] += numbers.tolist()
                    F.cross_entropy(model(x), y).backward()  # the weights stay as they are, so that orders repeat
                    if step == stop:
                        return epochs, through_a_file(loader.state_dict())
            assert sampler.epoch == 2
        return epochs, None

    whole, _ = run(None, None)
    first, state = run(None, 3)
    rest, _ = run(state, None)
    assert [sorted(epoch) for epoch in whole] == [list(range(24))] * 3
    assert first[0] + rest[0] == whole[0]


@pytest.mark.filterwarnings("ignore:all of epoch")  # nobody watches
@settings(max_examples=60, deadline=None)
@given(
    examples=st.integers(6, 40),
    unit=st.integers(1, 3),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    drop=st.booleans(),
    order=st.sampled_from(["rr", "cd-grab"]),
    where=st.data(),
)
def test_another_number_of_ranks_finishes_the_epoch_and_goes_on(
    examples: int, unit: int, before: int, after: int, drop: bool, order: str, where: st.DataObject
) -> None:
    if examples // unit < max(before, after):
        return
    data = range(examples)
    old = [OrderedSampler(data, order, unit, before, rank, drop_last=drop) for rank in range(before)]
    for sampler in old:
        list(sampler)  # a whole epoch first
    taken = where.draw(st.integers(0, len(old[0])))
    drawings = [iter(sampler) for sampler in old]
    seen = [next(drawing) for drawing in drawings for _ in range(taken)]
    state = through_a_file(old[0].state_dict())
    new = [OrderedSampler(data, order, unit, after, rank, drop_last=drop) for rank in range(after)]
    for sampler in new:
        sampler.load_state_dict(state)
    if taken < len(old[0]) and (not drop or (len(old[0]) - taken) * before >= after):
        rest = [list(sampler) for sampler in new]
        assert len({len(each) for each in rest}) == 1
        got = [i for each in rest for i in each]
        if drop:
            assert len(got) == len(set(got))
            assert set(got) <= set(range(examples)) - set(seen)
        else:
            assert set(got) | set(seen) == set(range(examples))
    for _ in range(2):
        epoch = [list(sampler) for sampler in new]
        assert {len(each) for each in epoch} == {len(new[0])}
        got = [i for each in epoch for i in each]
        assert len(set(got)) == (examples // unit // after * after * unit if drop else examples)


@pytest.mark.filterwarnings("ignore:nothing was learnt", "ignore:all of epoch")
def test_places_are_kept_when_ranks_change() -> None:
    """A finished epoch's next order, dealt to two ranks like cards."""
    data, model = make(4)
    sampler = OrderedSampler(data, "cd-grab")
    train(sampler, data, model, 1, 4)
    state = sampler.state_dict()
    following = OrderedSampler(data, "cd-grab")
    following.load_state_dict(state)
    with following.watch(model):
        sequence = list(following)
    ranks = [OrderedSampler(data, "cd-grab", num_replicas=2, rank=rank) for rank in range(2)]
    for each in ranks:
        each.load_state_dict(state)
    assert [list(each) for each in ranks] == [sequence[0::2], sequence[1::2]]


def test_one_ranks_state_can_be_loaded_by_all_but_not_with_exact() -> None:
    data = range(12)
    for sketch, fine in (("fold:8", True), ("exact", False)):
        state = OrderedSampler(data, num_replicas=2, rank=0, sketch=sketch).state_dict()
        other = OrderedSampler(data, num_replicas=2, rank=1, sketch=sketch)
        if fine:
            other.load_state_dict(state)
            assert not set(other) & set(OrderedSampler(data, num_replicas=2, rank=0, sketch=sketch))
        else:
            with pytest.raises(InputError, match="every rank loads its own state; rank 1 got rank 0's"):
                other.load_state_dict(state)


def test_foreign_state_is_refused() -> None:
    sampler = OrderedSampler(range(10))
    state = sampler.state_dict()
    for change, message in (
        ({"kind": "averager"}, "not the state of a 'ordered-sampler': its kind is 'averager'"),
        ({"version": 7}, "version 7"),
        ({"examples": 11}, "saved with examples = 11, this run has 10"),
        ({"order": "grab"}, "saved with order = 'grab', this run has 'cd-grab'"),
        ({"unit": 2}, "saved with unit = 2"),
        ({"sketch": "exact"}, "saved with sketch = 'exact', this run has 'ghost:4:thin'"),
        ({"seed": 1}, "saved with seed = 1"),
    ):
        with pytest.raises(InputError, match=message):
            sampler.load_state_dict({**state, **change})
    assert np.array_equal(sorted(sampler), range(10))
