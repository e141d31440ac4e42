"""The sampler in one process: what it hands out, and when an epoch is an epoch."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from hemiola.errors import InputError, SamplerWarning
from hemiola.loops.deal import deal
from hemiola.loops.sampler import OrderedSampler
from hemiola.order import ORDERS, CDGraB

EXAMPLES = 23


def make(count: int = EXAMPLES) -> tuple[TensorDataset, nn.Module]:
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(count), torch.randn(count, 4).double(), torch.randint(0, 3, (count,)))
    return data, nn.Linear(4, 3).double()


class Loop:
    """An ordinary training loop that remembers what it trained on."""

    def __init__(
        self, sampler: OrderedSampler, data: TensorDataset, model: nn.Module, batch: int = 4, **options
    ) -> None:
        self.loader = DataLoader(data, batch_size=batch, sampler=sampler, **options)
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def epoch(self, leave: int | None = None) -> list[int]:
        seen: list[int] = []
        for step, (numbers, x, y) in enumerate(self.loader):
            if step == leave:
                break
            seen += numbers.tolist()
            self.step(x, y)
        return seen


def naive_pair_balance(sequence: list[int], gradients: list[np.ndarray]) -> list[int]:
    """The paper's loop for one worker."""
    front, back, total = [], [], np.zeros_like(gradients[0])
    for t in range(0, len(sequence) - 1, 2):
        c = gradients[t] - gradients[t + 1]
        plus = total @ c <= 0
        total += c if plus else -c
        front.append(sequence[t] if plus else sequence[t + 1])
        back.append(sequence[t + 1] if plus else sequence[t])
    return front + sequence[len(sequence) // 2 * 2 :] + back[::-1]


# The next epoch is only read, not trained on.
@pytest.mark.filterwarnings("ignore:nothing was learnt")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_epoch_is_what_the_paper_makes_of_this_one(workers: int) -> None:
    data, model = make()
    sampler = OrderedSampler(data, order="cd-grab", sketch="exact")
    loop = Loop(sampler, data, model, num_workers=workers)
    _, inputs, targets = data.tensors
    with sampler.watch(model):
        for _ in range(3):
            expected: list[np.ndarray] = []
            sequence: list[int] = []
            for numbers, x, y in loop.loader:
                twin = copy.deepcopy(model)  # not watched
                for i in numbers.tolist():
                    loss = F.cross_entropy(twin(inputs[i : i + 1]), targets[i : i + 1])
                    expected.append(
                        torch.cat([g.flatten() for g in torch.autograd.grad(loss, twin.parameters())]).numpy()
                    )
                sequence += numbers.tolist()
                loop.step(x, y)
            other = OrderedSampler(data, order="cd-grab", sketch="exact")
            other.load_state_dict(sampler.state_dict())
            with other.watch(copy.deepcopy(model)):
                assert list(other) == naive_pair_balance(sequence, expected)


@pytest.mark.parametrize("order", sorted(set(ORDERS) - {"scored"}))  # whose loop tells losses: test_sampler_losses.py
def test_every_epoch_is_a_permutation_and_epochs_differ_as_they_should(order: str) -> None:
    data, model = make()
    sampler = OrderedSampler(data, order=order)
    loop = Loop(sampler, data, model)
    with sampler.watch(model):
        epochs = [loop.epoch() for _ in range(4)]
    for epoch, seen in enumerate(epochs):
        assert sorted(seen) == list(range(EXAMPLES)), epoch
    fixed = order in ("shuffle-once", "in-order")
    assert (epochs[0] == epochs[1]) is fixed
    if order == "in-order":
        assert epochs[0] == list(range(EXAMPLES))


@settings(max_examples=60, deadline=None)
@given(
    examples=st.integers(1, 60),
    unit=st.integers(1, 7),
    ranks=st.integers(1, 6),
    drop=st.booleans(),
    seed=st.integers(0, 3),
)
def test_a_deal_gives_everyone_as_much_and_leaves_nothing_out(
    examples: int, unit: int, ranks: int, drop: bool, seed: int
) -> None:
    if examples // unit < ranks:
        with pytest.raises(InputError, match=f"too few for {ranks} replicas"):
            deal(examples, unit, ranks, seed, drop)
        return
    found = deal(examples, unit, ranks, seed, drop)
    everything = np.concatenate([found.examples(rank, np.arange(found.shards.shape[1])) for rank in range(ranks)])
    assert len(everything) == ranks * found.length
    if drop:
        assert len(np.unique(everything)) == len(everything) == examples // unit // ranks * ranks * unit
    else:
        assert set(everything.tolist()) == set(range(examples))
        assert found.length == found.ordered + -(-(examples - found.ordered * ranks) // ranks)
        if unit == 1:
            assert found.length == -(-examples // ranks)  # as DistributedSampler has it


def test_ranks_divide_the_data_without_any_process_group() -> None:
    data, _ = make(20)
    shards = [list(OrderedSampler(data, "rr", num_replicas=3, rank=rank)) for rank in range(3)]
    assert {len(shard) for shard in shards} == {7}
    assert set().union(*shards) == set(range(20))


# ------------------------------------------------------------------------------------------- when an epoch is an epoch


def test_an_epoch_left_early_is_over() -> None:
    data, model = make()
    sampler = OrderedSampler(data)
    loop = Loop(sampler, data, model, num_workers=1, prefetch_factor=2)
    with sampler.watch(model):
        first = loop.epoch()
        left = loop.epoch(leave=2)
        assert sampler.state_dict()["position"] == len(left) == 8
        third = loop.epoch()
        assert sampler.epoch == 2
    assert sorted(first) == sorted(third) == list(range(EXAMPLES))


@pytest.mark.parametrize("how", ["eval", "no_grad", "other model mode inside"])
def test_an_evaluation_with_the_same_loader_is_no_epoch(how: str) -> None:
    data, model = make()
    runs = []
    for evaluates in (False, True):
        torch.manual_seed(5)
        for p in model.parameters():
            nn.init.ones_(p)
        sampler = OrderedSampler(data)
        loop = Loop(sampler, data, model)
        seen = []
        with sampler.watch(model):
            for epoch in range(3):
                for step, (numbers, x, y) in enumerate(loop.loader):
                    seen += numbers.tolist()
                    loop.step(x, y)
                    if evaluates and step == 2 and how != "other model mode inside":  # in mid-epoch
                        evaluate(how, loop)
                if evaluates:
                    evaluate(how, loop)
                    assert sampler.epoch in (epoch, epoch + 1)
        runs.append(seen)
    assert runs[0] == runs[1]


def evaluate(how: str, loop: Loop) -> None:
    if how == "no_grad":
        with torch.no_grad():
            assert sorted(i for numbers, x, _ in loop.loader for i in (loop.model(x), numbers.tolist())[1]) == list(
                range(EXAMPLES)
            )
        return
    if how == "eval":
        loop.model.eval()
    for _, x, _ in loop.loader:  # the last kind: the mode is changed only inside the loop
        loop.model.eval()
        with torch.no_grad():
            loop.model(x)
    loop.model.train()


def test_set_epoch_is_accepted_and_changes_nothing() -> None:
    data, _ = make()
    sampler = OrderedSampler(data, "rr")
    plain = OrderedSampler(data, "rr")
    for epoch in (5, 5, 9):
        sampler.set_epoch(epoch)
        assert list(sampler) == list(plain)
    with pytest.raises(InputError, match="at least 0, got -1"):
        sampler.set_epoch(-1)


def test_without_a_watch_every_iterator_is_an_epoch() -> None:
    data, _ = make()
    sampler = OrderedSampler(data, "rr")
    first, second = list(sampler), list(sampler)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(EXAMPLES))
    assert len(sampler) == EXAMPLES


def test_watching_epoch_by_epoch_is_the_same_as_watching_all() -> None:
    data, model = make()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    sampler = OrderedSampler(data)
    loop = Loop(sampler, data, model)
    with sampler.watch(model):
        together = [loop.epoch() for _ in range(3)]
    model.load_state_dict(start)
    sampler = OrderedSampler(data)
    loop = Loop(sampler, data, model)
    apart = []
    for _ in range(3):
        with sampler.watch(model):
            apart.append(loop.epoch())
    assert apart == together


def test_a_pickled_sampler_goes_on_alike() -> None:
    data, _ = make()
    sampler = OrderedSampler(data, "rr")
    list(sampler)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


# ------------------------------------------------------------------------------------------------- loud and clear


def test_a_sampler_that_was_replaced_says_so() -> None:
    data, model = make()
    sampler = OrderedSampler(data)
    loop = Loop(None, data, model)
    with pytest.warns(SamplerWarning, match="trained on 4 examples in epoch 0, but its sampler has handed out only 0"):
        with sampler.watch(model):
            loop.epoch()


def test_a_sampler_that_was_sharded_again_says_so() -> None:
    data, model = make(40)
    sampler = OrderedSampler(data)
    loop = Loop(sampler, data, model)

    def every_second_batch() -> None:
        with sampler.watch(model):
            for step, (_, x, y) in enumerate(loop.loader):
                if step % 2 == 0:
                    loop.step(x, y)

    with pytest.warns(SamplerWarning, match="20 of the 40 examples that rank 0's sampler") as caught:
        every_second_batch()
    assert len(caught) == 1


def test_dropping_the_loaders_last_batch_is_nothing_to_warn_of() -> None:
    data, model = make()
    sampler = OrderedSampler(data)
    loop = Loop(sampler, data, model, drop_last=True)
    with sampler.watch(model):
        assert len({len(loop.epoch()) for _ in range(3)}) == 1


def test_the_log_says_what_was_chosen_and_how_good_the_order_is(caplog: pytest.LogCaptureFixture) -> None:
    data, model = make()
    sampler = OrderedSampler(data)
    with caplog.at_level(logging.INFO, "hemiola"), sampler.watch(model):
        loop = Loop(sampler, data, model)
        loop.epoch()
        loop.epoch()
    assert "balancing ghost:4:thin on ghosts of each example (4 directions of 1 layers, thinned out)" in caplog.text
    assert "epoch 0 is over: herding" in caplog.text
    assert sampler.telemetry()["skipped"] == 0
    assert sampler.telemetry()["herding"] > 0


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_bad_input_is_one_clear_line() -> None:
    data, model = make()
    with pytest.raises(InputError, match="IterableDataset cannot be ordered"):
        OrderedSampler(Stream())
    with pytest.raises(InputError, match="must have a length, got object"):
        OrderedSampler(object())
    with pytest.raises(InputError, match="the data set is empty"):
        OrderedSampler([])
    with pytest.raises(InputError, match="2 whole units of 10 examples, too few for 3 replicas"):
        OrderedSampler(data, unit=10, num_replicas=3, rank=0)
    with pytest.raises(InputError, match="rank must be from 0 to 1, got 2"):
        OrderedSampler(data, num_replicas=2, rank=2)
    with pytest.raises(InputError, match="num_replicas must be at least 1, got 0"):
        OrderedSampler(data, num_replicas=0, rank=0)
    with pytest.raises(InputError, match="did you mean 'cd-grab'"):
        OrderedSampler(data, order="cd-grap")
    with pytest.raises(InputError, match="unit must be at least 1, got 0"):
        OrderedSampler(data, unit=0)
    with pytest.raises(InputError, match="'rr' uses no gradients, so sketch = 'exact'"):
        OrderedSampler(data, "rr", sketch="exact")
    with pytest.raises(InputError, match="unit = 4 was given, but the policy has unit = 2"):
        OrderedSampler(data, CDGraB(unit=2), unit=4)
    sampler = OrderedSampler(data)
    with pytest.raises(InputError, match="no trainable parameters"):
        with sampler.watch(nn.ReLU()):
            pass
    with sampler.watch(model), pytest.raises(InputError, match="already watches a model"):
        with sampler.watch(model):
            pass
    with pytest.raises(InputError, match="2 replicas needs torch"):
        with OrderedSampler(data, num_replicas=2, rank=0).watch(model):
            pass


def test_torchrun_without_a_process_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match=r"one of 4 \(WORLD_SIZE\) but torch"):
        OrderedSampler(make()[0])


def test_a_watch_that_is_never_left_does_no_harm_at_exit() -> None:
    """A generator-based block would be ended by the garbage collector, among tensors that are half gone."""
    script = """
import torch
from hemiola.loops.sampler import OrderedSampler
from hemiola.order import CDGraB
def loop(order):
    model, sampler = torch.nn.Linear(4, 3), OrderedSampler(range(16), order)
    sampler.watch(model).__enter__()
    while True:
        for i in sampler:
            model(torch.randn(1, 4)).sum().backward()
            yield
def block(order):
    model, sampler = torch.nn.Linear(4, 3), OrderedSampler(range(16), order)
    with sampler.watch(model):
        while True:
            for i in sampler:
                model(torch.randn(1, 4)).sum().backward()
                yield
running = [loop("cd-grab"), loop(CDGraB(sketch="ghost:4")), block(CDGraB(sketch="ghost:4"))]
for _ in range(20):
    for each in running:
        next(each)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_framework_that_shards_the_sampler_again_is_an_error_at_once() -> None:
    """With the frameworks' own samplers, as they wrap one they do not know."""
    from accelerate.data_loader import BatchSamplerShard
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    sampler = OrderedSampler(range(12), num_replicas=2, rank=0)
    shard = BatchSamplerShard(BatchSampler(sampler, 2, drop_last=False), num_processes=2, process_index=0)
    with pytest.raises(InputError, match=r"accelerate's BatchSamplerShard deals .* to 2 ranks once more.*hemiola\.acc"):
        list(shard)
    with pytest.raises(InputError, match=r"lightning's DistributedSamplerWrapper deals .* 2 ranks.*hemiola\.lightning"):
        list(DistributedSamplerWrapper(sampler, num_replicas=2, rank=0))
    alone = BatchSamplerShard(BatchSampler(sampler, 2, drop_last=False), num_processes=1, process_index=0)
    assert len(list(chain(*alone))) == 6


def test_a_model_that_trains_on_one_of_several_ranks_without_its_sampler_is_an_error_at_once() -> None:
    data, model = make()
    sampler = OrderedSampler(data, "rr", num_replicas=2, rank=1)
    with sampler.watch(model), pytest.raises(InputError, match=r"rank 1 of 2 trains .* nothing was drawn"):
        Loop(None, data, model).epoch()
