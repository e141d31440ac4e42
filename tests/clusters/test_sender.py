"""What arrives of the workers' changes: everyone's in one call is what each by itself would be."""

import numpy as np
import pytest
import torch

from hemiola.clusters.sender import Sender
from hemiola.contracts import Batch, Stint
from hemiola.wire.exchange import Exchange


def stint(worker: int, number: int) -> Stint:
    return Stint(worker=worker, number=number, version=0, batches=(Batch(0, 0, np.arange(1)),), rates=(0.1,))


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("wire", [{"wire": "int8"}, {"wire": "int4"}, {"wire": "bf16"}, {"quantise": 8}], ids=str)
def test_changes_that_are_sent_together_arrive_as_if_sent_one_by_one(wire, feedback) -> None:
    exchange = Exchange(**wire, error_feedback=feedback)
    together, alone = Sender(exchange, 300, seed=1), Sender(exchange, 300, seed=1)
    random = torch.Generator().manual_seed(0)
    for number, workers in enumerate([[0, 1, 2], [2, 0], [1], [0, 2, 1, 3]]):
        rows = torch.randn(len(workers), 300, generator=random)
        stints = [stint(worker, number) for worker in workers]
        arrived = together.send(rows, stints)
        one_by_one = torch.cat([alone.send(row[None], [one]) for row, one in zip(rows, stints, strict=True)])
        assert torch.equal(arrived, one_by_one)
        assert not torch.equal(arrived, rows)
    ours, theirs = together.state_dict()["residuals"], alone.state_dict()["residuals"]
    assert set(ours) == set(theirs) == ({0, 1, 2, 3} if exchange.feedback else set())
    assert all(torch.equal(ours[worker], theirs[worker]) for worker in ours)


def test_two_stints_of_one_worker_pass_in_their_order() -> None:
    exchange = Exchange(wire="int4")
    together, alone = Sender(exchange, 50, seed=0), Sender(exchange, 50, seed=0)
    rows = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    arrived = together.send(rows, [stint(0, 0), stint(0, 1)])
    assert torch.equal(arrived[0], alone.send(rows[:1], [stint(0, 0)])[0])
    assert torch.equal(arrived[1], alone.send(rows[1:], [stint(0, 1)])[0])
