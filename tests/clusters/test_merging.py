"""Merging by hand: a weighted sum, a spread, a look for numbers that are not finite."""

from __future__ import annotations

import pytest
import torch

from hemiola.clusters.merging import all_finite, spread_of, weighted_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weighted_sum_by_hand(dtype):
    rows = [torch.tensor([1.0, 2.0], dtype=dtype), torch.tensor([3.0, -2.0], dtype=dtype)]
    total = weighted_sum(rows, [0.5, 0.25])
    assert total.dtype == dtype
    assert total.tolist() == [1.25, 0.5]
    assert rows[0].tolist() == [1.0, 2.0]


def test_spread_by_hand():
    """The mean is (2, 0); the squared distances are 1 + 4 and 1 + 4."""
    assert spread_of([torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])]) == 5.0


def test_a_sum_that_overflows_is_not_taken_for_a_number_that_is_not_finite():
    assert all_finite(torch.full((4,), 3e38))
    assert not all_finite(torch.tensor([1.0, float("inf")]))
    assert not all_finite(torch.tensor([float("inf"), float("-inf")]))
