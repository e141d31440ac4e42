"""What each rank does in the real tests: `run_on_ranks`, or `torchrun averager_ranks.py FOLDER`, runs every scenario.

One start of the processes serves all scenarios, and each saves its result; test_averager_real.py looks at them.
Scenarios over two ranks run on the first two of four.
"""

import logging
import os
import sys
import time
import traceback
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hemiola.clusters.probe import DriftProbe
from hemiola.errors import InputError
from hemiola.loops.averager import Averager
from hemiola.peers import RankLostError
from hemiola.period import FDA, Adaptive, Clocked, Constant
from hemiola.wire.codec import WIRES
from hemiola.wire.group_mean import GroupMean


def flat(model):
    return torch.cat([t.detach().double().flatten() for t in model.state_dict().values()])


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(rank, count, shape=(8, 6)):
    stream = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        x = torch.randn(*shape, generator=stream)
        yield x, x.flatten(1)[:, :3].argmax(1)


def train(model, optimizer, data, after=lambda t: None):
    for t, (x, y) in enumerate(data):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        after(t)


class Awkward(nn.Module):
    """What the averaging must survive: channels_last, BatchNorm, a frozen layer, a branch only some ranks take."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.frozen = nn.Linear(8, 8)
        self.branch = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.frozen.requires_grad_(False)

    def forward(self, x, branch):
        h = self.norm(self.conv(x)).relu().mean((2, 3))
        h = self.frozen(h)
        return self.head(self.branch(h) if branch else h)


def awkward(rank, group):
    """Adam, two parameter groups, two micro-batches a step, a branch without gradients on rank 1 for a while."""
    torch.manual_seed(rank)  # different at first; the averager starts from rank 0's
    model = Awkward().to(memory_format=torch.channels_last)
    head = list(model.head.parameters())
    rest = [p for p in model.parameters() if p.requires_grad and all(p is not q for q in head)]
    optimizer = torch.optim.Adam([{"params": rest, "lr": 1e-2}, {"params": head, "lr": 3e-3}])
    averager = Averager(model, optimizer, period=Adaptive(start=2, guard=False), steps=24, process_group=group)
    seen = []
    with averager:
        data = batches(rank, 48, (8, 3, 5, 5))
        for step in range(24):
            if step == 12:
                for group_ in optimizer.param_groups:
                    group_["lr"] *= 0.1
            optimizer.zero_grad()
            for _ in range(2):
                x, y = next(data)
                out = model(x.to(memory_format=torch.channels_last), branch=not (rank == 1 and step < 9))
                (nn.functional.cross_entropy(out, y) / 2).backward()
            before = len(averager.history)
            optimizer.step()
            seen.append((len(averager.history) > before, flat(model)))
    return {
        "seen": seen,
        "final": flat(model),
        "periods": [record.period for record in averager.history],
        "spreads": [record.spread for record in averager.history],
        "steps": [record.step for record in averager.history],
        "channels_last": model.conv.weight.is_contiguous(memory_format=torch.channels_last),
        "branch_has_state": model.branch.weight in optimizer.state,
    }


def awkward_pair(rank, group):
    return awkward(rank, group)


def like_ddp(rank, group):
    """Period 1 and DDP, SGD with momentum and weight decay, same data."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
    mine, theirs = mlp(), DistributedDataParallel(mlp(), process_group=group)
    optimizer = torch.optim.SGD(mine.parameters(), **options)
    with Averager(mine, optimizer, period=Constant(p=1), process_group=group):
        train(mine, optimizer, batches(rank, 20))
    train(theirs, torch.optim.SGD(theirs.parameters(), **options), batches(rank, 20))
    return {"mine": flat(mine), "ddp": flat(theirs)}


def like_ddp_pair(rank, group):
    return like_ddp(rank, group)


def wires(rank, group):
    """Every wire on a decaying learning rate, from the same start."""
    result = {}
    for wire in WIRES:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        with Averager(model, optimizer, period=Constant(p=4), wire=wire, process_group=group) as averager:
            train(model, optimizer, batches(rank, 160), lambda _, s=schedule: s.step())
        result[wire] = flat(model)
        result[wire + "-bytes"] = averager.bytes_sent
    return result


def ddp_local(rank, group):
    """A DDP model: gradients stay local inside the averager and are all-reduced again outside."""
    torch.manual_seed(rank)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), process_group=group
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for _ in range(2):  # the same model can be averaged again
        with Averager(model, optimizer, period=Constant(p=4), process_group=group):
            train(model, optimizer, batches(rank, 8), lambda _: kept.append(flat(model)))
    train(model, optimizer, batches(rank, 1))
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return {"kept": kept, "gradient": gradient, "buffers_sent": model.broadcast_buffers}


def skipped_steps(rank, group):
    """One rank overflows; with the scaler given, the loop's own collectives do not collide with the averaging."""
    result = {}
    for given in (True, False):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        averager = Averager(
            model, optimizer, period=Constant(p=4), process_group=group, scaler=scaler if given else None, timeout=60
        )
        with averager:
            for t, (x, y) in enumerate(batches(rank, 16)):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                if rank == 1 and t in (2, 3, 9):
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                if given:
                    dist.all_reduce(torch.ones(1), group=group)
        name = "given" if given else "own"
        result[name] = flat(model)
        result[name + "-steps"] = [record.step for record in averager.history]
        result["restored"] = "step" not in vars(scaler)
    return result


def uneven(rank, group):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = Averager(model, optimizer, period=Adaptive(start=3, guard=False), process_group=group, timeout=60)
    with averager:
        train(model, optimizer, batches(rank, 7 + 5 * rank))
    return {"final": flat(model), "steps": [record.step for record in averager.history]}


class Told(deque):
    """Step times that are not measured."""

    def append(self, seconds):
        pass


SPEEDS = [1.0, 1.0, 2.0, 4.0]  # seconds of a step, in `balanced`
BALANCED_STEPS = [32, 32, 20, 14]  # a stint of 8 for everybody, then three of 8, 8, 4 and 2


def balanced(rank, group):
    """Stints as long as each rank is fast; and where all are equally fast, what they are without."""

    def trained(steps, seconds, **options):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        averager = Averager(model, optimizer, period=Constant(p=8), process_group=group, timeout=60, **options)
        averager._pace = Told([seconds])
        with averager:
            train(model, optimizer, batches(rank, steps))
        return {"final": flat(model), "records": [(r.step, r.period, r.spread) for r in averager.history]}

    return {
        "fast and slow": trained(BALANCED_STEPS[rank], SPEEDS[rank], balance="speed"),
        "int8": trained(BALANCED_STEPS[rank], SPEEDS[rank], balance="speed", wire="int8"),
        "equal": trained(24, 3.0, balance="speed"),
        "plain": trained(24, 3.0),
    }


def resumed(rank, group):
    """40 steps in one go, and stopped in the middle of a stint with an averaging under way."""

    def parts():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options = {"wire": "int4", "overlap": 2, "momentum": "average", "steps": 40}
        period = Adaptive(start=4, guard=False)
        return model, optimizer, Averager(model, optimizer, period=period, process_group=group, **options)

    data = list(batches(rank, 40))
    whole, optimizer, averager = parts()
    with averager:
        train(whole, optimizer, data)
    result = {"whole": flat(whole), "records": [(r.step, r.period, r.spread) for r in averager.history]}
    for stop in (17, 18, 22):  # 16 begins an averaging that lands at 18
        first, optimizer, averager = parts()
        path = Path(os.environ["TMPDIR"]) / f"resume-{rank}.pt"
        try:
            with averager:
                train(first, optimizer, data[:stop])
                torch.save([first.state_dict(), optimizer.state_dict(), averager.state_dict()], path)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            early = averager.history
        second, optimizer, averager = parts()
        states = torch.load(path, weights_only=True)
        for part, state in zip((second, optimizer, averager), states, strict=True):
            part.load_state_dict(state)
        with averager:
            train(second, optimizer, data[stop:])
        result[stop] = flat(second)
        result[f"records-{stop}"] = [(r.step, r.period, r.spread) for r in early + averager.history]
    return result


def looked(rank, group):
    """averaged() in the middle of stints, with and without overlap: seen alike, restored, and without a trace."""
    result = {}
    for overlap in (0, 3):
        runs = []
        for look in (False, True):
            model = nn.Sequential(mlp(), nn.BatchNorm1d(3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            seen = []
            averager = Averager(model, optimizer, period=Constant(p=4), overlap=overlap, process_group=group)

            def after(t, averager=averager, model=model, seen=seen, look=look):
                if look and t in (1, 4, 6):
                    own = flat(model)
                    with averager.averaged():
                        seen.append((own, flat(model)))
                    assert torch.equal(own, flat(model))

            with averager:
                train(model, optimizer, batches(rank, 10), after)
            runs.append(flat(model))
        result[overlap] = {"seen": seen, "runs": runs}
    return result


def refused(rank, group):
    """Each of these must be the same one-line error on every rank."""
    cases = {
        "shape": (nn.Linear(3, 2 + (rank == 1)), 0.1),
        "name": (nn.ModuleDict({"b" if rank == 1 else "a": nn.Linear(2, 2)}), 0.1),
        "count": (nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + (rank == 1))]), 0.1),
        "rate": (nn.Linear(2, 2), 0.1 + 0.1 * (rank == 1)),
        "sync": (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), 0.1),
        "sharded": (fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,))), 0.1),
    }
    result = {}
    for name, (model, lr) in cases.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        try:
            with Averager(model, optimizer, period=Constant(p=2), process_group=group):
                result[name] = "accepted"
        except InputError as error:
            result[name] = str(error)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with Averager(model, optimizer, period=Constant(p=2 + (rank == 1)), steps=5 + (rank == 1), process_group=group):
            result["settings"] = "accepted"
    except InputError as error:
        result["settings"] = str(error)
    try:
        with Averager(model, optimizer, period=Constant(p=2), process_group=group):
            for t in range(4):
                optimizer.param_groups[0]["lr"] = 0.2 if rank == 1 and t > 1 else 0.1
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    except InputError as error:
        result["rate in the middle"] = str(error)
    return result


def raised(rank, group):
    """Rank 1 leaves by an exception: without a collective, and the others are told who."""
    dist.barrier()  # the time-out is short: nobody may be in the scenario before
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = Path(os.environ["TMPDIR"]) / "lost"
    averager = Averager(model, optimizer, period=Constant(p=4), process_group=group, timeout=10, checkpoint=folder)
    weights = []

    def after(t):
        weights.append(flat(model))
        if rank == 1 and t == 5:
            raise ZeroDivisionError("a bug in the loop")

    try:
        with averager:
            train(model, optimizer, batches(rank, 12), after)
    except ZeroDivisionError:
        return {"averagings": len(averager.history)}
    except RankLostError as lost:
        saved = torch.load(lost.checkpoint, weights_only=True)
        again = mlp()
        again.load_state_dict(saved["model"])
        return {"message": str(lost), "ranks": lost.ranks, "anchor": weights[3], "saved": flat(again)}
    return {}


def spoilt(rank, group):
    """Rank 2's weights turn NaN before the averaging."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = {}
    for wire in ("fp32", "int8"):
        with Averager(model, optimizer, period=Constant(p=1), wire=wire, process_group=group) as averager:
            start = flat(model)
            optimizer.zero_grad()
            (model.weight.sum() * (float("nan") if rank == 2 else rank + 1.0) + 0 * model.bias.sum()).backward()
            optimizer.step()
        result[wire] = {"moved": (flat(model) - start)[:16], "left_out": averager.history[0].left_out}
    return result


def overlapped(rank, group):
    """One weight, loss (w - target_rank)^2 / 2, overlap 2: the weights after every step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    path = []
    with Averager(model, optimizer, period=Constant(p=3), overlap=2, process_group=group) as averager:
        for _ in range(10):
            optimizer.zero_grad()
            ((model.weight - rank) ** 2 / 2).sum().backward()
            optimizer.step()
            path.append(model.weight.item())
    return {"path": path, "final": model.weight.item(), "delays": [record.delay for record in averager.history]}


def automatic(rank, group):
    """overlap='auto' with a compute step longer than the loopback's transfer, and all ranks with the same delays."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Averager(model, optimizer, period=Constant(p=4), overlap="auto", wire="int8", process_group=group) as averager:
        train(model, optimizer, batches(rank, 30))
    return {"final": flat(model), "delays": [record.delay for record in averager.history]}


def momentum(rank, group):
    """Optimizer state after an averaging: averaged alike, or gone."""
    result = {}
    for how in ("average", "reset", "local"):
        for make in (torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
            model = mlp()
            optimizer = make(model.parameters())
            states = []

            def after(t, model=model, optimizer=optimizer, states=states):
                if t == 3:
                    entries = [optimizer.state.get(p, {}) for p in model.parameters()]
                    kept = [v.flatten() for e in entries for v in e.values() if torch.is_tensor(v) and v.dim()]
                    states.append(torch.cat(kept) if kept else torch.empty(0))

            with Averager(model, optimizer, period=Constant(p=4), momentum=how, wire="int8", process_group=group):
                train(model, optimizer, batches(rank, 12), after)
            result[f"{how}-{type(optimizer).__name__}"] = {"state": states[0], "final": flat(model)}
    return result


def outer(rank, group):
    """One weight, loss (w - rank)^2 / 2, and what outer optimizers make of the mean change; then exact resume."""
    result = {}
    for name in (None, "SGD", "diloco", "slowmo", "delayed-nesterov"):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        path = []
        with Averager(model, optimizer, period=Constant(p=3), outer=name, process_group=group):
            for _ in range(10 + rank):  # ranks that have left come along: no outer step without a change
                optimizer.zero_grad()
                ((model.weight - rank) ** 2 / 2).sum().backward()
                optimizer.step()
                path.append(model.weight.item())
        result[str(name)] = {"path": path[:10], "final": model.weight.item()}

    def parts():
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        period = Adaptive(start=4, guard=False)
        options = {"outer": "diloco", "wire": "int4", "overlap": 2, "momentum": "average", "steps": 40}
        return model, optimizer, Averager(model, optimizer, period=period, process_group=group, **options)

    data = list(batches(rank, 40))
    whole, optimizer, averager = parts()
    with averager:
        train(whole, optimizer, data)
    result["whole"] = flat(whole)
    for stop, look in ((17, False), (17, True), (19, False)):  # 16 begins an averaging that is applied at 18
        first, optimizer, averager = parts()
        path = Path(os.environ["TMPDIR"]) / f"outer-{rank}.pt"
        try:
            with averager:
                train(first, optimizer, data[:stop])
                if look:
                    with averager.averaged():
                        pass
                torch.save([first.state_dict(), optimizer.state_dict(), averager.state_dict()], path)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        second, optimizer, averager = parts()
        for part, state in zip((second, optimizer, averager), torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(state)
        with averager:
            train(second, optimizer, data[stop:])
        result[f"{stop}-{look}"] = flat(second)
    return result


def fda(rank, group):
    """Averaging when the ranks are far apart: probes, thresholds, uneven ends, an evaluation in between, one resume."""
    everyone = [torch.randn(5000, generator=torch.Generator().manual_seed(r)) + 0.5 for r in range(4)]
    probe = DriftProbe(5000)
    drifts = torch.stack(everyone).double()
    result = {
        "probed": probe.between(everyone[rank], meet=False),
        "asked": probe.between(everyone[rank] if rank else None, meet=rank == 0),
        "spreads": [(d - d.mean(0)).square().sum(1).mean().item() for d in (drifts, drifts[1:])],
    }

    def parts():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        return model, optimizer, Averager(model, optimizer, period=FDA(most=12), process_group=group)

    data, path = list(batches(rank, 60 + 3 * rank)), Path(os.environ["TMPDIR"]) / f"fda-stopped-{rank}.pt"
    model, optimizer, averager = parts()
    seen = []

    def after(t):
        if t in (20, 33):
            with averager.averaged():
                seen.append(flat(model))
        if t == 25:
            torch.save([p.state_dict() for p in (model, optimizer, averager)], path)

    with averager:
        train(model, optimizer, data, after)
    result |= {"final": flat(model), "seen": seen, "periods": [r.period for r in averager.history]}
    result["history"] = [(r.period, r.spread) for r in averager.history]
    again, optimizer, averager = parts()
    for part, state in zip((again, optimizer, averager), torch.load(path, weights_only=True), strict=True):
        part.load_state_dict(state)
    with averager:
        train(again, optimizer, data[26:])
    result["again"] = flat(again)
    return result


class Constantly(nn.Module):
    """Gradients that do not depend on the weights, so that the end does not depend on when averagings happened."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(600))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, slope):
        self.seen += 1
        return slope * self.weight.sum()


def clocked(rank, group):
    """Averagings by the clock: sums over P, whatever the mix, the wire, the lengths, evaluations and a resume."""
    result = {}
    for mix in (0.0, 0.5, 1.0):
        for wire in ("fp32", "int8"):
            model = Constantly()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            seen, steps = [], 30 + 10 * rank
            period = Clocked(mix=mix)
            averager = Averager(model, optimizer, period=period, wire=wire, scaler=scaler, process_group=group)
            with averager:
                for t in range(steps):
                    optimizer.zero_grad()
                    for _ in range(2):  # two micro-batches a step
                        loss = model((rank + 1.0) / 2)
                        scaler.scale(loss * (float("inf") if rank == 1 and t == 3 else 1.0)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    if t in (10, 20):
                        with averager.averaged():
                            seen.append(model.weight.detach().clone())
            taken = steps - (rank == 1)  # one step of rank 1 overflowed
            result[f"{mix}-{wire}"] = {
                "final": model.weight.detach().clone(),
                "seen": seen,
                "taken": taken,
                "counter": model.seen.item(),
                "averagings": len(averager.history),
            }
    return result


def clocked_nobody_waits(rank, group):
    """Rank 3 stands still in its second step until rank 0 has seen five more averagings come and go."""
    store = dist.distributed_c10d._get_default_store()
    model = Constantly()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    averager = Averager(model, optimizer, period=Clocked(), process_group=group)

    def step():
        optimizer.zero_grad()
        model(1.0).backward()
        optimizer.step()

    taken = 0
    with averager:
        if rank == 0:
            store.wait(["clocked/standing"])
            while len(averager.history) < 5:
                step()
                taken += 1
                time.sleep(0.001)
            store.set("clocked/seen", "yes")
        elif rank == 3:
            step()
            store.set("clocked/standing", "yes")
            store.wait(["clocked/seen"])
            step()
            taken = 2
        else:
            for _ in range(20):
                step()
            taken = 20
    return {"final": model.weight.detach().clone(), "taken": taken}


def clocked_models(rank, group):
    """BatchNorm and AdamW under the clock; a rank that turns NaN; stopped inside averaged() and resumed."""

    def parts():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, Averager(model, optimizer, period=Clocked(), wire="int8", process_group=group)

    data = list(batches(rank, 120))
    model, optimizer, averager = parts()
    with torch.no_grad():
        before = sum(nn.functional.cross_entropy(model(x), y).item() for x, y in data) / 120
    model, optimizer, averager = parts()
    with averager:
        train(model, optimizer, data)
    states = [value.clone() for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]
    final = flat(model)  # before the losses, whose forward passes move the running statistics
    with torch.no_grad():
        after = sum(nn.functional.cross_entropy(model(x), y).item() for x, y in data) / 120
    result = {"final": final, "states": torch.cat([s.flatten() for s in states]), "losses": (before, after)}

    first, optimizer, averager = parts()
    path = Path(os.environ["TMPDIR"]) / f"stopped-while-clocked-{rank}.pt"  # not the name of a result
    try:
        with averager:
            train(first, optimizer, data[: 20 + rank])
            try:
                averager.state_dict()
            except InputError as error:
                result["outside"] = str(error)
            with averager.averaged():
                result["at rest"] = flat(first)
                torch.save([first.state_dict(), optimizer.state_dict(), averager.state_dict()], path)
            dist.barrier()  # no rank leaves while another is on its way to the rest
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    second, optimizer, averager = parts()
    for part, state in zip((second, optimizer, averager), torch.load(path, weights_only=True), strict=True):
        part.load_state_dict(state)
    with averager:
        result["again"] = flat(second)
        train(second, optimizer, data[20 + rank :])
    result["resumed"] = flat(second)

    model = Constantly()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Averager(model, optimizer, period=Clocked(), process_group=group):
        for t in range(60):
            optimizer.zero_grad()
            model(float("nan") if rank == 2 and t == 5 else 1.0).backward()
            optimizer.step()
            time.sleep(0.002)
    result["with NaN"] = model.weight.detach().clone()
    return result


def clocked_raised(rank, group):
    """Rank 1 leaves by an exception; the others are told who, and keep the weights of the last averaging."""
    dist.barrier()  # the others have noticed a loss in the scenario before, which takes as long as the time-out here
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = Path(os.environ["TMPDIR"]) / "clocked-lost"
    averager = Averager(model, optimizer, period=Clocked(), process_group=group, timeout=10, checkpoint=folder)

    def after(t):
        if rank == 1 and t == 5:
            raise ZeroDivisionError("a bug in the loop")

    try:
        with averager:
            train(model, optimizer, batches(rank, 12), after)
    except ZeroDivisionError:
        return {}
    except RankLostError as lost:
        saved = torch.load(lost.checkpoint, weights_only=True)
        return {"message": str(lost), "ranks": lost.ranks, "keys": sorted(saved)}
    return {"message": "nothing"}


class Branching(nn.Module):
    """A layer that only some ranks use, so that only they have optimizer state for it."""

    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(self.branch(h) if dist.get_rank() != 2 or not self.training else h)


def after_the_block(rank, group):
    """Ranks of different length, one without some state; after the block all go on with DDP, and train one model."""
    makers = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
        "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    }
    result = {}
    for name, make in makers.items():
        for how in ("local", "average", "reset"):
            torch.manual_seed(0)
            model = Branching()
            optimizer = make(model.parameters())
            with Averager(model, optimizer, period=Constant(p=4), momentum=how, process_group=group) as averager:
                train(model, optimizer, batches(rank, 9 + rank))
                state = optimizer.state.get(model.last.weight, {})
                own = {key: state[key].clone() for key in ("momentum_buffer", "exp_avg") if key in state}
            left = [optimizer.state.get(p, {}) for p in model.parameters()]
            states = [{k: v.clone() for k, v in sorted(s.items()) if torch.is_tensor(v)} for s in left]
            model.eval()  # every rank takes the branch from here on
            ddp = DistributedDataParallel(model, process_group=group)
            train(ddp, optimizer, batches(rank, 10))
            result[f"{name}-{how}"] = {"states": states, "own": own, "final": flat(model), "bytes": averager.bytes_sent}
    return result


def wrapped(rank, group):
    """What a user may hand over of a DDP model: all of these must train locally."""
    result = {}
    pick = {
        "ddp": lambda ddp: (ddp, ddp),
        "module": lambda ddp: (ddp.module, ddp),
        "compiled": lambda ddp: (torch.compile(ddp, backend="eager"),) * 2,
        "inside": lambda ddp: (nn.Sequential(ddp),) * 2,
    }
    for name, choose in pick.items():
        given, called = choose(DistributedDataParallel(mlp(), process_group=group))
        optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
        with Averager(given, optimizer, period=Constant(p=4), process_group=group) as averager:
            train(called, optimizer, batches(rank, 8))
        train(called, optimizer, batches(rank, 1))
        gradient = torch.cat([p.grad.flatten() for p in given.parameters()])
        result[name] = {"spreads": [r.spread for r in averager.history], "gradient": gradient}
    hooked = DistributedDataParallel(mlp(), process_group=group)
    hooked.register_comm_hook(None, allreduce_hook)
    try:
        with Averager(hooked.module, torch.optim.SGD(hooked.parameters(), lr=0.1), process_group=group):
            result["hooked"] = "accepted"
    except InputError as error:
        result["hooked"] = str(error)
    return result


def two_levels(rank, group):
    """DDP within the pairs (0, 1) and (2, 3), averaging between them: the all-reduce within a pair stays on."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DistributedDataParallel(mlp(), process_group=pairs[rank // 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    with Averager(model, optimizer, period=Constant(p=4), process_group=across[rank % 2]):
        train(model, optimizer, batches(rank, 8), lambda _: kept.append(flat(model)))
    return {"kept": kept}


def same_examples(rank, group):
    """Every rank trains on rank 0's examples, or on its own."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hemiola.averager").addHandler(handler)
    said = {}
    for name, data in (("same", 0), ("own", rank)):
        for wire in ("fp32", "int8"):
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with Averager(model, optimizer, period=Constant(p=2), wire=wire, process_group=group):
                train(model, optimizer, batches(data, 6))
            said[f"{name}-{wire}"] = list(lines)
            lines.clear()
    logging.getLogger("hemiola.averager").removeHandler(handler)
    return said


def measured(rank, group):
    """GroupMean against the definition in float64, for small drifts around weights of size 1."""
    everyone = [torch.randn(5000, generator=torch.Generator().manual_seed(r)) * 1e-5 + 2e-5 for r in range(4)]
    true_mean = torch.stack(everyone).double().mean(0)
    true_spread = (torch.stack(everyone).double() - true_mean).square().sum(1).mean().item()
    result = {"spread": true_spread, "movement": true_mean.square().sum().item(), "mean": true_mean}
    for wire, codec in WIRES.items():
        mean = GroupMean(dist.group.WORLD, lossy=5000, exact=3, counted=5000, codec=codec, feedback=True)
        merged = mean(everyone[rank], torch.full((3,), float(rank)), [1.0, 1.0 / 3.0, -float(rank)])
        result[wire] = {
            "spread": merged.spread,
            "movement": merged.movement,
            "mean": merged.change.double(),
            "exact": merged.exact,
            "notes": torch.from_numpy(merged.notes),
            "bytes": merged.bytes,
        }
    return result


PAIRS = [awkward_pair, like_ddp_pair, wrapped]
ALL = [
    awkward,
    like_ddp,
    wires,
    ddp_local,
    skipped_steps,
    uneven,
    balanced,
    resumed,
    looked,
    refused,
    spoilt,
    overlapped,
    automatic,
    momentum,
    after_the_block,
    two_levels,
    outer,
    same_examples,
    fda,
    clocked,
    clocked_nobody_waits,
    clocked_models,
    measured,
    raised,
    clocked_raised,
]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    out = Path(sys.argv[1])
    pair = dist.new_group([0, 1])
    for scenario in PAIRS + ALL:
        group = pair if scenario in PAIRS else None
        if scenario in PAIRS and rank > 1:
            continue
        try:
            result = scenario(rank, group)
        except Exception:
            result = {"failed": traceback.format_exc()}
        torch.save(result, out / f"{scenario.__name__}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
