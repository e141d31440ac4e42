"""torchft's LocalSGD with a period, on two real replicas: its managers, its lighthouse, its process groups.

Runs where torchft is installed (``pip install torchft-nightly``); it is not part of the dev extra.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

import hemiola

pytest.importorskip("torchft")
pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]

from torchft.coordination import LighthouseServer  # noqa: E402
from torchft.manager import Manager  # noqa: E402
from torchft.process_group import ProcessGroupGloo  # noqa: E402

from hemiola.adapters.torchft import LocalSGD  # noqa: E402


@pytest.fixture(autouse=True)
def _sockets() -> Iterator[None]:
    """torchft leaves sockets to the garbage collector; let it come while warnings are ignored."""
    yield
    gc.collect()


class Replica:
    """A model that is trained on numbers of its own, until enough averagings are committed."""

    def __init__(self, number: int, lighthouse: str, period: hemiola.Period | int) -> None:
        self.number = number
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        torch.manual_seed(number)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.manager = Manager(
            pg=ProcessGroupGloo(),
            min_replica_size=2,
            load_state_dict=self.load,
            state_dict=lambda: {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()},
            replica_id=str(number),
            store_addr="localhost",
            store_port=self.store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse,
            timeout=timedelta(seconds=60),
            use_async_quorum=False,
        )
        self.local = LocalSGD(self.manager, self.model, self.optimizer, sync_every=period)

    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def train(self, averagings: int) -> None:
        random = torch.Generator().manual_seed(self.number)
        with self.local:
            while len(self.local.history) < averagings:
                self.optimizer.zero_grad()
                x = torch.randn(8, 4, generator=random)
                (self.model(x) - self.number).square().mean().backward()
                self.optimizer.step()


def trained(periods: list[hemiola.Period | int], averagings: int) -> list[Replica]:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=100)
    replicas = [Replica(number, lighthouse.address(), period) for number, period in enumerate(periods)]
    try:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(each.train, averagings) for each in replicas]:
                done.result(timeout=120)
    finally:
        for each in replicas:
            each.manager.shutdown()
        lighthouse.shutdown()
    return replicas


def test_a_period_decides_alike_on_all_replicas() -> None:
    first, second = trained([hemiola.Adaptive(start=2), hemiola.Adaptive(start=2)], averagings=6)
    shown = [
        [(seen.spread, seen.movement, seen.local_steps) for seen in each.local.history] for each in (first, second)
    ]
    assert shown[0] == shown[1]
    reference = hemiola.Adaptive(start=2)
    for seen in first.local.history:
        assert seen.local_steps == reference.length(0.1, 0.0)
        reference.averaged(seen)
    assert all(seen.spread > 0 for seen in first.local.history[1:])
    for mine, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert threading.active_count() < 64


def test_a_number_averages_every_so_many_steps() -> None:
    first, _ = trained([3, 3], averagings=3)
    assert [seen.local_steps for seen in first.local.history] == [3, 3, 3]


def test_bad_input_is_one_clear_line() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hemiola.InputError, match="sync_every cannot be Full"):
        LocalSGD(None, model, optimizer, sync_every=hemiola.Full())  # type: ignore[arg-type]
    with pytest.raises(hemiola.InputError, match="depends on the length of the run: give steps="):
        LocalSGD(None, model, optimizer, sync_every=hemiola.PostLocal())  # type: ignore[arg-type]
