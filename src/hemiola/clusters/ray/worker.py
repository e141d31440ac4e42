"""One worker of the Ray cluster: the class every actor is an instance of.

The server sends a stint with the weights it is to be run from and gets an `Outcome` back. A stint cancels those before
it, so its message arrives in a second thread while another stint may still run; that one looks at what the message left
between two local steps and while it sleeps. An update that cuts stints instead asks for what is done: the stint ends
after its present step and reports. A SIGTERM, which is what most clusters send before they take a machine away, does
the same; the server hears of it with the report and puts another worker in this one's place.

A stint that did not count leaves no trace. Whether it counted is known to the server only, which says so with the next
stint; if it did not, the worker goes back to what its optimizer and its end of the wire remembered before it.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import platform
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import hemiola
from hemiola.clusters.sender import Sender
from hemiola.clusters.stints import Finished, StintRunner
from hemiola.contracts import Directions, State, Stint, TaskLike
from hemiola.errors import FailedElsewhere, InputError, told
from hemiola.optimizers import Optimizer, moments
from hemiola.wire.exchange import Exchange

FEW_BYTES = 32 * 1024  # what is no longer than this travels in a message; the rest goes through the object store
IDLE_SECONDS = 5.0  # a worker that is to leave and has nothing to do waits so long for a chance to say so
THREADS = {"max_concurrency": 2, "concurrency_groups": {"control": 1}}
"""Of an actor: one for a stint, one for the message of the stint that cancels it, one for ``memory`` and ``cut``."""


@dataclass(frozen=True)
class Setup:
    """All that workers know of a run; sent once.

    Attributes:
        task: Model, data and loss.
        shards: Example indices of every worker.
        unit, sketch: Of the order.
        optimizer: For local steps.
        exchange: How changes travel.
        local: Whether a stint is local steps or one gradient.
        seed: Of the run.
        device: Where models run: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        threads: Of torch, in one worker.
        deck: Whether all workers take batches from one deck, and their shards are all the same.
        tells_losses: Whether rows of sketches end with the loss of their unit.
    """

    task: TaskLike
    shards: Sequence[np.ndarray]
    unit: int
    sketch: str | None
    optimizer: Optimizer
    exchange: Exchange
    local: bool
    seed: int
    device: str
    threads: int
    deck: bool = False
    tells_losses: bool = False


class Assignment(NamedTuple):
    """A stint and what goes with it.

    Attributes:
        stint: What to do.
        wanted: For each batch, whether sketches are wanted.
        sleeps: The least seconds each local step takes; empty where no delay is injected.
        counted: Number of this worker's last stint that counted.
    """

    stint: Stint
    wanted: tuple[bool, ...]
    sleeps: tuple[float, ...]
    counted: int


class Outcome(NamedTuple):
    """What came of a stint.

    Attributes:
        seconds: From reading the weights to the end of the last local step.
        loss: Mean training loss over the stint's batches.
        steps: Local steps that it stands for: all of the stint's, fewer if it was cut, none if it was cancelled.
        payload: The packed change; None if it was not finite, or the stint was cancelled.
        sketches: For each batch its rows, or None.
        momentum: The optimizer's vectors by name, where they are to be averaged.
        leaves: Of a worker that was told to leave: what it remembers after this stint, for whoever takes its place.
    """

    seconds: float
    loss: float
    steps: int
    payload: np.ndarray | None
    sketches: tuple[np.ndarray | None, ...]
    momentum: dict[str, np.ndarray] | None
    leaves: State | None = None

    @property
    def report_bytes(self) -> int:
        """Of the change and the sketches that ride on it."""
        return sum(part.nbytes for part in (self.payload, *self.sketches) if part is not None)

    @property
    def nbytes(self) -> int:
        """Of everything."""
        return self.report_bytes + sum(vector.nbytes for vector in (self.momentum or {}).values())


class Momentum(NamedTuple):
    """What an averaging made of the optimizers' memories: their mean by name, or None to forget everything."""

    vectors: dict[str, np.ndarray] | None


class _Longest:
    """The longest of the seconds noted lately; without any, for ever."""

    def __init__(self) -> None:
        self.most = math.inf

    def note(self, seconds: float) -> None:
        self.most = max(seconds, 0.9 * self.most) if math.isfinite(self.most) else seconds


class _CancelledError(Exception):
    """The server does not want this stint any more."""


@contextmanager
def _failing_with_its_traceback() -> Iterator[None]:
    """What fails here, in the user's model or loss, must be told where the user is."""
    try:
        yield
    except (InputError, _CancelledError):
        raise
    except Exception as error:
        raise FailedElsewhere(told(error), traceback.format_exc()) from None


class Worker:
    """One worker. Methods are called by the server only, at most two at a time; ``memory`` and ``cut`` besides.

    Args:
        heeds_notice: Whether a SIGTERM to this process means that the worker is to leave.
    """

    def __init__(self, heeds_notice: bool = False) -> None:
        self._taken = False  # whether it is someone's turn: one stint runs at a time, or a session begins
        self._session = 0  # of the stint that runs
        self._newest = 0  # the last session that has begun, or waits for its turn to
        self._bell = threading.Condition()
        self._cancelled = -1  # number of the last stint that is not wanted any more
        self._cut = -1  # number of the stint that is to end after its present step
        self._done = 0  # whole steps of the stint that runs
        self._asked = 0  # stints that the server waits for an answer about
        self._leaving = False
        self._memory_lock = threading.Lock()
        self._running = False
        self._ahead: int | None = None  # the stint that what is remembered is ahead of what is settled by
        self._settled: State = {}
        if heeds_notice:
            signal.signal(signal.SIGTERM, self._noticed)

    def _noticed(self, number: int, frame: FrameType | None) -> None:
        """This process is to end: with its next answer, or soon where nobody asks for one."""
        with self._bell:
            self._leaving = True
            self._bell.notify_all()
        leaving = threading.Timer(IDLE_SECONDS, self._leave_if_idle)
        leaving.daemon = True
        leaving.start()

    def _leave_if_idle(self) -> None:
        if not self._asked:
            os._exit(1)

    def hello(self) -> dict[str, Any]:
        """Who this is; asked for before anything that could depend on versions is sent."""
        return {
            "hemiola": hemiola.__version__,
            "torch": torch.__version__.partition("+")[0],
            "python": platform.python_version(),
            "node": platform.node(),
            "pid": os.getpid(),
        }

    @_failing_with_its_traceback()
    def begin(self, session: int, worker: int, setup: Setup, memory: State | None) -> dict[str, Any]:
        """Build the model; take over an earlier worker's memory, if there is any.

        Sessions are numbered: what belongs to an earlier one is stopped, or not looked at any more. That can be this
        very call, where messages that were sent one after the other are taken at the same time.
        """
        with self._bell:
            self._newest = max(self._newest, session)
            self._bell.notify_all()
        with self._turn(lambda: False):
            if session < self._session:
                return self.hello()
            torch.set_num_threads(setup.threads)
            self._session, self.worker, self.setup = session, worker, setup
            self._cancelled, self._cut, self._ahead = -1, -1, None
            self._step_seconds = _Longest()
            self.runner = StintRunner(
                setup.task,
                setup.shards,
                setup.unit,
                setup.sketch,
                setup.optimizer,
                setup.seed,
                pick_device(setup.device),
                setup.deck,
                setup.tells_losses,
            )
            self.sender = Sender(setup.exchange, self.runner.initial.numel(), setup.seed)
            self._settled = memory if memory is not None else self._live()
            self._recall()
            return self.hello()

    # ----------------------------------------------------------------------------------------------------- a stint

    @_failing_with_its_traceback()
    def run(
        self,
        message: bytes,
        weights: np.ndarray | bytes,
        momentum: Momentum | None = None,
        directions: Directions | None = None,
    ) -> Outcome | bytes:
        """Run the stint of a packed `Assignment` from these weights; stints before it are cancelled.

        Momentum and ghost directions come along where they are news to this worker.
        """
        began = time.perf_counter()
        session, assignment = unpack_assignment(message)
        number = assignment.stint.number
        if session == self._session:
            self.cancel(number - 1)

        def void() -> bool:
            return session != self._session or self._unwanted(number)

        with self._awaited():
            try:
                # Two messages can be answered at a time. Who is unwanted must not be in the way of the one that says so
                # of the stint that runs, wherever that came first.
                with self._turn(void):
                    if void():
                        raise _CancelledError
                    self.runner.adopt(directions)
                    return pack_outcome(self._answer(assignment, weights, momentum, began))
            except _CancelledError:
                return pack_outcome(Outcome(time.perf_counter() - began, 0.0, 0, None, (), None))

    @contextmanager
    def _turn(self, void: Callable[[], bool]) -> Iterator[None]:
        """Wait for one's turn, unless it is not wanted any more."""
        with self._bell:
            self._bell.wait_for(lambda: not self._taken or void())
            if self._taken:
                raise _CancelledError
            self._taken = True
        try:
            yield
        finally:
            with self._bell:
                self._taken = False
                self._bell.notify_all()

    def _answer(
        self, assignment: Assignment, weights: np.ndarray | bytes, momentum: Momentum | None, began: float
    ) -> Outcome:
        """What comes of a stint; from a worker that is to leave, with what it remembers."""
        try:
            outcome = self._run(assignment, weights, momentum, began)
        except _CancelledError:
            outcome = Outcome(time.perf_counter() - began, 0.0, 0, None, (), None)
        if self._leaving:
            self._settle(assignment.stint.number if outcome.steps else -1)
            outcome = outcome._replace(leaves=self._settled)
        return outcome

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        """While the server waits for an answer."""
        with self._bell:
            self._asked += 1
        try:
            yield
        finally:
            with self._bell:
                self._asked -= 1

    def _run(
        self, assignment: Assignment, weights: np.ndarray | bytes, momentum: Momentum | None, began: float
    ) -> Outcome:
        stint = assignment.stint
        with self._bell:
            self._done = 0
        self._wait_until(stint.number, began)  # A stint after this one may have been the first to get its turn.
        torch.set_num_threads(self.setup.threads)  # holds for this thread only
        self._settle(assignment.counted)
        if momentum is not None:
            self._take_momentum(momentum)
        start = np.frombuffer(weights, self.runner.initial.numpy().dtype) if isinstance(weights, bytes) else weights
        with self._memory_lock:
            self._running, self._ahead = True, stint.number
        try:
            change, finished = self._compute(assignment, as_tensor(start), began)
        finally:
            self._running = False
        seconds = time.perf_counter() - began
        loss = finished.losses[0]
        rows = tuple(None if part is None else self.runner.packed(part).numpy() for part in finished.sketches[0])
        if not finished.finite[0]:
            return Outcome(seconds, loss, self._done, None, rows, None)
        payload = self.sender.pack(change, stint).numpy()
        averages = self.setup.local and self.setup.exchange.momentum == "average"
        return Outcome(seconds, loss, self._done, payload, rows, self._vectors() if averages else None)

    def cancel(self, number: int) -> None:
        """Stop the stints up to this number, whether they run or have not begun."""
        with self._bell:
            self._cancelled = max(self._cancelled, number)
            self._bell.notify_all()

    def cut(self, session: int, number: int) -> int:
        """End this stint after its present step, or at once before its first; how many steps it has done by now."""
        with self._bell:
            if session != self._session:
                return 0
            done = self._done if self._ahead == number else 0
            if done:
                self._cut = max(self._cut, number)
            else:
                self._cancelled = max(self._cancelled, number)
            self._bell.notify_all()
            return done

    def _compute(self, assignment: Assignment, start: Tensor, began: float) -> tuple[Tensor, Finished]:
        """The local steps of a stint, each as long as it is to take.

        A step with a delay sleeps first and computes last, to be ready when its time is over. Would it compute first,
        all workers that an update has started would do so at the same time, on a machine they share; and who is
        cancelled would have done it for nothing.
        """
        stint = assignment.stint
        ends = (began + np.cumsum(assignment.sleeps)).tolist()
        self._sleep_before(stint.number, ends, 0)
        woke = time.perf_counter()

        def after_step(index: int) -> bool:
            nonlocal woke
            self._step_seconds.note(time.perf_counter() - woke)
            self._wait_until(stint.number, ends[index] if ends else began)
            with self._bell:
                self._done = index + 1
            ends_here = self._sleep_before(stint.number, ends, index + 1)
            woke = time.perf_counter()
            return ends_here

        if self.setup.local:
            changes, finished = self.runner.changes([start], [stint], [assignment.wanted], after_step)
        else:
            changes, finished = self.runner.gradients([start], [stint], [assignment.wanted[0]])
            after_step(0)
        return changes[0], finished

    def _sleep_before(self, number: int, ends: list[float], index: int) -> bool:
        """Sleep as long as this step can and still end in time; says whether the stint is to end before it.

        Raises:
            _CancelledError: The stint is cancelled, or is to end before it has done anything.
        """
        moment = ends[index] - self._step_seconds.most if index < len(ends) else 0.0
        with self._bell:
            self._bell.wait_for(
                lambda: self._unwanted(number) or self._to_end(number), max(moment - time.perf_counter(), 0.0)
            )
            if self._unwanted(number) or (self._to_end(number) and not index):
                raise _CancelledError
            return self._to_end(number)

    def _wait_until(self, number: int, moment: float) -> None:
        """Sleep until the moment unless it has passed; raise as soon as the stint is cancelled."""
        with self._bell:
            if self._bell.wait_for(lambda: self._unwanted(number), max(moment - time.perf_counter(), 0.0)):
                raise _CancelledError

    def _unwanted(self, number: int) -> bool:
        return self._cancelled >= number or self._newest > self._session

    def _to_end(self, number: int) -> bool:
        """Whether a stint is to end after its present step."""
        return self._leaving or self._cut >= number

    # ------------------------------------------------------------------------------------------------------ memory

    def memory(self, counted: int) -> State:
        """What the last stint that counted left behind; may be asked for while the next one runs."""
        if not self._running:
            self._settle(counted)
        return self._settled

    def _settle(self, counted: int) -> None:
        """Keep what the last stint changed in memory if it counted, else forget it."""
        with self._memory_lock:
            if self._ahead is None or self._running:
                return
            if self._ahead == counted:
                self._settled = copy.deepcopy(self._live())
            else:
                self._recall()
            self._ahead = None

    def _live(self) -> State:
        local = self.runner.local.get(self.worker)
        return {
            "optimizer": None if local is None else local.state_dict(),
            "residuals": self.sender.state_dict()["residuals"],
        }

    def _recall(self) -> None:
        settled = copy.deepcopy(self._settled)
        optimizer = settled["optimizer"]
        local = {} if optimizer is None else {self.worker: optimizer}
        self.runner.load_state_dict(self.runner.state_dict() | {"local": local})
        self.sender.load_state_dict({"residuals": settled["residuals"]})

    def _vectors(self) -> dict[str, np.ndarray]:
        return {name: vector.cpu().numpy() for name, vector in self._moments().items()}

    def _take_momentum(self, momentum: Momentum) -> None:
        for name, vector in self._moments().items():
            if momentum.vectors is None:
                vector.zero_()
            elif name in momentum.vectors:
                vector.copy_(as_tensor(momentum.vectors[name]))
        self._settled = copy.deepcopy(self._live())

    def _moments(self) -> dict[str, Tensor]:
        optimizer = self.runner.local.get(self.worker)
        return {} if optimizer is None else moments(optimizer)


def pack_assignment(session: int, assignment: Assignment) -> bytes:
    """An assignment as bytes; Ray would pickle it in Python, which takes longer than all else the server does."""
    return pickle.dumps((session, assignment), pickle.HIGHEST_PROTOCOL)


def unpack_assignment(message: bytes) -> tuple[int, Assignment]:
    """What `pack_assignment` has packed."""
    session, assignment = pickle.loads(message)
    return session, assignment


def pack_outcome(outcome: Outcome) -> Outcome | bytes:
    """An outcome as bytes, for the same reason, unless it is long: then it is shared and must not be copied."""
    return pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL) if outcome.nbytes <= FEW_BYTES else outcome


def unpack_outcome(message: Outcome | bytes) -> Outcome:
    """What `pack_outcome` has packed."""
    if isinstance(message, Outcome):
        return message
    outcome: Outcome = pickle.loads(message)
    return outcome


def as_tensor(array: np.ndarray) -> Tensor:
    """View an array of the object store; it cannot be written to, and nobody here does."""
    return torch.from_numpy(array)


def _hear_warning_once() -> None:
    """Of arrays that cannot be written to, torch warns once in a process; nobody needs to see it."""
    frozen = np.zeros(1)
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(frozen)


_hear_warning_once()


def pick_device(name: str) -> str:
    """``"auto"`` is a GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name
