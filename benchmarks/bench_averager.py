"""What the averager adds to a training loop where nobody else is, and what the wire costs in plain memory copies.

The communication itself is measured on a real slow link by ``bench_link.py``.
"""

from __future__ import annotations

import time
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
        found = _cpu_ratio(*_loops(p, _Wide))
        yield Ratio(f"a step with p = {p}", found, "<= 1.03", "one process, 2 M parameters, batch 32")
    found = _cpu_ratio(*_loops(4, _Transformer))
    yield Ratio("a step of a small transformer", found, "<= 1.03", "one process, 4 layers, 128 wide, p = 4")
    vector = torch.randn(4_000_000, generator=torch_stream("bench"))
    for codec in (*WIRES.values(), quantiser(8)):
        stream = torch_stream("bench", codec.name)
        there_and_back = _there_and_back(codec, vector, stream)
        yield Ratio(
            f"{codec.name} there and back", compare(there_and_back, vector.clone), "", "over a copy of 4 M numbers"
        )


def _cpu_ratio(loop: Callable[[], None], averaged: Callable[[], None]) -> float:
    """In CPU seconds, which other programs disturb less, and over many rounds: the bar is three percent."""
    return compare(averaged, loop, rounds=25, clock=time.process_time)


def _loops(p: int, kind: type[_Loop]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Eight steps of a plain loop, and of one inside an averager."""
    plain, averaged = kind(), kind()
    Averager(averaged.model, averaged.optimizer, period=Constant(p=p)).__enter__()
    return plain, averaged


class _Loop:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    x: torch.Tensor

    def __call__(self) -> None:
        for _ in range(8):
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()


class _Wide(_Loop):
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.x = torch.randn(32, 512, generator=torch_stream("bench"))


class _Transformer(_Loop):
    """As large as the smallest character models of nanoGPT; 12 sequences of 64 tokens."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(12, 64, 128, generator=torch_stream("bench"))


def _there_and_back(codec: Codec, vector: torch.Tensor, stream: torch.Generator) -> Callable[[], torch.Tensor]:
    return lambda: codec.decode(codec.encode(vector, stream), vector.numel())
