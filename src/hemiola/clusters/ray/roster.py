"""The workers as the server sees them: which actor has which slot, what it does, and whether it still answers.

Ray tells of a dead actor within milliseconds, on the reference of what it was doing. A worker that hangs says nothing:
it has a deadline, some multiple of the slowest step ever measured. Past it the worker counts as late, nobody waits for
it any more; past twice that it counts as dead, and is killed. The dead are started again, up to a limit.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hemiola.clusters.ray.engine import Engine
from hemiola.clusters.ray.worker import THREADS, Assignment, Outcome, Setup, Worker, pack_assignment, unpack_outcome
from hemiola.contracts import Directions, State, Stint
from hemiola.errors import FailedElsewhere, InputError, told

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25  # how long a wait lasts at most before deadlines are looked at
START_SECONDS = 180.0
ANSWER_SECONDS = 30.0
PATIENCE = 20.0  # a step that takes so many times the slowest step so far is taken to hang
FIRST_PATIENCE = 10.0  # factor on hang_seconds while nothing has been measured

_SESSIONS = itertools.count(1)


@dataclass
class Slot:
    """One worker's slot.

    Attributes:
        worker: Its number.
        actor: The process that has this slot; None when it died once too often.
        pid: Of that process.
        reference: What is waited for: the outcome of the stint, or the end of the actor's start.
        stint: What it works on; None when it is free or starting.
        started: When the stint was sent.
        deadline: Seconds the stint may take.
        hung: It missed its deadline; its units were given back.
        abandoned: Number of the stint that it still works on although nobody waits for it, if there is one.
        counted: Number of its last stint that counted.
        momentum: Reference of what the last averaging made of its optimizer's memory, until a stint from there counted.
        directions_of: The epoch whose ghost directions its actor has.
        free_since: When it last had nothing to do.
        deaths: How often it died.
    """

    worker: int
    actor: Any = None
    pid: int = 0
    reference: Any = None
    stint: Stint | None = None
    started: float = 0.0
    deadline: float = 0.0
    hung: bool = False
    abandoned: int | None = None
    counted: int = -1
    momentum: Any = None
    directions_of: int = -1
    free_since: float = 0.0
    deaths: int = 0

    @property
    def free(self) -> bool:
        """Has an actor and nothing to do."""
        return self.actor is not None and self.reference is None

    @property
    def busy(self) -> bool:
        """Works on a stint that can be waited for."""
        return self.stint is not None and not self.hung

    def vacate(self) -> None:
        """Its actor is gone, and what the server knew of its doings means nothing to another one."""
        self.actor = self.reference = self.abandoned = self.momentum = None
        self.counted = -1


class Event(NamedTuple):
    """Something happened to a worker: it finished, died, hung, or is ready to work; and what it finished with."""

    slot: Slot
    kind: Literal["finished", "died", "hung", "ready"]
    outcome: Outcome | None = None


def start_actors(engine: Engine, workers: int, device: str) -> list[Any]:
    """Start so many actors and see that they are of our kind; they know nothing of a run yet."""
    if workers > engine.cpus and device != "cuda":
        log.warning("%d workers share %d CPUs: steps take longer than on machines of their own", workers, engine.cpus)
    actors = [new_actor(engine, workers, device) for _ in range(workers)]
    check_versions(_answers(engine, [actor.hello.remote() for actor in actors]))
    return actors


def new_actor(engine: Engine, workers: int, device: str) -> Any:
    """One actor; with a CPU of its own on a cluster that has enough, else all share; spread over the nodes."""
    make = engine.ray.remote(
        num_cpus=1 if not engine.local and engine.cpus >= workers else 0,
        num_gpus=min(1.0, engine.gpus / workers) if device != "cpu" else 0.0,
        scheduling_strategy="SPREAD",
        max_restarts=0,
        max_task_retries=0,
        **THREADS,
    )
    return make(Worker).remote(heeds_notice=True)


def check_versions(hellos: Sequence[dict[str, Any]]) -> None:
    """Raise unless all workers run the code this process runs."""
    mine = Worker().hello()
    for package in ("hemiola", "torch"):
        for worker, hello in enumerate(hellos):
            if hello[package] != mine[package]:
                raise InputError(
                    f"worker {worker} on node {hello['node']!r} has {package} {hello[package]}, this process has "
                    f"{mine[package]}; install the same version on every node"
                )


class Roster:
    """All workers of one run.

    Args:
        engine: The connection to Ray.
        actors: The workers, as `start_actors` gives them.
        setup: What they are to know of the run.
        max_restarts: How often each may be started again.
        hang_seconds: The least deadline of a stint.
    """

    def __init__(
        self,
        engine: Engine,
        actors: Sequence[Any],
        setup: Setup,
        max_restarts: int,
        hang_seconds: float,
    ) -> None:
        self.engine = engine
        self.ray = engine.ray
        self.max_restarts = max_restarts
        self.hang_seconds = hang_seconds
        self.hangs = 0
        self._directions: tuple[Directions, Any] | None = None  # the newest, and where workers find them
        self.slots = [Slot(worker, actor) for worker, actor in enumerate(actors)]
        self._device = setup.device
        self._slowest = 0.0
        self._next_check = 0.0  # when deadlines are looked at again
        try:
            self._setup = self.ray.put(setup)
        except TypeError as error:
            raise InputError(f"the task cannot be sent to other processes: {' '.join(str(error).split())}") from None
        self.begin({})

    # ----------------------------------------------------------------------------------------------------- starting

    def begin(self, memories: dict[int, State]) -> None:
        """Build everyone's model, with these memories, and wait until all are ready; stints from before are void."""
        self._session = next(_SESSIONS)
        hellos = _answers(self.engine, [self._begin(slot, memories.get(slot.worker)) for slot in self.slots])
        for slot, hello in zip(self.slots, hellos, strict=True):
            slot.pid = hello["pid"]

    def _begin(self, slot: Slot, memory: State | None = None) -> Any:
        slot.directions_of = -1
        return slot.actor.begin.remote(self._session, slot.worker, self._setup, memory)

    # ------------------------------------------------------------------------------------------------------ working

    def send(self, slot: Slot, assignment: Assignment, weights: Any, directions: Directions | None) -> None:
        """Give a free worker a stint, and ghost directions it does not have yet."""
        news: dict[str, Any] = {} if slot.momentum is None else {"momentum": slot.momentum}
        if directions is not None and directions.epoch != slot.directions_of:
            news["directions"] = self._stored(directions)
            slot.directions_of = directions.epoch
        slot.reference = slot.actor.run.remote(pack_assignment(self._session, assignment), weights, **news)
        slot.stint = assignment.stint
        slot.started = time.monotonic()
        slowest = PATIENCE * self._slowest * len(assignment.stint.batches) + sum(assignment.sleeps)
        least = self.hang_seconds if self._slowest else FIRST_PATIENCE * self.hang_seconds
        slot.deadline = max(least, slowest)
        slot.hung = False
        slot.abandoned = None

    def _stored(self, directions: Directions) -> Any:
        """Where all workers find these directions."""
        if self._directions is None or self._directions[0] is not directions:
            self._directions = directions, self.ray.put(directions)
        return self._directions[1]

    def abandon(self, slot: Slot) -> None:
        """Do not wait for this worker any more. Its next stint will stop it; where there is none, ``stop`` does."""
        assert slot.stint is not None
        slot.abandoned = slot.stint.number
        slot.stint = slot.reference = None

    def stop(self, slot: Slot) -> None:
        """Tell an abandoned worker that has no next stint to stop."""
        if slot.abandoned is not None:
            slot.actor.cancel.remote(slot.abandoned)
            slot.abandoned = None

    def cut(self, slots: Sequence[Slot]) -> list[int]:
        """End the stints of these workers after their present steps; how many steps each has done by now.

        None, where a worker does not answer: whoever waits for it will notice.
        """
        asked = [
            slot.actor.cut.options(concurrency_group="control").remote(self._session, slot.stint.number)
            for slot in slots
            if slot.stint is not None
        ]
        return [self._answer(reference) or 0 for reference in asked]

    def replace(self, slot: Slot, memory: State | None) -> None:
        """Put another worker in the place of one that was told to leave, with what that one remembers."""
        log.warning("worker %d was told to leave; another one takes its place", slot.worker)
        self.ray.kill(slot.actor)
        slot.vacate()
        self._fill(slot, memory)

    def _fill(self, slot: Slot, memory: State | None = None) -> None:
        slot.actor = new_actor(self.engine, len(self.slots), self._device)
        slot.reference = self._begin(slot, memory)

    def wait(self, wanted: int, seconds: float = math.inf) -> list[Event]:
        """What happened until so many workers had something to tell, or a little time passed, at most these seconds."""
        watched = {slot.reference: slot for slot in self.slots if slot.reference is not None}
        ready, _ = self.ray.wait(
            list(watched), num_returns=min(wanted, len(watched)), timeout=min(TICK_SECONDS, seconds)
        )
        events = [self._examine(watched[reference]) for reference in ready]
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + TICK_SECONDS
            self.engine.check()
            silent = [slot for slot in self.slots if slot.stint is not None and slot.reference in watched]
            events += [event for slot in silent if (event := self._overdue(slot)) is not None]
        return events

    def _examine(self, slot: Slot) -> Event:
        errors = self.ray.exceptions
        try:
            outcome = self.ray.get(slot.reference)
        except (errors.RayActorError, errors.ObjectLostError, errors.WorkerCrashedError) as error:
            return self._died(slot, str(error).partition("\n")[0])
        except errors.RayTaskError as error:
            raise _plain(error) from None
        slot.reference = None
        if slot.stint is None:
            slot.pid = outcome["pid"]
            check_versions([outcome])
            return Event(slot, "ready")
        outcome = unpack_outcome(outcome)
        if outcome.steps:
            self._slowest = max(self._slowest, outcome.seconds / outcome.steps)
        return Event(slot, "finished", outcome)

    def _overdue(self, slot: Slot) -> Event | None:
        taken = time.monotonic() - slot.started
        if taken <= slot.deadline or self.ray.wait([slot.reference], timeout=0)[0]:
            return None  # It has time, or it has answered and was not looked at yet.
        if taken > 2 * slot.deadline:
            self.ray.kill(slot.actor)
            return self._died(slot, f"did not answer for {taken:.1f} s")
        if slot.hung:
            return None
        self.hangs += 1
        log.warning("worker %d has not answered for %.1f s; nobody waits for it any more", slot.worker, taken)
        return Event(slot, "hung")

    def _died(self, slot: Slot, why: str) -> Event:
        """Replace a dead actor, or leave the slot empty if it died too often; the stint is the caller's to see to."""
        self.engine.check()  # Workers die with their Ray, and it cannot start others.
        slot.deaths += 1
        slot.vacate()
        if slot.deaths > self.max_restarts:
            log.warning(
                "worker %d died (%s) and is not started again: max_restarts = %d", slot.worker, why, self.max_restarts
            )
        else:
            log.warning("worker %d died (%s); start %d of at most %d", slot.worker, why, slot.deaths, self.max_restarts)
            self._fill(slot)
        return Event(slot, "died")

    # ---------------------------------------------------------------------------------------------------- the others

    def memories(self) -> dict[int, State]:
        """What the workers remember of the stints that counted; of those that answer."""
        asked = {
            slot.worker: slot.actor.memory.options(concurrency_group="control").remote(slot.counted)
            for slot in self.slots
            if slot.free or slot.stint is not None
        }
        found = {worker: self._answer(reference) for worker, reference in asked.items()}
        return {worker: memory for worker, memory in found.items() if memory is not None}

    def _answer(self, reference: Any) -> Any:
        """What a worker says beside its stints; None if it does not.

        That is noticed where the stint is waited for, and its successor starts with an empty memory.
        """
        try:
            return self.ray.get(reference, timeout=ANSWER_SECONDS)
        except (self.ray.exceptions.RayActorError, self.ray.exceptions.GetTimeoutError):
            return None

    def close(self) -> None:
        """End all actors."""
        for slot in self.slots:
            if slot.actor is not None and self.ray.is_initialized() and not self.engine.dead:
                self.ray.kill(slot.actor)
            slot.actor = slot.reference = slot.stint = None


def _answers(engine: Engine, references: list[Any]) -> list[Any]:
    """What the first calls gave; nothing has begun yet, so a worker that fails here fails the run."""
    ray = engine.ray
    try:
        return list(ray.get(references, timeout=START_SECONDS))
    except ray.exceptions.GetTimeoutError:
        free = ray.available_resources()
        raise RuntimeError(
            f"{len(references)} workers did not start within {START_SECONDS:.0f} s; free on the cluster: "
            f"{free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs"
        ) from None
    except ray.exceptions.RayTaskError as error:
        raise _plain(error) from None
    except ray.exceptions.RayActorError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        if "No module named" in reason:
            raise InputError(
                f"a node of the Ray cluster lacks what the run needs ({reason}); install it on every node"
            ) from None
        raise RuntimeError(f"a worker died while it started: {reason}") from None


def _plain(error: Any) -> Exception:
    """What a worker raised, without Ray's wrapping."""
    cause = error.cause
    if isinstance(cause, InputError):
        return cause
    return FailedElsewhere(f"a worker failed: {told(cause)}", getattr(cause, "trace", str(error)))
