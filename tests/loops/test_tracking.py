"""Tracked loaders: batches stay what they were, and what the model is given is known by its examples."""

from __future__ import annotations

import pickle
from collections import Counter, UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sampler_audit import BATCH, BATCHES, EXAMPLES, Finding, Loop, Numbered, audit, plain
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

import hemiola
from hemiola import OrderedSampler, SamplerWarning
from hemiola.errors import InputError

# ------------------------------------------------------------------------------------------------- what the loop gets

Pair = namedtuple("Pair", "text numbers")


class Records(Dataset[Any]):
    """A bit of everything that data sets return."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> Any:
        tokens = list(range(number, number + 3 + number % 4))
        return {"tokens": tokens, "pair": Pair(f"n{number}", np.arange(3.0) + number), "label": number % 3}


def padded(items: list[Any]) -> Any:
    longest = max(len(item["tokens"]) for item in items)
    rows = [item["tokens"] + [0] * (longest - len(item["tokens"])) for item in items]
    return UserDict(tokens=torch.tensor(rows), labels=torch.tensor([item["label"] for item in items]))


def listed(items: list[Any]) -> Any:
    return [item["label"] for item in items]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, UserDict):
        return same(a.data, b.data)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "collate_fn": padded},
        {"batch_size": 4, "collate_fn": listed, "num_workers": 2, "persistent_workers": True},
        {"batch_size": 3, "collate_fn": padded, "num_workers": 1, "drop_last": True},
        {"batch_size": None},
        {"batch_size": None, "collate_fn": lambda item: item["label"]},
    ],
    ids=["padded", "persistent workers", "dropped last", "single items", "single labels"],
)
def test_batches_are_those_of_the_loader_as_it_was(options: dict[str, Any]) -> None:
    loaders = [DataLoader(Records(), sampler=OrderedSampler(Records(), "rr"), **options) for _ in range(2)]
    tracked = loaders[0].sampler.track(loaders[0])
    assert tracked is loaders[0]
    for _ in range(2):
        expected = list(loaders[1])
        found = list(tracked)
        assert [type(batch) for batch in found] == [type(batch) for batch in expected]
        assert all(map(same, found, expected))
    assert type(tracked.dataset) is Records


def test_tensors_in_memory_are_read_as_before() -> None:
    data = TensorDataset(torch.arange(12), torch.randn(12, 3))
    plain_loader = DataLoader(data, 4, sampler=OrderedSampler(data, "rr"))
    tracked = hemiola.OrderedLoader(data, 4, "rr")
    assert all(map(same, list(tracked), list(plain_loader)))
    assert len(tracked) == 3


class Opened(Numbered):
    """Opens something in its worker."""

    state = "closed"

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        assert self.state == "open"
        return super().__getitem__(number)


def open_it(_: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Opened)
    assert len(info.dataset) == EXAMPLES
    info.dataset.state = "open"


def test_a_worker_finds_its_data_set_and_can_change_it() -> None:
    found = audit(Loop(True, dataset=Opened(), num_workers=2, worker_init_fn=open_it))
    assert sorted(found.shown) == list(range(EXAMPLES))


def test_what_workers_are_sent_can_be_pickled() -> None:
    """As it is where workers are spawned."""
    from hemiola.loops.identity import Numbered as Numbers
    from hemiola.loops.identity import Tagging

    data, collate = pickle.loads(pickle.dumps((Numbers(Records()), Tagging(padded))))
    tagged = collate(data.__getitems__([3, 1]))
    assert tagged.numbers.tolist() == [3, 1]
    assert tagged.kept is None
    assert same(tagged.batch, padded([Records()[3], Records()[1]]))


def test_what_cannot_be_tracked_is_one_clear_line() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(4))

    sampler = OrderedSampler(range(8))
    with pytest.raises(InputError, match="an IterableDataset cannot be tracked"):
        sampler.track(DataLoader(Stream()))
    with pytest.raises(InputError, match=r"needs a torch.utils.data.DataLoader, got list"):
        sampler.track([1, 2])  # type: ignore[type-var]
    with pytest.raises(InputError, match="got shuffle = True; to use another one"):
        hemiola.OrderedLoader(Records(), shuffle=True)
    with pytest.raises(InputError, match="numbers of the examples, got"):
        sampler.visiting([0.5])
    with pytest.raises(InputError, match="example 8 is not one of those this rank visits"):
        sampler.visiting([8])


# --------------------------------------------------------------------------------------------- what the model is given


def prefetching(change: Callable[[Tensor], Tensor], visiting: bool = False) -> Callable[[Loop, int], None]:
    """A loop whose batches are changed on their way, one ahead."""

    def run(loop: Loop, epochs: int) -> None:
        for _ in range(epochs):
            ready: list[tuple[Tensor, Tensor]] = []
            for x, numbers in loop.loader:
                ready.append((change(x), numbers))
                if len(ready) == 2:
                    train(loop, *ready.pop(0))
            train(loop, *ready.pop(0))

    def train(loop: Loop, x: Tensor, numbers: Tensor) -> None:
        if visiting:
            loop.sampler.visiting(numbers)
        loop.step(x, numbers)

    return run


def complete(found: Finding) -> bool:
    return found.wrong == 0 and Counter(found.shown) == Counter(found.trained) and not found.warned


def test_a_copy_is_recognised_by_its_values_where_batches_are_prefetched() -> None:
    assert complete(audit(Loop(True), prefetching(torch.clone), 3))
    assert complete(audit(Loop(True), prefetching(lambda x: x.double().float()), 3))


def test_a_prefetched_batch_that_was_changed_teaches_nothing_and_says_so() -> None:
    found = audit(Loop(True), prefetching(lambda x: -x), 2)  # the same norms, so rows would be right
    assert found.shown == []
    assert "the loop prefetches and gives the model other tensors" in found.warned[0]


@pytest.mark.parametrize("tracked", [False, True])
def test_a_loop_may_say_which_examples_are_visited(tracked: bool) -> None:
    assert complete(audit(Loop(tracked), prefetching(lambda x: -x, visiting=True), 3))


def test_a_loop_that_does_not_prefetch_may_give_the_model_anything() -> None:
    def run(loop: Loop, epochs: int) -> None:
        for _ in range(epochs):
            for step, (x, numbers) in enumerate(loop.loader):
                if step != 3:
                    loop.step(-x, numbers)

    assert complete(audit(Loop(True), run, 3))


def micro_batches(loop: Loop, epochs: int) -> None:
    for _ in range(epochs):
        for x, numbers in loop.loader:
            for part, of in zip(x.chunk(2), numbers.chunk(2), strict=True):
                loop.step(part, of)


def copied_micro_batches(loop: Loop, epochs: int) -> None:
    for _ in range(epochs):
        for x, numbers in loop.loader:
            for part, of in zip((-x).chunk(2), numbers.chunk(2), strict=True):
                loop.step(part, of)


def every_second_row(loop: Loop, epochs: int) -> None:
    for _ in range(epochs):
        for x, numbers in loop.loader:
            loop.step(x[1::2], numbers[1::2])


@pytest.mark.parametrize("run", [micro_batches, copied_micro_batches, every_second_row])
def test_parts_of_a_batch_are_their_own_examples(run: Callable[[Loop, int], None]) -> None:
    # A direction for every input dimension needs three examples, and these passes have two.
    assert complete(audit(Loop(True, sketch="exact"), run, 2))


def test_a_batch_that_is_run_several_times_is_learnt_from_once() -> None:
    def sharpness_aware(loop: Loop, epochs: int) -> None:
        for _ in range(epochs):
            for x, numbers in loop.loader:
                loop.backward(loop.forward(x), numbers[:0])
                loop.step(x, numbers)

    found = audit(Loop(True), sharpness_aware, 2)
    assert complete(found)
    assert found.telemetry["trained_on"] == EXAMPLES


def test_views_put_together_are_not_taken_for_other_examples() -> None:
    def views(loop: Loop, epochs: int) -> None:
        for x, numbers in loop.loader:
            loop.step(torch.cat([x, x]), numbers)

    found = audit(Loop(True), views)
    assert found.shown == []
    assert "given 8 examples where the batch at hand has 4" in found.warned[0]


def test_batches_of_another_loader_are_not_taken_for_those_of_this_one() -> None:
    loop = Loop(True)
    loop.loader = DataLoader(loop.dataset, BATCH, sampler=loop.sampler)
    found = audit(loop)
    assert "did not come through the tracked loader" in found.warned[0]
    assert found.wrong == 0  # they were counted instead


def test_a_loader_of_other_examples_says_so() -> None:
    loop = Loop(False)
    shuffled = DataLoader(TensorDataset(torch.randn(100, 3), torch.arange(100)), BATCH, sampler=range(99, 0, -1))
    loop.sampler.track(shuffled)
    with pytest.warns(SamplerWarning, match="the tracked loader yields example 99, which this sampler has not"):
        next(iter(shuffled))


# ------------------------------------------------------------------------------------------- attach, detach, telemetry


def test_attach_and_detach_are_what_the_block_is() -> None:
    orders = []
    for block in (True, False):
        loop = Loop(True)
        if block:
            with loop.sampler.watch(loop.model):
                plain(loop, 3)
        else:
            loop.sampler.attach(loop.model)
            plain(loop, 3)
            loop.sampler.detach()
            loop.sampler.detach()  # nothing is attached any more
        assert not loop.model._forward_hooks
        orders.append(list(loop.sampler))
    assert orders[0] == orders[1] != list(OrderedSampler(Numbered()))


@pytest.mark.parametrize("workers", [0, 2])
def test_telemetry_says_what_was_handed_out_trained_on_and_learnt_from(workers: int) -> None:
    loop = Loop(True, num_workers=workers)
    with loop.sampler.watch(loop.model):
        assert [loop.sampler.telemetry()[key] for key in ("handed_out", "trained_on", "learnt_from")] == [0, 0, 0]
        for step, (x, numbers) in enumerate(loop.loader):
            if step in (2, 5):
                continue
            loop.step(x, numbers)
            if step == 8:
                break
        found = loop.sampler.telemetry()
        ahead = 0 if workers == 0 else 2 * workers * BATCH  # the loader's prefetch_factor is 2
        assert found["epoch"] == 0
        assert 9 * BATCH <= found["handed_out"] <= 9 * BATCH + ahead
        assert (found["trained_on"], found["learnt_from"]) == (7 * BATCH, 7 * BATCH)
        plain(loop, 1)
        found = loop.sampler.telemetry()
        assert [found[key] for key in ("epoch", "handed_out", "trained_on", "learnt_from")] == [1, *3 * [EXAMPLES]]


def test_rows_that_cannot_be_explained_teach_nothing_and_say_so() -> None:
    def first_two_changed(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        x, numbers = default_collate(items)
        return -x[:2] * 2, 3 * numbers[:2] + 200

    loop = Loop(True, collate_fn=first_two_changed)
    found = audit(loop)
    assert len(loop.trained) == 2 * BATCHES
    assert found.shown == []
    assert "collate_fn makes rows of which it cannot be told which examples they are" in found.warned[0]
