"""The simulated cluster: one process, a virtual clock, real gradients.

`Clockwork` decides who finishes when; this file computes what the finishers found, lazily, from the version of the
weights each had read. Versions are shared, not copied per worker; stints that read the same version are computed in
one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from hemiola.clusters.merging import shares, spread_of_stacked
from hemiola.clusters.sender import Sender
from hemiola.clusters.simulated.clockwork import Clockwork, Round
from hemiola.clusters.simulated.machines import Machines
from hemiola.clusters.simulated.sketch_cost import Charge
from hemiola.clusters.stints import Finished, StintRunner
from hemiola.contracts import FOLLOWED, LINK, Report, Span, State, Stint, Update, Work
from hemiola.plan import Plan
from hemiola.timing.link import gather_bytes, ring_bytes


class SimulatedCluster:
    """P workers in one process.

    Args:
        plan: What is run.
        work: Gives out stints and holds the versions of the weights.
        runner: Computes stints.
        machines: What the workers run on.
    """

    def __init__(self, plan: Plan, work: Work, runner: StintRunner, machines: Machines):
        self.work = work
        self.runner = runner
        self.pace = plan.pace
        self.period = plan.period
        self.exchange = plan.exchange
        self.link = machines.link
        self.rings = plan.pace.lockstep or machines.link.reports == "ring"
        self.workers = machines.delays.workers
        self.sender = Sender(plan.exchange, runner.initial.numel(), plan.seed)
        runner.keeps_ends = plan.exchange.overlap != 0
        self._steps_seen, self._seconds_seen = 0, 0.0
        self._staleness = self._refused = 0
        self.clock = Clockwork(work, plan.pace, machines, self.sender.message_bytes)

    @property
    def now(self) -> float:
        """Cluster time."""
        return self.clock.now

    def live_versions(self) -> set[int]:
        """Versions that stints under way have read."""
        held = [*self.clock.running.values(), *(running for running, _ in self.clock.gathered)]
        return {running.stint.version for running in held}

    def collect(self) -> Update:
        """Run the clock to the next update and compute its reports."""
        this = self.clock.next_round()
        this.arrived.sort(key=lambda pair: (pair[0].stint.worker, pair[0].stint.number))
        stints = [running.stint for running, _ in this.arrived]
        self.runner.adopt(self.work.directions)
        change, finished, spread = self._merge(stints)
        reports, refused = [], []
        for (running, arrived), loss, sketches, finite in zip(
            this.arrived, finished.losses, finished.sketches, finished.finite, strict=True
        ):
            if not finite:
                refused.append(running.stint)
                continue
            staleness = self.clock.race.version - running.stint.version
            self._staleness += staleness
            seconds = arrived - running.started
            reports.append(Report(running.stint, staleness, seconds, loss, sketches, running.compute))
        self._refused += len(refused)
        gathered = self.clock.most_sketch_bytes(this)
        return Update(
            reports=reports,
            change=change if reports else None,
            seconds=self._exchange_time(this, gathered),
            spread=spread,
            cancelled=[stint for stint, _ in this.cancelled] + this.rests + this.late,
            dropped=this.dropped,
            refused=refused,
            bytes_per_worker=self._bytes(this, gathered),
            idle_seconds=this.idle_seconds,
            wasted_seconds=this.wasted_seconds,
            durations=this.durations,
            censored=[ran / len(stint.batches) for stint, ran in this.cancelled],
            waits=this.waits,
            spans=this.spans,
        )

    def telemetry(self) -> State:
        """Nothing here is measured, so it says what ordering was charged; the identities of staleness are checked."""
        self._check_staleness()
        return self.clock.charge.facts()

    def _check_staleness(self) -> None:
        """With fixed P and K nothing about staleness is random.

        Every update makes P - K stints one update older (K-async; P - 1 in K-batch-async, where finishers have gone
        on), so what merged reports and stints under way have aged by must add up. A deviation is a bug.
        """
        k = self.pace.fixed_k
        if k is None or self.pace.max_staleness is not None or self._refused or self.clock.race.behind:
            return
        aged = 0 if self.pace.cancels else self.workers - (k if self.pace.idles else 1)
        pending = sum(self.clock.race.version - running.stint.version for running in self.clock.running.values())
        pending *= not self.pace.cancels
        law = aged * self.clock.race.version
        if self._staleness + pending != law:
            raise AssertionError(
                f"after {self.clock.race.version} updates merged reports are {self._staleness} and stints under way "
                f"{pending} updates old in all; with {self.workers} workers and K = {k} that must make {law}"
            )

    def publish(self) -> None:
        """Workers that start from now on read the next version."""
        self.clock.race.version += 1

    def close(self) -> None:
        """Nothing to release."""

    # ---------------------------------------------------------------------------------------------------------- merge

    def _merge(self, stints: Sequence[Stint]) -> tuple[Tensor, Finished, float]:
        """The weighted mean of the stints' changes; if it is not finite, of those that are."""
        weigh = self.exchange.weighs
        factors = shares(self.work, self.pace, self.clock.race.version, stints, weigh)
        if not self.period.local and self.sender.exact:
            change, finished = self._shared_gradient(stints, factors)
            if bool(torch.isfinite(change).all()):
                return change, finished, 0.0
        rows, finished = self._rows(stints)
        good = [i for i, finite in enumerate(finished.finite) if finite]
        if not good:
            return rows[0], finished, 0.0
        rows = self.sender.send(rows[good], [stints[i] for i in good])
        factors = shares(self.work, self.pace, self.clock.race.version, [stints[i] for i in good], weigh)
        weights = torch.tensor(factors, dtype=rows.dtype)
        change = weights @ rows
        if not self.period.local:
            return change, finished, 0.0
        self.runner.combine_momentum([stints[i].worker for i in good], self.exchange.momentum)
        # Buffers are averaged too, but are no part of the spread.
        return change, finished, spread_of_stacked(rows[:, : self.runner.flat.size])

    def _shared_gradient(self, stints: Sequence[Stint], factors: Sequence[float]) -> tuple[Tensor, Finished]:
        """One backward pass for each version read."""
        total: Tensor | None = None
        finished = Finished([0.0] * len(stints), [()] * len(stints), [True] * len(stints))
        for version in sorted({stint.version for stint in stints}):
            chosen = [i for i, stint in enumerate(stints) if stint.version == version]
            group = [stints[i] for i in chosen]
            wanted = [self.work.wants_sketches(stint)[0] for stint in group]
            change, part = self.runner.gradient(self.work.read(version), group, [factors[i] for i in chosen], wanted)
            total = change if total is None else total + change
            for at, i in enumerate(chosen):
                finished.losses[i], finished.sketches[i], finished.finite[i] = (
                    part.losses[at],
                    part.sketches[at],
                    part.finite[at],
                )
        assert total is not None
        return total, finished

    def _rows(self, stints: Sequence[Stint]) -> tuple[Tensor, Finished]:
        """Every stint's own change. A worker that reports twice runs its stints one after the other."""
        finished = Finished([0.0] * len(stints), [()] * len(stints), [True] * len(stints))
        rows: list[Tensor] = [torch.empty(0)] * len(stints)
        waiting = list(range(len(stints)))
        while waiting:
            now: list[int] = []
            for i in waiting:
                if stints[i].worker not in {stints[j].worker for j in now}:
                    now.append(i)
            waiting = [i for i in waiting if i not in now]
            group = [stints[i] for i in now]
            starts = [self.work.read(stint.version) for stint in group]
            wanted = [self.work.wants_sketches(stint) for stint in group]
            if self.period.local:
                changes, part = self.runner.changes(starts, group, wanted, lag=self.clock.lag)
            else:
                changes, part = self.runner.gradients(starts, group, [want[0] for want in wanted])
            for at, i in enumerate(now):
                rows[i] = changes[at]
                finished.losses[i], finished.sketches[i], finished.finite[i] = (
                    part.losses[at],
                    part.sketches[at],
                    part.finite[at],
                )
        return torch.stack(rows), finished

    # ------------------------------------------------------------------------------------------------ time and bytes

    def _exchange_time(self, this: Round, gathered: int) -> float:
        """By a ring that everyone waits for, changes pass by an all-reduce, then sketches by an all-gather.

        Else reports have paid their way.
        """
        if self.rings and not self.clock.race.behind:
            transfer = self.link.ring_seconds(self.sender.message_bytes, self.workers)
            transfer += self.link.gather_seconds(gathered, self.workers)
            if transfer:
                met = range(min(self.workers, FOLLOWED)) if self.exchange.overlap == 0 else [LINK]
                this.spans += [Span(who, "exchanges", self.clock.now, self.clock.now + transfer) for who in met]
            self.clock.advance(transfer)
            self._set_lag(this, transfer)
        return self.clock.now

    def _set_lag(self, this: Round, transfer: float) -> None:
        """How many steps workers go on before they need this average; "auto": as many as the transfer lasts."""
        if self.exchange.overlap != "auto":
            self.clock.lag = self.exchange.overlap
            return
        self._steps_seen += len(this.durations)
        self._seconds_seen += sum(this.durations)
        self.clock.lag = math.ceil(transfer * self._steps_seen / self._seconds_seen)

    def _bytes(self, this: Round, gathered: int) -> float:
        """Bytes an average worker sent for this update: its change, and its sketches."""
        message = self.sender.message_bytes
        if self.rings:
            return ring_bytes(message, self.workers) + gather_bytes(gathered, self.workers)
        sent = [running.stint for running, _ in this.arrived] + this.late + this.dropped
        return sum(message + self.clock.sketch_bytes(stint) for stint in sent) / self.workers

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """Clock, the workers' optimizers, and the residuals of the wire."""
        return {
            "clock": self.clock.state_dict(),
            "runner": self.runner.state_dict(),
            "ends": dict(self.runner.ends),
            "sender": self.sender.state_dict(),
            "seen": [self._steps_seen, self._seconds_seen],
            "staleness": [self._staleness, self._refused],
            "charge": asdict(self.clock.charge),
        }

    def load_state_dict(self, state: State) -> None:
        self.clock.load_state_dict(state["clock"])
        self.runner.load_state_dict(state["runner"])
        self.runner.ends = dict(state["ends"])
        self.sender.load_state_dict(state["sender"])
        self._steps_seen, self._seconds_seen = state["seen"]
        self._staleness, self._refused = state["staleness"]
        self.clock.charge = Charge(**state["charge"])  # A factor measured again might be another one.
