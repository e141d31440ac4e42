"""A real slow link on one machine: two gloo ranks in network namespaces, joined through a bridge shaped to 100 Mbit/s.

``python benchmarks/run.py link`` (Linux, root or unprivileged user namespaces, ``ip``, ``tc`` and ``unshare``). The
whole network lives inside one ``unshare``: nothing outside sees the traffic, and everything is gone when it ends. A
rate can be shaped this way on any kernel with ``tbf``; a latency cannot.

Compared, in turn and several times over, on a model of 7.9 M parameters: DistributedDataParallel; the averager with
p = 8; the same with int8 deltas and automatic overlap. And the bytes the interface counted against the averager's own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

from ratio import Ratio, Skip

RATE = "100mbit"
ROUNDS = 3
SHAPE = ["root", "tbf", "rate", RATE, "burst", "512kb", "latency", "100ms"]


def ratios() -> Iterator[Ratio]:
    result = measure()
    ddp = result["ddp"]["step"]
    for mode, bar in (("p8", "<= 0.35"), ("p8-int8-auto", "<= 0.15")):
        value = result[mode]["step"] / ddp
        note = f"step time over DDP's {ddp:.2f} s; {result[mode]['delay']} of 8 steps overlapped"
        yield Ratio(f"{mode} step time", value, bar, note)
    for mode in ("p8", "p8-int8-auto"):
        value = result[mode]["sent"] / result[mode]["counted"]
        megabytes = result[mode]["sent"] / result[mode]["averagings"] / 8 / 1e6
        yield Ratio(f"{mode} bytes, high", value, "<= 1.05", f"interface over own count, {megabytes:.3f} MB a step")
        yield Ratio(f"{mode} bytes, low", value, ">= 0.95", "the same number")
    yield Ratio(
        "p8-int8-auto bytes", result["p8-int8-auto"]["sent"] / result["p8"]["sent"], "", "interface, over fp32 p8"
    )


def measure(script: str = __file__, ranks: int = 2) -> dict[str, dict[str, float]]:
    """Run ``script --rank OUT`` on every rank and return what rank 0 has written to OUT."""
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            raise Skip(f"{tool} is not installed (packages util-linux and iproute2)")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = ["unshare", "-Urnm", sys.executable, __file__, "--network", str(out)]
        command += ["--script", script, "--ranks", str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.exists():
            reason = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise Skip(f"cannot shape a link here: {reason}")
        return json.loads(out.read_text())


# ---------------------------------------------------------------------------------------------- inside the unshare


def network(out: Path, script: str, ranks: int) -> None:
    """A namespace for every rank and a bridge between them, every end shaped; then one rank in each."""

    def run(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")

    run("mount", "-t", "tmpfs", "tmpfs", "/run")  # a private place for the names of the namespaces
    run("ip", "link", "add", "hub", "type", "bridge")
    run("ip", "link", "set", "hub", "up")
    for rank in range(ranks):
        space, outer = f"rank{rank}", f"port{rank}"
        run("ip", "netns", "add", space)
        run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", outer, "master", "hub", "up")
        run("tc", "qdisc", "add", "dev", outer, *SHAPE)
        for command in (
            ["ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0"],
            ["ip", "link", "set", "eth0", "up"],
            ["ip", "link", "set", "lo", "up"],
            ["tc", "qdisc", "add", "dev", "eth0", *SHAPE],
        ):
            run("ip", "netns", "exec", space, *command)
    processes = []
    for rank in range(ranks):
        where = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": "eth0"}
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", f"rank{rank}", sys.executable, script, "--rank", str(out)]
        processes.append(subprocess.Popen(command, env={**os.environ, **where, **place}))
    codes = [process.wait(timeout=1200) for process in processes]
    for rank in range(ranks):
        run("ip", "netns", "delete", f"rank{rank}")
    if any(codes):
        sys.exit(f"the ranks ended with {codes}")


# ------------------------------------------------------------------------------------------------------ on each rank


def rank_main(out: Path) -> None:
    """Measure every mode, interleaved, and let rank 0 write the medians."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from hemiola.loops.averager import Averager
    from hemiola.period import Constant

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    widths = [784, 2048, 2048, 1024, 10]
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    stream = torch.Generator().manual_seed(rank)
    batch = torch.randn(32, 784, generator=stream), torch.randint(0, 10, (32,), generator=stream)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()
            optimizer.step()
        dist.barrier()
        return (time.perf_counter() - begin) / steps

    def sent_so_far() -> int:
        line = next(row for row in Path("/proc/net/dev").read_text().splitlines() if row.strip().startswith("eth0:"))
        return int(line.split(":")[1].split()[8])

    ddp = DistributedDataParallel(model)
    ddp_optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train(ddp, ddp_optimizer, 1)
    times: dict[str, list[float]] = {"ddp": [], "p8": [], "p8-int8-auto": []}
    result: dict[str, dict[str, float]] = {mode: {} for mode in times}
    modes = {"p8": {"wire": "fp32", "overlap": 0}, "p8-int8-auto": {"wire": "int8", "overlap": "auto"}}
    for _ in range(ROUNDS):
        times["ddp"].append(train(ddp, ddp_optimizer, 2))
        for mode, options in modes.items():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            with Averager(model, optimizer, period=Constant(p=8), timeout=600, **options) as averager:
                before = sent_so_far()  # after the start, where rank 0 sends its weights
                train(model, optimizer, 16)  # the first averagings measure the link, then the overlap is chosen
                times[mode].append(train(model, optimizer, 16))
            sent = sent_so_far() - before
            delay = max(record.delay for record in averager.history)
            result[mode] = {"sent": sent, "counted": averager.bytes_sent, "averagings": 5, "delay": delay}
    for mode, values in times.items():
        result[mode]["step"] = median(values)
    if rank == 0:
        out.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", type=Path)
    parser.add_argument("--script", default=__file__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=Path)
    arguments = parser.parse_args()
    if arguments.network:
        network(arguments.network, arguments.script, arguments.ranks)
    elif arguments.rank:
        rank_main(arguments.rank)
