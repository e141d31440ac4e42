"""Ghosts against projecting the exact per-example gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hemiola.errors import InputError
from hemiola.gradients.directions import principal_directions
from hemiola.gradients.units import UnitGradients

EXAMPLES = 9


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def convolutional(**options: object) -> nn.Sequential:
    torch.manual_seed(1)
    first = nn.Conv2d(4, 6, 3, **options)  # type: ignore[arg-type]
    size = first(torch.zeros(1, 4, 9, 9)).numel()
    return nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(size, 5), nn.Tanh(), nn.Linear(5, 3)).double()


OPTIONS = [
    {},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": "same"},
    {"padding": 1, "padding_mode": "reflect", "bias": False},
    {"groups": 2, "padding": (2, 0)},
]


def data(shape: tuple[int, ...] = (4, 9, 9)) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    inputs = torch.randn(EXAMPLES, *shape, generator=random, dtype=torch.float64) + 0.5
    return inputs, torch.arange(EXAMPLES) % 3, torch.rand(EXAMPLES, generator=random, dtype=torch.float64) + 0.1


def exact_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[dict[str, Tensor]]:
    found = []
    for i in range(EXAMPLES):
        loss = cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        found.append(dict(zip([name for name, _ in model.named_parameters()], grads, strict=True)))
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_ghost_is_the_exact_gradient_projected_on_the_input_directions(options: dict[str, object]) -> None:
    model = convolutional(**options)
    inputs, targets, weights = data()
    exact = exact_gradients(model, inputs, targets)
    ghosts = UnitGradients(model, cross_entropy, "ghost:2:100000", seed=0)
    _, rows = ghosts.compute(inputs, targets, weights, torch.arange(EXAMPLES))
    directions = ghosts.directions()
    for i in range(EXAMPLES):
        expected = []
        for (number, module), along in zip(
            [(n, m) for n, m in model.named_children() if isinstance(m, nn.Conv2d | nn.Linear)], directions, strict=True
        ):
            groups = along.shape[0]
            gradient = exact[i][f"{number}.weight"].flatten(1).unflatten(0, (groups, -1))  # (groups, out, length)
            block, bias = gradient @ along.transpose(1, 2), exact[i].get(f"{number}.bias")
            if isinstance(module, nn.Conv2d):  # a row per direction, and one for the bias
                expected += [block.transpose(1, 2).flatten()] + ([] if bias is None else [bias])
            else:  # a column per direction, and one for the bias
                assert bias is not None
                expected.append(torch.cat([block[0], bias.unsqueeze(1)], 1).flatten())
        torch.testing.assert_close(rows[i], torch.cat(expected))
    for p, name in ((p, n) for n, p in model.named_parameters()):
        torch.testing.assert_close(p.grad, sum(w * each[name] for w, each in zip(weights, exact, strict=True)))


def test_with_every_direction_a_ghost_keeps_every_inner_product() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 12, (2, 1), padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 30, 3)).double()
    inputs, targets, weights = data((2, 4, 4))
    exact = exact_gradients(model, inputs, targets)
    flat = torch.stack([torch.cat([g.flatten() for g in each.values()]) for each in exact])
    ghosts = UnitGradients(model, cross_entropy, "ghost:1000:100000", 0)
    many = torch.randn(600, 2, 4, 4, dtype=torch.float64)  # enough for their inputs to span everything
    ghosts.compute(many, torch.zeros(600, dtype=torch.long), torch.ones(600).double(), torch.arange(600))
    _, rows = ghosts.compute(inputs, targets, weights, torch.arange(EXAMPLES))
    torch.testing.assert_close(rows @ rows.T, flat @ flat.T)


def test_units_are_means_of_their_examples() -> None:
    model = convolutional()
    inputs, targets, weights = data()
    ghosts = UnitGradients(model, cross_entropy, "ghost:2", 0)
    _, each = ghosts.compute(inputs, targets, weights, torch.arange(EXAMPLES))
    units = torch.tensor([2, 0, 1, 1, 2, 0, 0, 2, 2])
    _, rows = ghosts.compute(inputs, targets, torch.full_like(weights, 0.25), units)
    for unit in range(3):
        torch.testing.assert_close(rows[unit], each[units == unit].mean(0))


def test_directions_are_found_once_and_again_only_when_asked() -> None:
    model = convolutional()
    ghosts = UnitGradients(model, cross_entropy, "ghost:2", 0)
    assert ghosts.directions() == []
    inputs, targets, weights = data()
    ghosts.compute(inputs, targets, weights, torch.arange(EXAMPLES))
    first = ghosts.directions()
    ghosts.compute(inputs.flip(3) ** 3, targets, weights, torch.arange(EXAMPLES))
    assert all(torch.equal(a, b) for a, b in zip(first, ghosts.directions(), strict=True))
    ghosts.refresh()
    ghosts.compute(inputs.flip(3) ** 3, targets, weights, torch.arange(EXAMPLES))
    assert not torch.equal(first[0], ghosts.directions()[0])
    other = UnitGradients(convolutional(), cross_entropy, "ghost:2", 0)
    other.adopt(first)
    other.compute(inputs.flip(3) ** 3, targets, weights, torch.arange(EXAMPLES))
    assert torch.equal(other.directions()[0], first[0])
    with pytest.raises(InputError, match="belong to another model"):
        UnitGradients(nn.Linear(4, 2), cross_entropy, "ghost:2", 0).adopt(other.directions())


def test_layers_out_of_reach_are_named_and_the_rest_still_counts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 4)
            self.lstm = nn.LSTM(4, 5, batch_first=True)
            self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
            self.unused = nn.Linear(3, 3)
            self.head = nn.Linear(5, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.lstm(self.embedding(tokens))[0]
            return self.head(self.attention(x, x, x)[0].mean(1))

    torch.manual_seed(0)
    model = Model()
    tokens, targets = torch.randint(0, 50, (EXAMPLES, 7)), torch.arange(EXAMPLES) % 3
    ghosts = UnitGradients(model, cross_entropy, "ghost:2", 0)
    _, rows = ghosts.compute(tokens, targets, torch.ones(EXAMPLES), torch.arange(EXAMPLES))
    lstm = "lstm (LSTM, all but the first input-to-hidden weights)"
    assert ghosts.left_out == [lstm, "unused (Linear, not reached)"]
    assert rows.shape == (EXAMPLES, ghosts.dimension)
    assert torch.linalg.matrix_rank(rows) == EXAMPLES


def test_embedding_ghosts_keep_inner_products_roughly() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 16), nn.Flatten(), nn.Linear(16 * 12, 3).requires_grad_(False))
    tokens, targets = torch.randint(0, 1000, (200, 12)), torch.arange(200) % 3
    weights, rows = torch.ones(200), torch.arange(200)
    _, exact = UnitGradients(model, cross_entropy, "exact", 0).compute(tokens, targets, weights, rows)
    ghosts = UnitGradients(model, cross_entropy, "ghost:4", 0)
    _, found = ghosts.compute(tokens, targets, weights, rows)
    assert ghosts.dimension == 32 * 16
    errors = (exact @ exact.T - found @ found.T) / (exact.norm(dim=1, keepdim=True) * exact.norm(dim=1))
    assert errors.square().mean().sqrt() < 0.1  # of a cosine; 1 / sqrt(numbers kept) is 0.044
    assert errors.mean().abs() < 0.005  # unbiased


def test_mixed_precision_gives_rows_close_to_full_precision() -> None:
    model = convolutional(padding=1).float()
    inputs, targets, weights = (x.float() if x.is_floating_point() else x for x in data())
    ghosts = UnitGradients(model, cross_entropy, "ghost:3", 0)
    _, full = ghosts.compute(inputs, targets, weights, torch.arange(EXAMPLES))
    with torch.autocast("cpu", torch.bfloat16):
        _, half = ghosts.compute(inputs, targets, weights, torch.arange(EXAMPLES))
    assert half.dtype == torch.float32
    assert (half - full).norm() < 0.03 * full.norm()


def test_a_copy_of_the_model_is_left_alone() -> None:
    model = convolutional()
    inputs, targets, weights = data()
    ghosts = UnitGradients(model, cross_entropy, "ghost:2", 0)
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    _, rows = ghosts.compute(inputs, targets, weights, torch.arange(EXAMPLES))
    for other in (twin, loaded):
        torch.testing.assert_close(other(inputs), model(inputs))
        for p in other.parameters():
            nn.init.constant_(p, 0.5)
        assert not torch.allclose(other(inputs), model(inputs))
        cross_entropy(other(inputs), targets).sum().backward()  # into nobody's rows
    for p in model.parameters():
        p.grad = None
    torch.testing.assert_close(ghosts.compute(inputs, targets, weights, torch.arange(EXAMPLES))[1], rows)


@pytest.mark.parametrize(("rows", "length"), [(40, 6), (5, 30), (2, 6)])
def test_principal_directions_are_those_of_the_singular_value_decomposition(rows: int, length: int) -> None:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, rows, length, generator=random, dtype=torch.float64)
    found = principal_directions(inputs, 3)
    for group in range(2):
        right = torch.linalg.svd(inputs[group], full_matrices=False).Vh[:3]
        wanted = torch.zeros(3, length, dtype=torch.float64)
        wanted[: len(right)] = right
        torch.testing.assert_close((found[group] @ wanted.T).abs().diagonal(), wanted.norm(dim=1))
        torch.testing.assert_close(found[group].norm(dim=1), wanted.norm(dim=1))


def test_constant_and_broken_inputs_have_directions_too() -> None:
    inputs = torch.zeros(1, 10, 4)
    assert torch.equal(principal_directions(inputs, 2), torch.zeros(1, 2, 4, dtype=torch.float64))
    inputs[0, 3, 1] = float("nan")
    inputs[0, 4, 2] = 1.0
    assert torch.equal(principal_directions(inputs, 1).abs()[0, 0], torch.tensor([0, 0, 1, 0]).double())
