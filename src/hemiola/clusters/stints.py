"""Running stints: real gradients of the real model, in as few calls as possible.

Three ways, all giving the same numbers to float tolerance (tests compare them):

* gradients of many workers at the same weights: one forward and backward over all their examples, each weighted;
* local steps of many workers at different weights: parameters stacked (``many_weights.py``), where measuring showed
  this to be faster;
* one worker after the other: everything else (BatchNorm, recurrent layers, convolutions with real batches, sketches
  under local steps).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hemiola.clusters.batches import BatchReader, Read
from hemiola.clusters.many_weights import ManyWeights
from hemiola.contracts import Batch, Directions, State, Stint, TaskLike
from hemiola.flat import FlatModel
from hemiola.gradients.layers import working_type
from hemiola.gradients.sketch import encode_rows
from hemiola.gradients.units import UnitGradients
from hemiola.optimizers import MomentumRule, Optimizer, combine_momentum
from hemiola.plan import Plan
from hemiola.streams import seed_torch

logger = logging.getLogger(__name__)

Sketches = tuple[Tensor | None, ...]

# Below this many examples per worker, convolutions stacked over workers (grouped convolutions) beat one call each.
_SMALL_BATCH = 4


@dataclass
class Finished:
    """What running some stints gave.

    Attributes:
        losses: Mean training loss of each stint.
        sketches: Of each stint, one entry a batch: a row a unit, or None.
        finite: For each stint, whether its change was finite.
    """

    losses: list[float]
    sketches: list[Sketches]
    finite: list[bool]


class StintRunner:
    """Runs stints of any worker in this process.

    Args:
        task: Model, data and loss.
        shards: Example indices of each worker.
        unit: Examples per unit.
        sketch: What the order policy asked for, or None.
        optimizer: For local steps.
        seed: Of the run.
        device: Where models run; weights, changes and sketches are handed over on the CPU.
        deck: Whether all workers take batches from one deck.
        tells_losses: Whether rows end with the loss of their unit.

    Attributes:
        local: The workers' own optimizers, by worker.
        unit_gradients: Gives the sketches; None if the order wants none.
        directions_of: The epoch whose ghost directions are in use; -1 for none yet.
    """

    def __init__(
        self,
        task: TaskLike,
        shards: Sequence[np.ndarray],
        unit: int,
        sketch: str | None,
        optimizer: Optimizer,
        seed: int,
        device: torch.device | str = "cpu",
        deck: bool = False,
        tells_losses: bool = False,
    ):
        self.task = task
        self.tells_losses = tells_losses
        self.device = torch.device(device)
        self.seed = seed
        self.optimizer = optimizer
        seed_torch("model", seed)
        self.flat = FlatModel(task.model().to(self.device))
        self.initial = self.flat.weights.clone()
        self.reader = BatchReader(task, shards, unit, seed, self.device, deck)
        self.local: dict[int, torch.optim.Optimizer] = {}
        self.directions_of = -1
        self.keeps_ends = False
        self.ends: dict[int, Tensor] = {}
        self.unit_gradients = UnitGradients(self.flat.module, task.losses, sketch, seed) if sketch else None
        if self.unit_gradients is not None and self.unit_gradients.kind != self.unit_gradients.spec.kind:
            logger.warning(
                "ghosts see no layer of the model of %s; its units are balanced on fold:%d of their whole gradients",
                task.name,
                self.unit_gradients.dimension,
            )
        kinds = [type(module) for module in self.flat.module.modules()]
        self._convolves = any(issubclass(kind, nn.modules.conv._ConvNd) for kind in kinds)
        self._many = ManyWeights(self.flat, task.losses)
        self._stacks = not self.flat.has_buffers and not any(issubclass(kind, nn.RNNBase) for kind in kinds)

    @classmethod
    def of(cls, plan: Plan, device: torch.device | str = "cpu") -> StintRunner:
        """A runner of a plan's stints."""
        order = plan.order
        return cls(
            plan.task,
            plan.shards,
            order.unit,
            order.sketch,
            plan.optimizer,
            plan.seed,
            device,
            plan.deck,
            order.wants_losses,
        )

    # ------------------------------------------------------------------------------------------- gradients, p = 1

    def gradient(
        self, weights: Tensor, stints: Sequence[Stint], factors: Sequence[float], wanted: Sequence[bool]
    ) -> tuple[Tensor, Finished]:
        """The sum over stints of factor times gradient, all at the same weights.

        With buffers (BatchNorm) every worker's batch passes alone, so that statistics are a worker's own.
        """
        if self.flat.has_buffers and len(stints) > 1:
            changes, finished = self.gradients([weights] * len(stints), stints, wanted)
            return torch.tensor(factors, dtype=changes.dtype) @ changes, finished
        weights = weights.to(self.device)
        read = self.reader.read([(stint.worker, stint.batches[0]) for stint in stints])
        scales = [factor / count for factor, count in zip(factors, read.counts, strict=True)]
        per_example = self._vector(np.repeat(scales, read.counts))
        losses, rows = self._backward(weights, read, per_example, any(wanted), stints[0])
        change = self.flat.weights - weights  # zero but for buffers, which the forward pass may have moved
        change[: self.flat.size] = self.flat.gradient
        if self.task.l2:
            change[: self.flat.size].add_(weights[: self.flat.size], alpha=self.task.l2 * sum(factors))
        if self.flat.has_buffers:
            change[self.flat.size :] *= sum(factors)
        means = _means(losses, read.counts)
        pieces = torch.split(rows, read.units) if rows is not None else [None] * len(stints)
        sketches: list[Sketches] = [(piece if want else None,) for piece, want in zip(pieces, wanted, strict=True)]
        return change.cpu(), Finished(means, sketches, [bool(np.isfinite(mean)) for mean in means])

    def gradients(
        self, starts: Sequence[Tensor], stints: Sequence[Stint], wanted: Sequence[bool]
    ) -> tuple[Tensor, Finished]:
        """Each stint's own gradient, one row a stint."""
        rows, finished = [], Finished([], [], [])
        for weights, stint, want in zip(starts, stints, wanted, strict=True):
            row, one = self.gradient(weights, [stint], [1.0], [want])
            rows.append(row)
            finished.losses += one.losses
            finished.sketches += one.sketches
            finished.finite.append(bool(torch.isfinite(row).all()))
        return torch.stack(rows), finished

    # ------------------------------------------------------------------------------------------ local steps, p >= 1

    def changes(
        self,
        starts: Sequence[Tensor],
        stints: Sequence[Stint],
        wanted: Sequence[Sequence[bool]],
        after_step: Callable[[int], bool] | None = None,
        lag: int = 0,
    ) -> tuple[Tensor, Finished]:
        """Each stint's change of weights by its worker's own optimizer, one row a stint.

        The stints must be of different workers, because a worker's optimizer remembers its stints in order.

        Args:
            starts: For each stint, the averaged weights it builds on.
            stints: What to run.
            wanted: For each stint and batch, whether to sketch unit gradients.
            after_step: Called after each local step with its index; says whether the stints end here, each with the
                steps it has taken. May raise to give up.
            lag: Overlap: the averaged weights reach the worker only after so many steps. Until then it goes on from
                where its last stint ended (w_i), and then moves by what the average changed (w_i += mean - end_i).
        """
        if len({stint.worker for stint in stints}) != len(stints):
            raise ValueError("two stints of one worker in one call")
        before = torch.stack(list(starts)).to(self.device)
        now = before.clone()
        arrivals = self._go_on_from_ends(now, stints, lag)
        totals = [0.0] * len(stints)
        sketches: list[list[Tensor | None]] = [[] for _ in stints]
        for index in range(max(len(stint.batches) for stint in stints)):
            active = [i for i, stint in enumerate(stints) if index < len(stint.batches)]
            batches = [(stints[i].worker, stints[i].batches[index]) for i in active]
            want = [wanted[i][index] for i in active]
            losses, gradients, rows = self._local_gradients(
                now[active], batches, want, [stints[i] for i in active], index
            )
            for at, i in enumerate(active):
                totals[i] += losses[at]
                sketches[i].append(rows[at])
                self._local_step(stints[i].worker, now[i], gradients[at], stints[i].rates[index])
            for i in arrivals.get(index + 1, ()):
                now[i] += before[i] - self.ends[stints[i].worker]
            if after_step is not None and after_step(index):
                break
        if self.keeps_ends:
            self.ends = {stint.worker: now[i].clone() for i, stint in enumerate(stints)}
        change = (now - before).cpu()
        finite = torch.isfinite(change).all(dim=1).tolist()
        self._forget([stint.worker for stint, good in zip(stints, finite, strict=True) if not good])
        means = [total / len(rows) for total, rows in zip(totals, sketches, strict=True)]
        return change, Finished(means, [tuple(rows) for rows in sketches], finite)

    def _go_on_from_ends(self, now: Tensor, stints: Sequence[Stint], lag: int) -> dict[int, list[int]]:
        """Overlap: let stints begin where their workers' last ones ended; returns after which step averages arrive."""
        arrivals: dict[int, list[int]] = {}
        for i, stint in enumerate(stints):
            if lag and stint.worker in self.ends:
                now[i] = self.ends[stint.worker]
                arrivals.setdefault(min(lag, len(stint.batches)), []).append(i)
        return arrivals

    def _forget(self, workers: Sequence[int]) -> None:
        """What these workers found is not finite. Their memory is not either, and would spoil every later stint."""
        for worker in workers:
            self.local.pop(worker, None)
            self.ends.pop(worker, None)

    def adopt(self, directions: Directions | None) -> None:
        """Make ghosts along these directions from now on."""
        if directions is not None and self.unit_gradients is not None and directions.epoch != self.directions_of:
            self.directions_of = directions.epoch
            self.unit_gradients.adopt(directions.found)

    def combine_momentum(self, workers: Sequence[int], rule: MomentumRule) -> None:
        """After an averaging of these workers, average or reset their optimizers' memory."""
        combine_momentum([self.local[worker] for worker in workers if worker in self.local], rule)

    def _local_step(self, worker: int, weights: Tensor, gradient: Tensor, rate: float) -> None:
        """One step of a worker's own optimizer, in place; buffers simply take their new values."""
        if worker not in self.local:
            self.local[worker] = self.optimizer.attach(nn.Parameter(weights[: self.flat.size].clone()))
        group = self.local[worker].param_groups[0]
        parameter = group["params"][0]
        group["lr"] = rate
        parameter.data = weights[: self.flat.size]
        parameter.grad = gradient[: self.flat.size]
        self.local[worker].step()
        if self.flat.has_buffers:
            weights[self.flat.size :] += gradient[self.flat.size :]

    def _local_gradients(
        self,
        weights: Tensor,
        batches: Sequence[tuple[int, Batch]],
        wanted: Sequence[bool],
        stints: Sequence[Stint],
        index: int,
    ) -> tuple[list[float], Tensor, list[Tensor | None]]:
        sizes = {len(self.reader.examples(worker, batch.units)) for worker, batch in batches}
        stack = (
            self._stacks
            and len(batches) > 1
            and (not any(wanted) or self.unit_gradients is None or self._batch_is_unit(batches))
            and len(sizes) == 1
            and (not self._convolves or max(sizes) < _SMALL_BATCH)
        )
        if stack:
            return self._stacked_gradients(weights, batches, wanted, stints[0], index)
        losses, rows, gradients = [], [], []
        for at, (worker, batch) in enumerate(batches):
            read = self.reader.read([(worker, batch)])
            per_example = self._vector(np.full(read.counts[0], 1 / read.counts[0]))
            example_losses, row = self._backward(weights[at], read, per_example, wanted[at], stints[at], index)
            gradient = self.flat.weights - weights[at]
            gradient[: self.flat.size] = self.flat.gradient
            if self.task.l2:
                gradient[: self.flat.size].add_(weights[at][: self.flat.size], alpha=self.task.l2)
            losses.append(float(example_losses.mean()))
            gradients.append(gradient)
            rows.append(row)
        return losses, torch.stack(gradients), rows

    def _batch_is_unit(self, batches: Sequence[tuple[int, Batch]]) -> bool:
        """Whether a worker's gradient is at the same time its one unit's, so that no others need to be computed."""
        ghosts = self.unit_gradients is not None and self.unit_gradients.spec.kind == "ghost"
        return not ghosts and all(len(batch.units) == 1 for _, batch in batches)

    def _stacked_gradients(
        self,
        weights: Tensor,
        batches: Sequence[tuple[int, Batch]],
        wanted: Sequence[bool],
        stint: Stint,
        index: int,
    ) -> tuple[list[float], Tensor, list[Tensor | None]]:
        """Gradients at different weights in one call."""
        read = self.reader.read(batches)
        self._prepare(stint, index)
        losses, gradients = self._many.gradients(weights, read.inputs, read.targets)
        rows: list[Tensor | None] = [None] * len(batches)
        if any(wanted):
            sketches = None if self.unit_gradients is None else self.unit_gradients.sketched(gradients)
            pieces = torch.split(self._rows(sketches, losses.flatten(), read), read.units)
            rows = [piece if want else None for piece, want in zip(pieces, wanted, strict=True)]
        if self.task.l2:
            gradients = gradients.add(weights, alpha=self.task.l2)
        return losses.mean(1).tolist(), gradients, rows

    # --------------------------------------------------------------------------------------------------- one backward

    def _backward(
        self, weights: Tensor, read: Read, per_example: Tensor, wanted: bool, stint: Stint, index: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Fill ``self.flat.gradient`` with the weighted sum of the examples' gradients; return losses and sketches."""
        self.flat.load(weights)
        self.flat.gradient.zero_()
        self._prepare(stint, index)
        if wanted and self.unit_gradients is not None:
            losses, sketches = self.unit_gradients.compute(read.inputs, read.targets, per_example, read.rows)
            return losses, self._rows(sketches, losses, read)
        losses = self.task.losses(self.flat.module(read.inputs), read.targets)
        (losses * per_example).sum().backward()  # type: ignore[no-untyped-call]
        losses = losses.detach()
        return losses, self._rows(None, losses, read) if wanted else None

    def _rows(self, sketches: Tensor | None, losses: Tensor, read: Read) -> Tensor:
        """What the order is told of each unit: its sketch, and its loss where that is wanted."""
        found = [] if sketches is None else [sketches.cpu()]
        if self.tells_losses:
            units = sum(read.units)
            totals = torch.zeros(units, dtype=losses.dtype).index_add_(0, read.rows, losses.cpu())
            means = totals / torch.bincount(read.rows, minlength=units)
            found.append(means.to(found[0].dtype if found else working_type(means)).unsqueeze(1))
        return torch.cat(found, 1) if len(found) > 1 else found[0]

    @property
    def width(self) -> int:
        """Numbers in a row; 0 where the order is told nothing."""
        return (0 if self.unit_gradients is None else self.unit_gradients.dimension) + self.tells_losses

    def packed(self, rows: Tensor) -> Tensor:
        """Rows as they travel: numbers, or bytes where sketches are int8. Losses are sent as they are."""
        int8 = self.unit_gradients is not None and self.unit_gradients.spec.int8
        return encode_rows(rows, int(self.tells_losses)) if int8 else rows

    def _vector(self, numbers: np.ndarray) -> Tensor:
        return torch.tensor(numbers, dtype=self.flat.weights.dtype, device=self.device)

    def _prepare(self, stint: Stint, index: int) -> None:
        """Dropout and its like draw from torch's global generator: give each call a stream of its own."""
        self.flat.module.train()
        seed_torch("forward", self.seed, stint.worker, stint.number, index)

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """What the workers' own optimizers remember."""
        return {"local": {worker: optimizer.state_dict() for worker, optimizer in self.local.items()}}

    def load_state_dict(self, state: State) -> None:
        self.local = {}
        for worker, saved in state["local"].items():
            self.local[worker] = self.optimizer.attach(nn.Parameter(self.initial[: self.flat.size].clone()))
            self.local[worker].load_state_dict(saved)


def _means(losses: Tensor, counts: Sequence[int]) -> list[float]:
    """Mean loss of each batch."""
    sums = np.add.reduceat(losses.double().numpy(), np.cumsum([0, *counts[:-1]]))
    means: list[float] = (sums / np.asarray(counts)).tolist()
    return means
