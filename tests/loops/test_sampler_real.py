"""The sampler on real ranks: what they are handed is what the papers' loop, run in one process, says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from forked_ranks import run_on_ranks
from hemiola.gradients.sketch import build_sketch, parse_sketch
from hemiola.loops.deal import deal
from hemiola.streams import stream

SCRIPT = Path(__file__).with_name("sampler_ranks.py")
_spec = importlib.util.spec_from_file_location("sampler_ranks", SCRIPT)
assert _spec is not None
ranks = importlib.util.module_from_spec(_spec)
assert _spec.loader is not None
_spec.loader.exec_module(ranks)

pytestmark = pytest.mark.real


@pytest.fixture(scope="module", params=[2, 4])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of 2 or 4 ranks wrote down."""
    folder = tmp_path_factory.mktemp("ranks")
    assert "SamplerWarning" not in run_on_ranks(SCRIPT, folder, request.param)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


def pair_balance(orders: list[np.ndarray], gradients: list[np.ndarray]) -> list[np.ndarray]:
    """The CD-GraB paper's loop, on (n, d) gradients in the order of visiting."""
    size = len(orders[0])
    following = [np.full(size, -1) for _ in orders]
    total, left, right = np.zeros(gradients[0].shape[1]), 0, size - 1
    for t in range(0, size - 1, 2):
        for j, order in enumerate(orders):
            c = gradients[j][t] - gradients[j][t + 1]
            front, back = (t, t + 1) if total @ c <= 0 else (t + 1, t)
            total += c if total @ c <= 0 else -c
            following[j][left], following[j][right] = order[front], order[back]
        left, right = left + 1, right - 1
    if size % 2:
        for j, order in enumerate(orders):
            following[j][left] = order[-1]
    return following


def simulate(name: str, count: int) -> list[list[list[int]]]:
    """[rank][epoch] -> examples: train in one process, with ordinary per-unit gradients and the loop above."""
    _, sketch, unit, batch, epochs, _ = ranks.SCENARIOS[name]
    accumulate = 2 if "accumulate" in name else 1
    inputs, targets = ranks.make_data().tensors
    model = ranks.make_model()
    parameters = list(model.parameters())
    fold = build_sketch(parse_sketch(sketch), sum(p.numel() for p in parameters), 3)
    dealt = deal(ranks.EXAMPLES, unit, count, seed=3, drop_last=False)
    size = dealt.shards.shape[1]
    orders = [stream("order", 3, 0, j).permutation(size) for j in range(count)]
    seen: list[list[list[int]]] = [[] for _ in range(count)]
    for _ in range(epochs):
        sequences = [dealt.examples(j, orders[j]) for j in range(count)]
        gradients: list[list[torch.Tensor]] = [[] for _ in range(count)]
        for start in range(0, dealt.length, batch):
            mean = [torch.zeros_like(p) for p in parameters]
            for j, sequence in enumerate(sequences):
                part = sequence[start : start + batch]
                losses = F.cross_entropy(model(inputs[part]), targets[part], reduction="none")
                for at in range(0, len(part), unit):
                    found = torch.autograd.grad(losses[at : at + unit].mean(), parameters, retain_graph=True)
                    gradients[j].append(torch.cat([g.flatten() for g in found]))
                found = torch.autograd.grad(losses.mean(), parameters)
                mean = [a + g / count for a, g in zip(mean, found, strict=True)]
            if accumulate == 1:
                total = mean
            elif start // batch % 2 == 0:
                total = mean
                continue
            else:
                total = [a + b for a, b in zip(total, mean, strict=True)]
            with torch.no_grad():
                for p, g in zip(parameters, total, strict=True):
                    p -= ranks.RATE * g
        for j in range(count):
            seen[j].append(sequences[j].tolist())
        rows = [fold.apply(torch.stack(each[:size])).numpy() for each in gradients]
        orders = pair_balance(orders, rows)
    return seen


@pytest.mark.parametrize("name", ["plain-exact", "plain-fold", "ddp-exact", "ddp-fold-accumulate"])
def test_real_ranks_are_handed_what_the_paper_says(run: list[dict], name: str) -> None:
    expected = simulate(name, len(run))
    for rank, found in enumerate(run):
        assert found[name]["seen"] == expected[rank]
    assert found[name]["seen"][1] != found[name]["seen"][2]


@pytest.mark.parametrize("name", ranks.SCENARIOS)
def test_every_rank_knows_the_same_orders_and_they_change(run: list[dict], name: str) -> None:
    known = [found[name]["orders"] for found in run]
    assert all(each == known[0] for each in known)
    assert known[0][0] != known[0][1]


@pytest.mark.parametrize("name", ranks.SCENARIOS)
def test_every_epoch_visits_everything(run: list[dict], name: str) -> None:
    leave = ranks.SCENARIOS[name][-1]
    for epoch in range(ranks.SCENARIOS[name][-2]):
        if leave is not None and epoch == 1:
            continue
        shards = [found[name]["seen"][epoch] for found in run]
        assert len({len(shard) for shard in shards}) == 1
        assert set().union(*shards) == set(range(ranks.EXAMPLES))
        assert sum(len(shard) for shard in shards) < ranks.EXAMPLES + len(run)


@pytest.mark.parametrize("name", ranks.RESUMED)
def test_ranks_that_resume_in_mid_epoch_see_what_they_would_have_seen(run: list[dict], name: str) -> None:
    for found in run:
        assert found[f"{name}-resumed"] == found[name]


def test_an_epoch_that_was_left_early_counts_for_what_was_trained_on(run: list[dict]) -> None:
    found = run[0]["plain-ghost-break"]
    assert len(found["seen"][1]) == 3 * 4
    size = len(found["orders"][0]) // len(run)
    assert all(sorted(orders[:size]) == list(range(size)) for orders in found["orders"])


def test_one_deck_is_visited_once_an_epoch_whoever_is_slow_and_whoever_goes_on(run):
    found = [rank["deck"] for rank in run]

    def together(*parts: str) -> list[int]:
        return sorted(example for rank in found for part in parts for example in rank[part])

    everything = list(range(ranks.EXAMPLES))
    assert together("first") == everything
    assert together("before", "after") == everything
    assert together("last") == everything
    assert sorted(found[0]["alone"] + together("before")) == everything
    for number in range(2):
        orders = [rank["orders"][number] for rank in found]
        assert all(order == orders[0] for order in orders)
    assert found[0]["orders"][0] != found[0]["orders"][1]
