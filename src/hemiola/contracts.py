"""The contracts: what a policy, a task and a cluster are. Read this file first.

One loop (``training/loop.py``) drives three policies on any cluster::

    worker:  read weights (version v) -- p local steps over its next units -- report(change, v, sketches, loss) --+
               ^                          + period says p     + order says which                                  |
               +------------- new weights <-- update: merge the K reports that pace waited for <------------------+

Vocabulary, the same everywhere:

* **unit**: what is ordered; one example, or a few examples that stay together.
* **batch**: the units of one local step.
* **stint**: what a worker does between reading weights and reporting: p batches, one local step each.
* **report**: a worker's change after a stint. With ``Period.local`` false the stint is one step and the change is a
  gradient, which the server's optimizer applies; otherwise it is a difference of weights made by a local optimizer.
* **update**: merges K reports into one new version of the weights.
* **spread**: (1/K) sum ||w_i - mean w||^2 over the merged reports. **staleness**: updates between read and use.

A policy decides from what it is shown. It owns no clock, socket, thread or global random state, so the same object runs
on every cluster. Every policy is constructed from its options alone, told the facts of a run by ``begin``, and saved
and restored with ``state_dict``: plain numbers, strings, lists, dicts and tensors, loadable with ``weights_only=True``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from hemiola.state import State as State
from hemiola.state import own_state, pack, stamped, unpack

# ---------------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Batch:
    """The units of one local step of one worker.

    Attributes:
        epoch: Which of this worker's passes over its shard the units belong to, from 0.
        position: Index of the first unit within that epoch's order.
        units: Unit numbers within the worker's shard, in the order they are visited.
    """

    epoch: int
    position: int
    units: np.ndarray

    def as_state(self) -> list[Any]:
        """Plain values, for a state."""
        return [self.epoch, self.position, self.units.tolist()]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Batch:
        """The reverse of `as_state`."""
        epoch, position, units = state
        return cls(epoch, position, np.asarray(units, dtype=np.int64))


@dataclass(frozen=True)
class Stint:
    """What one worker is asked to do before it reports.

    Attributes:
        worker: Who.
        number: How many stints this worker has been given before this one; names its random streams, so every policy
            sees common random numbers.
        version: The version of the weights it reads.
        batches: One per local step.
        rates: The learning rate of each local step.
    """

    worker: int
    number: int
    version: int
    batches: tuple[Batch, ...]
    rates: tuple[float, ...]

    def as_state(self) -> State:
        """Plain values, for a state."""
        batches, rates = [batch.as_state() for batch in self.batches], list(self.rates)
        return {
            "worker": self.worker,
            "number": self.number,
            "version": self.version,
            "batches": batches,
            "rates": rates,
        }

    @classmethod
    def from_state(cls, state: State) -> Stint:
        """The reverse of `as_state`."""
        batches = tuple(Batch.from_state(batch) for batch in state["batches"])
        return cls(state["worker"], state["number"], state["version"], batches, tuple(state["rates"]))


@dataclass
class Report:
    """What the server knows of a finished stint; the change itself is already merged into its `Update`.

    Attributes:
        stint: What was asked.
        staleness: Updates between reading the weights and this merge.
        seconds: Cluster time from reading the weights to the report's arrival.
        loss: Mean training loss over the stint's batches.
        sketches: For each batch a (units, k) tensor, one row a unit, or None where the order did not want them. Where
            it wants losses, the last number of a row is the unit's.
        compute: Seconds of ``seconds`` in which its local steps were computed.
    """

    stint: Stint
    staleness: int
    seconds: float
    loss: float
    sketches: tuple[Tensor | None, ...]
    compute: float = 0.0


class Span(NamedTuple):
    """What a worker did from one moment to another, for the time line of the report.

    Attributes:
        worker: Who; `LINK` for an averaging that passes behind the workers' backs.
        what: ``computes``, ``sends``, ``receives``, ``exchanges``; or, of work that came to nothing, ``cancelled``,
            ``cut`` (the step that a stint was cut in), ``late`` or ``dropped``. A worker that does none of this waits.
        begin, end: Cluster seconds.
    """

    worker: int
    what: str
    begin: float
    end: float


LINK = -1
FOLLOWED = 32  # workers whose spans are told; nobody reads more lines


@dataclass
class Update:
    """K reports, merged.

    Attributes:
        reports: The reports that count, sorted by worker, then by age.
        change: Their weighted mean: a gradient when ``Period.local`` is false, else a difference of weights. None when
            no report of this update was finite: then the weights stay as they are. The next ``collect`` may use its
            memory again.
        seconds: Cluster time at which the merged weights exist.
        spread: See the module's vocabulary; 0 for gradients.
        cancelled: Stints thrown away by this update, and what is left of those it cut; their units come again.
        dropped: Stints whose reports were refused as too stale; their units count as visited.
        refused: Stints whose reports were not finite; their units count as visited.
        bytes_per_worker: What this update sent from an average worker.
        idle_seconds: Worker-seconds spent waiting since the update before.
        wasted_seconds: Worker-seconds spent on cancelled, late or dropped stints since the update before.
        durations: Compute seconds per local step of each stint that ended.
        censored: Seconds per local step that each cancelled stint had run for.
        waits: Of each stint that ended, seconds from asking for the weights to its report's arrival; infinite for those
            that this update cut or cancelled.
        spans: What the first `FOLLOWED` workers did for it.
    """

    reports: list[Report]
    change: Tensor | None
    seconds: float
    spread: float = 0.0
    cancelled: list[Stint] = field(default_factory=list)
    dropped: list[Stint] = field(default_factory=list)
    refused: list[Stint] = field(default_factory=list)
    bytes_per_worker: float = 0.0
    idle_seconds: float = 0.0
    wasted_seconds: float = 0.0
    durations: list[float] = field(default_factory=list)
    censored: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Visit:
    """One worker's used units of one batch, as an `Order` sees them.

    Attributes:
        worker: Who visited.
        epoch: The worker's epoch these units belong to.
        units: Unit numbers within the shard, in visiting order.
        sketches: One row a unit: its gradient, or a linear sketch of it. Rows may be non-finite. None when
            the order did not want this epoch's gradients.
        local_steps: Length p of the stint the batch was part of.
        losses: The loss of each unit, the mean over its examples, as it was before the step. May be non-finite. None
            when the order did not want this epoch's losses.
    """

    worker: int
    epoch: int
    units: np.ndarray
    sketches: Tensor | None
    local_steps: int
    losses: np.ndarray | None = None

    @classmethod
    def of_rows(
        cls, worker: int, epoch: int, units: np.ndarray, rows: Tensor | None, local_steps: int, losses: bool
    ) -> Visit:
        """A visit whose rows came as they travel: each a sketch, then the loss if there are ``losses``."""
        if rows is None or not losses:
            return cls(worker, epoch, units, rows, local_steps)
        sketches = rows[:, :-1] if rows.shape[1] > 1 else None
        return cls(worker, epoch, units, sketches, local_steps, rows[:, -1].numpy(force=True))


@dataclass(frozen=True)
class Averaging:
    """One update, as a `Period` sees it. Every number is the same on every rank.

    Attributes:
        step: Local steps each worker has taken since the start of the run (the longest, where they differ).
        progress: Share of the run that is over, in [0, 1].
        lr: Learning rate of the last local step.
        spread: Measured spread of the merged reports.
        movement: ||mean change||^2, how far the averaged weights moved since the averaging before.
        loss: Mean training loss of the merged reports.
        local_steps: The stint length that led to this averaging.
    """

    step: int
    progress: float
    lr: float
    spread: float
    movement: float
    loss: float
    local_steps: int


@dataclass(frozen=True)
class Arrivals:
    """One update, as a `Pace` sees it.

    Attributes:
        seconds: Cluster time of the update.
        progress: Share of the run that is over, in [0, 1].
        workers: Who the merged reports came from.
        losses: Mean training loss of each merged report.
        durations: Compute seconds of each finished stint per local step, merged or not.
        censored: For each stint cancelled by this update, seconds per local step it had run for without finishing.
        staleness: Of each merged report.
        waits: Of each stint that ended, merged or not, seconds from asking for the weights to its report's arrival;
            infinite for those that this update cut or cancelled.
    """

    seconds: float
    progress: float
    workers: Sequence[int]
    losses: Sequence[float]
    durations: Sequence[float]
    censored: Sequence[float]
    staleness: Sequence[int]
    waits: Sequence[float] = ()


# --------------------------------------------------------------------------------------------------------- policies

# Subclass `Order`, `Period` or `Pace` and write what differs: the abstract member has to be there, everything else has
# a default (type checkers take an empty body for an abstract one, hence the lone returns). A class of other descent
# must have every member but those in `CAPABILITIES`, see `hemiola.own`.


AS_GIVEN = "_given"  # attribute of a policy: its options as they were written, for its repr


def _shown(policy: object) -> str:
    """A policy as it was made: ``CDGraB(sketch='fold:64')``."""
    return f"{type(policy).__name__}({getattr(policy, AS_GIVEN, '')})"


class Policy(Protocol):
    """What all policies have: a kind, numbers for the log, and a state.

    Attributes:
        kind: Whose state it is; the name of the class unless it says otherwise. Other kinds' states are refused.
        version: Of what the state holds; raise it when that changes, and older states are refused.
        saved: Names of the attributes that are the state: numbers, strings, tensors, arrays, lists and dicts of these.
            Enough for most policies; others write ``state_dict`` and ``load_state_dict``.
    """

    kind: ClassVar[str] = "policy"
    version: ClassVar[int] = 1
    saved: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        made = super().__new__(cls)
        given = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
        object.__setattr__(made, AS_GIVEN, ", ".join(given))
        return made

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" not in vars(cls):
            cls.kind = cls.__name__
        if cls.__repr__ is object.__repr__:
            cls.__repr__ = _shown  # type: ignore[method-assign]

    def telemetry(self) -> State:
        """Numbers for the log; those that the report draws are named below."""
        return {}

    def state_dict(self) -> State:
        """Everything needed to go on exactly, plain and small: a copy, that later calls do not change."""
        attributes = {name: pack(getattr(self, name), f"{self.kind}.{name}") for name in self.saved}
        return stamped(self.kind, self.version, **attributes)

    def load_state_dict(self, state: State) -> None:
        """Go on from a saved state, in an object made with the same options (and after ``begin``, where there is one).

        Raises:
            InputError: It is the state of another kind.
        """
        own_state(state, self.kind, self.version)
        for name in self.saved:
            setattr(self, name, unpack(state[name]))


Total = Callable[[np.ndarray], np.ndarray]
"""Adds up arrays of numbers over all ranks."""


@runtime_checkable
class Order(Policy, Protocol):
    """Which unit does each worker visit next?

    Life cycle: ``begin``, then ``meet``, once; then for every worker and epoch, ``sequence`` when the worker reaches
    that epoch (epochs of one worker come in turn, epochs of different workers may overlap) and ``observe`` once for
    every update, with all batches that were used in it. A worker's ``sequence`` for epoch e + 1 is asked for only after
    every unit of its epoch e was taken from the queue, but reports may still be under way: under asynchronous paces the
    last batch of e may be observed after ``sequence(worker, e + 1)``.

    Attributes:
        unit: Examples per unit.
        sketch: How unit gradients are to be sketched: ``"exact"``, ``"fold:K"``, ``"ghost:R"``; None when never wanted.
        wants_losses: Whether visits should also have the losses of their units, or only these.
        wants_scores: Whether ``meet`` should be told the examples' scores.
        slices: Whether ``observe`` can do with a slice of every row's coordinates, whose inner products ``total`` adds
            up; then exact rows travel in slices between the ranks of one's own loop.
        total: Set by `hemiola.OrderedSampler` where rows come in slices, before the first of them; else None.
        sizes, seed, lockstep: What ``begin`` was told, unless a subclass keeps it elsewhere.
    """

    unit: int = 1
    sketch: str | None = None
    wants_losses: bool = False
    wants_scores: bool = False
    slices: ClassVar[bool] = False
    total: Total | None = None
    sizes: list[int]
    seed: int
    lockstep: bool

    def begin(self, sizes: Sequence[int], seed: int, lockstep: bool) -> None:
        """Start a run: ``sizes[j]`` units at worker j; ``lockstep`` if every update waits for every worker."""
        self.sizes, self.seed, self.lockstep = list(sizes), seed, lockstep

    def meet(self, examples: Sequence[np.ndarray], count: int, scores: np.ndarray | None) -> None:
        """After ``begin``: which examples the units are. Ignored by default.

        Args:
            examples: For each worker j the numbers of its examples in the data set; its unit u is
                ``examples[j][u * unit : (u + 1) * unit]``.
            count: Examples in the data set.
            scores: One number for each of them, see `Graded`. None if they have none, or none are wanted.
        """
        return

    @abstractmethod
    def sequence(self, worker: int, epoch: int) -> np.ndarray:
        """Return the order of ``range(sizes[worker])`` for this epoch. Asking twice gives the same answer."""

    def wants(self, worker: int, epoch: int) -> bool:
        """Whether reports about this epoch should carry sketches, losses or both. Called before a batch is computed."""
        return self.sketch is not None or self.wants_losses

    def observe(self, visits: Sequence[Visit]) -> None:
        """Take note of the units that one update used, sorted by worker, then in visiting order. Called after it."""
        return

    def adopt(self, epoch: int, orders: Sequence[np.ndarray]) -> None:
        """After ``begin``: another number of workers had learnt these orders for this epoch; ignored by default."""
        return

    def telemetry(self) -> State:
        """``herding``: bound of the last finished epoch; ``skipped``: units or pairs left out as not finite."""
        return {}


@dataclass(frozen=True)
class Clock:
    """How averagings follow the clock; see `hemiola.period.clocked`.

    Attributes:
        every: Least seconds between the beginnings of two averagings.
        mix: How much of its own contribution a worker goes on with before it is averaged, in [0, 1].
    """

    every: float
    mix: float


@runtime_checkable
class Period(Policy, Protocol):
    """How many local steps does a worker take between two averagings?

    Life cycle: ``length`` whenever a worker is given a stint, ``averaged`` after every update.

    Attributes:
        local: False when reports are gradients and the optimizer is the server's (full communication).
        needs_progress: Whether ``length`` depends on the progress, so that one's own loop must say how long it is.
        clock: Set where averagings follow the clock and nobody waits for them; then ``length`` is 1, a report holds
            what a worker found since its last one, and ``averaged`` is called whenever a mean has arrived.
        probes: Whether workers do not average after every stint, but probe how far they are apart, and ``due`` decides.
    """

    local: bool = True
    needs_progress: bool = False
    clock: Clock | None = None
    probes: bool = False

    @abstractmethod
    def length(self, lr: float, progress: float) -> int:
        """Local steps of a stint that starts now; at least 1."""

    def due(self, spread: float, steps: int) -> bool:
        """After a probe: whether workers that are so far apart, so many steps after the last averaging, average now."""
        return True

    def averaged(self, seen: Averaging) -> None:
        """Take note of an update. Called once per update, on every rank with the same numbers."""
        return

    def telemetry(self) -> State:
        """``c2``: the spread aimed at, divided by the learning rate; it is logged with every averaging."""
        return {}


@runtime_checkable
class Pace(Policy, Protocol):
    """How many reports does an update wait for, and what happens to the workers it did not wait for?

    Life cycle: ``begin`` once, ``k`` before every report is counted, ``deadline`` when K have come, ``weight`` for
    every report that is merged, ``updated`` after every update.

    Attributes:
        cancels: The others are cancelled and restart from the new weights; otherwise they keep going on their old ones.
        idles: A finisher idles until the update (K distinct workers count); otherwise it takes another batch at once
            (K stints count, K may exceed the number of workers).
        late: With ``cancels``: ``"cancel"`` stops the others at once; ``"cut"`` does so and takes the whole local steps
            they have done; ``"ignore"`` lets them finish and discards the result.
        max_staleness: Reports older than this are dropped instead of merged; None for no limit.
        needs_distance: Whether ``weight`` uses its ``distance`` argument; clusters compute it only then.
        workers: What ``begin`` was told, unless a subclass keeps it elsewhere.
    """

    cancels: bool = False
    idles: bool = True
    late: str = "cancel"
    max_staleness: int | None = None
    needs_distance: bool = False
    workers: int

    def begin(self, workers: int) -> None:
        """Start a run; raises `InputError` for a K that cannot be."""
        self.workers = workers

    @abstractmethod
    def k(self) -> int:
        """How many reports the next update waits for. Clusters clip it to the workers that are alive and have work."""

    def deadline(self) -> float | None:
        """Seconds after the update before, until which this one stays open for more reports than K; None for none.

        It closes at once when all have come. For paces that idle: with the others, never all have come.
        """
        return None

    @property
    def fixed_k(self) -> int | None:
        """After ``begin``: how many reports every update of the run has, where that never changes; theory needs it."""
        return None

    @property
    def adapts(self) -> bool:
        """Whether K depends on what updates measure (losses, durations), so that only a real run can tell it."""
        return False

    @property
    def lockstep(self) -> bool:
        """After ``begin``: whether every update of the run waits for exactly one report of every worker."""
        return self.idles and self.fixed_k == self.workers

    def weight(self, staleness: int, distance: float) -> float:
        """Factor on one report's change; ``distance`` is ||w_now - w_read||^2, or 0 unless ``needs_distance``."""
        return 1.0

    def updated(self, seen: Arrivals) -> None:
        """Take note of an update."""
        return

    def telemetry(self) -> State:
        """``k``: how many reports the next update waits for."""
        return {"k": self.k()}


_OF_ALL = {"kind", "version", "saved", "telemetry"}
_TOLD = {"sizes", "seed", "lockstep"}

CAPABILITIES: dict[type, frozenset[str]] = {
    Order: frozenset({*_OF_ALL, "unit", "wants_losses", "wants_scores", "slices", "total"} | {"meet", "adopt"} | _TOLD),
    Period: frozenset({*_OF_ALL, "needs_progress", "clock", "probes", "due"}),
    Pace: frozenset(
        {*_OF_ALL, "late", "max_staleness", "needs_distance", "workers", "deadline", "fixed_k", "adapts", "weight"}
    ),
}
"""Members that also a class that does not subclass its protocol may do without: it is given the default."""


# ------------------------------------------------------------------------------------------------------------- tasks


class Examples(Protocol):
    """A finite data set, read by index."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of these examples, stacked along the first dimension."""

    def labels(self) -> np.ndarray | None:
        """One class per example, for splits by label; None when the examples have no classes."""


@runtime_checkable
class Grouped(Protocol):
    """What `Examples` may have beside: groups they came in, such as who wrote them, for the split ``"natural"``."""

    def groups(self) -> np.ndarray | None:
        """The group of each example, any whole numbers; None when the examples have no groups."""


@runtime_checkable
class Graded(Protocol):
    """What `Examples`, or the data set of one's own loop, may have beside: a score of each, such as how hard it is."""

    def scores(self) -> np.ndarray | None:
        """The score of each example, finite numbers; None when the examples have no scores."""


@runtime_checkable
class TaskLike(Protocol):
    """A model, its data, its loss and its metric.

    Attributes:
        name: As in the experiment file.
        metric: What ``scores`` measures, e.g. ``"accuracy"``.
        higher_is_better: Direction of the metric.
        convex: Whether the objective has one minimum, so that its gap f - f* can be shown.
        l2: Strength of (l2/2)||w||^2 in the objective; its gradient is added to every report's.
        lr, batch: Sensible defaults.
    """

    name: str
    metric: str
    higher_is_better: bool
    convex: bool
    l2: float
    lr: float
    batch: int
    train: Examples
    test: Examples

    def model(self) -> nn.Module:
        """A freshly initialised model. The caller has seeded torch's generator."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per example, without the l2 term."""

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One score per example."""

    def summarise(self, mean_score: float) -> float:
        """The metric from the mean score; the identity for an accuracy, exp for a perplexity."""

    def perturb(self, inputs: Tensor, targets: Tensor, stream: torch.Generator) -> tuple[Tensor, Tensor]:
        """Noise that is fresh at every visit."""

    @property
    def noisy(self) -> bool:
        """Whether ``perturb`` does anything; it is not called otherwise."""


# ---------------------------------------------------------------------------------------------------------- clusters


@dataclass(frozen=True)
class Directions:
    """Input directions that ghost sketches are taken along.

    Attributes:
        epoch: At whose beginning they were found.
        found: Of each layer that projects its inputs.
    """

    epoch: int
    found: list[Tensor]


class Work(Protocol):
    """Where a cluster gets stints from; implemented once, by the training loop."""

    def assign(self, worker: int) -> Stint | None:
        """The next stint of a worker, at the current version; None while it has to rest (see ``training/loop.py``)."""

    def give_back(self, stint: Stint) -> None:
        """Return the units of a stint that was not used to the head of the worker's queue."""

    def read(self, version: int) -> Tensor:
        """The weights of a version some worker still holds, as one vector."""

    def wants_sketches(self, stint: Stint) -> tuple[bool, ...]:
        """For each batch, whether its report should carry sketches."""

    @property
    def directions(self) -> Directions | None:
        """What the ghosts of every stint assigned from now on are taken along; None for other sketches."""


class Cluster(Protocol):
    """Runs stints and merges reports.

    Life cycle: ``collect`` and ``publish`` alternate until the run stops; then ``close``, also after an exception.
    """

    def collect(self) -> Update:
        """Give every free worker a stint, wait until pace's K reports are in, and merge them."""

    def publish(self) -> None:
        """New weights exist (``Work.read`` has them); workers that start from now on read them."""

    @property
    def now(self) -> float:
        """Cluster time in seconds; virtual when simulated."""

    def live_versions(self) -> set[int]:
        """Versions of the weights that stints under way have read; the others may be forgotten."""

    def telemetry(self) -> State:
        """What real machines measured since the call before, for the log; empty when simulated.

        ``step_seconds``: compute seconds of local steps, and ``step_workers``: who took each of them, so that a log is
        a trace for ``hemiola predict``.
        ``exchange_seconds``: what exchanges took when the last worker had come.
        """

    def state_dict(self) -> State:
        """Everything needed to go on exactly, between two updates."""

    def load_state_dict(self, state: State) -> None: ...

    def close(self) -> None:
        """Release processes and files."""
