"""Who is waited for and who is lost, between real processes."""

import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from forked_ranks import Forked

pytestmark = pytest.mark.real

# Rank 2 comes too late, stops, or dies; the other two say who it is. `where` picks who asks: a bare attendance, an
# averager in a loop of one's own, or the torch cluster's group.
SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
from pathlib import Path
from torch import nn
from hemiola.peers import Attendance, RankLostError
rank, where, how, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
torch.set_num_threads(1)
torch.manual_seed(rank)
said = lambda line: print("SAID", line, flush=True)

def trouble():
    (folder / f"{rank}-came").touch()
    while rank != 2 and not all((folder / f"{other}-came").exists() for other in range(3)):
        time.sleep(0.05)
    Attendance.PATIENCE = 2.0  # from here on: a slow start is no trouble
    if rank == 2 and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 2 and how == "late":
        while not (folder / "go").exists():
            time.sleep(0.05)
    if rank == 2 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)

try:
    if where == "cluster":
        from hemiola.clusters.torch.group import Place, join, leave, share
        join(Place(rank, 3, rank, 0), "gloo", 600, folder / "store", said)
        assert share(rank) == 0
        trouble()
        assert share({"rank": rank}) == {"rank": 0}
        leave()
    else:
        from hemiola.loops.averager import Averager
        from hemiola.period import Constant
        import logging
        logging.basicConfig(format="SAID %(message)s", stream=sys.stdout)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Averager(model, optimizer, period=Constant(p=2), timeout=600):
            for t in range(4):
                if t == 3:
                    trouble()
                optimizer.zero_grad()
                model(torch.randn(3, 2)).square().sum().backward()
                optimizer.step()
    print("DONE", flush=True)
except RankLostError as lost:
    print("LOST", lost.ranks, lost, flush=True)
    os._exit(0)
"""


@pytest.fixture
def start(tmp_path):
    """Starts three ranks; whatever happens, none is left."""
    started = []
    (tmp_path / "rank.py").write_text(SCRIPT)

    def start(where, how):
        for rank in range(3):
            started.append(Forked(tmp_path / "rank.py", str(rank), where, how, str(tmp_path)))
        return started

    yield start
    for rank in started:
        rank.close()


@pytest.mark.parametrize(("where", "how"), [("cluster", "stop"), ("averager", "late")])
def test_after_a_while_the_first_rank_that_waits_says_for_whom_and_then_all_go_on(start, tmp_path, where, how):
    ranks = start(where, how)
    first = ranks[0].stdout.readline()  # nothing is printed before somebody has waited
    place = "the averaging at step 4" if where == "averager" else "an exchange of plain values"
    life = "gives no sign of life (stopped, or gone)" if how == "stop" else "is alive and still computing"
    assert first.startswith(f"SAID {place} has waited ")
    assert first.endswith(f" s for rank 2, which {life}\n")
    (tmp_path / "go").touch()
    ranks[2].send_signal(signal.SIGCONT)
    assert [rank.stdout.read() for rank in ranks] == ["DONE\n"] * 3


def test_a_rank_that_dies_is_named_within_seconds(start):
    ranks = start("cluster", "die")
    assert ranks[2].stdout.read() == ""
    died = time.monotonic()
    said = [rank.stdout.read() for rank in ranks[:2]]
    assert time.monotonic() - died < 300  # the time-out is twice that
    for line in said:
        assert line.splitlines()[-1].startswith("LOST [2] rank 2 did not come to an exchange of plain values: ")


# A group that is garbage, in a cycle, when the process forks. What the child must not do is collect it: the group would
# wait for threads that only its parent has, for ever, or until the alarm kills it.
FORKING = """
import gc, os, signal, sys, torch, torch.distributed as dist
from hemiola.peers import new_group
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
gc.disable()

def used_and_forgotten():
    group = new_group(timeout=600.0, backend="gloo")
    dist.all_reduce(torch.ones(1), group=group)
    cycle = [group]
    cycle.append(cycle)
    dist.destroy_process_group(group)

used_and_forgotten()
child = os.fork()
if child == 0:
    signal.alarm(60)
    gc.collect()
    os._exit(0)
print("CHILD", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_forked_process_does_not_collect_groups_of_its_parent(tmp_path):
    (tmp_path / "forking.py").write_text(FORKING)
    process = Forked(tmp_path / "forking.py")
    try:
        assert process.stdout.readline() == "CHILD 0\n"
    finally:
        process.close()
