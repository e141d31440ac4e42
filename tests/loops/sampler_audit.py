"""Whose gradient is it? An auditor for training loops that needs no knowledge of how the sampler knows.

The model is linear and the loss the mean of its outputs, so an example's gradient is its own input, whatever the
weights are. Inputs have norms that tell them apart, and sketches keep norms here, so every row that the policy is shown
names the example it came from, to be compared with the example it is booked on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hemiola import OrderedSampler, SamplerWarning
from hemiola.contracts import Visit
from hemiola.order import CDGraB

EXAMPLES, BATCH, WIDTH = 48, 4, 3
BATCHES = EXAMPLES // BATCH


class Numbered(Dataset[tuple[Tensor, int]]):
    """Random directions; example i has norm i + 1."""

    def __init__(self) -> None:
        directions = torch.randn(EXAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
        self.inputs = nn.functional.normalize(directions) * torch.arange(1.0, EXAMPLES + 1)[:, None]

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.inputs[number], number


class Witness(CDGraB):
    """An order that keeps what it is shown."""

    def begin(self, *args: Any, **options: Any) -> None:
        super().begin(*args, **options)
        self.shown: list[Visit] = []

    def observe(self, visits: Sequence[Visit]) -> None:
        self.shown += visits
        super().observe(visits)


@dataclass
class Finding:
    """What an audited loop came to.

    Attributes:
        wrong: Units that were shown with another unit's gradient.
        shown: Examples whose gradients were shown.
        trained: Examples that the loop says it trained on.
        warned: Texts of `SamplerWarning`.
        telemetry: At the end, inside of the watch.
    """

    wrong: int = 0
    shown: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    telemetry: dict[str, Any] = field(default_factory=dict)


class Loop:
    """What a training loop has at hand; loops under test are functions of it.

    Args:
        tracked: Whether the loader is tracked.
        unit: Examples per unit.
        sketch: What the policy is shown; ``ghost:4`` has a direction for every input dimension.
        model: A linear model in any disguise.
        dataset: Whose inputs are `Numbered`'s.
        loader: Makes the DataLoader; by default an ordinary one.
        options: Of the DataLoader.
    """

    def __init__(
        self,
        tracked: bool,
        unit: int = 1,
        sketch: str | None = None,
        model: nn.Module | None = None,
        dataset: Numbered | None = None,
        loader: Callable[[Dataset[Any], OrderedSampler], DataLoader[Any]] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.dataset = dataset or Numbered()
        self.policy = Witness(unit=unit, sketch=sketch)
        self.sampler = OrderedSampler(self.dataset, self.policy)
        if loader is not None:
            self.loader = loader(self.dataset, self.sampler)
        else:
            self.loader = DataLoader(self.dataset, BATCH, sampler=self.sampler, **options)
        if tracked:
            self.sampler.track(self.loader)
        self.model = linear() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.call: Callable[[Tensor], Tensor] = self.model
        self.trained: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        return self.call(x).mean()

    def backward(self, loss: Tensor, numbers: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.trained += numbers.tolist()

    def step(self, x: Tensor, numbers: Tensor) -> None:
        self.backward(self.forward(x), numbers)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, 1, bias=False)


def plain(loop: Loop, epochs: int) -> None:
    """The loop of every tutorial."""
    for _ in range(epochs):
        for x, numbers in loop.loader:
            loop.step(x, numbers)


def audit(
    loop: Loop, run: Callable[[Loop, int], None] = plain, epochs: int = 1, watched: nn.Module | None = None
) -> Finding:
    """Run a loop inside of a watch, then compare every row with the example it was booked on."""
    found = Finding()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with loop.sampler.watch(loop.model if watched is None else watched):
            run(loop, epochs)
            found.telemetry = loop.sampler.telemetry()
    for warning in caught:
        assert issubclass(warning.category, SamplerWarning), warning.message
    found.warned = [str(warning.message) for warning in caught]
    found.trained = loop.trained
    for visit in loop.policy.shown:
        assert visit.sketches is not None
        for unit, row in zip(visit.units.tolist(), visit.sketches, strict=True):
            members = loop.sampler._deal.units[unit]
            expected = loop.dataset.inputs[members].mean(0).norm()
            found.wrong += not torch.isclose(row.norm(), expected, rtol=1e-3)
            found.shown += members.tolist()
    return found
