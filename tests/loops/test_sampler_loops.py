"""Loops of other people's training code: every gradient is booked on its own example, or a warning says otherwise."""

from __future__ import annotations

import copy
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

import pytest
import torch
from sampler_audit import BATCH, BATCHES, EXAMPLES, WIDTH, Finding, Loop, Numbered, audit, linear, plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate

from hemiola import OrderedSampler, SamplerWarning

# ------------------------------------------------------------ loops in which counting goes wrong, as people write them


def nan_guard(loop: Loop, epochs: int) -> None:
    for _ in range(epochs):
        for step, (x, numbers) in enumerate(loop.loader):
            loss = loop.forward(x * torch.nan if step == 2 else x)
            if not torch.isfinite(loss):
                continue
            loop.backward(loss, numbers)


def skip_and_break(loop: Loop, epochs: int) -> None:
    for _ in range(epochs):
        for step, (x, numbers) in enumerate(loop.loader):
            loss = loop.forward(x)
            if step == 2:
                continue
            loop.backward(loss, numbers)
            if step == 9:
                break


def prefetch_before_forward(loop: Loop, epochs: int) -> None:
    batches = iter(loop.loader)
    now = next(batches)
    for _ in range(epochs * BATCHES):
        try:
            then = next(batches)
        except StopIteration:
            batches = iter(loop.loader)
            then = next(batches)
        loop.step(*now)
        now = then


def prefetch_between_forward_and_backward(loop: Loop, epochs: int) -> None:
    batches = iter(loop.loader)
    x, numbers = next(batches)
    for _ in range(epochs * BATCHES):
        loss, trained = loop.forward(x), numbers
        try:
            x, numbers = next(batches)
        except StopIteration:
            batches = iter(loop.loader)
            x, numbers = next(batches)
        loop.backward(loss, trained)


def resume_by_skipping(loop: Loop, epochs: int) -> None:
    for epoch in range(epochs):
        for step, (x, numbers) in enumerate(loop.loader):
            if epoch == 0 and step < 5:
                continue
            loop.step(x, numbers)


def drop_some(items: list[tuple[Tensor, int]]) -> Any:
    """The usual way to leave out what could not be read."""
    return default_collate([item for item in items if item[1] % 15 != 5])


class Buckets:
    """Batches of examples of about the same length, out of a pool of what the sampler hands out."""

    def __init__(self, sampler: OrderedSampler, lengths: Tensor) -> None:
        self.sampler, self.lengths = sampler, lengths

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        pool: list[int] = []
        for number in self.sampler:
            pool.append(number)
            if len(pool) == 4 * BATCH:
                pool.sort(key=self.lengths.__getitem__)
                yield from [pool[at : at + BATCH] for at in range(0, len(pool), BATCH)]
                pool = []


class Late(Numbered):
    """Its first worker's first batch is ready only after two batches of the second worker."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event
        self.batches = 0

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tensor, int]]:
        worker = torch.utils.data.get_worker_info().id
        self.batches += 1
        if worker == 1 and self.batches == 2:
            self.event.set()
        if worker == 0 and self.batches == 1:
            assert self.event.wait(60)
        return [self[number] for number in numbers]


CASES = {
    "nan guard": (nan_guard, {}),
    "skip and break": (skip_and_break, {}),
    "collate drops": (plain, {"collate_fn": drop_some}),
    "buckets": (
        plain,
        {"loader": lambda data, sampler: DataLoader(data, batch_sampler=Buckets(sampler, data.inputs[:, 0]))},
    ),
    "any order": (plain, {"num_workers": 2, "in_order": False}),
    "prefetch before": (prefetch_before_forward, {}),
    "prefetch between": (prefetch_between_forward_and_backward, {}),
    "resume by skipping": (resume_by_skipping, {}),
}


def case(name: str, tracked: bool, epochs: int, **more: Any) -> Finding:
    run, options = CASES[name]
    if name == "any order":
        options = {**options, "dataset": Late(multiprocessing.get_context().Event())}
    return audit(Loop(tracked, **options, **more), run, epochs)


@pytest.mark.parametrize("sketch", ["ghost:4", "exact"])
@pytest.mark.parametrize("name", CASES)
def test_a_tracked_loop_books_every_gradient_on_its_own_example(name: str, sketch: str) -> None:
    found = case(name, tracked=True, epochs=3, sketch=sketch)
    assert found.wrong == 0
    missed = Counter(found.trained) - Counter(found.shown)
    assert not Counter(found.shown) - Counter(found.trained)
    # A loop that prefetches asks for the next order before it has trained on the last batch of this one.
    assert missed.total() <= (3 * BATCH if "prefetch" in name else 0)
    assert found.warned == []


@pytest.mark.parametrize("name", CASES)
def test_a_counted_loop_that_goes_wrong_says_so_in_the_same_epoch(name: str) -> None:
    found = case(name, tracked=False, epochs=1)
    assert found.shown
    assert not found.wrong or found.warned


def test_the_auditor_finds_what_counting_gets_wrong() -> None:
    found = case("nan guard", tracked=False, epochs=1)
    assert found.wrong == EXAMPLES - 3 * BATCH  # all batches after the one that was left out
    (text,) = found.warned
    assert text.startswith(
        "4 of the 48 examples that rank 0's sampler handed out in epoch 0 were not trained on (1 forw"
    )
    assert "sampler.track(loader)" in text


def test_a_warning_comes_before_the_next_epoch_is_trained_on() -> None:
    loop = Loop(tracked=False)
    with loop.sampler.watch(loop.model):
        nan_guard(loop, 1)
        with pytest.warns(SamplerWarning, match="epoch 0"):
            next(iter(loop.loader))


# ----------------------------------------------------------------------------- loops in which the order never learnt


class Losing(nn.Module):
    """A model whose loop calls a method of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def loss(self, x: Tensor) -> Tensor:
        return self.inner(x).mean()

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError


class Auxiliary(Losing):
    """Its first output is looked at only."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.inner(x)
        return features * 1.0, features


@dataclass
class Output:
    hidden: Tensor
    logits: Tensor


class Structured(Losing):
    """Returns an object."""

    def forward(self, x: Tensor) -> Output:
        features = self.inner(x)
        return Output(features.detach(), features)


def frozen_statistics(loop: Loop, epochs: int) -> None:
    for _ in range(epochs):
        loop.model.train()
        loop.model.eval()
        for x, numbers in loop.loader:
            loop.step(x, numbers)


def own_loss(loop: Loop, epochs: int) -> None:
    loop.call = loop.model.loss
    plain(loop, epochs)


def second_output(loop: Loop, epochs: int) -> None:
    loop.call = lambda x: loop.model(x)[1]
    plain(loop, epochs)


def logits(loop: Loop, epochs: int) -> None:
    loop.call = lambda x: loop.model(x).logits
    plain(loop, epochs)


def summed_losses(loop: Loop, epochs: int) -> None:
    for _ in range(epochs):
        losses: list[Tensor] = []
        for x, numbers in loop.loader:
            losses.append(loop.call(x).mean())
            loop.trained += numbers.tolist()
            if len(losses) == 3:
                loop.optimizer.zero_grad()
                sum(losses).backward()
                loop.optimizer.step()
                losses = []


def gradient_penalty(loop: Loop, epochs: int) -> None:
    for _ in range(epochs):
        for x, numbers in loop.loader:
            x.requires_grad_()
            loss = loop.forward(x)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loop.backward(loss + slope.square().sum(), numbers)


def checkpointed(loop: Loop, epochs: int) -> None:
    loop.call = lambda x: checkpoint(loop.model, x, use_reentrant=False)
    plain(loop, epochs)


def compiled_before() -> nn.Module:
    torch._dynamo.reset()
    model = torch.compile(linear(), backend="aot_eager")
    model(torch.randn(BATCH, WIDTH)).mean().backward()
    return model


LEARNT = ""  # no warning, because everything was learnt from
SILENT = {  # the loop, its options, and what the warning says
    "model.loss": (own_loss, Losing, 1, "the watched Losing was trained, but never called"),
    "model.eval": (frozen_statistics, linear, 1, LEARNT),
    "auxiliary first output": (second_output, Auxiliary, 1, LEARNT),
    "dataclass": (logits, Structured, 1, LEARNT),
    "summed losses": (summed_losses, linear, 1, LEARNT),
    "summed losses, a batch a unit": (summed_losses, linear, BATCH, "summed losses of several batches"),
    "checkpoint": (checkpointed, linear, 1, LEARNT),
    "checkpoint, a batch a unit": (checkpointed, linear, BATCH, LEARNT),
    "compiled before": (plain, compiled_before, 1, "OptimizedModule is compiled"),
    "compiled before, a batch a unit": (plain, compiled_before, BATCH, LEARNT),
}


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("name", SILENT)
def test_an_order_learns_or_says_why_not_in_the_same_epoch(name: str, tracked: bool) -> None:
    run, model, unit, warning = SILENT[name]
    found = audit(Loop(tracked, unit, model=model()), run)
    assert found.wrong == 0
    assert len(found.trained) == EXAMPLES
    if warning:
        assert found.shown == []
        (text,) = found.warned
        assert text.startswith("nothing was learnt in epoch 0")
        assert warning in text
    else:
        assert sorted(found.shown) == list(range(EXAMPLES))
        assert found.warned == []
        assert found.telemetry["learnt_from"] == EXAMPLES


def test_a_gradient_penalty_is_named_as_the_cause() -> None:
    found = audit(Loop(True), gradient_penalty)
    assert found.shown == []
    assert "the loop differentiates gradients" in found.warned[0]  # as soon as it does
    assert found.warned[1].startswith("nothing was learnt in epoch 0")
    assert "the loop differentiates gradients" in found.warned[1]


@pytest.mark.parametrize("tracked", [False, True])
def test_a_forgotten_watch_says_so_when_the_epoch_is_over(tracked: bool) -> None:
    loop = Loop(tracked)
    plain(loop, 1)
    with pytest.warns(SamplerWarning, match="all of epoch 0 was handed out, but no model is watched"):
        plain(loop, 1)


@pytest.mark.parametrize("tracked", [False, True])
def test_another_model_is_not_the_one_that_is_trained(tracked: bool) -> None:
    loop = Loop(tracked)
    found = audit(loop, watched=copy.deepcopy(loop.model))
    assert found.shown == []
    (text,) = found.warned
    assert "the watched Linear was neither called nor trained" in text


def train_mode_inside(loop: Loop, epochs: int) -> None:
    for _ in range(epochs):
        for x, numbers in loop.loader:
            loop.model.train()
            loop.step(x, numbers)
        loop.model.eval()
        with torch.no_grad():
            loop.call(x)


@pytest.mark.parametrize("tracked", [False, True])
def test_asking_for_batches_in_eval_mode_is_named_as_the_cause(tracked: bool) -> None:
    found = audit(Loop(tracked), train_mode_inside, epochs=2)
    assert found.wrong == 0
    assert sorted(found.shown) == list(range(EXAMPLES))
    (text,) = found.warned
    assert "the loader was asked for batches while the model was in eval mode" in text
    assert "call model.train() before" in text
