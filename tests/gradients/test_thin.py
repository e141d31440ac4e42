"""Thin ghosts: which layers they are made of, and that each is a part of the ghost that is not thin."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hemiola.errors import InputError
from hemiola.gradients.finding import find_layers
from hemiola.gradients.ghost import Recorder
from hemiola.gradients.layers import Convolution, Dense
from hemiola.gradients.sketch import SketchSpec, parse_sketch
from hemiola.gradients.thin import LAYERS, thin_out


def names(model: nn.Module) -> list[str]:
    return [layer.name for layer in thin_out(find_layers(model, 4, 0)[0])]


def test_linear_layers_speak_for_convolutions_where_they_hold_the_weights() -> None:
    lenet = nn.Sequential(nn.Conv2d(3, 6, 5), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(24, 50), nn.Linear(50, 10))
    assert names(lenet) == ["3", "4"]


def test_a_model_of_convolutions_gives_them_too() -> None:
    convolutions = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 32, 3)
    resnet = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, 2))
    assert names(resnet) == ["0", "2", "4"]


def test_of_many_layers_some_are_taken_evenly_spread() -> None:
    deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(15)))
    assert names(deep) == ["0", "2", "4", "6", "8", "10", "12", "14"]
    assert len(names(deep)) == LAYERS


def test_a_model_without_products_gives_all_it_has() -> None:
    assert names(nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3))) == ["0", "1"]


def test_a_thin_linear_layer_keeps_some_outputs_of_its_ghost() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 7, 6, dtype=torch.float64), torch.randn(3, 7, 100, dtype=torch.float64)
    full, thin = (Dense("x", nn.Linear(6, 100).double(), 4) for _ in range(2))
    thin.thin(outputs=32, positions=8)
    directions = full.estimate(a)
    for layer in (full, thin):
        layer.adopt(directions)
    (whole,), (part,) = (layer.blocks(layer.capture(a, 3), b, 3) for layer in (full, thin))
    assert part.shape == (3, thin.widths[0]) == (3, 34 * 5)  # every third of 100 outputs; 4 directions and the bias
    kept = whole.view(3, 100, 5)[:, ::3].flatten(1) * math.sqrt(3)
    torch.testing.assert_close(part, kept)


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"padding": "same", "dilation": 2}], ids=str)
def test_a_thin_convolution_is_the_ghost_of_a_signal_at_some_positions(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 70, 3, **options).double()  # type: ignore[arg-type]
    a = torch.randn(3, 4, 33, 20, dtype=torch.float64)
    b = torch.randn_like(conv(a))
    full, thin = Convolution("x", conv, 2), Convolution("x", conv, 2)
    thin.thin(outputs=32, positions=8)
    directions = full.estimate(a)
    for layer in (full, thin):
        layer.adopt(directions)
    (part,) = thin.blocks(thin.capture(a, 3), b, 3)
    coarser = [math.ceil(length / 8) for length in b.shape[2:]]
    sampled = torch.zeros_like(b)
    sampled[:, :, :: coarser[0], :: coarser[1]] = b[:, :, :: coarser[0], :: coarser[1]] * math.prod(coarser)
    (whole,) = full.blocks(full.capture(a, 3), sampled, 3)
    channels = whole.view(3, 3, 70)[:, :, ::2].flatten(1) * math.sqrt(2)  # 2 directions, then the bias
    torch.testing.assert_close(part, channels)
    assert part.shape[1] == thin.widths[0]


def test_rows_of_a_thin_recorder_come_from_the_ordinary_backward_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 3))
    x, y = torch.randn(6, 1, 4, 4), torch.arange(6) % 3
    plain = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    recorder = Recorder(model, SketchSpec("ghost", width=10_000, rank=4, thin=True), seed=0)
    recording = recorder.start(6)
    F.cross_entropy(model(x), y).backward()
    rows: Tensor = recorder.rows(recording)
    recorder.close()
    assert [layer.name for layer in recorder.layers] == ["2", "4"]
    assert rows.shape == (6, 40 * 5 + 3 * 5)
    assert recorder.left_out == []  # what is spared is not unknown
    for p, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, expected)


def test_how_a_thin_sketch_is_written() -> None:
    assert parse_sketch("ghost:4:thin") == SketchSpec("ghost", width=512, rank=4, thin=True)
    assert parse_sketch("ghost:4:64:thin") == SketchSpec("ghost", width=64, rank=4, thin=True)
    for wrong in ("ghost:thin", "fold:4:thin", "ghost:4:thin:64", "exact:thin"):
        with pytest.raises(InputError, match=r"ghost:R:thin|whole number"):
            parse_sketch(wrong)
