"""Shards: a partition, nearly equal in size, of the kind that was asked for."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hemiola.errors import InputError
from hemiola.lab.tasks import TensorExamples
from hemiola.training import split_examples


def examples(count: int, classes: int = 4) -> TensorExamples:
    return TensorExamples(torch.zeros(count, 1), torch.arange(count) % classes)


@given(
    count=st.integers(1, 120),
    workers=st.integers(1, 12),
    split=st.sampled_from(["iid", "label-sorted", {"dirichlet": 0.1}, {"dirichlet": 10.0}]),
    seed=st.integers(0, 2**32 - 1),
)
def test_shards_are_a_partition_of_nearly_equal_parts(count, workers, split, seed):
    if workers > count:
        with pytest.raises(InputError, match=f"at most {count}"):
            split_examples(examples(count), workers, split, seed)
        return
    shards = split_examples(examples(count), workers, split, seed)
    assert sorted(np.concatenate(shards)) == list(range(count))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def test_label_sorted_shards_hold_few_classes():
    shards = split_examples(examples(80), 4, "label-sorted", seed=0)
    assert [set(shard % 4) for shard in shards] == [{0}, {1}, {2}, {3}]


def test_a_small_alpha_gives_more_uneven_classes_than_a_large_one():
    def unevenness(alpha: float) -> float:
        shards = split_examples(examples(4000), 8, {"dirichlet": alpha}, seed=1)
        return float(np.mean([np.bincount(shard % 4, minlength=4).std() for shard in shards]))

    assert unevenness(0.1) > 2 * unevenness(10.0)


def test_seeds_give_different_shards_and_the_same_seed_the_same():
    one, again, other = (split_examples(examples(100), 4, "iid", seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_splitting_by_label_needs_labels():
    regression = TensorExamples(torch.zeros(10, 1), torch.zeros(10))
    with pytest.raises(InputError, match="one class each"):
        split_examples(regression, 2, "label-sorted", seed=0)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), workers=st.integers(1, 14), seed=st.integers(0, 999))
def test_natural_shards_hold_whole_groups(sizes, workers, seed):
    groups = np.repeat(np.arange(len(sizes)) * 7, sizes)
    grouped = TensorExamples(torch.zeros(len(groups), 1), torch.zeros(len(groups)), groups=groups)
    if workers > len(sizes):
        with pytest.raises(InputError, match="workers cannot share"):
            split_examples(grouped, workers, "natural", seed)
        return
    shards = split_examples(grouped, workers, "natural", seed)
    assert sorted(np.concatenate(shards)) == list(range(len(groups)))
    held = [set(groups[shard]) for shard in shards]
    assert sum(map(len, held)) == len(sizes)  # no group is at two workers
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_natural_shards_need_groups():
    with pytest.raises(InputError, match="'natural' needs examples that come in groups"):
        split_examples(examples(10), 2, "natural", seed=0)
