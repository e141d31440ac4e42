"""The wire: error bounds, unbiasedness, telescoping residuals, exact bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.errors import InputError
from hemiola.streams import torch_stream
from hemiola.wire.codec import WIRES, quantiser, round_trip
from hemiola.wire.exchange import Exchange

ALL = [*WIRES.values(), quantiser(8), quantiser(4)]


def vectors(*shape, seed=0):
    return torch.randn(*shape, generator=torch_stream("test", seed)) * 10.0 ** torch.randint(
        -6, 3, (shape[-1],), generator=torch_stream("test", seed + 1)
    )


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("fp32", 1000, 4000),
        ("bf16", 1000, 2000),
        ("int8", 1000, 1000 + 2 * 4),
        ("int8", 512, 512 + 4),
        ("int4", 1000, 500 + 8 * 4),
        ("int4", 7, 4 + 4),
        ("qsgd8", 1025, 1025 + 3 * 4),
    ],
)
def test_bytes_are_counted_exactly(name, numbers, expected):
    codec = quantiser(8) if name == "qsgd8" else WIRES[name]
    assert codec.size(numbers) == expected
    payload = codec.encode(torch.ones(numbers), torch_stream("test"))
    assert payload.dtype == torch.uint8
    assert payload.numel() == expected


def test_int4_by_hand():
    """Largest magnitude 7, so the levels are the whole numbers from -7 to 7."""
    payload = WIRES["int4"].encode(torch.tensor([7.0, -3.4, 0.4, 2.6, -7.0]))
    assert payload[:3].tolist() == [15 | 5 << 4, 8 | 11 << 4, 1 | 8 << 4]
    assert WIRES["int4"].decode(payload, 5).tolist() == [7.0, -3.0, 0.0, 3.0, -7.0]


@given(numbers=st.integers(1, 1400), rows=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_error_bounds_and_rows_do_not_meet(numbers, rows, seed):
    x = vectors(rows, numbers, seed=seed)
    for codec in ALL:
        decoded = codec.decode(codec.encode(x, torch_stream("test", seed)), numbers)
        if codec.bits == 32:
            assert torch.equal(decoded, x)
        elif codec.bits == 16:
            assert bool(((decoded - x).abs() <= x.abs() * 2.0**-8).all())
        else:
            slack = 1.0 if codec.stochastic else 0.5
            for row, got in zip(x, decoded, strict=True):
                for block, back in zip(row.split(codec.block), got.split(codec.block), strict=True):
                    step = block.abs().max() / codec.levels
                    assert (block - back).abs().max() <= slack * step * (1 + 1e-5)
        if not codec.stochastic:
            assert torch.equal(decoded[0], codec.decode(codec.encode(x[0]), numbers))


@pytest.mark.parametrize("bits", [4, 8])
def test_qsgd_is_unbiased_and_nearest_rounding_is_not(bits):
    x = vectors(600)
    stream = torch_stream("test", "unbiased")
    codec, rounds = quantiser(bits), 4000
    total = torch.zeros(600, dtype=torch.float64)
    for _ in range(rounds):
        total += codec.decode(codec.encode(x, stream), 600).double()
    bias = total / rounds - x.double()
    step = torch.cat([b.abs().max().expand(len(b)) for b in x.split(512)]).double() / codec.levels
    # the deviation of one rounding is at most step / 2; 600 numbers within 5 standard errors
    assert bool((bias.abs() <= 5 * step / 2 / rounds**0.5 + 1e-6 * step).all())
    nearest = WIRES[f"int{bits}"]
    wrong = nearest.decode(nearest.encode(x), 600).double() - x.double()
    assert bool((wrong.abs() > 10 * bias.abs().max() / step.max() * step).any())


def test_qsgd_depends_on_its_stream_only():
    x, codec = vectors(300), quantiser(8)
    first, again, other = (codec.encode(x, torch_stream("qsgd", key)) for key in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with pytest.raises(ValueError, match="needs a generator"):
        codec.encode(x)


@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
def test_error_feedback_telescopes(wire):
    """Sum of what arrived + the last residual = sum of what was sent; without feedback the errors pile up."""
    sent = torch.zeros(4, 700, dtype=torch.float64)
    arrived, plain = sent.clone(), sent.clone()
    residual = torch.zeros(4, 700)
    step = vectors(4, 700, seed=5)
    for k in range(60):
        x = step + 1e-3 * vectors(4, 700, seed=k)
        decoded, residual, size = round_trip(WIRES[wire], x, residual)
        assert size == WIRES[wire].size(700)
        sent += x
        arrived += decoded
        plain += round_trip(WIRES[wire], x)[0]
    torch.testing.assert_close(arrived + residual, sent, rtol=1e-5, atol=1e-3)
    assert (arrived - sent).norm() < 0.2 * (plain - sent).norm()


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_detected(codec, bad):
    x = torch.ones(2, 600)
    x[1, 599] = bad
    with pytest.raises(FloatingPointError, match=f"not finite on the {codec.name} wire"):
        codec.encode(x, torch_stream("test"))
    with pytest.raises(FloatingPointError, match="not finite"):
        round_trip(codec, x, generator=torch_stream("test"))


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
def test_zeros_and_the_very_small_stay_finite(codec):
    x = torch.tensor([0.0, 1e-42, -1e-38, 0.0])
    decoded, residual, _ = round_trip(codec, x, torch.zeros(4), torch_stream("test"))
    assert bool(decoded.isfinite().all())
    torch.testing.assert_close(decoded + residual, x, rtol=0.0, atol=1e-44)
    assert codec.decode(codec.encode(torch.zeros(700), torch_stream("test")), 700).abs().sum() == 0.0


def test_a_payload_of_another_length_is_refused():
    with pytest.raises(ValueError, match="5 int8 numbers take 9 bytes, got 3"):
        WIRES["int8"].decode(torch.zeros(3, dtype=torch.uint8), 5)


# ------------------------------------------------------------------------------------------------------------ exchange


def test_exchange_chooses_codec_and_feedback():
    assert Exchange().codec is WIRES["fp32"]
    assert not Exchange().feedback
    assert Exchange(wire="int8").feedback
    assert not Exchange(wire="int8", error_feedback=False).feedback
    assert Exchange(quantise=8).codec.stochastic
    assert not Exchange(quantise=8).feedback


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Exchange(wire="int9"), "wire must be one of fp32, bf16, int8, int4, got 'int9'; did you mean 'int8'?"),
        (lambda: Exchange(momentum="mean"), "momentum must be one of local, average, reset, got 'mean'"),
        (lambda: Exchange(overlap=-1), "overlap must be at least 0, got -1"),
        (lambda: Exchange(overlap="aut"), "overlap, unless a number of steps, must be one of auto, got 'aut'"),
        (lambda: Exchange(quantise=5), "quantise must be 4 or 8 bits, got 5"),
        (lambda: Exchange(quantise=8, wire="int8"), "quantise = 8 sets the wire; leave wire at 'fp32', got 'int8'"),
        (lambda: Exchange(quantise=8).check(local=True), "quantise = 8 rounds gradients and needs full communication"),
        (lambda: Exchange(overlap=2).check(local=False), "overlap = 2 needs local steps"),
        (lambda: Exchange(momentum="reset").check(local=False), "momentum = 'reset' needs local steps"),
    ],
)
def test_impossible_exchanges(make, line):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(line)
