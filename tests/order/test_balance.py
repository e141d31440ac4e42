from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.order.balance import WALK_SCALE, Sums, balance


def loop(vectors, workers, leans, workers_alone=False):
    """The papers' loop, one vector at a time; ``lean`` weighs the worker's own sum against the shared one."""
    shared = np.zeros(vectors.shape[1])
    own = {w: np.zeros(vectors.shape[1]) for w in workers.tolist()}
    signs = []
    for c, worker, lean in zip(vectors, workers.tolist(), leans.tolist(), strict=True):
        if not np.isfinite(c @ c):
            signs.append(0)
            continue
        s = own[worker] if workers_alone else (1 - lean) * shared + lean * own[worker]
        sign = 1 if np.linalg.norm(s + c) ** 2 - np.linalg.norm(s - c) ** 2 <= 1e-9 else -1
        signs.append(sign)
        shared += sign * c
        own[worker] += sign * c
    return signs, shared, own


def case(seed, b, k, m):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((b, k)), rng.integers(0, m, b)


def in_parts(sums, vectors, workers, leans, edges, **options):
    edges = sorted({0, len(vectors), *edges})
    parts = [balance(sums, vectors[a:b], workers[a:b], leans[a:b], **options) for a, b in pairwise(edges)]
    return np.concatenate(parts).tolist()


def test_by_hand():
    """s: 0 -> tie, +1 -> (1,0); <s,(1,1)> = 1 > 0, -1 -> (0,-1); <s,(0,2)> = -2, +1 -> (0,1); <s,(3,0)> = 0, +1."""
    vectors = np.array([[1.0, 0], [1, 1], [0, 2], [3, 0]])
    sums = Sums(np.zeros(2))
    assert balance(sums, vectors, np.zeros(4, int), np.zeros(4)).tolist() == [1, -1, 1, 1]
    assert sums.shared.tolist() == [3, 1]


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    b=st.integers(1, 80),
    k=st.integers(1, 6),
    m=st.integers(1, 4),
    mode=st.sampled_from(["shared", "leaning", "alone"]),
    edges=st.lists(st.integers(1, 79), max_size=3),
    bad=st.lists(st.tuples(st.integers(0, 79), st.sampled_from([np.nan, np.inf, -np.inf, 1e200])), max_size=3),
)
def test_blocks_equal_the_papers_loop(seed, b, k, m, mode, edges, bad):
    vectors, workers = case(seed, b, k, m)
    for row, value in bad:
        vectors[row % b, row % k] = value
    leans = np.zeros(b)
    if mode == "leaning":
        leans = np.random.default_rng(seed + 1).choice([0.25, 0.5, 1.0], b)
    elif mode == "alone":
        leans = np.ones(b)
    with np.errstate(over="ignore", invalid="ignore"):
        expected, shared, own = loop(vectors, workers, leans, workers_alone=mode == "alone")
        sums = Sums(None if mode == "alone" else np.zeros(k))
        signs = in_parts(sums, vectors, workers, leans, [edge for edge in edges if edge < b])
    assert signs == expected
    if mode != "alone":
        np.testing.assert_allclose(sums.shared, shared, atol=1e-9)
    for worker, total in sums.own.items():
        np.testing.assert_allclose(total, own[worker], atol=1e-9)


@pytest.mark.parametrize("mode", ["shared", "leaning", "alone"])
def test_slices_of_the_coordinates_give_the_same_signs(mode):
    """Three ranks hold a third of the coordinates each and add up inner products only."""
    vectors, workers = case(0, 90, 12, 5)
    vectors[7, 3] = np.nan  # seen by one rank only, skipped by all
    leans = {"shared": np.zeros(90), "leaning": np.full(90, 0.4), "alone": np.ones(90)}[mode]

    def sums(width):
        return Sums(None if mode == "alone" else np.zeros(width))

    whole = sums(12)
    expected = balance(whole, vectors, workers, leans)

    # What the other ranks add to each call is known by running them first with the answers of the whole.
    calls = []
    balance(sums(12), vectors, workers, leans, total=lambda products: calls.append(products.copy()) or products)
    answers = iter(calls)
    own_share = []
    sliced = sums(4)
    signs = balance(sliced, vectors[:, 4:8], workers, leans, total=lambda p: own_share.append(p) or next(answers))
    assert signs.tolist() == expected.tolist()
    assert any(not np.allclose(share, answer, equal_nan=True) for share, answer in zip(own_share, calls, strict=True))
    if mode != "alone":
        np.testing.assert_allclose(sliced.shared, whole.shared[4:8])


def test_a_bad_row_never_reaches_the_sums():
    vectors, workers = case(3, 20, 5, 2)
    clean = Sums(np.zeros(5))
    good = np.arange(20) != 6
    expected = balance(clean, vectors[good], workers[good], np.zeros(19))
    vectors[6] = np.nan
    sums = Sums(np.zeros(5))
    signs = balance(sums, vectors, workers, np.zeros(20))
    assert signs[6] == 0
    assert signs[good].tolist() == expected.tolist()
    np.testing.assert_array_equal(sums.shared, clean.shared)


def test_only_bad_rows():
    sums = Sums(np.zeros(2))
    assert balance(sums, np.full((3, 2), np.nan), np.zeros(3, int), np.zeros(3)).tolist() == [0, 0, 0]
    assert sums.shared.tolist() == [0, 0]


def test_probabilistic_signs_follow_their_law():
    """+1 with probability 1/2 - <s,c>/(2 c0), c0 = WALK_SCALE * mean ||c||^2: here s = c = (1, 0) after the first."""
    coins = (np.arange(10_000) + 0.5) / 10_000
    plus = 0
    for coin in coins:
        sums = Sums(np.array([1.0, 0.0]), squares=1.0, count=1)
        plus += balance(sums, np.array([[1.0, 0.0]]), np.zeros(1, int), np.zeros(1), np.array([coin]))[0] == 1
    assert plus / 10_000 == pytest.approx(0.5 - 1 / (2 * WALK_SCALE), abs=1e-3)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_probabilistic_signs_keep_sums_short_at_any_scale(scale):
    """5000 random vectors in 10 dimensions: unsigned or coin-flip sums reach about sqrt(5000) = 70."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        vectors = rng.standard_normal((5000, 10))
        vectors *= scale / np.linalg.norm(vectors, axis=1, keepdims=True)
        signs = balance(Sums(np.zeros(10)), vectors, np.zeros(5000, int), np.zeros(5000), rng.random(5000))
        longest = np.linalg.norm(np.cumsum(signs[:, None] * vectors, 0), axis=1).max()
        assert longest < 12 * scale
