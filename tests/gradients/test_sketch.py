from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.errors import InputError
from hemiola.gradients.sketch import Exact, Fold, SketchSpec, build_sketch, decode_rows, encode_rows, parse_sketch


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("exact", SketchSpec("exact")),
        ("fold:1024", SketchSpec("fold", width=1024)),
        ("ghost:4", SketchSpec("ghost", width=1024, rank=4)),
        ("ghost:2:256", SketchSpec("ghost", width=256, rank=2)),
        ("fold:8:int8", SketchSpec("fold", width=8, int8=True)),
        ("ghost:2:256:int8", SketchSpec("ghost", width=256, rank=2, int8=True)),
    ],
)
def test_parse(text, spec):
    assert parse_sketch(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fold", "got 'fold'$"),
        ("exact:3", "got 'exact:3'$"),
        ("exact:int8", "got 'exact:int8'$"),
        ("fodl:3", "did you mean 'fold'"),
        ("fold:0", "K in sketch 'fold:0' must be a whole number of at least 1, got '0'"),
        ("fold:-4", "got '-4'"),
        ("fold:1.5", "got '1.5'"),
        ("ghost:x", "R in sketch 'ghost:x'"),
        ("ghost:1:2:3", "got 'ghost:1:2:3'"),
        ("", "got ''"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(InputError, match=message):
        parse_sketch(text)


def slow_fold(fold, row):
    """The definition: random signs, then a sum over equal index modulo k; signs are read off unit vectors."""
    out = [0.0] * fold.width
    for i, number in enumerate(row.tolist()):
        unit = torch.zeros(1, fold.dimension, dtype=torch.float64)
        unit[0, i] = 1
        image = fold.apply(unit)[0]
        assert image.abs().sum() == 1
        assert image[i % fold.width].abs() == 1
        out[i % fold.width] += float(image[i % fold.width]) * number
    return torch.tensor(out, dtype=torch.float64)


@settings(deadline=None)
@given(
    width=st.integers(1, 9),
    dimension=st.integers(1, 40),
    units=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    seed=st.integers(0, 5),
)
def test_fold_is_its_definition_however_it_is_filled_in(width, dimension, units, cuts, seed):
    fold = Fold(width, dimension, seed)
    rows = torch.randn(units, dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    whole = fold.apply(rows)
    torch.testing.assert_close(whole, torch.stack([slow_fold(fold, row) for row in rows]))

    edges = sorted({0, dimension, *(min(cut, dimension) for cut in cuts)})
    pieces = torch.zeros_like(whole)
    for start, end in pairwise(edges):
        fold.add_(pieces, start, rows[:, start:end])
    torch.testing.assert_close(pieces, whole)


def test_fold_depends_on_its_seed_only():
    row = torch.randn(1, 500)
    torch.testing.assert_close(Fold(64, 500, 3).apply(row), Fold(64, 500, 3).apply(row), rtol=0, atol=0)
    assert not torch.equal(Fold(64, 500, 3).apply(row), Fold(64, 500, 4).apply(row))


def test_fold_keeps_inner_products_on_average():
    """E <fold a, fold b> = <a, b> with variance below 2 |a|^2 |b|^2 / k; over 50 folds the mean is within 4 sigma."""
    a, b = torch.randn(2, 3000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b += 0.5 * a
    products = torch.stack([(lambda f: f[0] @ f[1])(Fold(256, 3000, s).apply(torch.stack([a, b]))) for s in range(50)])
    sigma = (2 * (a @ a) * (b @ b) / 256 / 50).sqrt()
    assert abs(products.mean() - a @ b) < 4 * sigma
    assert products.std() < 2 * (2 * (a @ a) * (b @ b) / 256).sqrt()


def test_low_precision_rows_fold_in_float32():
    rows = torch.ones(2, 100, dtype=torch.bfloat16)
    assert Fold(8, 100, 0).apply(rows).dtype == torch.float32


def test_exact_is_the_gradient_itself():
    exact = Exact(7)
    rows = torch.randn(3, 7)
    assert exact.apply(rows) is rows
    out = torch.zeros(3, 7)
    exact.add_(out, 0, rows[:, :4])
    exact.add_(out, 4, rows[:, 4:])
    assert torch.equal(out, rows)


def test_build_sketch_folds_only_where_that_is_shorter():
    assert isinstance(build_sketch(parse_sketch("exact"), 100, 0), Exact)
    assert isinstance(build_sketch(parse_sketch("fold:100"), 100, 0), Exact)
    assert build_sketch(parse_sketch("fold:99"), 100, 0).width == 99


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=1, max_size=5))
def test_int8_rows_are_off_by_half_a_level_at_most(numbers):
    rows = torch.tensor(numbers)
    payload = encode_rows(rows)
    assert payload.dtype == torch.uint8
    assert payload.shape == (len(rows), 3 + 4)
    decoded = decode_rows(payload)
    level = rows.abs().amax(1, keepdim=True) / 127
    assert bool(((decoded - rows).abs() <= 0.5001 * level + 1e-30).all())


def test_int8_rows_by_hand():
    decoded = decode_rows(encode_rows(torch.tensor([[127.0, -1.4, 0.6], [0.0, 0.0, 0.0]])))
    assert decoded.tolist() == [[127.0, -1.0, 1.0], [0.0, 0.0, 0.0]]
    bad = decode_rows(encode_rows(torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [1.0, 2.0]])))
    assert bad.isfinite().all(1).tolist() == [False, False, True]
