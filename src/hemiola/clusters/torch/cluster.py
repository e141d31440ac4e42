"""The torch cluster: one process a worker, collectives in place of a server.

Every rank runs the whole training loop. Queues, orders, periods and weights are the same everywhere, because all of
them follow from the plan and from numbers that every rank gets in the same exchange; so every rank knows what every
worker is asked to do, runs the stint of its own worker only, and builds the same `Update`. One exchange carries

    [change, buffers (, optimizer memory)] and the notes [counts, loss, seconds, exchange seconds, steps, stop, save],

a second one the sketches, where the order wants any. Whether to stop and when to write a checkpoint is decided by notes
as well: a rank that acted on its own clock or signal would leave the others waiting for it.

Collectives need everyone, so an update that does not wait for all cannot do without the others here; but it can cut
their stints. Who is through says so in the job's store; who is not looks there after every step, and where the race
is over it ends its stint and comes (``late = "cut"``). How many steps each has done is in the notes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from hemiola.clusters.merging import cut, relative_weights, together, units_of
from hemiola.clusters.probe import DriftProbe
from hemiola.clusters.step_times import MeasuredTimes
from hemiola.clusters.stints import Finished, Sketches, StintRunner
from hemiola.clusters.torch.group import exchange as attended
from hemiola.clusters.torch.group import gather, share
from hemiola.clusters.torch.sketches import gather_sketches
from hemiola.contracts import FOLLOWED, Directions, Report, Span, State, Stint, Update, Work
from hemiola.errors import InputError
from hemiola.optimizers import moment_names, moments
from hemiola.pace.race import Race
from hemiola.plan import Plan
from hemiola.state import own_state
from hemiola.timing.delays import DelayStreams
from hemiola.timing.link import ring_bytes
from hemiola.wire.group_mean import GroupMean

KIND, VERSION = "torch-cluster", 2

_RUNS = itertools.count()  # the same on every rank: keys in the store must not be those of a run before


@dataclass
class Wishes:
    """What a rank asks of all ranks, with the next update.

    Attributes:
        stop: End the run after it, with a checkpoint.
        checkpoint: Write one after it.
    """

    stop: bool = False
    checkpoint: bool = False


@dataclass
class _Mine:
    """What this rank's worker did. The defaults are those of a worker that rests."""

    change: Tensor
    exact: Tensor
    counts: float = 0.0
    loss: float = 0.0
    seconds: float = 0.0
    sketches: Sketches = ()
    steps: int = 0


class CollectiveCluster:
    """This process's part of a torch cluster; its worker's number is its rank in the default process group.

    Args:
        plan: What is run; its pace must wait for everyone, or cut the stints of those that it does not wait for.
        work: Gives out stints and holds the weights.
        runner: Computes stints.
        delays: The least time of a local step, so that stragglers can be tried on one machine; None for none.

    Attributes:
        wishes: What this rank asks for with the next update.
        granted: What some rank had asked for with the last update; the same on every rank.
        at_rest: Whether the state may be taken now, which here is so after every update.
    """

    at_rest = True

    def __init__(self, plan: Plan, work: Work, runner: StintRunner, delays: DelayStreams | None):
        pace, period, exchange = plan.pace, plan.period, plan.exchange
        self.work = work
        self.runner = runner
        self.pace = pace
        self.period = period
        self.exchange = exchange
        self.delays = delays
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        self.wishes, self.granted = Wishes(), Wishes()
        self._moments = moment_names(runner.optimizer) if period.local and exchange.momentum == "average" else []
        self._buffers = runner.initial.numel() - runner.flat.size
        self.mean = GroupMean(
            dist.group.WORLD,
            lossy=runner.flat.size,
            exact=self._buffers + runner.flat.size * len(self._moments),
            codec=exchange.codec,
            feedback=exchange.feedback,
            seed=plan.seed,
        )
        self.probe = DriftProbe(runner.flat.size)
        self._seconds = 0.0
        self._exchange_seconds = 0.0
        self._drawn = 0
        self._measured = MeasuredTimes(self.workers)
        self._race = None if pace.lockstep else Race(pace)
        self._run_number = next(_RUNS)

    @property
    def now(self) -> float:
        """Seconds spent computing, by the slowest worker of each update, and exchanging; the same on every rank."""
        return self._seconds

    def live_versions(self) -> set[int]:
        """Nothing is under way between updates."""
        return set()

    def publish(self) -> None:
        """Every rank has computed the new weights itself."""

    def settle(self) -> None:
        """The run is over, on every rank: nothing is under way."""

    def close(self) -> None:
        """The group belongs to whoever joined it."""

    # --------------------------------------------------------------------------------------------------------- collect

    def collect(self) -> Update:
        """Run this rank's stint and merge it with everyone's."""
        asked, wanted, mine, probes = self._stints()
        notes = [mine.counts * self._weight(asked, mine.steps), mine.loss, mine.seconds, self._exchange_seconds]
        with attended(f"update {self.mean.count + 1}"):
            merged = self.mean(mine.change, mine.exact, [*notes, mine.steps, self.wishes.stop, self.wishes.checkpoint])
        counts, losses, seconds, exchanged, steps, stop, checkpoint = merged.notes.T
        self.granted = Wishes(bool(stop.any()), bool(checkpoint.any()))
        parts = [cut(stint, int(steps[stint.worker])) for stint in asked]
        stints, rests = [done for done, _ in parts], [rest for _, rest in parts if rest.batches]
        for rest in rests:
            self.work.give_back(rest)
        good = [stint for stint in stints if counts[stint.worker]]
        began = time.perf_counter()
        sketches, sketch_bytes = self._exchange_sketches(stints, wanted, mine.sketches)
        self._exchange_seconds = merged.seconds + time.perf_counter() - began
        if self.period.local and counts[self.rank]:
            self._combine_momentum(merged.exact[self._buffers :])
        self._pass_time(stints, seconds, exchanged)
        return Update(
            reports=[
                Report(
                    stint=stint,
                    staleness=0,
                    seconds=float(seconds[stint.worker]),
                    loss=float(losses[stint.worker]),
                    sketches=sketches[stint.worker],
                    compute=float(seconds[stint.worker]),
                )
                for stint in good
            ],
            change=self._whole(merged.change, merged.exact) if good else None,
            seconds=self._seconds,
            spread=merged.spread if self.period.local else 0.0,
            cancelled=rests,
            refused=[stint for stint in stints if not counts[stint.worker]],
            bytes_per_worker=merged.bytes + sketch_bytes + probes * ring_bytes(self.probe.bytes, self.workers),
            idle_seconds=float((seconds.max() - seconds).sum()),
            durations=[float(seconds[stint.worker]) / len(stint.batches) for stint in stints],
            waits=[math.inf if rest.batches else float(seconds[done.worker]) for done, rest in parts],
            spans=self._spans(stints, seconds, float(exchanged.min())),
        )

    def _weight(self, stints: Sequence[Stint], steps: int) -> float:
        """What this rank's change counts, after so many steps, beside those of the ranks that could count most."""
        if self._race is not None and self.exchange.weighs == "work":  # nobody knows what the others have done
            done = [units_of(cut(stint, steps)[0]) for stint in stints if stint.worker == self.rank]
            return sum(done) / max(units_of(stint) for stint in stints)
        weights = relative_weights(stints, self.exchange.weighs)
        mine = [weight for stint, weight in zip(stints, weights, strict=True) if stint.worker == self.rank]
        return mine[0] / max(weights) if mine else 0.0

    def _spans(self, stints: Sequence[Stint], seconds: np.ndarray, exchange: float) -> list[Span]:
        """What everyone did for the update that ends now; the exchange is the one before, as in `_pass_time`."""
        met = self._seconds - float(seconds.max())
        followed = [stint.worker for stint in stints if stint.worker < FOLLOWED]
        spans = [Span(worker, "exchanges", met - exchange, met) for worker in followed if exchange]
        return spans + [Span(worker, "computes", met, met + float(seconds[worker])) for worker in followed]

    def _stints(self) -> tuple[list[Stint], dict[int, tuple[bool, ...]], _Mine, int]:
        """Everybody's stints of one update, with their wanted sketches; this rank's part in them; and how many probes.

        There is one stint of everybody, or several, where they probe after each how far they are apart.
        """
        given: dict[int, list[Stint]] = {}
        wanted: dict[int, tuple[bool, ...]] = {}
        mine = _Mine(torch.zeros(self.runner.flat.size), torch.zeros(self.mean.exact))
        probes = steps = 0
        while new := [stint for worker in range(self.workers) if (stint := self.work.assign(worker)) is not None]:
            self._agree_on_directions()
            for stint in new:
                given.setdefault(stint.worker, []).append(stint)
                wanted[stint.worker] = wanted.get(stint.worker, ()) + self.work.wants_sketches(stint)
                if stint.worker == self.rank:
                    mine = self._run(stint, mine)
            steps += max(len(stint.batches) for stint in new)
            if not self.period.probes:
                break
            probes += 1
            began = time.perf_counter()
            with attended(f"probe {probes} before update {self.mean.count + 1}"):
                spread, _ = self.probe.between(mine.change if mine.steps else None, meet=False)
            mine = replace(mine, seconds=mine.seconds + time.perf_counter() - began)  # it has waited for the slowest
            if self.period.due(spread, steps):
                break
        return [together(given[worker]) for worker in sorted(given)], wanted, mine, probes

    def _run(self, stint: Stint, before: _Mine) -> _Mine:
        """Compute a stint of this rank, after what it has done for this update before."""
        size, wanted = self.runner.flat.size, self.work.wants_sketches(stint)
        began = time.perf_counter()
        start = self.work.read(stint.version)
        if before.steps:
            start = start + torch.cat([before.change, before.exact[: self._buffers]])
        if self._race is not None:
            rows, finished = self._race_through(self._race, start, stint, began)
        elif self.period.local:
            rows, finished = self.runner.changes([start], [stint], [wanted])
        else:
            rows, finished = self.runner.gradients([start], [stint], [wanted[0]])
        change, buffers = rows[0, :size], rows[0, size:]
        done = len(finished.sketches[0])
        self._sleep(done, began)
        self._drawn += len(stint.batches)
        steps = before.steps + done
        if before.steps:
            change, buffers = before.change + change, before.exact[: self._buffers] + buffers
        return _Mine(
            change,
            torch.cat([buffers, *(self._memory() if self._moments else [])]),
            float(finished.finite[0] and (before.counts or not before.steps)),
            (before.loss * before.steps + finished.losses[0] * done) / steps,
            before.seconds + time.perf_counter() - began,
            before.sketches + finished.sketches[0],
            steps,
        )

    def _race_through(self, race: Race, start: Tensor, stint: Stint, began: float) -> tuple[Tensor, Finished]:
        """Local steps until the stint is through, or until the update does not wait for it any longer."""
        store, key = _get_default_store(), f"hemiola/race/{self._run_number}/{self.mean.count}"
        for worker in range(self.workers):
            race.start(worker)

        def after_step(index: int) -> bool:
            self._sleep(index + 1, began)
            if index + 1 == len(stint.batches):
                store.add(key, 1)
                return True
            if time.perf_counter() - began < (self.pace.deadline() or 0.0):
                return False
            race.counted = store.add(key, 0)
            deadline = race.deadline
            return race.complete or (deadline is not None and time.perf_counter() - began >= deadline)

        rows, finished = self.runner.changes([start], [stint], [self.work.wants_sketches(stint)], after_step)
        race.close()
        return rows, finished

    def _whole(self, change: Tensor, exact: Tensor) -> Tensor:
        """The merged vector as the loop wants it: parameters, then buffers."""
        whole = torch.cat([change, exact[: self._buffers]]).cpu().to(self.runner.initial.dtype)
        return whole * self.pace.weight(0, 0.0)

    def _sleep(self, steps: int, began: float) -> None:
        """Let so many steps last as long as drawn, the draws being those of the simulated cluster."""
        if self.delays is not None:
            ends = began + self.delays.seconds(self.rank, self._drawn, steps)
            time.sleep(max(0.0, ends - time.perf_counter()))

    def _pass_time(self, stints: Sequence[Stint], seconds: np.ndarray, exchanged: np.ndarray) -> None:
        """Cluster time, from what everyone measured.

        An exchange takes what it took the rank that came last, for it waited for nobody. That is known one exchange
        later, so the time of the last one is not in it.
        """
        exchange = float(exchanged.min())
        self._seconds += float(seconds.max()) + exchange
        if exchange:
            self._measured.exchange(exchange)
        for stint in stints:
            self._measured.step(stint.worker, float(seconds[stint.worker]) / len(stint.batches))

    def telemetry(self) -> State:
        """Measured seconds of local steps, and of exchanges once the last worker had come."""
        measured = self._measured.take()
        return measured if measured["step_seconds"] else {}

    # -------------------------------------------------------------------------------------------------------- sketches

    def _exchange_sketches(
        self, stints: Sequence[Stint], wanted: dict[int, tuple[bool, ...]], mine: Sketches
    ) -> tuple[dict[int, Sketches], int]:
        """Every worker's sketches, and the bytes this rank sent; nothing is sent where none are wanted."""
        units = {
            stint.worker: [
                len(batch.units) if want else 0
                for batch, want in zip(stint.batches, wanted[stint.worker], strict=False)
            ]
            for stint in stints
        }
        totals = [sum(units.get(worker, [])) for worker in range(self.workers)]
        if not any(totals):
            return {stint.worker: (None,) * len(stint.batches) for stint in stints}, 0
        with attended(f"the sketches of update {self.mean.count}"):
            received, sent = gather_sketches(self.runner, mine, totals)
        found: dict[int, Sketches] = {}
        for worker, counts in units.items():
            pieces = torch.split_with_sizes(received[worker], counts)
            found[worker] = tuple(rows if want else None for rows, want in zip(pieces, wanted[worker], strict=False))
        return found, sent

    def _agree_on_directions(self) -> None:
        """Every rank has found the same ones, but for signs, which may depend on the machine: rank 0's are taken."""
        mine = self.work.directions
        if mine is not None and mine.epoch != self.runner.directions_of:
            self.runner.adopt(Directions(mine.epoch, share(mine.found)))

    # -------------------------------------------------------------------------------------------- optimizer memory

    def _memory(self) -> list[Tensor]:
        """What this rank's optimizer remembers, where that is averaged."""
        if self.rank not in self.runner.local:  # It met something that was not finite, and its change does not count.
            return [torch.zeros(self.runner.flat.size) for _ in self._moments]
        state = moments(self.runner.local[self.rank])
        return [state[name].float().cpu() for name in self._moments]

    def _combine_momentum(self, averaged: Tensor) -> None:
        if self.exchange.momentum == "reset":
            self.runner.combine_momentum([self.rank], "reset")
        elif self._moments:
            state = moments(self.runner.local[self.rank])
            for name, values in zip(self._moments, averaged.view(len(self._moments), -1), strict=True):
                state[name].copy_(values)

    # ----------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """All ranks must call this together. Whole on rank 0; elsewhere ``ranks`` is empty."""
        mine = {"runner": self.runner.state_dict(), "mean": self.mean.state_dict(), "drawn": self._drawn}
        return {
            "kind": KIND,
            "version": VERSION,
            "workers": self.workers,
            "seconds": self._seconds,
            "exchange_seconds": self._exchange_seconds,
            "ranks": gather(mine) or [],
        }

    def load_state_dict(self, state: State) -> None:
        own_state(state, KIND, VERSION)
        if state["workers"] != self.workers:
            raise InputError(f"the saved cluster had {state['workers']} workers, this one has {self.workers}")
        mine = state["ranks"][self.rank]
        self._seconds, self._exchange_seconds = state["seconds"], state["exchange_seconds"]
        self._drawn = mine["drawn"]
        self.runner.load_state_dict(mine["runner"])
        if mine["mean"] is not None:
            self.mean.load_state_dict(mine["mean"])
