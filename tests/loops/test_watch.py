"""What the watch tells of a training loop: which passes counted, and the rows of their examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from hemiola.errors import InputError
from hemiola.gradients.sketch import parse_sketch
from hemiola.loops.epoch import Claim, Epoch
from hemiola.loops.sampler import OrderedSampler
from hemiola.loops.watch import Watch

BATCH = 4


class Notes:
    """Stands in for the sampler: units of ``unit`` examples, everything wanted."""

    def __init__(self, unit: int = 1) -> None:
        self.unit, self.seen, self.rows, self.looked_at = unit, [], [], []

    def claim(self, given: list[Tensor]) -> Claim:
        return Claim(Epoch(0, np.arange(len(given[0]))), len(given[0]))

    def fits_units(self, claim: Claim) -> bool:
        return claim.examples <= self.unit

    def wants_rows(self, claim: Claim) -> bool:
        return True

    def unused(self, claim: Claim) -> None:
        self.looked_at.append(claim.examples)

    def trained(self, claim: Claim, rows: Tensor | None) -> None:
        self.seen.append(claim.examples)
        self.rows.append(rows)


class Scale:
    """A GradScaler's scale, as it changes."""

    def __init__(self) -> None:
        self.value = 1024.0

    def get_scale(self) -> float:
        return self.value


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(seed: int, count: int = BATCH) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=random, dtype=torch.float64), torch.randint(0, 3, (count,), generator=random)


def per_example(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The reference, taken before the model is watched."""
    parameters = list(model.parameters())
    rows = []
    for i in range(len(y)):
        found = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), parameters)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def watching(model: nn.Module, notes: Notes, sketch: str = "exact", scaler: Scale | None = None) -> Watch:
    return Watch(model, parse_sketch(sketch), 0, notes, scaler, None)


@pytest.mark.parametrize("unit", [1, BATCH])
def test_rows_are_the_gradients_of_examples_or_of_the_batch(unit: int) -> None:
    model, (x, y) = perceptron(), batch(1)
    expected = per_example(model, x, y)
    notes = Notes(unit)
    watch = watching(model, notes)
    F.cross_entropy(model(x), y).backward()
    watch.settle()
    assert notes.seen == [BATCH]
    torch.testing.assert_close(notes.rows[0], expected if unit == 1 else expected.mean(0, keepdim=True))
    assert ("micro-batch" in watch.method) is (unit == BATCH)


@pytest.mark.parametrize("unit", [1, BATCH])
def test_accumulated_gradients_are_told_apart(unit: int) -> None:
    model, notes = perceptron(), Notes(unit)
    batches = [batch(seed) for seed in range(3)]
    expected = [per_example(model, x, y) for x, y in batches]
    watch = watching(model, notes)
    for x, y in batches:  # no zero_grad in between
        F.cross_entropy(model(x), y).backward()
    watch.settle()
    for rows, each in zip(notes.rows, expected, strict=True):
        torch.testing.assert_close(rows, each if unit == 1 else each.mean(0, keepdim=True))


def test_two_passes_and_one_backward_count_in_the_order_of_the_passes() -> None:
    model, notes = perceptron(), Notes()
    (x, y), (u, v) = batch(1), batch(2, 3)
    expected = [per_example(model, x, y), per_example(model, u, v)]
    watch = watching(model, notes, "ghost:6:1000")
    first = F.cross_entropy(model(x), y)
    (first + F.cross_entropy(model(u), v)).backward()
    watch.settle()
    assert notes.seen == [BATCH, 3]
    for rows, each in zip(notes.rows, expected, strict=True):  # the first batch spans too few directions for equality
        torch.testing.assert_close(rows.norm(dim=1), each.norm(dim=1), rtol=0.2, atol=0)


def test_only_passes_with_a_backward_count() -> None:
    model, notes, (x, y) = perceptron(), Notes(), batch(1)
    watch = watching(model, notes)
    with torch.no_grad():
        model(x)
    model(x)  # looked at, not trained on
    F.cross_entropy(model(x[:3]), y[:3]).backward()
    with torch.no_grad():
        model(x)
    watch.settle()
    model.eval()
    F.cross_entropy(model(x), y).backward()  # a model that was trained in training mode is evaluated in the other
    model.train()
    watch.settle()
    assert (notes.seen, notes.looked_at) == ([3], [BATCH])
    watch.close()
    F.cross_entropy(model(x), y).backward()
    watch.settle()
    assert notes.seen == [3]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_model_that_is_only_trained_in_eval_mode_counts() -> None:
    model, notes, (x, y) = perceptron().eval(), Notes(), batch(1)
    expected = per_example(model, x, y)
    watch = watching(model, notes)
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
    watch.settle()
    assert notes.seen == [BATCH, BATCH]
    torch.testing.assert_close(notes.rows[1], expected)


@dataclass
class Answer:
    auxiliary: Tensor
    scores: Tensor


class Answering(nn.Module):
    """Returns a dataclass whose first tensor is not trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.inner(x) + 0, self.inner(x))


def test_any_output_in_any_object_counts() -> None:
    model, notes, (x, y) = Answering(), Notes(), batch(1)
    watch = watching(model, notes, "ghost:2")
    F.cross_entropy(model(x).scores, y).backward()
    watch.settle()
    assert notes.seen == [BATCH]
    assert notes.rows[0] is not None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("unit", [1, BATCH])
def test_a_checkpointed_model_is_trained_once(unit: int, reentrant: bool) -> None:
    model, notes, (x, y) = perceptron(), Notes(unit), batch(1)
    expected = per_example(model, x, y)
    watch = watching(model, notes)
    for _ in range(2):
        scores = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
        F.cross_entropy(scores, y).backward()
    watch.settle()
    assert notes.seen == [BATCH, BATCH]
    for rows in notes.rows:
        torch.testing.assert_close(rows, expected if unit == 1 else expected.mean(0, keepdim=True))


def test_summed_losses_are_not_taken_for_one_batch() -> None:
    model, notes = perceptron(), Notes(unit=BATCH)
    batches = [batch(seed) for seed in range(3)]
    expected = [per_example(model, x, y).mean(0, keepdim=True) for x, y in batches]
    watch = watching(model, notes)
    sum(F.cross_entropy(model(x), y) for x, y in batches).backward()
    watch.settle()
    assert notes.rows == [None] * 3
    assert watch.seen.summed
    losses = [F.cross_entropy(model(x), y) for x, y in batches]  # all forward passes first, but each its own backward
    for loss in losses:
        loss.backward()
    watch.settle()
    for rows, each in zip(notes.rows[3:], expected, strict=True):
        torch.testing.assert_close(rows, each)


@pytest.mark.parametrize("unit", [1, BATCH])
def test_a_changing_loss_scale_is_taken_out(unit: int) -> None:
    model, notes, scale, (x, y) = perceptron(), Notes(unit), Scale(), batch(1)
    watch = watching(model, notes, scaler=scale)
    for value in (1024.0, 2048.0, 1.0):
        scale.value = value
        (F.cross_entropy(model(x), y) * scale.value).backward()
        scale.value *= 2  # GradScaler.update comes before the next forward pass
    watch.settle()
    torch.testing.assert_close(notes.rows[0], notes.rows[1])
    torch.testing.assert_close(notes.rows[0], notes.rows[2])


def test_a_real_grad_scaler_is_taken_out_even_where_it_skips_a_step() -> None:
    def rows(scaler: torch.amp.GradScaler | None) -> tuple[list[Tensor], list[Tensor]]:
        model, notes = perceptron().float(), Notes()
        watch = watching(model, notes, scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in (1, 2, 3):
            x, y = (part.float() if part.is_floating_point() else part for part in batch(seed))
            loss = F.cross_entropy(model(x), y) * (torch.inf if seed == 2 else 1.0)
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                if seed != 2:
                    optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        watch.settle()
        return notes.rows, [p.detach() for p in model.parameters()]

    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaled, scaled_weights = rows(scaler)
    plain, plain_weights = rows(None)
    assert scaler.get_scale() == 32.0
    torch.testing.assert_close(scaled_weights, plain_weights)
    torch.testing.assert_close([scaled[0], scaled[2]], [plain[0], plain[2]])
    assert not torch.isfinite(scaled[1]).any()


def test_mixed_precision_dropout_and_batch_norm_train_as_usual() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.5), nn.Linear(216, 3)
    )
    x, y = torch.randn(8, 1, 8, 8), torch.arange(8) % 3

    def gradient() -> Tensor:
        torch.manual_seed(9)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    before = gradient()
    notes = Notes()
    watch = watching(model, notes, "ghost:2")
    torch.testing.assert_close(gradient(), before)
    watch.settle()
    assert notes.rows[0].dtype == torch.float32
    assert notes.rows[0].shape == (8, watch.width)
    assert torch.isfinite(notes.rows[0]).all()


def test_checkpointed_layers_are_recorded_when_they_are_computed_again() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.saves = perceptron(), nn.Linear(3, 3).double(), False

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(checkpoint(self.inner, x, use_reentrant=False) if self.saves else self.inner(x))

    model, (x, y) = Model(), batch(1)
    rows = []
    for model.saves in (False, True):
        notes = Notes()
        watch = watching(model, notes)
        F.cross_entropy(model(x), y).backward()
        watch.settle()
        watch.close()
        rows += notes.rows
    torch.testing.assert_close(rows[0], rows[1])


def test_a_model_may_take_keywords_and_return_a_dictionary() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = perceptron()

        def forward(self, *, features: dict[str, Tensor], labels: Tensor) -> dict[str, Tensor | None]:
            scores = self.inner(features["x"])
            return {"none": None, "loss": F.cross_entropy(scores, labels), "scores": scores}

    model, notes, (x, y) = Model(), Notes(), batch(1)
    watch = watching(model, notes)
    model(features={"x": x}, labels=y)["loss"].backward()
    watch.settle()
    assert notes.seen == [BATCH]
    torch.testing.assert_close(notes.rows[0], per_example(model.inner, x, y))


def test_a_non_finite_example_is_skipped_and_counted() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 6), torch.arange(12) % 3
    x[5] = float("nan")
    model = nn.Linear(6, 3)
    sampler = OrderedSampler(TensorDataset(x, y))
    with sampler.watch(model):
        for _ in range(3):
            for a, b in DataLoader(TensorDataset(x, y), batch_size=4, sampler=sampler):
                model.zero_grad()
                F.cross_entropy(model(a), b).backward()  # the weights stay, so only this example is bad
    assert sampler.telemetry()["skipped"] == 3
    assert np.isfinite(sampler.telemetry()["herding"])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(1))[0][:, -1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.linear(x)), self.linear.weight)


def test_what_hooks_cannot_tell_is_one_clear_line() -> None:
    with pytest.raises(InputError, match=r"no layer of the watched model can give ghost sketches \(.*\(Bilinear\)\)"):
        watching(nn.Bilinear(6, 6, 3), Notes(), "ghost:4")
    model = Recurrent()
    watching(model, Notes(), "fold:8")
    with pytest.raises(InputError, match=r"holds several units .* in lstm \(LSTM\); use sketch"):
        model(torch.randn(BATCH, 6))
    model, (x, y) = Tied(), batch(1)
    watch = watching(model, Notes())
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(InputError, match="uses weights outside of their layers"):
        watch.settle()
    model = perceptron()
    watching(model, Notes())
    with pytest.raises(InputError, match="called without a tensor"):
        model("text")


def test_a_recurrent_model_is_ordered_by_its_micro_batches() -> None:
    model, notes = Recurrent(), Notes(unit=BATCH)
    watch = watching(model, notes, "fold:8")
    for size in (BATCH, BATCH + 1):  # a batch that reaches into the next unit, on an odd occasion, is no reason to stop
        model(torch.randn(size, 6)).sum().backward()
        watch.settle()
    assert notes.seen == [BATCH, BATCH + 1]
    assert [tuple(row.shape) for row in notes.rows] == [(1, 8), (1, 8)]
