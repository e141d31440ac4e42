"""What each of two ranks does with communication hooks: `torchrun ddp_ranks.py FOLDER`, or `run_on_ranks`.

One start of the processes serves all scenarios; test_ddp.py looks at the results.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hemiola
from hemiola.adapters.ddp import GradientWire, LocalSteps, gradient_wire_hook, local_steps_hook

STEPS, WIRES = 7, ("bf16", "int8", "int4", "qsgd8", "qsgd4")


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))


def batches():
    random = torch.Generator().manual_seed(10 + dist.get_rank())
    return [torch.randn(8, 6, generator=random) for _ in range(2 * STEPS)]


def flat(tensors):
    return torch.cat([each.detach().flatten() for each in tensors])


def steps(model, optimizer, data, accumulate=None):
    """One step after the other; with ``accumulate``, of two batches each, the first one without an exchange."""
    for x, other in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        if accumulate is not None:
            with accumulate():
                model(other).square().mean().backward()
        model(x).square().mean().backward()
        optimizer.step()


def local_steps():
    """The hook, the hook under compile, and an averager around a model without DistributedDataParallel."""
    found = {}
    for kind in ("hook", "compiled", "accumulated", "reference", "accumulated reference"):
        module, data = build(), batches()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        if "reference" in kind:
            state = hemiola.Averager(module, optimizer, period=hemiola.Constant(p=3))
            twice = torch.enable_grad if "accumulated" in kind else None
            with state:
                steps(module, optimizer, data, twice)
            found[kind] = {"weights": flat(module.parameters())}
            continue
        ddp = DistributedDataParallel(module)
        state = LocalSteps(ddp, optimizer, hemiola.Constant(p=3))
        ddp.register_comm_hook(state, local_steps_hook)
        model = torch.compile(ddp, backend="aot_eager") if kind == "compiled" else ddp
        with state:
            steps(model, optimizer, data, ddp.no_sync if kind == "accumulated" else None)
            apart = flat(p.grad for p in module.parameters())
        model(data[0]).square().mean().backward()
        found[kind] = {
            "weights": flat(module.parameters()),
            "apart": apart,
            "periods": [record.period for record in state.averager.history],
        }
        optimizer.zero_grad()
        model(data[0]).square().mean().backward()
        found[kind]["together"] = flat(p.grad for p in module.parameters())
    return found


def wires():
    """Gradients of the same weights, step after step: what arrives, and what should."""
    found = {}
    for wire in WIRES:
        module = nn.Sequential(nn.Linear(6, 500), nn.ReLU(), nn.Linear(500, 3))
        dist.broadcast(vector := flat(module.parameters()), 0)
        nn.utils.vector_to_parameters(vector, module.parameters())
        ddp, state = DistributedDataParallel(module, bucket_cap_mb=0.005), GradientWire(wire)
        ddp.register_comm_hook(state, gradient_wire_hook)
        true, arrived = [], []
        for x in batches()[:10]:
            own = flat(torch.autograd.grad(module(x).square().mean(), list(module.parameters())))
            dist.all_reduce(own)
            true.append(own / 2)
            module.zero_grad()
            ddp(x).square().mean().backward()
            arrived.append(flat(p.grad for p in module.parameters()))
        saved = state.state_dict()
        module.zero_grad()
        x = batches()[0] * (float("nan") if dist.get_rank() == 1 else 1.0)
        ddp(x).square().mean().backward()
        broken = flat(p.grad for p in module.parameters())
        found[wire] = {
            "true": torch.stack(true),
            "arrived": torch.stack(arrived),
            "broken": broken,
            "bytes": state.bytes_sent,
            "state": saved,
        }
    return found


def main():
    dist.init_process_group("gloo")
    found = {"local": local_steps(), "wires": wires()}
    torch.save(found, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
