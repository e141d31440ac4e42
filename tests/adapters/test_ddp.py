"""Communication hooks on two real ranks: what `ddp_ranks.py` saved."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import hemiola
from forked_ranks import run_on_ranks
from hemiola.adapters.ddp import GradientWire, LocalSteps

WIRES = ("bf16", "int8", "int4", "qsgd8", "qsgd4")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    run_on_ranks(Path(__file__).with_name("ddp_ranks.py"), folder, 2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.real
@pytest.mark.parametrize("kind", ["hook", "compiled", "accumulated"])
def test_gradients_stay_local_and_weights_are_averaged(ranks, kind):
    found = [rank["local"][kind] for rank in ranks]
    reference = ranks[0]["local"]["accumulated reference" if kind == "accumulated" else "reference"]["weights"]
    assert found[0]["periods"] == [3, 3, 1]
    assert not torch.equal(found[0]["apart"], found[1]["apart"])
    torch.testing.assert_close(found[0]["weights"], found[1]["weights"], rtol=0, atol=0)
    torch.testing.assert_close(found[0]["weights"], reference)


@pytest.mark.real
@pytest.mark.parametrize("kind", ["hook", "compiled"])
def test_when_it_is_closed_gradients_are_all_reduced_again(ranks, kind):
    first, second = (rank["local"][kind]["together"] for rank in ranks)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.real
@pytest.mark.parametrize("wire", WIRES)
def test_a_wire_averages_gradients_alike_on_all_ranks(ranks, wire):
    first, second = (rank["wires"][wire] for rank in ranks)
    assert torch.equal(first["arrived"], second["arrived"])
    error = (first["arrived"] - first["true"]).norm(dim=1) / first["true"].norm(dim=1)
    assert float(error.max()) < {"bf16": 0.01, "int8": 0.03, "int4": 0.4, "qsgd8": 0.03, "qsgd4": 0.5}[wire]
    assert first["bytes"] < 1.1 * 2 * {"bf16": 2, "int8": 1, "int4": 0.5, "qsgd8": 1, "qsgd4": 0.5}[wire] * (
        10 * first["true"].shape[1]
    )


@pytest.mark.real
@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_error_feedback_makes_up_for_what_was_rounded_away(ranks, wire):
    # The residuals telescope: the sum of nine steps is about as far off as one is; without, three times as far.
    found = ranks[0]["wires"][wire]
    errors = (found["arrived"] - found["true"])[1:]  # DDP makes its buckets anew after the first step
    assert len(errors) == 9
    assert float(errors.sum(0).norm()) < 2 * float(errors[0].norm())
    assert found["state"]["kind"] == "gradient-wire"


@pytest.mark.real
def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_on_all(ranks):
    for rank in ranks:
        assert bool(rank["wires"]["int8"]["broken"].isnan().any())


def test_bad_input_is_one_clear_line():
    model = nn.Linear(2, 2)
    with pytest.raises(hemiola.InputError, match="takes the DistributedDataParallel model, got Linear"):
        LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(hemiola.InputError, match="wire must be one of bf16, int8, int4, qsgd8, qsgd4, got 'int2'"):
        GradientWire("int2")
    with pytest.raises(hemiola.InputError, match="saved with wire = 'int8', this run has 'int4'"):
        GradientWire("int4").load_state_dict(GradientWire("int8").state_dict())
