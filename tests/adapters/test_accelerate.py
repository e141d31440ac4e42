"""Accelerate in one process: a prepared loader in an order, and its state."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
sys.path.insert(0, str(Path(__file__).parent))

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from parts import EXAMPLES, Net, Numbered, passes
from torch import nn
from torch.utils.data import DataLoader

import hemiola
from hemiola.adapters.accelerate import LocalSGD, ordered

pytestmark = [pytest.mark.filterwarnings("ignore", "error::hemiola.errors.SamplerWarning"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def alone():
    """Accelerate keeps its state in singletons."""
    yield
    for each in (AcceleratorState, PartialState, GradientState):
        each._reset_state()


def prepared(accelerator, **options):
    net = Net()
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(Numbered(), batch_size=8, shuffle=True, **options)
    )
    return net, model, optimizer, loader


def train(accelerator, model, optimizer, loader, stop=None):
    for number, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if number + 1 == stop:
            return


@pytest.mark.parametrize("workers", [0, 2])
def test_every_example_once_and_learnt_from(workers):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    net, model, optimizer, loader = prepared(accelerator, num_workers=workers)
    loader = ordered(accelerator, loader, model)
    for _ in range(3):
        train(accelerator, model, optimizer, loader)
        with torch.no_grad():
            model(Numbered().x)  # an evaluation in between
    assert [sorted(each) for each in passes(net.visited, EXAMPLES)] == [list(range(EXAMPLES))] * 3
    told = loader.order.telemetry()
    assert (told["epoch"], told["learnt_from"]) == (2, EXAMPLES)
    assert accelerator._dataloaders == [loader]
    loader.order.detach()


def test_a_saved_state_goes_on_in_mid_epoch(tmp_path):
    accelerator = Accelerator(cpu=True)
    net, model, optimizer, loader = prepared(accelerator)
    loader = ordered(accelerator, loader, model)
    train(accelerator, model, optimizer, loader)
    train(accelerator, model, optimizer, loader, stop=2)
    accelerator.save_state(str(tmp_path))
    before = list(net.visited)
    train(accelerator, model, optimizer, loader, stop=3)
    accelerator.load_state(str(tmp_path))
    net.visited.clear()
    train(accelerator, model, optimizer, loader)
    second = before[EXAMPLES:] + net.visited
    assert sorted(second) == list(range(EXAMPLES))
    loader.order.detach()


def test_local_sgd_has_the_call_shape_of_accelerate(tmp_path):
    accelerator = Accelerator(cpu=True)
    net, model, optimizer, loader = prepared(accelerator)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
        train(accelerator, model, optimizer, loader)
        local_sgd.step()
        accelerator.save_state(str(tmp_path))
        with local_sgd.averaged():
            assert len(net.visited) == EXAMPLES
    assert [record.period for record in local_sgd.averager.history] == [2, 2, 2]
    with LocalSGD(accelerator, model, 2, enabled=False) as local_sgd:
        assert local_sgd.averager is None


def test_what_cannot_be_ordered_is_said_in_one_line():
    accelerator = Accelerator(cpu=True)
    _, model, _, loader = prepared(accelerator)
    with pytest.raises(hemiola.InputError, match=r"takes the loader that accelerator\.prepare returned"):
        ordered(accelerator, DataLoader(Numbered()), model)
    loader = ordered(accelerator, loader)
    with pytest.raises(hemiola.InputError, match="ordered already"):
        ordered(accelerator, loader)
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(hemiola.InputError, match="the accelerator has 2"):
        LocalSGD(accelerator, model, 2)
