"""The averager between real processes: what `averager_ranks.py` saved on four gloo ranks."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import averager_ranks

from forked_ranks import Forked, run_on_ranks

HERE = Path(__file__).parent
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run all scenarios once; return a function that gives the results of one, a list with one entry a rank."""
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(HERE / "averager_ranks.py", folder, 4)

    def of(name):
        ranks = [torch.load(path, weights_only=True) for path in sorted(folder.glob(f"{name}-?.pt"))]
        assert ranks
        for rank, result in enumerate(ranks):
            assert "failed" not in result, f"rank {rank}: {result['failed']}"
        return ranks

    return of


def same(tensors):
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


@pytest.mark.parametrize(("name", "world"), [("awkward_pair", 2), ("awkward", 4)])
def test_ranks_are_bit_identical_after_every_averaging_and_differ_between(results, name, world):
    ranks = results(name)
    assert len(ranks) == world
    for step in range(24):
        averaged = [rank["seen"][step][0] for rank in ranks]
        weights = [rank["seen"][step][1] for rank in ranks]
        assert len(set(averaged)) == 1, "the ranks averaged at different steps"
        assert same(weights) == averaged[0]
    assert same([rank["final"] for rank in ranks])
    assert all(rank["channels_last"] for rank in ranks)


@pytest.mark.parametrize("name", ["awkward_pair", "awkward"])
def test_the_adaptive_period_is_the_same_on_every_rank_and_rises_after_the_drop(results, name):
    ranks = results(name)
    for key in ("periods", "spreads", "steps"):
        assert all(rank[key] == ranks[0][key] for rank in ranks)
    first = ranks[0]
    assert sum(first["periods"]) == 24  # micro-batches are not counted
    after = [p for p, step in zip(first["periods"], first["steps"], strict=True) if 14 < step < 24]
    assert after[-1] > 2


@pytest.mark.parametrize("name", ["like_ddp_pair", "like_ddp"])
def test_period_one_is_ddp(results, name):
    for rank in results(name):
        torch.testing.assert_close(rank["mine"], rank["ddp"], rtol=1e-4, atol=1e-5)


def test_narrow_wires_end_where_fp32_ends(results):
    for rank in results("wires"):
        moved = (rank["fp32"] - _start()).norm()
        for wire, share in (("bf16", 0.005), ("int8", 0.005), ("int4", 0.02)):
            assert (rank[wire] - rank["fp32"]).norm() < share * moved


def _start():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    return torch.cat([t.double().flatten() for t in model.state_dict().values()])


def test_a_ddp_model_trains_locally_inside_and_communicates_outside(results):
    ranks = results("ddp_local")
    for step in range(16):
        assert same([rank["kept"][step] for rank in ranks]) == (step % 4 == 3)
    assert same([rank["gradient"] for rank in ranks])
    assert all(rank["buffers_sent"] for rank in ranks)


def test_skipped_steps_neither_dead_lock_nor_shift_the_averagings(results):
    ranks = results("skipped_steps")
    for rank in ranks:
        assert rank["given-steps"] == [4, 8, 12, 16]
        assert rank["restored"]
    for name in ("given", "own"):
        assert same([rank[name] for rank in ranks])


def test_ranks_with_different_numbers_of_steps_all_finish_alike(results):
    ranks = results("uneven")
    assert same([rank["final"] for rank in ranks])
    assert ranks[0]["steps"][-1] == 22  # the longest rank's last step


@pytest.mark.parametrize("stop", [17, 18, 22])
def test_resuming_in_the_middle_of_a_stint_is_exact(results, stop):
    ranks = results("resumed")
    for rank in ranks:
        assert rank[f"records-{stop}"] == rank["records"]
        assert torch.equal(rank[stop], rank["whole"])
    assert same([rank["whole"] for rank in ranks])


@pytest.mark.parametrize("overlap", [0, 3])
def test_a_look_at_averaged_weights_is_consistent_and_leaves_no_trace(results, overlap):
    ranks = results("looked")
    for rank in ranks:
        assert torch.equal(*rank[overlap]["runs"])
    for look in range(3):
        seen = [rank[overlap]["seen"][look][1] for rank in ranks]
        own = torch.stack([rank[overlap]["seen"][look][0] for rank in ranks])
        assert same(seen)
        if overlap == 0:
            torch.testing.assert_close(seen[0][:-1], own.mean(0)[:-1], rtol=1e-5, atol=1e-6)


def test_what_differs_between_ranks_is_refused_on_every_rank_with_the_same_line(results):
    ranks = results("refused")
    expected = {
        "shape": "rank 0 has weight of shape [2, 3], rank 1 has weight of shape [3, 3]",
        "name": "rank 0 has a.weight of shape [2, 2], rank 1 has b.weight of shape [2, 2]",
        "count": "rank 0 trains 2 parameters, rank 1 trains 4",
        "rate": "learning rates differ between ranks: [0.1] on rank 0, [0.2] on rank 1",
        "sync": "module '1' is a SyncBatchNorm over the averaged ranks",
        "sharded": "the model is sharded by FSDP",
        "settings": "averagers differ between ranks",
        "rate in the middle": "learning rates differ between ranks at step 4: 0.1, 0.2, 0.1, 0.1",
    }
    for name, line in expected.items():
        messages = {rank[name] for rank in ranks}
        assert len(messages) == 1
        assert line in messages.pop()


def test_a_rank_that_is_not_finite_is_left_out(results):
    for rank in results("spoilt"):
        for wire, tolerance in (("fp32", 1e-6), ("int8", 1e-3)):
            moved = rank[wire]["moved"]
            # ranks 0, 1 and 3 move by -0.1 times 1, 2 and 4
            torch.testing.assert_close(moved, torch.full_like(moved, -0.7 / 3), rtol=tolerance, atol=1e-6)
            assert rank[wire]["left_out"] == 1


def test_overlap_follows_the_definition(results):
    """w_i += mean - snapshot_i two steps after the snapshot; the reference simulates four ranks of one weight each."""
    ranks = results("overlapped")
    w, target = np.ones(4), np.arange(4.0)
    path, snapshot, due, local = [], None, None, 0
    for step in range(1, 11):
        w = w - 0.25 * (w - target)
        local += 1
        if due == step:
            w, snapshot, due = w + (snapshot.mean() - snapshot), None, None
        if local == 3:
            snapshot, due, local = w.copy(), step + 2, 0
        path.append(w.copy())
    if snapshot is not None:
        w = w + (snapshot.mean() - snapshot)
    for number, rank in enumerate(ranks):
        np.testing.assert_allclose(rank["path"], np.array(path)[:, number], rtol=1e-5)
        assert rank["final"] == pytest.approx(w.mean(), rel=1e-5)
        assert rank["delays"] == [2, 2, 1, 0]


def test_automatic_overlap_is_agreed(results):
    ranks = results("automatic")
    assert same([rank["final"] for rank in ranks])
    assert all(rank["delays"] == ranks[0]["delays"] for rank in ranks)
    assert ranks[0]["delays"][0] == 0  # the first averaging measures the link


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_momentum_is_averaged_reset_or_left_alone(results, optimizer):
    ranks = results("momentum")
    average, reset, local = ([rank[f"{how}-{optimizer}"] for rank in ranks] for how in ("average", "reset", "local"))
    assert average[0]["state"].numel() > 0
    assert same([rank["state"] for rank in average])
    assert all(rank["state"].numel() == 0 for rank in reset)
    assert not same([rank["state"] for rank in local])
    for how in (average, reset, local):
        assert same([rank["final"] for rank in how])
        assert bool(how[0]["final"].isfinite().all())


@pytest.mark.parametrize("how", ["local", "average", "reset"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "NAdam"])
def test_after_the_block_optimizer_states_agree_and_ddp_trains_one_model(results, optimizer, how):
    ranks = [rank[f"{optimizer}-{how}"] for rank in results("after_the_block")]
    assert same([rank["final"] for rank in ranks])
    for states in zip(*(rank["states"] for rank in ranks), strict=True):
        assert all(state.keys() == states[0].keys() for state in states)
        for key in states[0]:
            assert same([state[key] for state in states]), key
        if how != "reset":
            assert states[0]
            assert optimizer == "SGD" or states[0]["step"] == 12  # of the rank that took the most


def test_momentum_left_local_is_averaged_once_at_the_end(results):
    ranks = results("after_the_block")
    for optimizer, key in (("SGD", "momentum_buffer"), ("AdamW", "exp_avg")):
        own = [rank[f"{optimizer}-local"]["own"][key] for rank in ranks]
        left = ranks[0][f"{optimizer}-local"]["states"][4][key]  # of last.weight, after first.* and branch.*
        assert not torch.equal(own[0], own[1])
        torch.testing.assert_close(left, torch.stack(own).mean(0))


@pytest.mark.parametrize("given", ["ddp", "module", "compiled", "inside"])
def test_a_ddp_is_found_in_and_around_what_is_averaged(results, given):
    ranks = [rank[given] for rank in results("wrapped")]
    for rank in ranks:
        assert len(rank["spreads"]) == 2
        assert all(spread > 1e-6 for spread in rank["spreads"])
    assert same([rank["gradient"] for rank in ranks])  # outside the block it communicates


def test_a_ddp_with_a_hook_of_its_own_is_refused(results):
    for rank in results("wrapped"):
        assert "has a communication hook of its own and would go on exchanging gradients" in rank["hooked"]


def test_an_outer_optimizer_follows_its_definition(results):
    """The reference: four ranks of one weight each; every third step the mean change goes through the outer rule."""
    ranks = results("outer")
    target, lr = np.arange(4.0), 0.25

    def diloco(state, change):
        state["m"] = 0.9 * state.get("m", 0.0) + change
        return 0.7 * (change + 0.9 * state["m"])

    def slowmo(state, change):
        state["u"] = 0.6 * state.get("u", 0.0) + change / lr
        return lr * state["u"]

    rules = {"None": lambda state, change: change, "diloco": diloco, "slowmo": slowmo, "delayed-nesterov": diloco}
    for name, rule in rules.items():
        w, anchor, state, path = np.ones(4), 1.0, {}, []
        for step in range(1, 11):
            w = w - lr * (w - target)
            if step % 3 == 0:
                anchor += rule(state, (w - anchor).mean())
                w = np.full(4, anchor)
            path.append(w.copy())
        for number, rank in enumerate(ranks):
            np.testing.assert_allclose(rank[name]["path"], np.array(path)[:, number], rtol=1e-5)
    for name in [*rules, "SGD"]:
        assert len({rank[name]["final"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["SGD"] == rank["None"]  # rate 1 without momentum, bit for bit
    assert ranks[0]["diloco"]["final"] != ranks[0]["None"]["final"]


@pytest.mark.parametrize("stop", ["17-False", "17-True", "19-False"])
def test_resuming_with_an_outer_optimizer_is_exact(results, stop):
    ranks = results("outer")
    for rank in ranks:
        assert torch.equal(rank[stop], rank["whole"])
    assert same([rank["whole"] for rank in ranks])


def test_fda_averages_when_the_ranks_are_far_apart(results):
    ranks = results("fda")
    for rank in ranks:
        for (spread, asked), true, expected in zip(
            (rank["probed"], rank["asked"]), rank["spreads"], (False, True), strict=True
        ):
            assert spread == pytest.approx(true, rel=0.2)
            assert asked is expected
        assert rank["history"] == ranks[0]["history"]
    for key in ("final", "again"):
        assert same([rank[key] for rank in ranks])
    for evaluation in range(2):
        assert same([rank["seen"][evaluation] for rank in ranks])
    assert torch.equal(ranks[0]["final"], ranks[0]["again"])  # resumed in the middle of a stint
    history = [(period, spread) for period, spread in ranks[0]["history"]]
    assert history[0][0] == 6
    threshold = history[0][1]
    for period, spread in history[1:6]:  # before the first rank's loop is over
        assert period == 12 or spread > 0.8 * threshold
        threshold = 6 / period * spread
    assert len({period for period, _ in history[:6]}) > 1


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("mix", ["0.0", "0.5", "1.0"])
def test_clocked_contributions_are_sums_over_the_ranks(results, mix, wire):
    """Rank r's n_r steps are -0.01 (r + 1) each: nothing is lost or doubled, whenever averagings happened."""
    ranks = [rank[f"{mix}-{wire}"] for rank in results("clocked")]
    moved = sum(0.01 * (number + 1) * rank["taken"] for number, rank in enumerate(ranks)) / 4
    expected = torch.full_like(ranks[0]["final"], 1.0 - moved)
    assert same([rank["final"] for rank in ranks])
    torch.testing.assert_close(ranks[0]["final"], expected, rtol=0, atol=1e-4 if wire == "fp32" else 0.02)
    for evaluation in range(2):  # all ranks see the same, with everything in it that was found by then
        seen = [rank["seen"][evaluation] for rank in ranks]
        assert same(seen)
        steps = 11 + 10 * evaluation
        found = sum(0.01 * (number + 1) * (steps - (number == 1)) for number in range(4)) / 4
        torch.testing.assert_close(
            seen[0], torch.full_like(seen[0], 1.0 - found), rtol=0, atol=1e-4 if wire == "fp32" else 0.02
        )
    assert all(rank["averagings"] > 1 for rank in ranks)
    # forward passes of all ranks over P, rounded at most once for every averaging
    counted = sum(2 * (30 + 10 * number) for number in range(4)) / 4
    assert abs(ranks[0]["counter"] - counted) <= 0.5 * ranks[0]["averagings"] + 1


def test_clocked_averagings_go_on_while_a_rank_stands_still(results):
    ranks = results("clocked_nobody_waits")
    assert same([rank["final"] for rank in ranks])
    moved = 0.01 * sum(rank["taken"] for rank in ranks) / 4
    torch.testing.assert_close(ranks[0]["final"], torch.full_like(ranks[0]["final"], 1.0 - moved), rtol=0, atol=1e-4)


def test_clocked_models_end_alike_with_states_that_agree_and_resume(results):
    ranks = results("clocked_models")
    for key in ("final", "states", "at rest", "again", "resumed", "with NaN"):
        assert same([rank[key] for rank in ranks]), key
    for rank in ranks:
        before, after = rank["losses"]
        assert after < 0.8 * before
        assert torch.equal(rank["again"], rank["at rest"])
        assert "save the state inside `with averager.averaged():`" in rank["outside"]
        assert bool(rank["with NaN"].isfinite().all())


def test_a_rank_that_leaves_a_clocked_block_is_named(results):
    ranks = results("clocked_raised")
    for number in (0, 2, 3):
        assert ranks[number]["ranks"] == [1]
        assert "rank 1 left: ZeroDivisionError: a bug in the loop" in ranks[number]["message"]
        assert ranks[number]["keys"] == ["model", "optimizer"]


def test_ddp_within_machines_goes_on_while_machines_are_averaged(results):
    kept = [rank["kept"] for rank in results("two_levels")]
    for step in range(8):
        assert torch.equal(kept[0][step], kept[1][step])
        assert torch.equal(kept[2][step], kept[3][step])
        assert torch.equal(kept[0][step], kept[2][step]) == (step % 4 == 3)


def test_ranks_that_all_do_the_same_are_noticed_once(results):
    ranks = results("same_examples")
    for wire in ("fp32", "int8"):
        said = [line for rank in ranks for line in rank[f"same-{wire}"]]
        assert len(said) == 1
        assert "all ranks have made the same change of the weights" in said[0]
        assert all(rank[f"own-{wire}"] == [] for rank in ranks)


def test_mean_spread_and_notes_are_measured_and_bytes_are_counted(results):
    # Out: to three owners an encoded quarter (padded to whole blocks), one buffer number, three notes and a rounding.
    # Back: to three ranks the encoded mean of that quarter, one buffer number, two sums.
    quarters = {"bf16": 1250 * 2, "int8": 3 * (512 + 4), "int4": 10 * (64 + 4)}
    sizes = {wire: 3 * (2 * quarter + 4 + 4 + 8 * 4 + 8 * 2) for wire, quarter in quarters.items()}
    sizes["fp32"] = 2 * 3 * (5003 + 4 * 4 * 4) * 4 // 4  # a ring; four pieces of four float64 notes from four ranks
    errors = {"fp32": 2e-6, "bf16": 1e-3, "int8": 1e-3, "int4": 0.02}
    for rank in results("measured"):
        for wire, tolerance in errors.items():
            found = rank[wire]
            assert found["spread"] == pytest.approx(rank["spread"], rel=tolerance)
            assert found["movement"] == pytest.approx(rank["movement"], rel=tolerance)
            assert (found["mean"] - rank["mean"]).norm() < 50 * tolerance * rank["mean"].norm()
            assert found["exact"].tolist() == [1.5, 1.5, 1.5]
            assert found["notes"].tolist() == [[1.0, 1.0 / 3.0, -float(r)] for r in range(4)]
            assert found["bytes"] == sizes[wire]


def test_a_rank_that_raises_runs_no_collective_and_is_named(results):
    ranks = results("raised")
    # had rank 1 averaged on its way out, the others would have gone on at step 8
    assert ranks[1]["averagings"] == 1
    for number in (0, 2, 3):
        rank = ranks[number]
        assert rank["ranks"] == [1]
        assert "rank 1 did not come to the averaging at step 8" in rank["message"]
        assert "ZeroDivisionError: a bug in the loop" in rank["message"]
        assert torch.equal(rank["saved"], rank["anchor"])


def test_a_rank_that_is_killed_is_named(tmp_path):
    script = f"""
import os, signal, sys, torch, torch.distributed as dist
sys.path.insert(0, {str(HERE)!r})
from averager_ranks import Averager, Constant, RankLostError, batches, mlp, train
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=3)
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def after(t):
    if rank == 2 and t == 5:
        os.kill(os.getpid(), signal.SIGKILL)
try:
    with Averager(model, optimizer, period=Constant(p=4), timeout=600, checkpoint={str(tmp_path)!r}):
        train(model, optimizer, batches(rank, 12), after)
except RankLostError as lost:
    print(lost.ranks, lost, flush=True)
    os._exit(0)
"""
    (tmp_path / "killed.py").write_text(script)
    ranks = [Forked(tmp_path / "killed.py", str(rank)) for rank in range(3)]
    said = [rank.stdout.read() for rank in ranks]
    for rank in ranks:
        rank.close()
    for number in (0, 1):
        assert said[number].startswith("[2] rank 2 did not come to the averaging at step 8"), said[number]
        assert set(torch.load(tmp_path / f"rank-{number}.pt", weights_only=True)) == {"model", "optimizer", "averager"}


def by_work():
    """Four stints in this process: everybody starts from the mean, and changes count by the steps they stand for."""
    mean = averager_ranks.mlp()
    data = [list(averager_ranks.batches(rank, steps)) for rank, steps in enumerate(averager_ranks.BALANCED_STEPS)]
    for lengths in ([8, 8, 8, 8], *[[8, 8, 4, 2]] * 3):
        start = {name: value.clone() for name, value in mean.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for rank, steps in enumerate(lengths):
            model = averager_ranks.mlp()
            model.load_state_dict(start)
            averager_ranks.train(model, torch.optim.SGD(model.parameters(), lr=0.1), data[rank][:steps])
            del data[rank][:steps]
            for name, value in model.state_dict().items():
                total[name] += steps / sum(lengths) * (value - start[name])
        mean.load_state_dict({name: value + total[name] for name, value in start.items()})
    return averager_ranks.flat(mean)


def test_stints_are_as_long_as_ranks_are_fast_and_count_by_their_steps(results):
    ranks = results("balanced")
    for name in ("fast and slow", "int8"):
        assert same([rank[name]["final"] for rank in ranks])
        assert [record[:2] for record in ranks[0][name]["records"]] == [(8, 8), (16, 8), (24, 8), (32, 8)]
    torch.testing.assert_close(ranks[0]["fast and slow"]["final"], by_work(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ranks[0]["int8"]["final"], by_work(), rtol=0.0, atol=2e-2)


def test_with_equal_speeds_a_balanced_averager_is_the_plain_one(results):
    for rank in results("balanced"):
        assert torch.equal(rank["equal"]["final"], rank["plain"]["final"])
        assert rank["equal"]["records"] == rank["plain"]["records"]
