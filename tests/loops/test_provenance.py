"""Which item is in which row of a padded batch."""

import numpy as np
import torch

from hemiola.loops.provenance import Provenance


def padded(items):
    width = max(len(item["ids"]) for item in items)
    ids = torch.tensor([item["ids"] + [0] * (width - len(item["ids"])) for item in items])
    return {"ids": ids, "mask": (ids > 0).long(), "labels": torch.tensor([item["label"] for item in items])}


ITEMS = [{"ids": list(range(start, start + length)), "label": start % 2} for start, length in [(5, 3), (1, 5), (8, 4)]]


def test_a_mask_that_looks_like_a_padded_label_says_nothing():
    # Every row of the mask begins with 1, which is also the label of two items.
    assert Provenance(padded).rows(ITEMS, padded(ITEMS)) is None


def test_sorting_by_length_is_seen_through_padding():
    def longest_first(items):
        return padded(sorted(items, key=lambda item: -len(item["ids"])))

    assert np.array_equal(Provenance(longest_first).rows(ITEMS, longest_first(ITEMS)), [1, 2, 0])
