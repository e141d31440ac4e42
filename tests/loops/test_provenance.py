"""Which items a collate function kept, and in which rows of its batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import default_collate

from hemiola.loops.provenance import PROVEN, SPOTS, UNKNOWN, Provenance

Item = tuple[list[int], float]


def ragged(items: list[Item]) -> dict[str, Tensor]:
    """Pads tokens at their end."""
    longest = max(len(tokens) for tokens, _ in items)
    rows = [tokens + [0] * (longest - len(tokens)) for tokens, _ in items]
    return {"tokens": torch.tensor(rows), "weights": torch.tensor([weight for _, weight in items])}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(a[key].nan_to_num(-1).tolist() == b[key].nan_to_num(-1).tolist() for key in a)


def kept_rows(kept: np.ndarray | None, items: list[Any]) -> list[int]:
    return list(range(len(items))) if kept is None else kept.tolist()


DISTINCT = [([n, n + 1, n * n][: 1 + n % 3], n / 7) for n in range(1, 9)]


@settings(max_examples=200, deadline=None)
@given(
    items=st.lists(
        st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from([0.1, 0.5, float("nan")])),
        min_size=1,
        max_size=8,
    ),
    seen_before=st.booleans(),
    data=st.data(),
)
def test_rows_are_told_apart_as_far_as_their_values_do(items: list[Item], seen_before: bool, data: Any) -> None:
    """Any rows, in any order: what is found are rows with the same values, or nothing."""
    rows = data.draw(st.permutations(range(len(items))))
    rows = rows[: data.draw(st.integers(1, len(items)))]
    explained = Provenance(ragged)
    for _ in range((PROVEN + 1) * seen_before):  # from then on batches are expected to be in place
        assert explained.rows(list(DISTINCT), ragged(DISTINCT)) is None
    batch = ragged([items[row] for row in rows])
    kept = explained.rows(list(items), batch)
    if kept is not UNKNOWN:
        assert same(ragged([items[row] for row in kept_rows(kept, items)]), batch)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=6),
    data=st.data(),
)
def test_a_collate_function_that_kept_items_in_place_is_not_taken_at_its_word(values: list[Any], data: Any) -> None:
    explained = Provenance(default_collate)
    first = [torch.tensor([n, 2 * n, 7]) for n in range(5)]
    for _ in range(PROVEN + 1):
        assert explained.rows(first, default_collate(first)) is None
    items = [torch.tensor(value) for value in values]
    rows = data.draw(st.permutations(range(len(items))))
    batch = default_collate([items[row] for row in rows])
    kept = explained.rows(items, batch)
    assert torch.equal(torch.stack([items[row] for row in kept_rows(kept, items)]), batch)


@pytest.mark.parametrize("before", [False, True])
def test_distinct_items_are_always_found_again(before: bool) -> None:
    explained = Provenance(ragged)
    for _ in range((PROVEN + 1) * before):
        explained.rows(list(DISTINCT), ragged(DISTINCT))
    for rows in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 0, 4], [2, 3, 5, 6], [7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5, 7, 6]):
        kept = explained.rows(list(DISTINCT), ragged([DISTINCT[row] for row in rows]))
        assert kept_rows(kept, DISTINCT) == rows


def test_of_a_function_that_kept_items_in_place_a_few_rows_are_compared_others_each_time() -> None:
    read: list[int] = []

    class Read(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            read.append(super().__getitem__(key)[0])
            return super().__getitem__(key)

    explained, count = Provenance(default_collate), 3 * SPOTS
    items = [Read(x=torch.tensor([n, 2 * n])) for n in range(count)]
    batch = {"x": torch.tensor([[n, 2 * n] for n in range(count)])}
    for _ in range(PROVEN + 1):
        assert explained.rows(items, batch) is None
    read.clear()
    for _ in range(3):
        assert explained.rows(items, batch) is None
    assert sorted(map(int, read)) == list(range(count))
    moved = [*range(1, count), 0]
    kept = explained.rows(items, {"x": batch["x"][moved]})
    assert kept is not None
    assert kept.tolist() == moved
    read.clear()
    assert explained.rows(items, batch) is None
    assert len(read) != SPOTS  # now it has to prove itself again


def padded(items: list[Any]) -> dict[str, Tensor]:
    width = max(len(item["ids"]) for item in items)
    ids = torch.tensor([item["ids"] + [0] * (width - len(item["ids"])) for item in items])
    return {"ids": ids, "mask": (ids > 0).long(), "labels": torch.tensor([item["label"] for item in items])}


ITEMS = [{"ids": list(range(start, start + length)), "label": start % 2} for start, length in [(5, 3), (1, 5), (8, 4)]]


def test_a_mask_that_looks_like_a_padded_label_says_nothing() -> None:
    # Every row of the mask begins with 1, which is also the label of two items.
    assert Provenance(padded).rows(ITEMS, padded(ITEMS)) is None


def test_sorting_by_length_is_seen_through_padding() -> None:
    def longest_first(items: list[Any]) -> dict[str, Tensor]:
        return padded(sorted(items, key=lambda item: -len(item["ids"])))

    assert np.array_equal(Provenance(longest_first).rows(ITEMS, longest_first(ITEMS)), [1, 2, 0])


def standardized(items: list[Tensor]) -> Tensor:
    """Leaves nothing as it was, and drops what is negative."""
    return torch.stack([(item - 3) ** 3 for item in items if item[0] >= 0])


def test_a_collate_function_that_changes_everything_is_asked_item_by_item() -> None:
    items = [torch.tensor([float(n), 1.0]) for n in (4, -1, 2, -5, 9)]
    state = torch.get_rng_state()
    kept = Provenance(standardized).rows(items, standardized(items))
    assert kept is not None
    assert kept.tolist() == [0, 2, 4]
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_that_cannot_be_explained_are_unknown() -> None:
    def mixed(items: list[Tensor]) -> Tensor:
        return default_collate(items)[:2].sum(1, keepdim=True) ** 0.5

    items = [torch.tensor([float(n), 1.0]) for n in range(1, 6)]
    assert Provenance(mixed).rows(items, mixed(items)) is UNKNOWN
