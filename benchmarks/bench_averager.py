"""What the averager adds to a training loop where nobody else is, and what the wire costs in plain memory copies.

The communication itself is measured on a real slow link by ``bench_link.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from ratio import Ratio, compare
from torch import nn

from hemiola.loops.averager import Averager
from hemiola.period import Constant
from hemiola.streams import torch_stream
from hemiola.wire.codec import WIRES, Codec, quantiser


def ratios() -> Iterator[Ratio]:
    torch.set_num_threads(1)
    for p in (8, 1):
        loop, averaged = _loops(p)
        yield Ratio(f"a step with p = {p}", compare(averaged, loop), "", "one process, 2 M parameters, batch 32")
    vector = torch.randn(4_000_000, generator=torch_stream("bench"))
    for codec in (*WIRES.values(), quantiser(8)):
        stream = torch_stream("bench", codec.name)
        there_and_back = _there_and_back(codec, vector, stream)
        yield Ratio(
            f"{codec.name} there and back", compare(there_and_back, vector.clone), "", "over a copy of 4 M numbers"
        )


def _loops(p: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Eight steps of a plain loop, and of one inside an averager."""
    plain, averaged = _Loop(), _Loop()
    Averager(*averaged.parts, period=Constant(p=p)).__enter__()
    return plain, averaged


class _Loop:
    def __init__(self) -> None:
        model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
        self.parts = model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.x = torch.randn(32, 512, generator=torch_stream("bench"))

    def __call__(self) -> None:
        model, optimizer = self.parts
        for _ in range(8):
            optimizer.zero_grad()
            model(self.x).square().mean().backward()
            optimizer.step()


def _there_and_back(codec: Codec, vector: torch.Tensor, stream: torch.Generator) -> Callable[[], torch.Tensor]:
    return lambda: codec.decode(codec.encode(vector, stream), vector.numel())
