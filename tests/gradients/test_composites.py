"""Attention, recurrent layers and layers of other libraries: rows against gradients of single examples."""

import pytest
import torch
from torch import nn

from hemiola.gradients.finding import find_layers
from hemiola.gradients.ghost import Recorder
from hemiola.gradients.sketch import parse_sketch

EXAMPLES, TIME, WIDTH = 4, 5, 8


class Attending(nn.Module):
    def __init__(self, batch_first, **options):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first, **options)
        self.batch_first = batch_first

    def forward(self, x):
        x = x if self.batch_first else x.transpose(0, 1)
        found, _ = self.attention(x, x, x, need_weights=False)
        return found if self.batch_first else found.transpose(0, 1)


class Conv1D(nn.Module):
    """As transformers has it: the weight is (inputs, outputs)."""

    def __init__(self, nf, nx):
        super().__init__()
        torch.manual_seed(0)
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class LlamaRMSNorm(nn.Module):
    def __init__(self, plus_one=False):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.variance_epsilon, self.plus_one = nn.Parameter(torch.rand(WIDTH)), 1e-6, plus_one

    def forward(self, x):
        scale = 1 + self.weight if self.plus_one else self.weight
        return scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def batch():
    return torch.randn(EXAMPLES, TIME, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_of(output):
    random = torch.Generator().manual_seed(2)
    return (output * torch.randn(output.shape, generator=random)).flatten(1).sum(1)


def recorded(model, sketch="exact"):
    recorder = Recorder(model, parse_sketch(sketch), 0)
    recording = recorder.start(EXAMPLES)
    loss_of(model(batch())).sum().backward()
    rows = recorder.rows(recording)
    recorder.close()
    return rows, recorder


def one_by_one(model):
    """Whole gradients of single examples, by as many backward passes."""
    rows = []
    for example in range(EXAMPLES):
        model.zero_grad()
        loss_of(model(batch()))[example].backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Attending(True),
        lambda: Attending(False),
        lambda: Attending(True, bias=False),
        lambda: Conv1D(6, WIDTH),
        LlamaRMSNorm,
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    ],
    ids=["attention", "time first", "without bias", "Conv1D", "RMSNorm", "encoder layer"],
)
def test_whole_rows_are_gradients_of_single_examples(make):
    model = make()
    rows, recorder = recorded(model)
    assert recorder.left_out == []
    torch.testing.assert_close(rows, one_by_one(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_recurrent_row_is_a_linear_image_of_the_gradient(kind, batch_first):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rnn = kind(WIDTH, 3, num_layers=2, batch_first=batch_first)

        def forward(self, x):
            x = x if batch_first else x.transpose(0, 1)
            return self.rnn(x)[0] if batch_first else self.rnn(x)[0].transpose(0, 1)

    model = Model()
    recorder = Recorder(model, parse_sketch(f"ghost:{WIDTH}"), 0)
    recording = recorder.start(EXAMPLES)
    loss_of(model(batch())).sum().backward()
    (layer,) = recorder.layers
    block = recording._blocks[0].view(EXAMPLES, WIDTH, WIDTH)  # sum_t (W^T g_t)(V x_t)^T, before the fold
    weight = model.rnn.weight_ih_l0
    for example in range(EXAMPLES):
        model.zero_grad()
        loss_of(model(batch()))[example].backward()
        expected = weight.T @ weight.grad @ layer.filters[0].T
        torch.testing.assert_close(block[example], expected, rtol=1e-4, atol=1e-5)
    recorder.close()
    assert recorder.left_out == ["rnn (" + kind.__name__ + ", all but the first input-to-hidden weights)"]


def test_what_is_not_understood_is_named():
    cross = nn.MultiheadAttention(WIDTH, 2, kdim=4)
    layers, left_out = find_layers(nn.ModuleList([cross]), 2, 0)
    assert layers == []
    assert left_out == ["0 (MultiheadAttention, with keys or values of other sizes, or with biases as keys)"]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), LlamaRMSNorm(plus_one=True))
    recorder = Recorder(model, parse_sketch("ghost:2"), 0)
    recorder.start(EXAMPLES)
    with pytest.warns(UserWarning, match="does not compute weight"):
        model(batch())
    recorder.close()


def test_the_model_computes_what_it_did_before():
    model = Attending(False)
    before = model(batch())
    recorder = Recorder(model, parse_sketch("ghost:2"), 0)
    recorder.start(EXAMPLES)
    assert torch.equal(model(batch()), before)
    recorder.close()
    assert torch.equal(model(batch()), before)
    assert not model.attention._forward_hooks
    assert not model.attention._forward_pre_hooks
