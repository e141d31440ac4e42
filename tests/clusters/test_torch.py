"""The torch cluster with 2 and 4 ranks: the same as the simulated one, bit for bit the same on all ranks, resumable."""

import json
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from torch_ranks import TASKS, Job, train_here, train_on_ranks

from hemiola import peers
from hemiola.clusters.torch import group
from hemiola.clusters.torch.group import Place
from hemiola.errors import InputError
from hemiola.lab import launching
from hemiola.lab import ranks as rank_side
from hemiola.lab.cell_folder import CellFolder
from hemiola.lab.experiment import Experiment
from hemiola.optimizers import Optimizer, moment_names
from hemiola.timing.traces import read_trace
from hemiola.training import Training
from hemiola.training.redeal import redeal

TORCH = {"name": "torch", "device": "cpu"}
SMALL = {
    "task": {"name": f"{TASKS}:small", "examples": 90},  # shards of 23 and 22: some workers rest
    "workers": 4,
    "batch": 4,
    "stop": {"epochs": 2},
    "optimizer": {"lr": 0.2, "momentum": 0.9},
    "cluster": TORCH,
}
DIGITS = {
    "task": {"name": "digits-mlp", "hidden": [16], "input_noise": 1.0},
    "batch": 25,
    "stop": {"epochs": 2},
    "optimizer": {"lr": 0.1, "momentum": 0.9},
    "order": {"name": "cd-grab", "sketch": "exact"},
    "period": {"name": "adaptive", "start": 2},
    "cluster": TORCH,
}


def constant(**options: object) -> dict:
    return {"period": {"name": "constant", "p": 3, **options}}


def simulated(given: dict) -> Job:
    return Job(given | {"cluster": "simulated"})


# ------------------------------------------------------------------------------------------- the same as simulated

SAME = {
    "full, nobody rests at once": SMALL,
    "momentum average": SMALL | constant(momentum="average"),
    "momentum reset": SMALL | constant(momentum="reset"),
    "Adam, averaged": SMALL | constant(momentum="average") | {"optimizer": {"name": "Adam", "lr": 0.02}},
    "BatchNorm, local": SMALL | constant() | {"task": f"{TASKS}:normed"},
    "BatchNorm, full": SMALL | {"task": f"{TASKS}:normed"},
    "stale_rate weights the update": SMALL
    | {"pace": {"name": "k-async", "stale_rate": "delay", "stale_constant": 0.5}},
    "units of two, int8 sketches": SMALL
    | constant()
    | {"order": {"name": "cd-grab", "unit": 2, "sketch": "fold:8:int8"}},
    "reports count by their work": SMALL | constant(weigh="work"),
    "CD-GraB and ADPSGD on digits": DIGITS | {"workers": 4},
}
ALIKE = {
    wire: SMALL | constant(wire=wire) | {"task": {"name": f"{TASKS}:small", "hidden": 400}}
    for wire in ("fp32", "bf16", "int8", "int4")
} | {"qsgd": SMALL | {"period": {"name": "full", "quantise": 8}}}
GHOST = SMALL | constant(wire="int8") | {"order": {"name": "cd-grab", "sketch": "ghost:2:8"}, "stop": {"epochs": 5}}

BALANCED = (
    SMALL
    | constant(balance="speed")
    | {"shards": {"deal": "deck"}, "cluster": TORCH | {"delay": "constant(0.01)", "slow": {"3": 3.0}}}
)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory):
    """Everything that is trained on four ranks, in one group of processes."""
    folder = tmp_path_factory.mktemp("four")
    jobs = {name: Job(given) for name, given in (SAME | ALIKE | {"ghost": GHOST}).items()}
    jobs["balanced"] = Job(BALANCED)
    jobs["ghost, stopped"] = Job(GHOST, folder, stop_at=3)
    jobs["ghost, resumed"] = Job(GHOST, folder)
    found = train_on_ranks(list(jobs.values()), 4, folder / "rendezvous")
    return dict(zip(jobs, found, strict=True))


@pytest.mark.real
@pytest.mark.timeout(600)
class TestFourRanks:
    def test_all_ranks_hold_the_same_weights_to_the_last_bit(self, four) -> None:
        for name, ranks in four.items():
            for other in ranks[1:]:
                assert torch.equal(ranks[0].weights, other.weights), name
                assert ranks[0].counts == other.counts, name
                assert ranks[0].period == other.period, name
                assert ranks[0].curve("seconds") == other.curve("seconds"), name

    @pytest.mark.parametrize("name", SAME)
    def test_a_run_is_what_it_is_in_the_simulator(self, name: str, four) -> None:
        here = train_here(simulated(SAME[name]))
        there = four[name][0]
        torch.testing.assert_close(there.weights, here.weights, rtol=1e-4, atol=2e-5)
        assert there.curve() == pytest.approx(here.curve(), rel=1e-4)
        assert there.curve("epochs") == here.curve("epochs")
        assert there.counts == here.counts
        assert there.updates == here.updates

    @pytest.mark.parametrize("name", ["units of two, int8 sketches", "CD-GraB and ADPSGD on digits"])
    def test_as_many_bytes_are_counted_as_in_the_simulator(self, name: str, four) -> None:
        """But for what the notes of an update take here: a few numbers a rank."""
        there, here = four[name][0].log[-1], train_here(simulated(SAME[name])).log[-1]
        notes = 0.01 * here["bytes_per_worker"] + 1000 * here["updates"]
        assert there["bytes_per_worker"] == pytest.approx(here["bytes_per_worker"], abs=notes)

    @pytest.mark.parametrize("name", ["momentum average", "momentum reset", "Adam, averaged"])
    def test_every_rank_remembers_what_its_worker_remembers(self, name: str, four) -> None:
        workers = train_here(simulated(SAME[name])).memory
        ranks = [memory for rank in four[name] for memory in rank.memory]
        assert len(ranks) == len(workers) > 0
        for mine, expected in zip(ranks, workers, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=2e-5)

    def test_stints_by_measured_speed_visit_every_unit_once_an_epoch(self, four) -> None:
        assert [set(counts) for counts in four["balanced"][0].counts["used"]] == [{2}]

    def test_narrow_wires_send_less_and_learn_as_much(self, four) -> None:
        sent = {wire: four[wire][0].log[-1]["bytes_per_worker"] for wire in ALIKE}
        assert sent["int4"] < sent["int8"] < sent["bf16"] < sent["fp32"]
        for wire in ("bf16", "int8", "int4"):
            assert four[wire][0].curve()[-1] == pytest.approx(four["fp32"][0].curve()[-1], rel=0.1), wire
        assert four["qsgd"][0].curve()[-1] < 0.9 * four["qsgd"][0].curve()[0]

    def test_a_stopped_run_goes_on_exactly_with_ghosts_momentum_and_what_int8_owes(self, four) -> None:
        whole, stopped, resumed = (four[name] for name in ("ghost", "ghost, stopped", "ghost, resumed"))
        assert 3 <= stopped[0].updates < whole[0].updates
        assert torch.equal(resumed[0].weights, whole[0].weights)
        assert resumed[0].curve() == whole[0].curve()
        assert all(torch.equal(a, b) for a, b in zip(resumed[2].memory, whole[2].memory, strict=True))

    def test_the_log_is_a_trace_of_step_times(self, four, tmp_path: Path) -> None:
        log = four["momentum average"][0].log
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
        steps = read_trace(tmp_path / "log.jsonl").seconds
        assert set(read_trace(tmp_path / "log.jsonl").workers) == set(range(len(log[-1]["workers"])))
        assert len(steps) == sum(len(line.get("step_seconds", [])) for line in log) > 0
        exchanges = [seconds for line in log for seconds in line.get("exchange_seconds", [])]
        assert len(exchanges) == log[-1]["updates"] - 1
        assert log[-1]["seconds"] > sum(exchanges) > 0


# -------------------------------------------------------------------------------------- another number of workers


@pytest.mark.real
@pytest.mark.timeout(600)
def test_a_run_goes_on_with_more_and_with_fewer_workers(tmp_path: Path) -> None:
    given = SMALL | {
        "order": {"name": "cd-grab", "sketch": "exact"},
        "period": {"name": "adaptive", "start": 2},
        "workers": 2,
    }
    given |= {"stop": {"epochs": 6}, "evaluate": {"every_epochs": 2}}
    deals = {deal: (given | {"shards": {"deal": deal}}, tmp_path / deal) for deal in ("shards", "deck")}
    for _, folder in deals.values():
        folder.mkdir()
    before = train_on_ranks([Job(*deal, stop_at=20) for deal in deals.values()], 2, tmp_path / "two")
    saved = {deal: (folder / "checkpoint.pt").read_bytes() for deal, (_, folder) in deals.items()}
    for workers in (3, 1):
        for deal, (_, folder) in deals.items():
            (folder / "checkpoint.pt").write_bytes(saved[deal])
        jobs = [Job(one | {"workers": workers}, folder) for one, folder in deals.values()]
        after = train_on_ranks(jobs, workers, tmp_path / str(workers))
        for stopped, ranks in zip(before, after, strict=True):
            assert all(torch.equal(ranks[0].weights, other.weights) for other in ranks)
            assert ranks[0].status == "done"
            assert ranks[0].log[0] == stopped[0].log[0]
            assert ranks[0].log[-1]["epochs"] == 6.0
            assert ranks[0].updates > stopped[0].updates
            assert ranks[0].curve()[-1] < 0.6 * ranks[0].curve()[0]
            assert ranks[0].period["calibration"] == stopped[0].period["calibration"]
            assert stopped[0].period["calibration"]["value"] is not None
            visits = [visit for worker in ranks[0].counts["used"] for visit in worker]
            assert len(visits) == 90
            assert set(visits) == {6}


def test_a_new_deal_starts_where_the_old_one_was(tmp_path: Path) -> None:
    """Two workers of 10 examples, batches of 2, 7 of 5 slots done: epoch 1, two slots in. Then five workers of 4."""
    given = {
        "task": {"name": f"{TASKS}:small", "examples": 20},
        "batch": 2,
        "stop": {"epochs": 4},
        "optimizer": {"lr": 0.1},
    }
    plan, make = Experiment(given | {"workers": 2}).cells[0].plan(None)
    old = Training(plan, make)
    old.run(lambda now: now.version < 7)
    state = old.state_dict()
    weights = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
    memory = [{"state": {0: {"momentum_buffer": one}}, "param_groups": [{"lr": 0.1}]} for one in weights]
    runners = [{"local": {number: one}} for number, one in enumerate(memory)]
    state["cluster"] = {
        "workers": 2,
        "seconds": 1.5,
        "ranks": [{"runner": one, "mean": "residual", "drawn": 9} for one in runners],
    }
    plan, make = Experiment(given | {"workers": 5}).cells[0].plan(None)
    new = Training(plan, make)
    dealt = redeal(state, new)
    # 7 / 5 epochs are done; five workers have 2 slots an epoch: round(2.8) = 3 slots, so epoch 1 and one slot in.
    assert dealt["queues"]["queues"] == [{"epoch": 1, "position": 2, "slot": 3, "rests": False, "returned": []}] * 5
    assert dealt["ledger"]["totals"]["used"] == [6] * 5
    assert [counts.sum() for counts in dealt["ledger"]["counts"]["used"]] == [6] * 5
    assert dealt["ledger"]["updates"] == 7
    assert dealt["stints_given"] == [7] * 5
    assert dealt["weights"]["now"] == 7
    assert torch.equal(dealt["weights"]["held"][7], old.versions[7])
    cluster = dealt["cluster"]
    assert (cluster["workers"], cluster["seconds"], len(cluster["ranks"])) == (5, 1.5, 5)
    assert cluster["ranks"][4]["runner"]["local"][4]["state"][0]["momentum_buffer"].tolist() == [2.0, 4.0]
    assert cluster["ranks"][4]["mean"] is None


# --------------------------------------------------------------------------------------------------- large data


@pytest.mark.real
@pytest.mark.data
@pytest.mark.timeout(900)
def test_lenet_on_cifar10_is_what_it_is_in_the_simulator(tmp_path: Path, data_folder: Path) -> None:
    given = DIGITS | {"task": "cifar10-lenet", "workers": 2, "batch": 16, "stop": {"updates": 6}}
    given |= {
        "evaluate": {"every_updates": 6, "train_examples": 200},
        "order": {"name": "cd-grab", "sketch": "fold:64"},
    }
    (ranks,) = train_on_ranks([Job(given, data=data_folder)], 2, tmp_path / "rendezvous")
    here = train_here(Job(given | {"cluster": "simulated"}, data=data_folder))
    assert torch.equal(ranks[0].weights, ranks[1].weights)
    torch.testing.assert_close(ranks[0].weights, here.weights, rtol=1e-3, atol=1e-4)
    assert ranks[0].curve() == pytest.approx(here.curve(), rel=1e-3)


# ---------------------------------------------------------------------------------------------------------- small parts


def test_moments_are_found_for_every_optimizer() -> None:
    assert moment_names(Optimizer("SGD", 0.1)) == []
    assert moment_names(Optimizer("SGD", 0.1, {"momentum": 0.9})) == ["momentum_buffer"]
    assert moment_names(Optimizer("AdamW", 0.1)) == ["exp_avg", "exp_avg_sq"]


def test_a_place_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert Place.find() is None
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Place.find() == Place(rank=3, world=4, local_rank=1, restarts=0)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(InputError, match="RANK in the environment must be a number, as torchrun sets it, got 'first'"):
        Place.find()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"pace": {"name": "k-async", "k": 2}}, r"'torch' exchanges by collectives, .* use 'ray' .* or 'simulated'"),
        ({"pace": {"name": "k-sync", "k": "adasync"}}, "every update waits for all of them"),
        ({"pace": "k-batch-sync"}, "every update waits for all of them"),
        (constant(overlap=1), r"period\.overlap: 1 is not for cluster 'torch'"),
        ({"cluster": TORCH | {"backend": "nccl"}}, "'nccl' needs device = 'cuda'"),
        ({"cluster": TORCH | {"timeout": 0.0}}, "timeout must be above 0 and finite, got 0.0"),
        ({"cluster": TORCH | {"checkpoint_every_updates": 0}}, "checkpoint_every_updates must be at least 1, got 0"),
        ({"cluster": TORCH | {"checkpoint_every_seconds": -1.0}}, "checkpoint_every_seconds must be above 0, got -1.0"),
        ({"cluster": TORCH | {"max_restarts": -1}}, "max_restarts must be at least 0, got -1"),
        ({"cluster": TORCH | {"slow": {"1": 3.0}}}, "multiplies delays, and there are none"),
        ({"cluster": TORCH | {"bakend": "gloo"}}, r"cluster: unknown option 'bakend'; did you mean 'backend'\?"),
    ],
)
def test_what_collectives_cannot_do_is_one_clear_line(change: dict, line: str) -> None:
    with pytest.raises(InputError, match=line) as caught:
        Experiment(SMALL | change)
    assert "\n" not in str(caught.value)


def test_a_process_alone_is_told_how_to_start() -> None:
    plan, make = Experiment(SMALL).cells[0].plan(None)
    with pytest.raises(InputError, match="trains in several processes, and this one is alone"):
        Training(plan, make)


def test_cuda_is_refused_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(InputError, match="'cuda' is not available on this machine"):
        Experiment(SMALL | {"cluster": {"name": "torch", "device": "cuda"}})


def test_machines_with_different_versions_are_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "exchange", lambda where: nullcontext())
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(peers, "everyone", lambda mine, group: [mine, mine])
    group.check_same({"the experiment": "abc"})
    monkeypatch.setattr(peers, "everyone", lambda mine, group: [mine, mine | {"hemiola": "0.0.9"}])
    with pytest.raises(
        InputError, match=r"the machines differ in hemiola: \S+ on rank 0, 0\.0\.9 on rank 1; make them"
    ):
        group.check_same({"the experiment": "abc"})


def test_ranks_that_have_come_apart_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, make = Experiment(SMALL | {"cluster": "simulated"}).cells[0].plan(None)
    training = Training(plan, make)
    training.run(lambda now: now.version < 3)
    digests: list[int] = []
    monkeypatch.setattr(rank_side, "gather", digests.append)
    monkeypatch.setattr(rank_side, "share", lambda _: list(digests))
    rank_side.check_agreement(training)
    rank_side.check_agreement(training)
    training.versions[3][0] += 1e-6
    with pytest.raises(RuntimeError, match="at update 3 weights or orders of rank 2 differ from rank 0's"):
        rank_side.check_agreement(training)


def test_more_workers_than_cores_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launching, "launch", lambda *_: True)
    monkeypatch.setattr(launching.os, "sched_getaffinity", lambda _: {0, 1})
    told: list[dict] = []
    cell = Experiment(SMALL).cells[0]
    launching.run_ranks(cell, CellFolder.of(cell, tmp_path), None, told.append, lambda: False)
    assert told == [{"note": "4 workers share 2 cores: steps take longer than on machines of their own"}]


def test_cells_of_a_torch_cluster_can_be_sent_to_its_ranks() -> None:
    cell = Experiment(SMALL).cells[0]
    assert pickle.loads(pickle.dumps(cell)).settings == cell.settings
