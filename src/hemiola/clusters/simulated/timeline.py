"""Virtual time under a clocked period: which steps end when, and which of them are in the next averaging.

At one moment things happen in this order: steps end; the mean that was under way arrives; the next averaging takes its
snapshot; free workers start their next steps, with the newest weights that have arrived. So where all steps take the
same time and the link none, every averaging holds one step of everyone, and this is synchronous training.

Nothing here knows about gradients; `clocked.py` computes them afterwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hemiola.clusters.simulated.machines import Machines
from hemiola.contracts import Clock, State, Stint, Work


@dataclass(frozen=True)
class Step:
    """One local step.

    Attributes:
        stint: Of one batch; its version is that of the newest weights that had arrived.
        started, ends: When.
    """

    stint: Stint
    started: float
    ends: float


@dataclass(frozen=True)
class BetweenAveragings:
    """What one averaging holds.

    Attributes:
        steps: Every worker's steps that ended since the snapshot before, in turn; none for some workers.
        snapshot: When the averaging began.
        sketch_bytes: Bytes of the sketches of the worker that sends most.
    """

    steps: list[list[Step]]
    snapshot: float
    sketch_bytes: int


class Timeline:
    """Workers that never wait, and the averagings behind them.

    Args:
        work: Gives out stints.
        clock: When averagings may begin.
        machines: What the workers run on.
        message: Bytes of one worker's contribution.

    Attributes:
        now: The time.
        version: How many averagings have arrived.
        running: The step of each worker that is under way.
        ended: Each worker's steps since the last snapshot.
    """

    def __init__(self, work: Work, clock: Clock, machines: Machines, message: int):
        self.work = work
        self.clock = clock
        self.delays = machines.delays
        self.link = machines.link
        self.message = message
        self.charge = machines.charge
        self.now = 0.0
        self.version = 0
        self.running: dict[int, Step] = {}
        self.ended: list[list[Step]] = [[] for _ in range(self.delays.workers)]
        self._due = 0.0  # no snapshot before this
        self._draws = [0] * self.delays.workers
        self._ends: list[tuple[float, int]] = []  # a heap

    def next_averaging(self) -> BetweenAveragings:
        """Run the clock until the next mean arrives."""
        sent: BetweenAveragings | None = None
        arrives = float("inf")
        while True:
            if sent is None and self.now >= self._due and any(self.ended):
                sent, arrives = self._snapshot()
            if sent is not None and self.now >= arrives:
                return sent
            self._start_free()
            self._go_on_to(min(self._ends[0][0], arrives if sent is not None or not any(self.ended) else self._due))

    def _snapshot(self) -> tuple[BetweenAveragings, float]:
        """Begin an averaging; when it arrives."""
        steps, self.ended = self.ended, [[] for _ in self.ended]
        self._due = self.now + self.clock.every
        workers = self.delays.workers
        gathered = max(sum(self._sketch_bytes(step.stint) for step in mine) for mine in steps)
        seconds = self.link.ring_seconds(self.message, workers) + self.link.gather_seconds(gathered, workers)
        return BetweenAveragings(steps, self.now, gathered), self.now + seconds

    def _go_on_to(self, time: float) -> None:
        self.now = time
        while self._ends and self._ends[0][0] <= time:
            _, worker = heapq.heappop(self._ends)
            self.ended[worker].append(self.running.pop(worker))

    def _start_free(self) -> None:
        """Whoever is not computing starts; another worker first every time, as in `clockwork.py`."""
        first = self.version % self.delays.workers
        for worker in [*range(first, self.delays.workers), *range(first)]:
            if worker not in self.running and (stint := self.work.assign(worker)) is not None:
                seconds = self.delays.seconds(worker, self._draws[worker])
                if any(self.work.wants_sketches(stint)):
                    seconds *= self.charge.step_factor
                self._draws[worker] += 1
                self._run(Step(stint, self.now, self.now + seconds))

    def _run(self, step: Step) -> None:
        self.running[step.stint.worker] = step
        heapq.heappush(self._ends, (step.ends, step.stint.worker))

    def _sketch_bytes(self, stint: Stint) -> int:
        return self.charge.message_bytes(stint, self.work.wants_sketches(stint))

    def state_dict(self) -> State:
        return {
            "now": self.now,
            "version": self.version,
            "due": self._due,
            "draws": list(self._draws),
            "running": _plain(self.running[worker] for worker in sorted(self.running)),
            "ended": [_plain(steps) for steps in self.ended],
        }

    def load_state_dict(self, state: State) -> None:
        self.now, self.version, self._due = state["now"], state["version"], state["due"]
        self._draws = list(state["draws"])
        self.running, self._ends = {}, []
        for step in _steps(state["running"]):
            self._run(step)
        self.ended = [_steps(steps) for steps in state["ended"]]


def _plain(steps: Iterable[Step]) -> list[State]:
    return [{"stint": step.stint.as_state(), "started": step.started, "ends": step.ends} for step in steps]


def _steps(state: Sequence[State]) -> list[Step]:
    return [Step(Stint.from_state(saved["stint"]), saved["started"], saved["ends"]) for saved in state]
