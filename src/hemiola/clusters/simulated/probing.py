"""The simulated cluster under a period that probes how far workers are apart, and averages when that is far enough.

Between two averagings every worker goes on from where it is. After every stint all of them meet for a probe, which
costs what the slowest takes and a small all-reduce; `Period.due` decides whether the stints since the last averaging
are merged now.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from hemiola.clusters.merging import spread_of_stacked, together
from hemiola.clusters.probe import DriftProbe
from hemiola.clusters.sender import Sender
from hemiola.clusters.simulated.machines import Machines
from hemiola.clusters.simulated.sketch_cost import Charge
from hemiola.clusters.stints import StintRunner
from hemiola.contracts import FOLLOWED, Report, Span, State, Stint, Update, Work
from hemiola.plan import Plan
from hemiola.timing.link import gather_bytes, ring_bytes


class ProbingCluster:
    """P workers in one process that meet after every stint, and average now and then.

    Args:
        plan: What is run; its period says when to average.
        work: Gives out stints and holds the versions of the weights.
        runner: Computes them.
        machines: What the workers run on.
    """

    def __init__(self, plan: Plan, work: Work, runner: StintRunner, machines: Machines):
        self.work, self.runner, self.period, self.exchange = work, runner, plan.period, plan.exchange
        self.delays, self.link, self.charge = machines.delays, machines.link, machines.charge
        self.workers = machines.delays.workers
        self.sender = Sender(plan.exchange, runner.initial.numel(), plan.seed)
        self.probe = DriftProbe(runner.flat.size)
        self.now = 0.0
        self._draws = [0] * self.workers

    def live_versions(self) -> set[int]:
        """Nothing is under way between updates."""
        return set()

    def publish(self) -> None:
        """Every worker goes on from the new weights."""

    def telemetry(self) -> State:
        """Nothing here is measured, so it says what ordering was charged."""
        return self.charge.facts()

    def close(self) -> None:
        """Nothing to release."""

    def collect(self) -> Update:
        """Stint after stint, until they are far enough apart or the run ends."""
        self.runner.adopt(self.work.directions)
        done = _Since(self.workers)
        probes, idle = 0, 0.0
        while stints := [stint for w in range(self.workers) if (stint := self.work.assign(w)) is not None]:
            idle += self._run(stints, done)
            probes += 1
            self.now += self.link.ring_seconds(self.probe.bytes, self.workers)
            drifts = torch.stack([change[: self.runner.flat.size] for change in done.changes.values()])
            if self.period.due(self.probe.here(drifts), done.steps):
                break
        return self._merge(done, probes * ring_bytes(self.probe.bytes, self.workers), idle)

    def _run(self, stints: list[Stint], done: _Since) -> float:
        """One stint of everybody, from where they are; returns how long they wait for the slowest, in all."""
        wanted = [self.work.wants_sketches(stint) for stint in stints]
        base = self.work.read(stints[0].version)
        starts = [base + done.changes[stint.worker] if stint.worker in done.changes else base for stint in stints]
        rows, finished = self.runner.changes(starts, stints, wanted)
        took = []
        for at, stint in enumerate(stints):
            seconds = self.delays.seconds(stint.worker, self._draws[stint.worker], len(stint.batches))
            seconds *= self.charge.step_factor if any(wanted[at]) else 1.0
            self._draws[stint.worker] += len(stint.batches)
            took.append(seconds)
            done.add(stint, rows[at], finished.losses[at], finished.sketches[at], seconds)
            done.sketch_bytes[stint.worker] += self.charge.message_bytes(stint, wanted[at])
            if stint.worker < FOLLOWED:
                done.spans.append(Span(stint.worker, "computes", self.now, self.now + seconds))
        self.now += max(took)
        done.steps += max(len(stint.batches) for stint in stints)
        return sum(max(took) - seconds for seconds in took)

    def _merge(self, done: _Since, probe_bytes: float, idle: float) -> Update:
        """The mean of everybody's change since the last averaging."""
        good = [w for w, change in done.changes.items() if bool(torch.isfinite(change).all())]
        gathered = max(done.sketch_bytes)
        seconds = self.link.ring_seconds(self.sender.message_bytes, self.workers)
        seconds += self.link.gather_seconds(gathered, self.workers)
        done.spans += [
            Span(w, "exchanges", self.now, self.now + seconds) for w in done.changes if w < FOLLOWED and seconds
        ]
        self.now += seconds
        change, spread = None, 0.0
        if good:
            rows = self.sender.send(torch.stack([done.changes[w] for w in good]), [done.stint(w) for w in good])
            change = torch.full((len(good),), 1.0 / len(good), dtype=rows.dtype) @ rows
            spread = spread_of_stacked(rows[:, : self.runner.flat.size])
            self.runner.combine_momentum(good, self.exchange.momentum)
        message = ring_bytes(self.sender.message_bytes, self.workers) + gather_bytes(gathered, self.workers)
        return Update(
            reports=[done.report(w) for w in good],
            change=change,
            seconds=self.now,
            spread=spread,
            refused=[done.stint(w) for w in done.changes if w not in good],
            bytes_per_worker=message + probe_bytes,
            idle_seconds=idle,
            durations=[done.seconds[w] / len(done.losses[w]) for w in done.changes],
            spans=done.spans,
        )

    def state_dict(self) -> State:
        """The clock, the workers' optimizers, and what the wire has rounded away."""
        return {
            "now": self.now,
            "draws": list(self._draws),
            "runner": self.runner.state_dict(),
            "sender": self.sender.state_dict(),
            "charge": asdict(self.charge),
        }

    def load_state_dict(self, state: State) -> None:
        self.now, self._draws = state["now"], list(state["draws"])
        self.runner.load_state_dict(state["runner"])
        self.sender.load_state_dict(state["sender"])
        self.charge = Charge(**state["charge"])


class _Since:
    """What every worker has done since the last averaging."""

    def __init__(self, workers: int) -> None:
        self.changes: dict[int, Tensor] = {}
        self.stints: dict[int, list[Stint]] = {}
        self.losses: dict[int, list[float]] = {}
        self.sketches: dict[int, list[Tensor | None]] = {}
        self.seconds = [0.0] * workers
        self.sketch_bytes = [0] * workers
        self.spans: list[Span] = []
        self.steps = 0

    def add(
        self, stint: Stint, change: Tensor, loss: float, sketches: tuple[Tensor | None, ...], seconds: float
    ) -> None:
        worker = stint.worker
        self.changes[worker] = self.changes[worker] + change if worker in self.changes else change
        self.stints.setdefault(worker, []).append(stint)
        self.losses.setdefault(worker, []).extend([loss] * len(stint.batches))
        self.sketches.setdefault(worker, []).extend(sketches)
        self.seconds[worker] += seconds

    def stint(self, worker: int) -> Stint:
        return together(self.stints[worker])

    def report(self, worker: int) -> Report:
        losses = self.losses[worker]
        stint, sketches = self.stint(worker), tuple(self.sketches[worker])
        return Report(stint, 0, self.seconds[worker], sum(losses) / len(losses), sketches)
