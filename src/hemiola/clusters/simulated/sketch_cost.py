"""What ordering costs in virtual time: bytes of sketches on the link, and a factor on the steps that make them.

The bytes follow from the sketch. The factor is one of three things, by the option ``sketch_cost`` of the simulated
cluster: by default a number for each way of making sketches, measured once on LeNet (`USUAL`); a number the user gives;
or measured on the user's own task, once, and kept in the cache beside the tasks' optima.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from hemiola.cache import cache_folder, keep, kept
from hemiola.contracts import State, Stint, TaskLike
from hemiola.errors import InputError, nearest
from hemiola.gradients.units import UnitGradients
from hemiola.streams import torch_seed

Source = Literal["none", "usual", "given", "measured"]
SketchCost = float | str | dict[str, float]

USUAL = {"exact": 2.5, "fold": 2.5, "ghost": 1.4}
"""Seconds of a step that makes a row for each of several units, over those of a plain step; by kind of sketch."""
USUAL_WHOLE = {"exact": 1.15, "fold": 1.3}
"""The same where a batch is one unit, whose row is the batch's own gradient; ghosts cost what they always cost."""

LOSS_BYTES = 4  # of a unit's loss, which is computed anyway

ROUNDING = 0.05  # of a measured factor: coarse enough that machines of a kind agree
_VERSION = 1
_SAMPLE_SECONDS = 0.01  # of CPU time at least, so that the clock's own resolution does not show
_PAIRS = 25
_BUDGET_SECONDS = 5.0


@dataclass(frozen=True)
class Charge:
    """What the simulated clock charges for ordering.

    Attributes:
        sketch: Kind of sketch, as the order asked for it; None if the order looks at no gradients.
        row_bytes: Bytes of what is sent of one unit: its sketch, its loss.
        step_factor: A local step that makes sketches takes so many times as long.
        source: Where the factor comes from.
    """

    sketch: str | None = None
    row_bytes: int = 0
    step_factor: float = 1.0
    source: Source = "none"

    def message_bytes(self, stint: Stint, wanted: Sequence[bool]) -> int:
        """Bytes of the sketches that go with a stint's report."""
        units = sum(len(batch.units) for batch, want in zip(stint.batches, wanted, strict=True) if want)
        return units * self.row_bytes

    def facts(self) -> State:
        """For the log."""
        return {} if self.sketch is None else {"charged": asdict(self)}


def check_sketch_cost(cost: SketchCost) -> None:
    """Refuse what is no cost, before anything is computed."""
    if isinstance(cost, str):
        if cost not in ("usual", "measured"):
            raise InputError(
                f"sketch_cost must be 'usual', 'measured', a number of at least 1, or a table of numbers by kind of "
                f"sketch, got {cost!r}{nearest(cost, ['usual', 'measured'])}"
            )
        return
    for kind, factor in cost.items() if isinstance(cost, dict) else [("", cost)]:
        if kind and kind not in USUAL:
            raise InputError(
                f"sketch_cost.{kind}: unknown kind of sketch{nearest(kind, list(USUAL))}; known: exact, fold, ghost"
            )
        if not 1 <= factor < math.inf:
            where = f"sketch_cost.{kind}" if kind else "sketch_cost"
            raise InputError(f"{where} must be at least 1 and finite, got {factor}")


def charge_for(
    cost: SketchCost, task: TaskLike, sketch: str | None, unit: int, batch: int, rows: UnitGradients | None
) -> Charge:
    """What this run's sketches cost.

    Args:
        cost: The option ``sketch_cost``.
        task: What is trained.
        sketch: What the order asked for; None for nothing.
        unit: Examples per unit.
        batch: Examples per local step.
        rows: What makes the sketches.
    """
    if sketch is None or rows is None:
        return Charge()
    kind = rows.kind
    source: Source
    if cost == "measured":
        factor, source = measured_factor(task, sketch, unit, batch), "measured"
    elif isinstance(cost, dict) and kind in cost:
        factor, source = float(cost[kind]), "given"
    elif isinstance(cost, int | float):
        factor, source = float(cost), "given"
    else:
        factor, source = usual_factor(kind, whole=unit == batch), "usual"
    return Charge(sketch, rows.row_bytes, factor, source)


def usual_factor(kind: str, whole: bool) -> float:
    """The factor of a kind of sketch where nothing else is known."""
    return USUAL_WHOLE.get(kind, USUAL[kind]) if whole else USUAL[kind]


# ------------------------------------------------------------------------------------------------------- measuring


def measured_factor(task: TaskLike, sketch: str, unit: int, batch: int) -> float:
    """CPU time of a step with sketches over one without, rounded to `ROUNDING`; from the cache if it is known."""
    path = cache_folder() / "sketch-costs" / f"{_fingerprint(task, sketch, unit, batch)}.json"
    known = kept(path, "factor")
    if known is None:
        known = max(1.0, round(measure(task, sketch, unit, batch) / ROUNDING) * ROUNDING)
        known = round(known, 2)
        keep(path, {"factor": known, "task": task.name, "sketch": sketch, "unit": unit, "batch": batch})
    return known


def measure(
    task: TaskLike, sketch: str, unit: int, batch: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Median over interleaved repetitions of the time of a step with sketches over that of a plain one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a run
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed("sketch-cost"))
            plain, sketched = _steps(task, sketch, unit, batch)
            return _ratio(plain, sketched, clock)
    finally:
        torch.set_num_threads(threads)


def _steps(task: TaskLike, sketch: str, unit: int, batch: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A local step without and one with sketches: read, forward, backward, optimizer."""
    indices = np.arange(min(batch, len(task.train)))
    weights = torch.full((len(indices),), 1 / len(indices))
    rows = torch.from_numpy(indices // unit)
    plain, watched = task.model().train(), task.model().train()
    units = UnitGradients(watched, task.losses, sketch, seed=0)

    def step_of(model: nn.Module, backward: Callable[[Any, Any], Any]) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def step() -> None:
            inputs, targets = task.train.batch(indices)
            optimizer.zero_grad()
            backward(inputs, targets)
            optimizer.step()

        return step

    return (
        step_of(plain, lambda x, y: torch.autograd.backward((task.losses(plain(x), y) * weights).sum())),
        step_of(watched, lambda x, y: units.compute(x, y, weights, rows)),
    )


def _ratio(plain: Callable[[], Any], sketched: Callable[[], Any], clock: Callable[[], float]) -> float:
    """One after the other, so that a machine that gets slower or faster meanwhile does so for both."""
    began = clock()
    for step in (plain, sketched, sketched, plain):  # The first calls allocate, and find out how to compute rows.
        step()
    before = clock()
    plain()
    calls = max(1, math.ceil(_SAMPLE_SECONDS / max(clock() - before, 1e-9)))
    calls = min(calls, 1000)
    ratios: list[float] = []
    while len(ratios) < _PAIRS and (len(ratios) < 3 or clock() - began < _BUDGET_SECONDS):
        spent = []
        for step in (plain, sketched):
            before = clock()
            for _ in range(calls):
                step()
            spent.append(max(clock() - before, 1e-9))
        ratios.append(spent[1] / spent[0])
    return statistics.median(ratios)


def _fingerprint(task: TaskLike, sketch: str, unit: int, batch: int) -> str:
    """A hash of what the factor depends on: model, shapes of a batch, sketch, and torch; not the values of the data."""
    with torch.random.fork_rng(devices=[]):
        model = task.model()
    shapes = [(part.dtype, tuple(part.shape[1:])) for part in task.train.batch(np.arange(1))]
    text = json.dumps([_VERSION, task.name, repr(model), str(shapes), sketch, unit, batch, torch.__version__])
    return hashlib.sha256(text.encode()).hexdigest()
