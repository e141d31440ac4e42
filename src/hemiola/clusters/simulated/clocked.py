"""The simulated cluster under a clocked period: averagings behind the computation, and nobody waits.

`Timeline` decides which steps an averaging holds; this file computes them afterwards, lazily and in groups: the k-th
step of every worker in one call. What a worker computes at is the newest weights that had arrived when the step began,
plus ``mix`` times what it has found itself and is not in them yet: the contribution that is under way (``_sent``), and
what it has gathered since.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from hemiola.clusters.merging import spread_of_stacked, together
from hemiola.clusters.sender import Sender
from hemiola.clusters.simulated.machines import Machines
from hemiola.clusters.simulated.sketch_cost import Charge
from hemiola.clusters.simulated.timeline import BetweenAveragings, Step, Timeline
from hemiola.clusters.stints import StintRunner
from hemiola.contracts import FOLLOWED, LINK, Clock, Report, Span, State, Stint, Update, Work
from hemiola.plan import Plan
from hemiola.timing.link import gather_bytes, ring_bytes


class ClockedCluster:
    """P workers in one process, whose averagings follow the clock.

    Args:
        plan: What is run.
        clock: Of its period: when averagings begin, and what workers do with their own contributions meanwhile.
        work: Gives out stints and holds the versions of the weights.
        runner: Computes steps.
        machines: What the workers run on.
    """

    def __init__(self, plan: Plan, clock: Clock, work: Work, runner: StintRunner, machines: Machines):
        self.work = work
        self.runner = runner
        self.workers = machines.delays.workers
        self.sender = Sender(plan.exchange, runner.initial.numel(), plan.seed)
        self.timeline = Timeline(work, clock, machines, self.sender.message_bytes)
        # Running means of BatchNorm move towards what they see; gathered many times at one place they would overshoot.
        self._mix = torch.full_like(runner.initial, clock.mix)
        self._mix[runner.flat.size :] = 1.0
        self._sent: dict[int, Tensor] = {}  # each worker's part of the averaging that has arrived last
        self._begun: dict[int, Tensor] = {}  # weights of steps that were under way at the last snapshot

    @property
    def now(self) -> float:
        """Cluster time."""
        return self.timeline.now

    def live_versions(self) -> set[int]:
        """Versions that steps have read which are not computed yet."""
        waiting = [*self.timeline.running.values(), *(step for steps in self.timeline.ended for step in steps)]
        return {step.stint.version for step in waiting}

    def publish(self) -> None:
        """Steps that start from now on read the next version."""
        self.timeline.version += 1

    def telemetry(self) -> State:
        """Nothing here is measured, so it says what ordering was charged."""
        return self.timeline.charge.facts()

    def close(self) -> None:
        """Nothing to release."""

    # -------------------------------------------------------------------------------------------------------- collect

    def collect(self) -> Update:
        """Run the clock until the next mean arrives, and compute it."""
        this = self.timeline.next_averaging()
        gathered, reports = self._compute(this)
        finite = {worker: bool(torch.isfinite(found).all()) for worker, found in gathered.items()}
        refused = [report.stint for report in reports if not finite[report.stint.worker]]
        reports = [report for report in reports if finite[report.stint.worker]]
        gathered = {worker: found for worker, found in gathered.items() if finite[worker]}
        self._remember(this, gathered)
        change, spread = self._mean(gathered, [report.stint for report in reports])
        message, workers = self.sender.message_bytes, self.workers
        followed = range(min(workers, FOLLOWED))
        return Update(
            reports=reports,
            change=change,
            seconds=self.now,
            spread=spread,
            refused=refused,
            bytes_per_worker=ring_bytes(message, workers) + gather_bytes(this.sketch_bytes, workers),
            durations=[step.ends - step.started for steps in this.steps for step in steps],
            spans=[
                *(Span(who, "computes", one.started, one.ends) for who in followed for one in this.steps[who]),
                Span(LINK, "exchanges", this.snapshot, self.now),
            ],
        )

    def _compute(self, this: BetweenAveragings) -> tuple[dict[int, Tensor], list[Report]]:
        """What every worker with steps in this averaging has found, and a report about it."""
        gathered: dict[int, Tensor] = {}
        losses: dict[int, list[float]] = {}
        sketches: dict[int, list[Tensor | None]] = {}
        self.runner.adopt(self.work.directions)
        for turn in range(max(len(steps) for steps in this.steps)):
            group = [steps[turn] for steps in this.steps if turn < len(steps)]
            stints = [step.stint for step in group]
            starts = [self._weights(step, gathered) for step in group]
            changes, finished = self.runner.changes(starts, stints, [self.work.wants_sketches(one) for one in stints])
            for at, stint in enumerate(stints):
                worker = stint.worker
                gathered[worker] = gathered[worker] + changes[at] if worker in gathered else changes[at]
                losses.setdefault(worker, []).append(finished.losses[at])
                sketches.setdefault(worker, []).extend(finished.sketches[at])
        reports = [
            Report(
                stint=together([step.stint for step in mine]),
                staleness=self.timeline.version - mine[0].stint.version,
                seconds=self.now - mine[0].started,
                loss=sum(losses[worker]) / len(mine),
                sketches=tuple(sketches[worker]),
            )
            for worker, mine in enumerate(this.steps)
            if mine
        ]
        return gathered, reports

    def _weights(self, step: Step, gathered: dict[int, Tensor]) -> Tensor:
        """What a step is computed at."""
        worker = step.stint.worker
        if worker in self._begun:
            return self._begun.pop(worker)
        weights = self.work.read(step.stint.version)
        if step.stint.version < self.timeline.version and worker in self._sent:
            weights = weights + self._mix * self._sent[worker]
        if worker in gathered:
            weights = weights + self._mix * gathered[worker]
        return weights

    def _remember(self, this: BetweenAveragings, gathered: dict[int, Tensor]) -> None:
        """Keep what steps that are not computed yet will need of this interval."""
        if not bool(self._mix.any()):
            return
        for worker, ended in enumerate(self.timeline.ended):
            following = ended[0] if ended else self.timeline.running.get(worker)
            if following is not None and following.started < this.snapshot and worker not in self._begun:
                self._begun[worker] = self._weights(following, gathered)
        self._sent = gathered

    def _mean(self, gathered: dict[int, Tensor], stints: list[Stint]) -> tuple[Tensor | None, float]:
        """The sum of the contributions over the number of workers, and their spread."""
        if not stints:
            return None, 0.0
        rows = self.sender.send(torch.stack([gathered[stint.worker] for stint in stints]), stints)
        change = torch.full((len(rows),), 1.0 / self.workers, dtype=rows.dtype) @ rows
        return change, spread_of_stacked(rows[:, : self.runner.flat.size])

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """Clock, the workers' optimizers, their contributions, and the residuals of the wire."""
        return {
            "timeline": self.timeline.state_dict(),
            "runner": self.runner.state_dict(),
            "sender": self.sender.state_dict(),
            "sent": dict(self._sent),
            "begun": dict(self._begun),
            "charge": asdict(self.timeline.charge),
        }

    def load_state_dict(self, state: State) -> None:
        self.timeline.load_state_dict(state["timeline"])
        self.runner.load_state_dict(state["runner"])
        self.sender.load_state_dict(state["sender"])
        self._sent, self._begun = dict(state["sent"]), dict(state["begun"])
        self.timeline.charge = Charge(**state["charge"])
