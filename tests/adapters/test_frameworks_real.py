"""Lightning, Accelerate and the Trainer on two real ranks: what `framework_ranks.py` saved under torchrun."""

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

for framework in ("lightning", "accelerate", "transformers"):
    pytest.importorskip(framework)
sys.path.insert(0, str(Path(__file__).parent))

from parts import EXAMPLES, passes  # noqa: E402

pytestmark = pytest.mark.real
HALF = EXAMPLES // 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frameworks")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("framework_ranks.py")), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return lambda name: [torch.load(folder / f"with_{name}-{rank}.pt") for rank in range(2)]


def shared_out(visited):
    """Whether every epoch visited every example once, on one rank or the other."""
    epochs = zip(*(passes(each, HALF) for each in visited), strict=True)
    return [sorted(chain(*each)) for each in epochs] == [list(range(EXAMPLES))] * (len(visited[0]) // HALF)


def same(weights):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(*weights, strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "local"])
def test_lightning_deals_every_example_once_and_ends_with_one_model(ranks, strategy):
    found = [rank[strategy] for rank in ranks("lightning")]
    assert shared_out([each["visited"] for each in found])
    assert [each["told"]["learnt_from"] for each in found] == [HALF, HALF]
    assert same([each["weights"] for each in found])


def test_lightning_averages_when_the_period_says_and_validates_what_was_averaged(ranks):
    found = [rank["local"] for rank in ranks("lightning")]
    assert found[0]["periods"] == [3] * 6
    assert same([each["validated"] for each in found])


def test_lightning_resumes_in_mid_epoch(ranks):
    whole, resumed = ([rank[key] for rank in ranks("lightning")] for key in ("local", "resumed"))
    for mine, theirs in zip(resumed, whole, strict=True):
        assert sorted(mine["visited"][:16]) == sorted(theirs["visited"][32:48])
    assert shared_out([each["visited"][16:] for each in resumed])
    assert resumed[0]["steps"] == [9, 12, 15, 18]
    assert same([each["weights"] for each in resumed])


def test_accelerate_deals_averages_saves_and_goes_on(ranks):
    found = ranks("accelerate")
    assert shared_out([each["visited"] for each in found])
    assert [each["told"]["learnt_from"] for each in found] == [HALF, HALF]
    assert found[0]["periods"] == [4, 4, 4, 4, 2]
    for key in ("weights", "averaged", "loaded"):
        assert same([each[key] for each in found]), key
    assert same([found[0]["averaged"], found[0]["loaded"]])
    for each in found:
        assert sorted(each["rest"]) == sorted(each["visited"][HALF + 12 : 2 * HALF])


def test_the_trainer_deals_averages_and_resumes(ranks):
    whole, resumed = ([rank[key] for rank in ranks("transformers")] for key in ("whole", "resumed"))
    assert shared_out([each["visited"] for each in whole])
    assert [each["told"]["learnt_from"] for each in whole] == [HALF, HALF]
    assert whole[0]["steps"] == [4, 8, 12, 16, 18]
    assert resumed[0]["steps"] == [12, 16, 18]
    for mine, theirs in zip(resumed, whole, strict=True):
        assert sorted(mine["visited"][:12]) == sorted(theirs["visited"][36:48])
    assert same([each["weights"] for each in whole])
    assert same([each["weights"] for each in resumed])


@pytest.mark.parametrize("framework", ["lightning", "fabric", "accelerate", "trainer"])
def test_a_framework_that_would_shard_the_sampler_again_is_an_error_at_once(ranks, framework):
    for said in ranks("defaults"):
        assert "to 2 ranks once more" in said[framework]
