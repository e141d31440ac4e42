"""Rows of a layer are right, or the layer is left out and named: never a crash, never wrong rows in silence."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from hemiola.errors import InputError, SamplerWarning
from hemiola.gradients.finding import find_layers
from hemiola.gradients.layers import Dense, Layer, Lookup
from hemiola.gradients.sketch import parse_sketch
from hemiola.gradients.units import UnitGradients
from hemiola.loops.epoch import Claim, Epoch
from hemiola.loops.sampler import OrderedSampler
from hemiola.loops.watch import Watch

BATCH, TIME, TOKENS, WIDTH, CLASSES = 4, 8, 20, 8, 5
WIDE = "ghost:1000:1000000"  # every direction, nothing folded: no inner product is lost


class Notes:
    """Stands in for the sampler; keeps the rows."""

    rows: Tensor | None = None

    def claim(self, given: list[Tensor]) -> Claim:
        return Claim(Epoch(0, np.arange(len(given[0]))), len(given[0]))

    def fits_units(self, claim: Claim) -> bool:
        return False

    def wants_rows(self, claim: Claim) -> bool:
        return True

    def unused(self, claim: Claim) -> None:
        pass

    def trained(self, claim: Claim, rows: Tensor | None) -> None:
        self.rows = rows


class Sequences(nn.Module):
    """A small language model; the subclasses fold batch and time in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(64, WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.tokens(x) + self.positions(torch.arange(x.shape[1])))))


class Folded(Sequences):
    """Positions folded into the batch, example by example, and left so: the lecture's nanoGPT."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.tokens(x).flatten(0, 1))))


class TimeFirst(Sequences):
    """Time before batch inside of the model."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.tokens(x).transpose(0, 1)))).transpose(0, 1)


class TimeFirstFolded(Sequences):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.tokens(x).transpose(0, 1).reshape(-1, WIDTH)))
        return self.head(h.view(x.shape[1], len(x), WIDTH).transpose(0, 1))


class FoldedToTheEnd(Sequences):
    """Never batch first again: nothing tells where an example is, but where the tokens came in."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.tokens(x).transpose(0, 1).reshape(-1, WIDTH))))


class TwoViews(Sequences):
    """The batch twice, one copy after the other."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(torch.cat([self.tokens(x), self.tokens(x.flip(1))])))
        return self.head(h[: len(x)] + h[len(x) :])


class Routed(Sequences):
    """As a mixture of experts does: as many tokens as there happen to be, a multiple of the batch size today."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        chosen = torch.zeros(x.shape, dtype=torch.bool)
        chosen[0, :5], chosen[1, :1], chosen[2, :1], chosen[3, :1] = True, True, True, True
        out = torch.zeros_like(h)
        out[chosen] = self.inner(h[chosen])
        return self.head(torch.tanh(h + out))


class OnlyTheLoss(Sequences):
    """Returns nothing that has an example's row."""

    def forward(self, x: Tensor, y: Tensor, mean: bool = True) -> Tensor:  # type: ignore[override]
        losses = F.cross_entropy(super().forward(x).mT, y, reduction="none").mean(1)
        return losses.mean() if mean else losses


class Checkpointed(Sequences):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(checkpoint(lambda h: torch.tanh(self.inner(h)), h, use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    reentrant = True


def example_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One loss per example, whatever the model makes of its output."""
    out = model(x)
    out = out.view(x.shape[1], len(x), TOKENS).transpose(0, 1) if isinstance(model, FoldedToTheEnd) else out
    losses = F.cross_entropy(out.reshape(-1, TOKENS), y.flatten(), reduction="none")
    return losses.view(x.shape).mean(1)


LEFT_OUT = {
    Sequences: {"positions"},
    Folded: {"positions"},
    TimeFirst: {"inner", "head", "positions"},
    TimeFirstFolded: {"inner", "positions"},
    FoldedToTheEnd: {"inner", "head", "positions"},
    TwoViews: {"inner", "positions"},
    Routed: {"inner", "positions"},
    OnlyTheLoss: {"positions"},
    Checkpointed: {"positions"},
    Reentrant: {"positions"},
}


def names(watch: Watch) -> set[str]:
    assert watch.recorder is not None
    return {name.partition(" ")[0] for name in watch.recorder.left_out}


def parts(watch: Watch, rows: Tensor) -> dict[str, tuple[Layer, Tensor]]:
    """Each layer's columns of rows that were not folded."""
    assert watch.recorder is not None
    layers = watch.recorder.layers
    pieces = rows.split([layer.widths[0] for layer in layers], 1)
    return {layer.name: (layer, piece) for layer, piece in zip(layers, pieces, strict=True)}


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Of every example, by backward passes of a copy that nobody watches."""
    found = []
    for i in range(len(x)):
        model.zero_grad()
        losses = model(x, y, mean=False) if isinstance(model, OnlyTheLoss) else example_losses(model, x, y)
        losses[i].backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


@pytest.mark.filterwarnings("ignore::hemiola.SamplerWarning")
@pytest.mark.parametrize("time", [BATCH, TIME, TIME - 1])
@pytest.mark.parametrize("kind", LEFT_OUT, ids=lambda kind: kind.__name__)
def test_every_row_is_its_own_example_s_gradient(kind: type[Sequences], time: int) -> None:
    torch.manual_seed(0)
    model = kind().double()
    x, y = torch.randint(TOKENS, (BATCH, time)), torch.randint(TOKENS, (BATCH, time))
    expected = gradients(copy.deepcopy(model), x, y)
    notes = Notes()
    watch = Watch(model, parse_sketch(WIDE), 0, notes, None, None)
    (model(x, y) if kind is OnlyTheLoss else example_losses(model, x, y).mean()).backward()
    watch.settle()
    watch.close()
    assert notes.rows is not None
    assert names(watch) == LEFT_OUT[kind]
    for name, (layer, found) in parts(watch, notes.rows).items():
        if name in LEFT_OUT[kind]:
            assert not found.any()
        elif isinstance(layer, Lookup):
            for row, each in zip(found, expected, strict=True):
                gradient = each[f"{name}.weight"] * layer.sign.unsqueeze(1)
                want = torch.zeros(layer.buckets, WIDTH).double().index_add_(0, layer.bucket, gradient)
                torch.testing.assert_close(row, want.flatten())
        else:  # along all directions, which rotate a gradient and keep its inner products
            flat = [torch.cat([each[f"{name}.weight"].flatten(), each[f"{name}.bias"]]) for each in expected]
            torch.testing.assert_close(found @ found.T, torch.stack(flat) @ torch.stack(flat).T)


def test_whole_gradients_of_shared_positions_are_refused_not_booked_on_other_examples() -> None:
    torch.manual_seed(0)
    model = Sequences().double()
    x, y = torch.randint(TOKENS, (BATCH, TIME)), torch.randint(TOKENS, (BATCH, TIME))
    watch = Watch(model, parse_sketch("exact"), 0, Notes(), None, None)
    example_losses(model, x, y).mean().backward()
    with pytest.raises(InputError, match="hooks cannot tell whole gradients"):
        watch.settle()
    watch.close()
    # A run has the loss of every example, and another way to its gradient.
    every = torch.arange(BATCH)
    units = UnitGradients(model, lambda out, y: F.cross_entropy(out.mT, y, reduction="none").mean(1), "exact", 0)
    _, rows = units.compute(x, y, torch.ones(BATCH).double(), every)
    want = [torch.cat([g.flatten() for g in each.values()]) for each in gradients(copy.deepcopy(model), x, y)]
    torch.testing.assert_close(rows, torch.stack(want))


def test_a_layer_that_shows_no_gradient_at_first_counts_once_it_does() -> None:
    """As the inner half of LoRA, whose outer half starts at zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, CLASSES)).double()
    nn.init.zeros_(model[1].weight)
    notes = Notes()
    watch = Watch(model, parse_sketch(WIDE), 0, notes, None, None)
    x, y = torch.randn(BATCH, 6).double(), torch.arange(BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        watch.settle()
        assert notes.rows is not None
        seen.append([bool(piece.any()) for _, piece in parts(watch, notes.rows).values()])
    watch.close()
    assert seen == [[False, True], [True, True], [True, True]]
    assert names(watch) == set()


@pytest.mark.parametrize("examples", [2, 16])
def test_batch_norm_couples_examples_and_is_no_reason_to_leave_a_layer_out(examples: int) -> None:
    torch.manual_seed(0)
    blocks = [m for _ in range(8) for m in (nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 6, 3), *blocks, nn.Flatten(), nn.Linear(6 * 36, CLASSES))
    notes = Notes()
    watch = Watch(model, parse_sketch("ghost:2"), 0, notes, None, None)
    F.cross_entropy(model(torch.randn(examples, 3, 8, 8)), torch.arange(examples) % CLASSES).backward()
    watch.settle()
    watch.close()
    assert notes.rows is not None
    assert names(watch) == set()


# ------------------------------------------------------------------------------- layers that are not what they seem


class LayerNorm2d(nn.LayerNorm):
    """ConvNeXt's, in torchvision and timm."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class LearnedPositions(nn.Embedding):
    """BART's: called with the tokens, for their number only."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(torch.arange(tokens.shape[1])).expand(len(tokens), -1, -1)


class Bart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, WIDTH), LearnedPositions(20, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.tokens(x) + self.places(x)).mean(1))


class Standardized(nn.Conv2d):
    """Another weight than the parameter, behind the same ``forward``."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


def images(*first: nn.Module) -> nn.Module:
    return nn.Sequential(*first, nn.Tanh(), nn.Flatten(), nn.Linear(6 * 36, CLASSES))


def patched() -> nn.Module:
    conv = nn.Conv2d(3, 6, 3)
    plain = conv.forward
    conv.forward = lambda x: 2 * plain(x)  # type: ignore[method-assign]
    return images(conv)


def bias_only(layer: nn.Module) -> nn.Module:
    layer.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
    return layer


PICTURES = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
STRANGE: dict[str, tuple[Callable[[], nn.Module], Tensor, set[str]]] = {
    "LayerNorm2d": (lambda: images(nn.Conv2d(3, 6, 3), LayerNorm2d(6)), PICTURES, {"1"}),
    "BART": (Bart, torch.randint(20, 50, (16, 12), generator=torch.Generator().manual_seed(0)), {"places"}),
    "spectral_norm": (lambda: images(parametrizations.spectral_norm(nn.Conv2d(3, 6, 3))), PICTURES, {"0"}),
    "weight_norm": (lambda: images(parametrizations.weight_norm(nn.Conv2d(3, 6, 3))), PICTURES, {"0"}),
    "old spectral_norm": (lambda: images(nn.utils.spectral_norm(nn.Conv2d(3, 6, 3))), PICTURES, {"0"}),
    "weight standardization": (lambda: images(Standardized(3, 6, 3)), PICTURES, {"0"}),
    "patched": (patched, PICTURES, {"0"}),
    "frozen Conv2d weight": (lambda: images(bias_only(nn.Conv2d(3, 6, 3))), PICTURES, set()),
    "frozen grouped Conv2d weight": (lambda: images(bias_only(nn.Conv2d(3, 6, 3, groups=3))), PICTURES, set()),
    "frozen Linear weight": (
        lambda: nn.Sequential(nn.Flatten(), bias_only(nn.Linear(192, 16)), nn.Linear(16, CLASSES)),
        PICTURES,
        set(),
    ),
    "LazyLinear": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.LazyLinear(CLASSES)),
        PICTURES,
        {"2"},
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", STRANGE)
def test_what_trains_alone_trains_under_watch_and_is_named_where_it_is_not_understood(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    make, inputs, strange = STRANGE[name]
    targets = torch.arange(len(inputs)) % CLASSES
    data = TensorDataset(inputs, targets)

    def train(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, sampler = make(), OrderedSampler(data, "cd-grab")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=4, sampler=sampler if watched else list(OrderedSampler(data, "cd-grab")))
        if not watched:
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            return list(model.parameters())
        with sampler.watch(model):
            assert sampler._watch is not None
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            assert names(sampler._watch) == strange
        assert sampler.position == len(data)
        return list(model.parameters())

    for plain, watched in zip(train(False), train(True), strict=True):
        torch.testing.assert_close(watched, plain)


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(3, 6, 3, bias=False)])
@pytest.mark.parametrize("sketch", ["exact", "ghost:2:100000"])
def test_a_bias_alone_has_its_own_rows(layer: nn.Conv2d, sketch: str) -> None:
    if layer.bias is None:
        layer = nn.Linear(3 * 64, 6)  # type: ignore[assignment]
    model = bias_only(copy.deepcopy(layer))
    inputs = PICTURES if isinstance(layer, nn.Conv2d) else PICTURES.flatten(1)

    def losses(out: Tensor, targets: Tensor) -> Tensor:
        return out.flatten(1).square().mean(1)

    units = UnitGradients(model, losses, sketch, 0)
    _, rows = units.compute(inputs, torch.zeros(16), torch.ones(16), torch.arange(16))
    want = [torch.autograd.grad(losses(model(x[None]), x)[0], [model.bias])[0] for x in inputs]  # type: ignore[list-item]
    torch.testing.assert_close(rows, torch.stack(want))


def test_a_model_of_lazy_layers_only_is_one_clear_line() -> None:
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES))
    for unit, line in ((1, r"1 \(LazyLinear, no weights yet: run one batch"), (4, "run one batch through it")):
        with pytest.raises(InputError, match=line), OrderedSampler(PICTURES, "cd-grab", unit).watch(model):
            pass


def test_an_error_in_a_hook_leaves_the_layer_out_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Dense, kept: Tensor, b: Tensor, examples: int) -> list[Tensor]:
        raise RuntimeError("no luck")

    monkeypatch.setattr(Dense, "blocks", broken)
    model, notes = images(nn.Conv2d(3, 6, 3)), Notes()
    watch = Watch(model, parse_sketch("ghost:2"), 0, notes, None, None)

    def step() -> None:
        F.cross_entropy(model(PICTURES), torch.arange(16) % CLASSES).backward()
        watch.settle()

    with pytest.warns(SamplerWarning) as caught:
        step()
    assert "leaves it out: 3 (Linear, RuntimeError: no luck)" in str(caught[0].message)
    assert "nothing of 87 % of the trained parameters: 3 (Linear" in str(caught[1].message)
    step()  # in silence
    assert notes.rows is not None
    assert names(watch) == {"3"}
    watch.close()


def test_a_gradient_penalty_trains_as_without_watch_and_says_that_it_teaches_nothing() -> None:
    def step(model: nn.Module) -> None:
        x = PICTURES.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (F.cross_entropy(out, torch.arange(16) % CLASSES) + slope.square().sum()).backward()

    torch.manual_seed(0)
    model, notes = images(nn.Conv2d(3, 6, 3)), Notes()
    twin = copy.deepcopy(model)
    step(twin)
    watch = Watch(model, parse_sketch("ghost:2"), 0, notes, None, None)
    with pytest.warns(SamplerWarning, match="differentiates gradients"):
        step(model)
    watch.settle()
    model.zero_grad()
    step(model)  # in silence
    watch.settle()
    assert notes.rows is None
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    F.cross_entropy(model(PICTURES), torch.arange(16) % CLASSES).backward()
    watch.settle()
    assert notes.rows is not None
    watch.close()


def test_two_samplers_may_watch_one_model() -> None:
    model, first, second = images(nn.Conv2d(3, 6, 3)), Notes(), Notes()
    watches = [Watch(model, parse_sketch("ghost:2"), 0, notes, None, None) for notes in (first, second)]
    F.cross_entropy(model(PICTURES), torch.arange(16) % CLASSES).backward()
    for watch in watches:
        watch.settle()
    assert first.rows is not None
    torch.testing.assert_close(first.rows, second.rows)
    for watch in watches:
        watch.close()
    assert "forward" not in vars(model[0])  # type: ignore[index]


# -------------------------------------------------------------------------------------------- what goes without saying


def test_many_parameters_that_ghosts_do_not_see_are_a_warning_and_few_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Recurrent(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, width, batch_first=True), nn.Linear(width, 100)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    data = TensorDataset(torch.randn(8, 3, 4), torch.arange(8))
    sampler = OrderedSampler(data, "cd-grab")
    # Of the LSTM's 4 * 20 * (4 + 20 + 2) = 2,080, 4 * 20 * 4 = 320 are seen, and the 20 * 100 + 100 of the head.
    with pytest.warns(
        SamplerWarning, match=r"nothing of 42 % of the trained parameters: lstm \(LSTM, all but the first"
    ):
        with sampler.watch(Recurrent(20)):
            pass
    # 4 * 2 * (4 + 2 + 2) = 64 and 2 * 100 + 100 = 300
    sampler = OrderedSampler(data, "cd-grab")
    with caplog.at_level(logging.INFO, "hemiola"), sampler.watch(model := Recurrent(2)):
        for x, y in DataLoader(data, batch_size=4, sampler=sampler):
            F.cross_entropy(model(x), y).backward()
    assert "left out: lstm (LSTM, all but" in caplog.text


def test_layers_that_turn_out_to_be_of_no_use_are_warned_of_when_they_do() -> None:
    torch.manual_seed(0)
    model = TimeFirst()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch = Watch(model, parse_sketch("ghost:2"), 0, Notes(), None, None)
    with pytest.warns(SamplerWarning, match=r"nothing of \d+ % .*inner \(Linear, not one input for each example\)"):
        model(torch.randint(TOKENS, (BATCH, TIME)))
    watch.close()


def test_layers_are_known_by_what_they_compute_not_by_their_class() -> None:
    class Same(nn.Linear):
        pass

    layers, left_out = find_layers(nn.Sequential(Same(2, 2), nn.SyncBatchNorm(2), nn.BatchNorm1d(2)), 2, 0)
    assert [layer.name for layer in layers] == ["0", "2"]
    assert left_out == ["1 (SyncBatchNorm)"]
