"""Unit gradients against a plain loop of one backward pass per example."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hemiola.errors import InputError
from hemiola.gradients.sketch import build_sketch, parse_sketch
from hemiola.gradients.units import UnitGradients

EXAMPLES, CLASSES = 7, 3
ROWS = torch.tensor([0, 1, 1, 2, 0, 2, 2])


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class Raw(nn.Module):
    """A parameter of its own, which no hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Tied(nn.Module):
    """The embedding's weight is used a second time, behind its module's back."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.embedding(tokens).sum(1), self.embedding.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


class Sequence(nn.Module):
    """Embedding, normalisation and one linear layer used twice, on (batch, time, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.rms = nn.RMSNorm(6)
        self.twice = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(self.norm(self.embedding(tokens)))))
        flat = self.rms(x).view(-1, 6)  # positions folded into the batch, example by example
        return self.head(flat).view(len(tokens), -1, CLASSES).mean(1)


def images(model: nn.Module) -> tuple[nn.Module, Tensor]:
    return model, torch.randn(EXAMPLES, 2, 8, 8)


def tokens(model: nn.Module, vocabulary: int = 11) -> tuple[nn.Module, Tensor]:
    return model, torch.randint(0, vocabulary, (EXAMPLES, 5))


MODELS = {
    "logistic": lambda: (nn.Linear(8, CLASSES), torch.randn(EXAMPLES, 8)),
    "mlp": lambda: (
        nn.Sequential(
            nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4, bias=False), nn.ReLU(inplace=True), nn.Linear(4, CLASSES)
        ),
        torch.randn(EXAMPLES, 8),
    ),
    "conv2d": lambda: images(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
        )
    ),
    "conv2d-grouped": lambda: images(
        nn.Sequential(
            nn.Conv2d(2, 4, (3, 2), groups=2, bias=False),
            nn.Conv2d(4, 6, 3, padding="same", dilation=2, padding_mode="circular"),
            nn.GroupNorm(3, 6),
            nn.Flatten(),
            nn.Linear(6 * 6 * 7, CLASSES),
        )
    ),
    "conv1d": lambda: (
        nn.Sequential(nn.Conv1d(3, 4, 5, stride=2, padding=2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 6, CLASSES)),
        torch.randn(EXAMPLES, 3, 12),
    ),
    "sequence": lambda: tokens(Sequence()),
    "raw": lambda: (Raw(), torch.randn(EXAMPLES, 8)),
    "tied": lambda: tokens(Tied(), CLASSES),
    "recurrent": lambda: tokens(Recurrent()),
    "frozen": lambda: (
        nn.Sequential(nn.Linear(8, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, CLASSES)),
        torch.randn(EXAMPLES, 8),
    ),
}
METHOD = {"raw": "vectorised", "tied": "vectorised", "recurrent": "one backward pass per unit"}


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    model, inputs = MODELS[name]()
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    return model.to(dtype), inputs, torch.randint(0, CLASSES, (EXAMPLES,)), torch.rand(EXAMPLES).to(dtype) + 0.1


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def one_by_one(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The reference: (N, d), one ordinary backward pass per example."""
    found = []
    for i in range(len(targets)):
        loss = cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        found.append(torch.cat([each.flatten() for each in torch.autograd.grad(loss, trained(model))]))
    return torch.stack(found)


def means(rows: Tensor, members: Tensor) -> Tensor:
    return torch.stack([rows[members == unit].mean(0) for unit in range(int(members.max()) + 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_rows_and_gradient_are_those_of_a_plain_loop(name: str, dtype: torch.dtype) -> None:
    model, inputs, targets, weights = make(name, dtype)
    expected = one_by_one(model, inputs, targets)
    gradients = UnitGradients(model, cross_entropy, "exact", seed=0)
    close = {"rtol": 1e-3, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
    for visit in (1, 2):  # the first visit checks the hooks, the second trusts them
        losses, rows = gradients.compute(inputs, targets, weights, ROWS)
        assert rows.dtype == dtype
        assert gradients.dimension == rows.shape[1] == expected.shape[1]
        torch.testing.assert_close(rows, means(expected, ROWS), **close)
        torch.testing.assert_close(losses, cross_entropy(model(inputs), targets).detach(), **close)
        assert not losses.requires_grad
        total = torch.cat([p.grad.flatten() for p in trained(model)])
        torch.testing.assert_close(total, visit * (weights @ expected), **close)
    assert METHOD.get(name, "layer by layer") in gradients.method
    assert gradients.left_out == []


@pytest.mark.parametrize("name", ["mlp", "raw", "recurrent"])
def test_gradients_are_accumulated_in_place(name: str) -> None:
    model, inputs, targets, weights = make(name)
    flat = torch.ones(sum(p.numel() for p in trained(model)), dtype=torch.float64)
    at = 0
    for p in trained(model):
        p.grad = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    expected = one_by_one(model, inputs, targets)
    gradients = UnitGradients(model, cross_entropy, "exact", seed=0)
    gradients.compute(inputs, targets, weights, ROWS)
    torch.testing.assert_close(flat, 1 + weights @ expected)
    flat.zero_()
    _, row = gradients.compute(inputs, targets, torch.full_like(weights, 0.5), torch.zeros_like(ROWS))
    torch.testing.assert_close(flat, 0.5 * expected.sum(0))
    torch.testing.assert_close(row[0], expected.mean(0))


@pytest.mark.parametrize("name", ["mlp", "conv2d", "sequence", "raw", "recurrent"])
@pytest.mark.parametrize("rows", [ROWS, torch.zeros_like(ROWS), torch.arange(EXAMPLES).flip(0)])
def test_a_fold_is_the_fold_of_the_exact_gradient(name: str, rows: Tensor) -> None:
    model, inputs, targets, weights = make(name)
    expected = means(one_by_one(model, inputs, targets), rows)
    gradients = UnitGradients(model, cross_entropy, "fold:5", seed=4)
    _, found = gradients.compute(inputs, targets, torch.full_like(weights, 1 / EXAMPLES), rows)
    torch.testing.assert_close(found, build_sketch(parse_sketch("fold:5"), expected.shape[1], 4).apply(expected))


def test_equal_units_side_by_side_are_vectorised_as_units() -> None:
    model, inputs, targets, _ = make("raw")
    weights = torch.tensor([0.1, 0.1, 0.3, 0.3, 0.2, 0.2], dtype=torch.float64)
    rows = torch.tensor([0, 0, 1, 1, 2, 2])
    expected = one_by_one(model, inputs[:6], targets[:6])
    _, found = UnitGradients(model, cross_entropy, "exact", 0).compute(inputs[:6], targets[:6], weights, rows)
    torch.testing.assert_close(found, means(expected, rows))
    torch.testing.assert_close(model.matrix.grad.flatten(), weights @ expected)


def test_large_layers_are_done_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hemiola.gradients.ghost.WHOLE_AT_ONCE", 20)
    monkeypatch.setattr("hemiola.gradients.units.WHOLE_AT_ONCE", 50)
    for name in ("conv2d", "sequence", "raw"):
        model, inputs, targets, weights = make(name)
        expected = means(one_by_one(model, inputs, targets), ROWS)
        _, rows = UnitGradients(model, cross_entropy, "exact", 0).compute(inputs, targets, weights, ROWS)
        torch.testing.assert_close(rows, expected)


@pytest.mark.parametrize("last", [nn.Linear(6, CLASSES), Raw()])
def test_examples_coupled_by_batch_norm_share_one_forward_pass(last: nn.Module) -> None:
    torch.manual_seed(0)
    width = 6 if isinstance(last, nn.Linear) else 8
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), last).double()
    inputs, targets = torch.randn(EXAMPLES, 8).double(), torch.randint(0, CLASSES, (EXAMPLES,))
    weights = torch.rand(EXAMPLES).double() + 0.1
    expected = torch.autograd.grad((cross_entropy(model(inputs), targets) * weights).sum(), trained(model))
    steps = int(model[1].num_batches_tracked)
    gradients = UnitGradients(model, cross_entropy, "exact", 0)
    _, rows = gradients.compute(inputs, targets, weights, torch.arange(EXAMPLES))
    torch.testing.assert_close(weights @ rows, torch.cat([each.flatten() for each in expected]))
    for p, each in zip(trained(model), expected, strict=True):
        torch.testing.assert_close(p.grad, each)
    assert int(model[1].num_batches_tracked) <= steps + 2


def test_dropout_masks_are_those_of_the_training_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 30), nn.Dropout(0.5), nn.Linear(30, CLASSES)).double()
    inputs, targets = torch.randn(EXAMPLES, 8).double(), torch.randint(0, CLASSES, (EXAMPLES,))
    weights = torch.rand(EXAMPLES).double() + 0.1
    _, rows = UnitGradients(model, cross_entropy, "exact", 0).compute(inputs, targets, weights, torch.arange(EXAMPLES))
    torch.testing.assert_close(weights @ rows, torch.cat([p.grad.flatten() for p in trained(model)]))


def test_a_non_finite_example_spoils_its_own_row_only() -> None:
    model, inputs, targets, weights = make("mlp")
    inputs[2] = float("nan")
    gradients = UnitGradients(model, cross_entropy, "fold:5", 0)
    for _ in range(2):
        _, rows = gradients.compute(inputs, targets, weights, torch.arange(EXAMPLES))
        assert torch.isfinite(rows).all(1).tolist() == [True, True, False, True, True, True, True]
    assert "layer by layer" in gradients.method


def test_bad_input_is_one_clear_line() -> None:
    with pytest.raises(InputError, match="no trainable parameters"):
        UnitGradients(nn.ReLU(), cross_entropy, "exact", 0)
    with pytest.raises(InputError, match="did you mean 'ghost'"):
        UnitGradients(nn.Linear(2, 2), cross_entropy, "gost:4", 0)
    gradients = UnitGradients(nn.Linear(2, 2), cross_entropy, "ghost:2", 0)
    with pytest.raises(InputError, match="ghost directions belong to another model"):
        gradients.adopt([torch.zeros(1, 2, 5)])


def test_close_takes_the_hooks_off() -> None:
    model, _, _, _ = make("conv2d", torch.float32)
    before = [dict(vars(module)) for module in model.modules()]
    for sketch in ("ghost:2", "exact"):
        UnitGradients(model, cross_entropy, sketch, 0).close()
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module) == attributes
        assert not module._forward_hooks
