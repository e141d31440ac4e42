"""Outer optimizers: trajectories of one weight that can be followed by hand, and what must be refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.errors import InputError
from hemiola.period import Clocked, Constant, Full
from hemiola.wire.outer import Outer


def moves(outer, changes, lr=0.1):
    return [outer(torch.tensor([float(c)], dtype=torch.float64), lr).item() for c in changes]


def test_diloco_by_hand():
    # buf: 1, 1.9, 0.71; applied 0.7 (change + 0.9 buf), with changes 1, 1, -1
    assert moves(Outer("diloco"), [1, 1, -1]) == pytest.approx([0.7 * 1.9, 0.7 * (1 + 1.71), 0.7 * (-1 + 0.639)])


def test_slowmo_by_hand_and_under_a_falling_rate():
    # u: -10, -16 (in gradients, changes over lr = 0.1); applied lr u
    assert moves(Outer("slowmo"), [1, 1]) == pytest.approx([1.0, 1.6])
    outer = Outer("slowmo", lr=0.5, momentum=0.5)
    assert moves(outer, [1], lr=0.1) == pytest.approx([0.5])
    # u = -10; the rate falls to 0.01, a change of 0.1 is u = -5 - 10 in gradients: 0.5 * 0.01 * 15
    assert moves(outer, [0.1], lr=0.01) == pytest.approx([0.075])
    assert moves(outer, [0.1], lr=0.0) == [0.1]


def test_delayed_nesterov_by_hand():
    # N = 2, b = 0.5, e = 1, c = 0. g = -change = 1, 2, 3, 4
    # t1: m = 0: -(0 + 1/2).  t2: m = (1 + 2)/2 = 1.5: -(0.5*1.5 + 2/2)
    # t3: -(0 + 3/2).         t4: m = 0.75 + 7/2 = 4.25: -(0.5*4.25 + 4/2)
    outer = Outer("delayed-nesterov", lr=1.0, momentum=0.5, every=2)
    assert moves(outer, [-1, -2, -3, -4]) == pytest.approx([-0.5, -1.75, -1.5, -4.125])


def test_delayed_nesterov_with_activation_by_hand():
    # N = 2, c = 0.25: on the N-th (1 - 0.5 + 0.25) b m = 0.375 m, otherwise 0.125 m; m = 1.5, then 4.25
    outer = Outer("delayed-nesterov", lr=1.0, momentum=0.5, every=2, activation=0.25)
    expected = [-0.5, -(0.375 * 1.5 + 1), -(0.125 * 1.5 + 1.5), -(0.375 * 4.25 + 2)]
    assert moves(outer, [-1, -2, -3, -4]) == pytest.approx(expected)


def test_delayed_nesterov_every_time_is_diloco():
    changes = [1.0, -0.5, 2.0, 0.25, -3.0]
    assert moves(Outer("delayed-nesterov"), changes) == pytest.approx(moves(Outer("diloco"), changes))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=8), st.sampled_from(["SGD", "Adam", "AdamW"]))
def test_a_torch_class_does_to_the_change_what_it_does_to_weights(changes, name):
    options = {"momentum": 0.9} if name == "SGD" else {}
    extra = {} if name != "AdamW" else {"weight_decay": 0.0}
    outer = Outer(name, lr=0.3, **options, **extra)
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    reference = getattr(torch.optim, name)([weight], lr=0.3, **options, **extra)
    total = 0.0
    for change in changes:
        weight.grad = torch.tensor([-change], dtype=torch.float64)
        reference.step()
        total += moves(outer, [change])[0]
        assert total == pytest.approx(weight.item(), abs=1e-12)


def test_rate_one_without_momentum_is_none_bit_for_bit():
    change = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for outer in (Outer("SGD"), Outer("SGD", lr=1.0, momentum=0.0)):
        assert outer.plain
        assert torch.equal(outer(change, 0.1), change)
    # and so it is without the short cut
    outer = Outer("SGD")
    outer.plain = False
    assert torch.equal(outer(change, 0.1), change)
    assert not Outer("SGD", lr=0.7).plain
    assert not Outer("SGD", momentum=0.9).plain


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("diloco", {}),
        ("slowmo", {}),
        ("delayed-nesterov", {"every": 3, "activation": 0.2}),
        ("Adam", {"lr": 0.1}),
        ("SGD", {"lr": 0.5, "momentum": 0.9}),
    ],
)
def test_state_is_plain_and_resumes_exactly(name, options, tmp_path):
    changes = [torch.randn(5, generator=torch.Generator().manual_seed(n)) for n in range(9)]
    whole = Outer(name, **options)
    expected = [whole(change, 0.1) for change in changes]
    for stop in (0, 4):
        first = Outer(name, **options)
        for change in changes[:stop]:
            first(change, 0.1)
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second = Outer(name, **options)
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert torch.equal(torch.stack([second(c, 0.1) for c in changes[stop:]]), torch.stack(expected[stop:]))


def test_foreign_state_is_refused():
    with pytest.raises(InputError, match="this is not the state of a 'outer'"):
        Outer("diloco").load_state_dict({"kind": "constant", "version": 1})
    with pytest.raises(InputError, match="was saved with name = 'diloco', this run has 'slowmo'"):
        Outer("slowmo").load_state_dict(Outer("diloco").state_dict())


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("dilloco", "outer: unknown outer optimizer 'dilloco'; did you mean 'diloco'?"),
        ({"lr": 0.7}, "outer must be a name such as 'diloco', or a table such as {'name': 'SGD', 'lr': 0.7}, got"),
        (3, "outer must be a name such as 'diloco'"),
        ({"name": "SGD", "momentun": 0.9}, "unknown argument 'momentun'; did you mean 'momentum'?"),
        ({"name": "SGD", "lr": -1}, "outer.lr: must be a positive number, got -1"),
        ({"name": "SGD", "weight_decay": 0.1}, "outer.weight_decay: belongs to the workers' optimizer"),
        ({"name": "slowmo", "momentum": 1.0}, "outer.momentum: must be at least 0 and below 1, got 1.0"),
        ({"name": "slowmo", "beta": 0.5}, "outer: for slowmo, unknown option 'beta'"),
        ({"name": "delayed-nesterov", "every": 0}, "outer.every must be at least 1, got 0"),
        ({"name": "delayed-nesterov", "every": 2, "activation": 0.6}, "must be between 0 and 1 / every = 0.5, got 0.6"),
    ],
)
def test_impossible_outer_optimizers(given, line):
    with pytest.raises(InputError) as caught:
        Outer.made(given)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_given_and_where_it_cannot_be():
    assert Outer.made(None) is None
    outer = Outer("slowmo")
    assert Outer.made(outer) is outer
    assert Outer.made({"name": "SGD", "lr": 0.7, "momentum": 0.9, "nesterov": True}).name == "SGD"
    outer.check(Constant(p=2))
    with pytest.raises(InputError, match="outer = 'slowmo' works on the change of local steps, and full communication"):
        outer.check(Full())
    with pytest.raises(InputError, match="outer = 'slowmo' is not for averagings that follow the clock"):
        outer.check(Clocked())
