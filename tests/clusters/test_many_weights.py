"""Gradients at many weights in one call: against one worker after the other, for models that fit and that do not."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from hemiola.clusters.many_weights import ManyWeights
from hemiola.flat import FlatModel
from hemiola.lab.tasks.task import cross_entropy

WORKERS, EXAMPLES, FEATURES, CLASSES = 3, 4, 6, 5


class Positions(nn.Module):
    """A linear layer at every one of three positions of an example, then one on all of them."""

    def __init__(self):
        super().__init__()
        self.each, self.all = nn.Linear(2, 4), nn.Linear(12, CLASSES)

    def forward(self, x):
        return self.all(torch.tanh(self.each(x.view(-1, 3, 2))).flatten(1))


class LastFirst(Positions):
    """The same with positions before examples, so that a worker's rows do not lie side by side."""

    def forward(self, x):
        return self.all(torch.tanh(self.each(x.view(-1, 3, 2).transpose(0, 1))).transpose(0, 1).flatten(1))


class Centred(nn.Linear):
    """Ties the examples of a batch together."""

    def __init__(self):
        super().__init__(FEATURES, CLASSES)

    def forward(self, x):
        return super().forward(x - x.mean(0))


class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Scaled(nn.Module):
    """Trains something beside its linear layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.ones(CLASSES))

    def forward(self, x):
        return self.layer(x) * self.scale


def half_frozen() -> nn.Module:
    layer = nn.Linear(FEATURES, CLASSES)
    layer.bias.requires_grad_(False)
    return layer


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES, bias=False))
    model[0].requires_grad_(False)
    return model


SIDE_BY_SIDE = {
    "one layer": lambda: nn.Linear(FEATURES, CLASSES),
    "layers": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES, bias=False)),
    "frozen first": frozen_first,
    "positions": Positions,
}
VMAPPED = {
    "positions first": LastFirst,
    "centred": Centred,
    "centre between": lambda: nn.Sequential(nn.Linear(FEATURES, 8), Centre(), nn.Linear(8, CLASSES)),
    "tied": Tied,
    "scaled": Scaled,
    "half frozen": half_frozen,
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(WORKERS * EXAMPLES, FEATURES), torch.randint(CLASSES, (WORKERS * EXAMPLES,))


def weights_of(flat: FlatModel) -> torch.Tensor:
    return flat.weights + 0.3 * torch.randn(WORKERS, flat.size)


def one_after_the_other(flat, weights, inputs, targets):
    """By plain autograd."""
    losses, gradients = [], []
    for row, x, y in zip(weights, inputs.chunk(WORKERS), targets.chunk(WORKERS), strict=True):
        leaves = {name: p[0].detach().requires_grad_() for name, p in flat.split(row[None]).items()}
        found = cross_entropy(functional_call(flat.module, leaves, (x,)), y)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(found.mean(), list(leaves.values()))]))
        losses.append(found.detach())
    return torch.stack(losses), torch.stack(gradients)


@pytest.mark.parametrize("name", [*SIDE_BY_SIDE, *VMAPPED])
def test_every_model_gets_the_gradients_of_one_worker_after_the_other(name):
    flat = FlatModel({**SIDE_BY_SIDE, **VMAPPED}[name]())
    many = ManyWeights(flat, cross_entropy)
    for _ in range(2):  # with the trial, and without it
        weights, (inputs, targets) = weights_of(flat), batch()
        for found, expected in zip(
            many.gradients(weights, inputs, targets), one_after_the_other(flat, weights, inputs, targets), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert many._agrees == (name in SIDE_BY_SIDE)
    assert not any("forward" in vars(module) for module in flat.module.modules())


def test_a_batch_that_is_not_finite_decides_nothing():
    flat = FlatModel(nn.Linear(FEATURES, CLASSES))
    many = ManyWeights(flat, cross_entropy)
    weights, (inputs, targets) = weights_of(flat), batch()
    many.gradients(weights * torch.inf, inputs, targets)
    assert many._agrees is None
    many.gradients(weights, inputs, targets)
    assert many._agrees


def test_the_trial_draws_nothing():
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    flat = FlatModel(model)
    many = ManyWeights(flat, cross_entropy)
    weights, (inputs, targets) = weights_of(flat), batch()
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(many.gradients(weights, inputs, targets)[1])
    assert torch.equal(*found)


def test_no_layer_keeps_the_workers_matrices_where_the_loss_raises():
    def raising(outputs, targets):
        raise ValueError("no loss today")

    flat = FlatModel(nn.Linear(FEATURES, CLASSES))
    with pytest.raises(ValueError, match="no loss today"):
        ManyWeights(flat, raising)._side_by_side(flat.split(weights_of(flat)), *batch())
    assert "forward" not in vars(flat.module)
