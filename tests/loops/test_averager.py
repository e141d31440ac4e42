"""The averager in a single process: it counts, decides and records, and changes nothing."""

import math

import pytest
import torch
from torch import nn

from hemiola.errors import InputError
from hemiola.loops.averager import Averager
from hemiola.period import FDA, QSR, Adaptive, Clocked, Constant, Decreasing, Full


def parts(lr=0.1, optimizer=torch.optim.SGD):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return model, optimizer(model.parameters(), lr=lr)


def train(model, optimizer, steps, after=lambda t: None):
    stream = torch.Generator().manual_seed(1)
    for t in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=stream)
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()
        after(t)


def weights(model):
    return torch.cat([t.detach().double().flatten() for t in model.state_dict().values()])


@pytest.mark.parametrize("momentum", ["local", "average"])
@pytest.mark.parametrize("wire", ["fp32", "int4"])
def test_alone_it_changes_no_bit_of_the_training(wire, momentum):
    model, optimizer = parts(optimizer=torch.optim.Adam)
    train(model, optimizer, 11)
    other, optimizer = parts(optimizer=torch.optim.Adam)
    averager = Averager(other, optimizer, period=Constant(p=4), wire=wire, momentum=momentum)
    with averager:
        train(other, optimizer, 11)
    assert torch.equal(weights(model), weights(other))
    assert [(r.step, r.period, r.spread, r.bytes) for r in averager.history] == [
        (4, 4, 0.0, 0),
        (8, 4, 0.0, 0),
        (11, 3, 0.0, 0),
    ]


def test_it_hears_of_steps_only_inside_the_block():
    model, optimizer = parts()
    averager = Averager(model, optimizer, period=Constant(p=1))
    train(model, optimizer, 3)
    with averager:
        train(model, optimizer, 2)
    train(model, optimizer, 3)
    assert [record.step for record in averager.history] == [1, 2]
    with averager.averaged() as seen:
        assert seen is model


def test_steps_are_counted_by_hand_where_wished():
    model, optimizer = parts()
    with Averager(model, optimizer, period=Constant(p=2), hook=False) as averager:
        train(model, optimizer, 4, lambda t: averager.step() if t % 2 else None)
    assert [record.step for record in averager.history] == [2]
    with pytest.raises(InputError, match="outside `with averager:`"):
        averager.step()
    with Averager(model, optimizer, period=Constant(p=2)) as averager:
        with pytest.raises(InputError, match="give hook=False"):
            averager.step()


def test_an_exception_detaches_and_averages_nothing():
    model, optimizer = parts()
    averager = Averager(model, optimizer, period=Constant(p=4))

    def fail(t):
        if t == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), averager:
        train(model, optimizer, 4, fail)
    train(model, optimizer, 5)
    assert averager.history == []


def test_progress_and_rates_reach_the_period():
    model, optimizer = parts()
    period = Decreasing(start=4, end=2)
    with Averager(model, optimizer, period=period, steps=16) as averager:
        train(model, optimizer, 16)
    assert [record.period for record in averager.history] == [4, 4, 2, 2, 2, 2]
    assert all(record.lr == 0.1 for record in averager.history)


def test_qsr_averages_through_a_warm_up_and_never_beyond_the_end():
    model, optimizer = parts(lr=0.4)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=20)
    drop = torch.optim.lr_scheduler.MultiStepLR(optimizer, [60], gamma=0.01)

    def schedule(t):
        warm_up.step()
        drop.step()

    with Averager(model, optimizer, period=QSR(base=4, alpha=0.2), steps=100) as averager:
        train(model, optimizer, 100, schedule)
        assert [record.period for record in averager.history] == [4] * 15 + [40]  # the rule asks for 2,500
    assert len(averager.history) == 16


def test_the_ramp_hears_the_losses_it_is_told():
    model, optimizer = parts()
    heard = []

    class Listening(Constant):
        def averaged(self, seen):
            heard.append(seen.loss)

    with Averager(model, optimizer, period=Listening(p=2)) as averager:
        train(model, optimizer, 4, lambda t: averager.observe(t) if t < 2 else None)
    # a loss observed after the step belongs to the stint that is under way by then
    assert heard[0] == 0.0
    assert heard[1] == 1.0
    assert len(heard) == 2
    assert not any(math.isnan(loss) for loss in heard)


def test_resume_is_exact_and_state_is_plain(tmp_path):
    model, optimizer = parts()
    path = tmp_path / "state.pt"
    with Averager(model, optimizer, period=Adaptive(start=4), steps=60) as averager:
        train(model, optimizer, 30, lambda t: torch.save(averager.state_dict(), path) if t == 17 else None)
    state = torch.load(path, weights_only=True)
    again, other = parts()
    resumed = Averager(again, other, period=Adaptive(start=4), steps=60)
    resumed.load_state_dict(state)
    assert resumed.state_dict() is state
    with resumed:
        train(again, other, 12)
    steps = [record.step for record in averager.history if record.step > 18]
    assert [record.step for record in resumed.history] == steps


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"period": Full()}, "period 'full' exchanges gradients: use DistributedDataParallel, or Constant(p=1) here"),
        ({"period": 4}, "period: must be an object such as a hemiola.Period, got 4"),
        ({"period": Decreasing()}, "period Decreasing depends on the length of the run: give steps=..."),
        ({"wire": "int9"}, "wire must be one of fp32, bf16, int8, int4, got 'int9'; did you mean 'int8'?"),
        ({"buffers": "mean"}, "buffers must be one of average, local, got 'mean'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"timeout": 0}, "timeout must be above 0 seconds, got 0"),
        (
            {"outer": "SGD", "period": Full()},
            "period 'full' exchanges gradients: use DistributedDataParallel, or Constant(p=1) here",
        ),
        ({"outer": {"name": "slowmo", "lr": 0}}, "outer.lr: must be a positive number, got 0"),
        (
            {"period": Clocked(), "momentum": "average"},
            "momentum is not for period Clocked, whose averagings follow the clock; leave it out",
        ),
        (
            {"period": Clocked(), "outer": "diloco"},
            "outer = 'diloco' is not for averagings that follow the clock; use a period that counts steps",
        ),
        ({"overlap": -2}, "overlap must be at least 0, got -2"),
        ({"balance": "fast"}, "balance must be one of none, speed, got 'fast'"),
        ({"period": FDA(), "balance": "speed"}, "balance = 'speed' is not for period FDA; leave it out"),
        (
            {"period": Clocked(), "balance": "speed"},
            "balance is not for period Clocked, whose averagings follow the clock; leave it out",
        ),
    ],
)
def test_impossible_options(options, line):
    with pytest.raises(InputError) as caught:
        Averager(*parts(), **options)
    assert str(caught.value) == line


def test_impossible_models_and_states():
    model, optimizer = parts()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    empty = torch.optim.SGD([torch.zeros(0)], lr=0.1)
    empty.param_groups[0]["params"] = []
    with pytest.raises(InputError, match="nothing to average"), Averager(frozen, empty, period=Constant()):
        pass
    with pytest.raises(InputError, match="not been entered"):
        Averager(model, optimizer).state_dict()
    with pytest.raises(InputError, match="not the state of a 'averager': its kind is 'constant'"):
        Averager(model, optimizer).load_state_dict(Constant().state_dict())
    with Averager(model, optimizer, period=Constant(p=2)) as averager:
        train(model, optimizer, 3)
        state = averager.state_dict()
        with pytest.raises(InputError, match="before `with averager:`"):
            averager.load_state_dict(state)
        with pytest.raises(InputError, match="already entered"):
            averager.__enter__()
    with pytest.raises(InputError, match="was saved with"):
        Averager(model, optimizer, period=Constant(p=2), wire="int8").load_state_dict(state)
    other = nn.Linear(3, 3)
    stranger = Averager(other, torch.optim.SGD(other.parameters(), lr=0.1), period=Constant(p=2))
    stranger.load_state_dict(state)
    with pytest.raises(InputError, match="of another model"), stranger:
        pass


def test_an_outer_optimizer_works_alone_and_its_state_is_part_of_the_averagers():
    model, optimizer = parts()
    with Averager(model, optimizer, period=Constant(p=2), outer="diloco") as averager:
        start = weights(model[0])
        train(model, optimizer, 1)
        one = weights(model[0]) - start
        train(model, optimizer, 1)
        state = averager.state_dict()
    plain, other = parts()
    train(plain, other, 1)
    torch.testing.assert_close(one, weights(plain[0]) - start)
    assert state["anchored"]["outer"]["kind"] == "outer"
    again = Averager(model, optimizer, period=Constant(p=2))
    again.load_state_dict(state)
    with pytest.raises(InputError, match="another outer optimizer"), again:
        pass
    same, third = parts()
    with Averager(same, third, period=Constant(p=2), outer={"name": "SGD", "lr": 1.0}):
        train(same, third, 7)
    plain, other = parts()
    train(plain, other, 7)
    assert torch.equal(weights(same), weights(plain))


def test_alone_a_clocked_averager_changes_no_bit_of_the_training():
    model, optimizer = parts(optimizer=torch.optim.Adam)
    train(model, optimizer, 11)
    other, optimizer = parts(optimizer=torch.optim.Adam)
    with Averager(other, optimizer, period=Clocked(mix=0.5)) as averager:
        train(other, optimizer, 11)
        with averager.averaged():
            assert torch.equal(weights(model), weights(other))
    assert torch.equal(weights(model), weights(other))


def test_a_layer_unfrozen_inside_is_refused():
    model, optimizer = parts()
    model[0].requires_grad_(False)
    averager = Averager(model, optimizer, period=Constant(p=2))
    with pytest.raises(InputError, match=r"parameter 0\.weight was unfrozen inside the averager"), averager:
        train(model, optimizer, 6, lambda t: model[0].requires_grad_(t > 2))


class WrappedOptimizer(torch.optim.Optimizer):
    """In the way of Accelerate's AcceleratedOptimizer: an Optimizer that never called Optimizer.__init__."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()


def test_the_optimizer_inside_a_wrapper_is_found():
    model, optimizer = parts()
    outer = WrappedOptimizer(WrappedOptimizer(optimizer))
    with Averager(model, outer, period=Constant(p=2)) as averager:
        train(model, outer, 4)
    assert [record.step for record in averager.history] == [2, 4]
    with pytest.raises(InputError, match=r"needs a torch\.optim\.Optimizer, or a wrapper .* got str"):
        Averager(model, "SGD", period=Constant(p=2))


def test_accelerates_optimizer_works():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*parts())
    with Averager(model, optimizer, period=Constant(p=2)) as averager:
        for _ in range(8):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(8, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    assert [record.step for record in averager.history] == [2, 4]  # optimizer steps, not micro-batches


def test_one_of_several_processes_without_a_process_group_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError) as caught, Averager(*parts(), period=Constant(p=2)):
        pass
    assert str(caught.value) == (
        "this process is one of 2 (WORLD_SIZE) but torch.distributed is not running; "
        "call init_process_group() before `with averager:`"
    )
