"""The one loop: K reports are merged into an update, the policies take note, new weights are published.

It is the same for every cluster. It also implements `hemiola.contracts.Work`: where workers get their stints from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hemiola.contracts import Arrivals, Averaging, Directions, State, Stint, Update, Visit
from hemiola.errors import InputError
from hemiola.flat import FlatModel
from hemiola.order.scored import scores_of
from hemiola.plan import ClusterFactory, Plan
from hemiola.state import own_state
from hemiola.streams import seed_torch
from hemiola.training.deck import Deck
from hemiola.training.directions import DirectionFinder, wants_ghosts
from hemiola.training.evaluation import Evaluator
from hemiola.training.ledger import Ledger
from hemiola.training.queues import Queues
from hemiola.training.speeds import Speeds
from hemiola.training.windows import Windows

KIND, VERSION = "hemiola-training", 7
LABELS = 100  # more labels than this are not told apart in the log
HOPELESS = 10  # reports a worker, all of them not finite and nothing else in between: the run has diverged


@dataclass
class Averages:
    """Running totals over averagings; see `Training.record`."""

    steps: int = 0
    count: int = 0
    bytes_per_worker: float = 0.0
    rate_sum: float = 0.0
    spread_sum: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Kept:
    """Weights a run leaves behind: of which version, and what the task's metric was there."""

    version: int
    metric: float
    weights: Tensor


class Training:
    """One run of a plan on a cluster.

    Args:
        plan: What to run.
        make_cluster: Builds the cluster around the plan and this object, which gives out the work.

    Attributes:
        records: One plain dict per evaluation, the lines of the log.
        status: ``"running"``, ``"done"`` or ``"diverged"``.
    """

    def __init__(self, plan: Plan, make_cluster: ClusterFactory):
        self.plan = plan
        self.workers = len(plan.shards)
        plan.pace.begin(self.workers)
        unit = plan.order.unit
        self.sizes = [-(-len(shard) // unit) for shard in (plan.shards[:1] if plan.deck else plan.shards)]
        self.lockstep = plan.lockstep
        plan.order.begin(self.sizes, plan.seed, self.lockstep)
        scores = scores_of(plan.task.train) if plan.order.wants_scores else None
        plan.order.meet(plan.shards[: len(self.sizes)], len(plan.task.train), scores)
        self.queues = self._dealer(plan.batch // unit)
        self.speeds = Speeds(self.workers)
        self.ledger = Ledger(self.sizes, self.workers)
        self.windows = Windows(self.workers)
        seed_torch("model", plan.seed)
        flat = FlatModel(plan.task.model())
        self.parameters = flat.size
        self.version = 0
        self.versions = {0: flat.weights.clone()}
        self._finder = DirectionFinder(plan, flat.weights) if wants_ghosts(plan) else None
        self._server = plan.optimizer.attach(nn.Parameter(flat.weights[: flat.size].clone()))
        seed_torch("model", plan.seed)  # What is not trained must be the same for who evaluates.
        self.evaluator = Evaluator(plan.task, plan.train_examples, plan.test_examples)
        self.averages = Averages()
        self.records: list[dict[str, Any]] = []
        self._best: Kept | None = None
        self.status = "running"
        self.wall_seconds = 0.0
        self._stints_given = [0] * self.workers
        self._marks = 0
        self._refused_in_a_row = 0
        self._ks: list[list[float]] = []  # (seconds, K) where K changed since the last record
        self._last_k = 0
        self._note_k(0.0)
        self.cluster = make_cluster(plan, self)

    def _dealer(self, units_per_batch: int) -> Queues | Deck:
        """What gives out batches."""
        plan, epochs = self.plan, self.plan.stop.epochs
        if plan.deck:
            return Deck(plan.order, self.sizes[0], self.workers, units_per_batch, self.lockstep, epochs)
        return Queues(plan.order, self.sizes, units_per_batch, self.lockstep, epochs)

    # ------------------------------------------------------------------------------------------------------- the loop

    def run(self, after_update: Callable[[Training], bool] | None = None) -> str:
        """Train until the plan's end, or until ``after_update`` returns False.

        Returns:
            The status: ``"done"``, ``"diverged"``, or ``"running"`` when it was told to stop early.
        """
        if not self.records:
            self._evaluate()
        while self.status == "running":
            began = time.perf_counter()
            update = self.cluster.collect()
            self._apply(update)
            self.wall_seconds += time.perf_counter() - began
            if self.status == "running" and self.progress >= 1 - 1e-12:
                self.status = "done" if self.ledger.total("used") else "diverged"
            if self.status != "running" or self._due():
                self._evaluate()
            if after_update is not None and not after_update(self):
                break
        return self.status

    def _apply(self, update: Update) -> None:
        """Turn a merged update into the next version of the weights, and tell the policies."""
        self.ledger.record(update)
        self.speeds.note(update.reports)
        self.windows.note(update.spans)
        if update.change is None:
            self._stay(update)
        else:
            self._move(update, update.change)
        self.plan.pace.updated(
            Arrivals(
                seconds=update.seconds,
                progress=self.progress,
                workers=[report.stint.worker for report in update.reports],
                losses=[report.loss for report in update.reports],
                durations=update.durations,
                censored=update.censored,
                staleness=[report.staleness for report in update.reports],
                waits=update.waits,
            )
        )
        self._note_k(update.seconds)

    def _note_k(self, seconds: float) -> None:
        if (k := self.plan.pace.k()) != self._last_k:
            self._last_k = k
            self._ks.append([float(f"{seconds:.7g}"), k])

    def _stay(self, update: Update) -> None:
        """Nothing came that is finite. One bad worker or example must not end a run, so the same weights are tried on.

        They are the next version all the same: workers go on, and staleness counts updates.
        """
        self.queues.wake()
        self._refused_in_a_row += len(update.refused)
        if self._refused_in_a_row >= HOPELESS * self.workers:
            self.status = "diverged"
        self._publish(self.versions[self.version])

    def _move(self, update: Update, merged: Tensor) -> None:
        self._refused_in_a_row = 0
        rate = self._rate(update)
        change = self._at_rest_included(merged, update)
        self._publish(self._next_weights(change, rate))
        self._observe(update)
        steps = max(len(report.stint.batches) for report in update.reports)
        loss = sum(report.loss for report in update.reports) / len(update.reports)
        self._note_averaging(update, change, steps, rate, loss)

    def _observe(self, update: Update) -> None:
        """Show the order every batch that was used; those from one deck by place, whoever had them."""
        visits = [
            (
                batch,
                Visit.of_rows(
                    self._holder(report.stint.worker),
                    batch.epoch,
                    batch.units,
                    rows,
                    len(report.sketches),
                    self.plan.order.wants_losses,
                ),
            )
            for report in update.reports
            for batch, rows in zip(report.stint.batches, report.sketches, strict=True)
        ]
        if self.plan.deck:
            visits.sort(key=lambda pair: (pair[0].epoch, pair[0].position))
        self.plan.order.observe([visit for _, visit in visits])

    def _holder(self, worker: int) -> int:
        """As whose the order knows this worker's units: its own, or those of the one deck."""
        return 0 if self.plan.deck else worker

    def _at_rest_included(self, change: Tensor, update: Update) -> Tensor:
        """A worker whose shard is through counts as standing still: every example weighs the same in an epoch."""
        reporters = {report.stint.worker for report in update.reports} | {stint.worker for stint in update.refused}
        resting = len(self.queues.wake() - reporters)
        reporting = len(update.reports) + len(update.refused)
        return change * (reporting / (reporting + resting)) if resting else change

    def _next_weights(self, change: Tensor, rate: float) -> Tensor:
        weights = self.versions[self.version].clone()
        if self.plan.period.local:
            return weights.add_(self._outer_step(change, rate))
        group = self._server.param_groups[0]
        parameter = group["params"][0]
        group["lr"] = rate
        parameter.data = weights[: self.parameters]
        parameter.grad = change[: self.parameters]
        self._server.step()
        weights[self.parameters :] += change[self.parameters :]
        return weights

    def _outer_step(self, change: Tensor, rate: float) -> Tensor:
        """What is applied in place of a merged change; buffers move as they were averaged."""
        if self.plan.outer is None or self.plan.outer.plain:
            return change
        return torch.cat((self.plan.outer(change[: self.parameters], rate), change[self.parameters :]))

    def _publish(self, weights: Tensor) -> None:
        self.version += 1
        self.versions[self.version] = weights
        self.cluster.publish()
        live = self.cluster.live_versions() | {self.version}
        self.versions = {version: kept for version, kept in self.versions.items() if version in live}

    def _note_averaging(self, update: Update, change: Tensor, steps: int, rate: float, loss: float) -> None:
        averages, period = self.averages, self.plan.period
        averages.steps += steps
        averages.count += 1
        averages.bytes_per_worker += update.bytes_per_worker
        averages.rate_sum += rate * steps
        averages.spread_sum += rate * steps * update.spread
        movement = float(change[: self.parameters].square().sum()) if period.local else 0.0
        seen = Averaging(averages.steps, self.progress, rate, update.spread, movement, loss, steps)
        period.averaged(seen)
        if period.local:
            averages.history.append(
                {
                    "step": averages.steps,
                    "period": steps,
                    "spread": update.spread,
                    "lr": rate,
                    "c2": period.telemetry().get("c2"),
                    "bytes": update.bytes_per_worker,
                    "seconds": update.seconds,
                }
            )

    def _rate(self, update: Update) -> float:
        """The learning rate this update was made, or is to be made, with."""
        if self.lockstep or self.plan.period.local:
            return max(report.stint.rates[-1] for report in update.reports)
        return self.plan.optimizer.rate(self.progress)

    # ------------------------------------------------------------------------------------------- contracts.Work

    def assign(self, worker: int) -> Stint | None:
        """The next stint of a worker; None while it rests."""
        progress = self._progress_of(worker)
        steps = self.plan.period.length(self.plan.optimizer.rate(progress), progress)
        if self.plan.exchange.balance == "speed":
            steps = self.speeds.length(worker, steps)
        batches = self.queues.take(worker, steps)
        if not batches:
            return None
        epoch = batches[0].epoch
        if self._finder is not None and self._finder.due(epoch) and self.plan.order.wants(self._holder(worker), epoch):
            self._finder.begin(epoch, self.versions[self.version])
        number = self._stints_given[worker]
        self._stints_given[worker] += 1
        rates = tuple(self.plan.optimizer.rate(progress + i * self._step_share) for i in range(len(batches)))
        return Stint(worker, number, self.version, tuple(batches), rates)

    def give_back(self, stint: Stint) -> None:
        """The units of a stint that was not used come again, first."""
        self.queues.give_back(stint.worker, stint.batches)

    def read(self, version: int) -> Tensor:
        """The weights of a version."""
        return self.versions[version]

    def wants_sketches(self, stint: Stint) -> tuple[bool, ...]:
        """For each batch, whether the order policy wants sketches or losses of its units."""
        wants, holder = self.plan.order.wants, self._holder(stint.worker)
        return tuple([wants(holder, batch.epoch) for batch in stint.batches])

    @property
    def directions(self) -> Directions | None:
        """What ghosts are taken along."""
        return None if self._finder is None else self._finder.found

    # ---------------------------------------------------------------------------------------------------- progress

    @property
    def epochs(self) -> float:
        """Passes over the training set that are complete or under way, as a fraction."""
        return self.ledger.visited / sum(self.sizes)

    @property
    def progress(self) -> float:
        """Share of the run that is over, in [0, 1]."""
        return min(self.plan.stop.share(self.epochs, self.version, self.cluster.now), 1.0)

    def _progress_of(self, worker: int) -> float:
        """Share of the run that is over as one worker starts a stint; in lockstep counted in its own local steps."""
        if self.lockstep and self.plan.stop.epochs is not None:
            return self.queues.slots_done(worker) / (self.plan.stop.epochs * self.queues.slots_per_epoch)
        return self.progress

    @property
    def _step_share(self) -> float:
        """What one local step of everybody adds to the progress within a stint."""
        if self.plan.stop.epochs is None:
            return 0.0
        return 1.0 / (self.plan.stop.epochs * self.queues.slots_per_epoch)

    # -------------------------------------------------------------------------------------------------- evaluation

    def _due(self) -> bool:
        marks = math.floor(self.plan.every.share(self.epochs, self.version, self.cluster.now) + 1e-9)
        return marks > self._marks

    def _evaluate(self) -> None:
        self._marks = math.floor(self.plan.every.share(self.epochs, self.version, self.cluster.now) + 1e-9)
        began = time.perf_counter()
        score = self.evaluator.score(self.versions[self.version])
        if not score.finite:
            self.status = "diverged"
        self._keep_if_best(score.test_metric)
        self.wall_seconds += time.perf_counter() - began
        self.records.append(
            self._record()
            | {
                "train_loss": score.train_loss,
                "train_gap": score.train_gap,
                "test_loss": score.test_loss,
                "test_metric": score.test_metric,
            }
        )
        self.averages.history, self._ks = [], []

    def _keep_if_best(self, metric: float) -> None:
        if self.plan.keep != "best" or math.isnan(metric):
            return
        sign = 1 if self.plan.task.higher_is_better else -1
        if self._best is None or sign * metric > sign * self._best.metric:
            self._best = Kept(self.version, metric, self.versions[self.version].clone())

    @property
    def kept(self) -> Kept:
        """The weights this run leaves behind: the last, or the best evaluated ones where the plan says so."""
        return self._best or Kept(self.version, self.records[-1]["test_metric"], self.versions[self.version])

    def _record(self) -> dict[str, Any]:
        ledger, averages, now = self.ledger, self.averages, self.cluster.now
        worked = max(now * self.workers, 1e-300)
        period: dict[str, Any] = {"p": round(averages.steps / averages.count) if averages.count else 1}
        if self.plan.period.local:
            period |= {"history": averages.history, **self.plan.period.telemetry()}
        return {
            "updates": self.version,
            "epochs": self.epochs,
            "seconds": now,
            "lr": self.plan.optimizer.rate(self.progress),
            "bytes_per_worker": averages.bytes_per_worker,
            "averagings": averages.count,
            "mean_period": averages.steps / averages.count if averages.count else None,
            "weighted_spread": averages.spread_sum / averages.rate_sum if averages.rate_sum else None,
            "mean_staleness": ledger.mean_staleness,
            "max_staleness": ledger.max_staleness,
            "mean_update_seconds": now / self.version if self.version else None,
            "units_cancelled": ledger.total("cancelled"),
            "units_dropped": ledger.total("dropped") + ledger.total("refused"),
            "wall_seconds": self.wall_seconds,
            "order": self.plan.order.telemetry(),
            "period": period,
            "pace": {
                **self.plan.pace.telemetry(),
                "staleness": {str(s): n for s, n in sorted(ledger.staleness.items())},
                "idle_share": ledger.idle_seconds / worked,
                "wasted_share": ledger.wasted_seconds / worked,
                "mean_update_seconds": now / self.version if self.version else None,
                "changes": self._ks,
            },
            "workers": ledger.per_worker(),
            **self._recorded(),
            **self.cluster.telemetry(),
        }

    def _recorded(self) -> dict[str, Any]:
        """What only some lines of the log have: a window of the time line, and at the end what became of each label."""
        ended = self.status != "running"
        told: dict[str, Any] = {}
        if window := self.windows.take(ended):
            told["timeline"] = window
        labels = self.plan.task.train.labels() if ended else None
        if labels is not None and len(np.unique(labels)) <= LABELS:
            holders = self.plan.shards[: len(self.sizes)]
            told["labels"] = self.ledger.per_label([labels[shard] for shard in holders], self.plan.order.unit)
        return told

    # ------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """Everything needed to go on exactly; plain values and tensors."""
        return {
            "kind": KIND,
            "version": VERSION,
            "weights": {"now": self.version, "held": dict(self.versions)},
            "optimizer": self._server.state_dict(),
            "outer": None if self.plan.outer is None else self.plan.outer.state_dict(),
            "order": self.plan.order.state_dict(),
            "directions": None if self._finder is None else vars(self._finder.found),
            "period": self.plan.period.state_dict(),
            "pace": self.plan.pace.state_dict(),
            "queues": self.queues.state_dict(),
            "ledger": self.ledger.state_dict(),
            "speeds": self.speeds.state_dict(),
            "windows": self.windows.state_dict(),
            "ks": [self._last_k, list(self._ks)],
            "cluster": self.cluster.state_dict(),
            "averages": vars(self.averages) | {"history": list(self.averages.history)},
            "records": list(self.records),
            "best": None if self._best is None else vars(self._best),
            "status": self.status,
            "wall_seconds": self.wall_seconds,
            "stints_given": list(self._stints_given),
            "marks": self._marks,
            "refused_in_a_row": self._refused_in_a_row,
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a state of the same plan."""
        own_state(state, KIND, VERSION)
        size, saved = self.versions[self.version].numel(), {held.numel() for held in state["weights"]["held"].values()}
        if saved != {size}:
            raise InputError(f"its model has {', '.join(map(str, saved))} weights, the task's has {size}")
        self.version, self.versions = state["weights"]["now"], dict(state["weights"]["held"])
        self._server.load_state_dict(state["optimizer"])
        if (state["outer"] is None) != (self.plan.outer is None):
            raise InputError("it was saved with another outer optimizer")
        if self.plan.outer is not None:
            self.plan.outer.load_state_dict(state["outer"])
        self.plan.order.load_state_dict(state["order"])
        if self._finder is not None:
            self._finder.found = Directions(**state["directions"])
        self.plan.period.load_state_dict(state["period"])
        self.plan.pace.load_state_dict(state["pace"])
        self.queues.load_state_dict(state["queues"])
        self.ledger.load_state_dict(state["ledger"])
        self.speeds.load_state_dict(state["speeds"])
        self.windows.load_state_dict(state["windows"])
        self._last_k, self._ks = state["ks"][0], list(state["ks"][1])
        self.cluster.load_state_dict(state["cluster"])
        self.averages = Averages(**state["averages"])
        self.records = list(state["records"])
        self._best = None if state["best"] is None else Kept(**state["best"])
        self.status = state["status"]
        self.wall_seconds = state["wall_seconds"]
        self._stints_given = list(state["stints_given"])
        self._marks = state["marks"]
        self._refused_in_a_row = state["refused_in_a_row"]

    def close(self) -> None:
        """Release the cluster."""
        self.cluster.close()
