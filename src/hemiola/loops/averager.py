"""The averager: periodic averaging in a PyTorch loop of one's own.

Every rank counts its optimizer steps. After ``period.length`` of them it sends its change since the last averaging (the
*anchor*, the same on every rank), and everybody goes on from the mean. Decisions use numbers that came out of the
exchange only, so every rank takes the same ones:

    stepped:  count; at the first step of a stint ask the period for its length; apply what is due; at the last average
    average:  snapshot -- change = snapshot - anchor -- exchange (at once, or while `overlap` more steps are taken)
    apply:    anchor += mean change;  weights += anchor - snapshot;  tell the period what was measured

A rank that has finished its loop still comes to the exchanges, with weight 0, until all have: ranks may have different
numbers of steps (uneven shards, skipped mixed-precision steps) and still no one waits for ever. Then the optimizer's
states are made the same, so that whoever goes on from there, with DistributedDataParallel say, trains one model.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hemiola.clusters.probe import DriftProbe
from hemiola.contracts import Averaging, Period, State
from hemiola.errors import InputError
from hemiola.loops.agreement import check_same, copy_from_first, learning_rates, refuse
from hemiola.loops.anchor import Anchored
from hemiola.loops.background import Arrival, BackgroundAveraging
from hemiola.loops.hooks import Undo, after_attempt, after_step, around, without_all_reduce
from hemiola.loops.layout import Layout
from hemiola.loops.notes import Kind, Note, Notes
from hemiola.loops.optimizer_state import agree_on_state, unwrapped
from hemiola.loops.telemetry import Log, Logs
from hemiola.options import one_of, whole
from hemiola.own import checked_policy
from hemiola.peers import Attendance, RankLostError, check_started, new_group
from hemiola.period.measuring import Adaptive
from hemiola.state import own_state
from hemiola.timing.link import ring_bytes
from hemiola.wire.exchange import Exchange, as_long_as_fast
from hemiola.wire.group_mean import Merged
from hemiola.wire.outer import Outer

log = logging.getLogger("hemiola.averager")

# A tenth of a step of waiting is cheaper than training one more step on weights that are not averaged yet.
WORTH_WAITING = 0.1
# Ranks with data of their own are further apart than this share of what they moved in common, whatever the batch.
ALIKE = 1e-5


@dataclass(frozen=True)
class Record:
    """One averaging, as ``Averager.history`` keeps it.

    Attributes:
        step: Optimizer steps taken when it began.
        period: Local steps that led to it.
        spread: Measured spread of the weights.
        lr: Learning rate of the last of these steps (the largest, with several parameter groups).
        c2: ADPSGD's constant so far; None for other periods.
        bytes: Sent by this rank.
        seconds: From sending to having received everything.
        delay: Local steps taken meanwhile.
        left_out: Ranks whose change was not finite and did not count.
    """

    step: int
    period: int
    spread: float
    lr: float
    c2: float | None
    bytes: int
    seconds: float
    delay: int
    left_out: int


class Averager:
    """Averages a model over ranks every so many optimizer steps, as a context manager around an unchanged loop::

        averager = hemiola.Averager(model, optimizer, period=hemiola.Adaptive(start=4), wire="int8")
        with averager:
            for x, y in loader:
                optimizer.zero_grad(); loss_fn(model(x), y).backward(); optimizer.step()

    On entry every rank receives the first rank's weights, and it is checked that all train the same model with the same
    learning rates. At the end of the block the weights are averaged a last time and the optimizer's states are made the
    same; when an exception leaves the block, no collective runs. In a single process everything works and there is
    nobody to average with.

    Args:
        model: A module. If a DistributedDataParallel is in it, or around it, and made before the block is entered, its
            gradient all-reduce is switched off inside the block.
        optimizer: Its optimizer, or a wrapper around it such as Accelerate's; steps are counted, not micro-batches.
        period: When to average. Not `Full`, which is what DistributedDataParallel does.
        wire: See `Exchange`, also for the next four.
        error_feedback: Add what the wire rounded away to the next message.
        momentum: What becomes of the optimizer's state at an averaging.
        overlap: Local steps taken while an averaging is under way, or ``"auto"``.
        balance: ``"speed"`` for stints as long as each rank is fast, so that all come to an averaging together: the
            fastest takes as many steps as the period says, a rank half as fast half of them. Changes then count by the
            steps they stand for. Ranks come to have different numbers of steps.
        outer: An outer optimizer on the mean change: ``"diloco"``, ``"slowmo"``, ``"delayed-nesterov"``, a table with a
            torch.optim class such as ``{"name": "SGD", "lr": 0.7, "momentum": 0.9}``, or an `Outer`. With one, a single
            process has something to do as well.
        buffers: ``"average"`` BatchNorm's running statistics and other buffers, or leave them ``"local"``.
        process_group: The ranks to average over; None for all, in a group of the averager's own. A group that is given
            keeps its own time-out, and with ``overlap`` the loop must not use it for other collectives.
        steps: Optimizer steps of the whole run, so that the period knows its progress. Without it `Adaptive` and
            `Budget` calibrate on their first 50 averagings; `Decreasing` and `PostLocal` need it.
        scaler: The GradScaler of a mixed-precision loop, so that skipped steps count alike on all ranks.
        hook: Count the optimizer's steps; False to call `step` by hand.
        timeout: Seconds to wait for the other ranks before `RankLostError`.
        checkpoint: Folder in which every surviving rank leaves a file when another rank is lost.

    Attributes:
        history: One `Record` for every averaging since this object was made.
        bytes_sent: By this rank, in everything that was exchanged.
    """

    KIND, VERSION = "averager", 3

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        period: Period | None = None,
        wire: Literal["fp32", "bf16", "int8", "int4"] = "fp32",
        error_feedback: bool = True,
        momentum: Literal["local", "average", "reset"] = "local",
        buffers: Literal["average", "local"] = "average",
        overlap: int | Literal["auto"] = 0,
        balance: Literal["none", "speed"] = "none",
        outer: Outer | str | Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        steps: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
        hook: bool = True,
        timeout: float = 1800.0,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        self.period: Period = Adaptive() if period is None else checked_policy(period, Period, "period")
        if not self.period.local:
            raise InputError("period 'full' exchanges gradients: use DistributedDataParallel, or Constant(p=1) here")
        if steps is None and self.period.needs_progress:
            raise InputError(f"period {type(self.period).__name__} depends on the length of the run: give steps=...")
        if timeout <= 0:
            raise InputError(f"timeout must be above 0 seconds, got {timeout:g}")
        self.exchange = Exchange(
            wire=wire, error_feedback=error_feedback, momentum=momentum, overlap=overlap, balance=balance
        )
        self.outer = Outer.made(outer)
        if self.outer is not None:
            self.outer.check(self.period)
        if self.period.clock is not None:
            _check_clocked(type(self.period).__name__, self.exchange)
        if self.period.probes and overlap != 0:
            raise InputError(f"overlap = {overlap!r} is not for period {type(self.period).__name__}; leave it 0")
        if self.period.probes and balance != "none":
            raise InputError(f"balance = {balance!r} is not for period {type(self.period).__name__}; leave it out")
        self.model, self.optimizer = model, unwrapped(optimizer)
        self.steps = None if steps is None else whole("steps", steps, 1)
        self.history: list[Record] = []
        self.bytes_sent = 0
        self._buffers = one_of("buffers", buffers, ["average", "local"])
        self._scaler = scaler
        self._hook = hook
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._timeout = float(timeout)
        self._outer_group = process_group

        self._logs = Logs("period")

        self._step = 0  # optimizer steps (attempts, with a scaler) since the start of the run
        self._local = 0  # of these, since the last averaging began
        self._length = 0  # of the present stint; decided at its first step
        self._whole = 0  # what the period said: the length for the fastest rank, where stints differ by speed
        self._speeds = (0.0, 0.0)  # seconds of a local step: of this rank and of the fastest, at the last averaging
        self._delay = 0 if isinstance(overlap, str) else overlap
        self._losses: list[float] = []
        self._transfer = 0.0  # seconds of this rank's last exchange
        self._pace: deque[float] = deque(maxlen=16)  # seconds of the last local steps
        self._clock = 0.0
        self._entered = False
        self._undo: list[Undo] = []
        self._group: dist.ProcessGroup | None = None
        self._attendance: Attendance | None = None
        self._anchored: Anchored | None = None
        self._background: BackgroundAveraging | None = None  # where averagings follow the clock
        self._probe: DriftProbe | None = None  # where ranks probe how far they are apart
        self._resumed: State | None = None

    # ---------------------------------------------------------------------------------------------------- the context

    def __enter__(self) -> Averager:
        if self._entered:
            raise InputError("this averager is already entered")
        self._start()
        if self._hook and self._scaler is None:
            self._undo.append(after_step(self.optimizer, self._stepped))
        elif self._hook and self._scaler is not None:
            self._undo.append(after_attempt(self._scaler, self.optimizer, self._stepped))
        self._entered = True
        self._clock = time.perf_counter()
        return self

    def _start(self) -> None:
        """Get a process group of our own, agree on everything, and start from the same weights."""
        distributed = check_started("before `with averager:`")
        ranks = dist.get_process_group_ranks(self._outer_group) if distributed else [0]
        refuse(self.model, ranks)
        layout = Layout(self.model, self.optimizer, self._buffers == "average")
        self._undo = [without_all_reduce(ddp) for ddp in around(self.model, ranks)]
        if len(ranks) > 1:
            self._group = self._outer_group
            if self._group is None:
                # A group of our own: an averaging under way cannot mix with the loop's collectives. Among some ranks
                # only, torch cannot make one safely: its name would depend on how many groups each rank made before.
                self._group = new_group(self._timeout)
            anchor = None if self._resumed is None else self._resumed["anchored"]["anchor"]
            settings = f"{type(self.period).__name__}, {self.exchange}, buffers={self._buffers!r}, steps={self.steps}"
            if self.outer is not None:
                settings += f", outer={self.outer.name!r} {self.outer.options}"
            check_same(layout, self.optimizer, settings, self._group, anchor)
            self._attendance = Attendance(self._group)
            if self._resumed is None:
                copy_from_first(self.model, layout, self._group)
        if self.period.clock is not None and self._group is not None and self._attendance is not None:
            self._background = BackgroundAveraging(
                layout, self.exchange, self.period.clock, self._group, self._attendance
            )
            if self._resumed is not None:
                self._background.load_state_dict(self._resumed["anchored"])
            self._background.start()
        else:
            self._anchored = Anchored(layout, self.exchange, self._group, self._attendance, self.outer)
            if self._resumed is not None:
                self._anchored.load_state_dict(self._resumed["anchored"])
        self._resumed = None
        self._probe = DriftProbe(layout.counted) if self.period.probes and self._group is not None else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()
        self._entered = False
        if error is not None:
            if self._attendance is not None and isinstance(error, RankLostError):  # someone else left first
                self._attendance.close()
            elif self._attendance is not None:
                self._attendance.leave(f"{type(error).__name__}: {error}")
            if self._background is not None:
                self._background.stop()
            return
        if self._background is None:
            self._apply()
        self._finish()
        if self._attendance is not None:
            self._attendance.close()
        if self._group is not None and self._outer_group is None:
            dist.destroy_process_group(self._group)
        self._group = self._attendance = None

    def _finish(self) -> None:
        """Average a last time, come to the exchanges of the others until all have done so, and agree on the rest."""
        if self._background is not None:
            self._rest(self._background, Kind.LEAVING)
            layout, self._background = self._background.layout, None
        else:
            kind = Kind.LEAVING
            self._apart(kind)
            while not self._average(kind).everyone_leaves:
                kind = Kind.LEFT
                self._apart(kind)
            layout = self._ready.layout
        if self._group is not None and self._attendance is not None:
            with self._attendance.exchange("the end of the block"):
                self.bytes_sent += agree_on_state(self.optimizer, layout.parameters, self._group)

    # ---------------------------------------------------------------------------------------------------- the counting

    def step(self) -> None:
        """Count one optimizer step, with ``hook=False``: once per iteration, on every rank at the same places."""
        if not self._entered:
            raise InputError("averager.step() was called outside `with averager:`")
        if self._hook:
            raise InputError("the averager counts optimizer steps by itself; give hook=False to call step() instead")
        self._stepped()

    def observe(self, loss: float) -> None:
        """Tell the averager a training loss of the present stint. Optional: only the ramp of `Adaptive` looks at it."""
        self._losses.append(float(loss))

    def _stepped(self) -> None:
        self._pace.append(time.perf_counter() - self._clock)
        self._step += 1
        self._local += 1
        if self.period.clock is not None:
            if self._background is not None:  # alone there is nobody to average with
                with self._checkpoint_if_lost():
                    arrived = self._background.stepped(self._note(Kind.AVERAGE))
                self._recorded(arrived)
            self._local, self._losses = 0, []
            self._clock = time.perf_counter()
            return
        if self._local == 1:
            # Before anything is applied: what the period knows now is the same on every rank, whenever messages arrive.
            self._whole = self._cut(
                self.period.length(max(learning_rates(self.optimizer)), self._progress(self._step - 1))
            )
            balances = self.exchange.balance == "speed"
            self._length = as_long_as_fast(self._whole, *self._speeds) if balances else self._whole
        pending = self._ready.pending
        if pending is not None and (self._step >= pending.due or self._local >= self._length):
            self._apply()
        if self._probe is not None and self._local >= self._length and not self._apart(Kind.AVERAGE):
            rate, progress = max(learning_rates(self.optimizer)), self._progress(self._step)
            self._length += self.period.length(rate, progress)
        if self._local >= self._length:
            if self._delay == 0:
                self._average(Kind.AVERAGE)
            else:
                self._send(Kind.AVERAGE, self._delay)
        self._clock = time.perf_counter()

    def _apart(self, kind: Kind) -> bool:
        """Probe how far the ranks are apart, and decide on all of them whether they average now.

        Every exchange comes after a probe, so that a rank whose loop is over, and which probes on, is there for it.
        """
        if self._probe is None or self._attendance is None:
            return False
        with self._checkpoint_if_lost(), self._attendance.exchange(f"the probe at step {self._step}"):
            drift = self._ready.drift() if kind in (Kind.AVERAGE, Kind.PREVIEW) else None
            spread, wanted = self._probe.between(drift, kind != Kind.AVERAGE, self._group)
        self.bytes_sent += int(ring_bytes(self._probe.bytes, dist.get_world_size(self._group)))
        return wanted or self.period.due(spread, self._local)

    def _cut(self, length: int) -> int:
        """A stint that begins with this step ends with the run, if its length is known and it has not been exceeded."""
        left = length if self.steps is None else self.steps - self._step + 1
        return min(length, left) if left > 0 else length

    def _progress(self, step: int) -> float:
        return 0.0 if self.steps is None else min(1.0, step / self.steps)

    # --------------------------------------------------------------------------------------------------- the averaging

    def _average(self, kind: Kind) -> Notes:
        self._send(kind, 0)
        notes = self._apply()
        assert notes is not None
        return notes

    def _send(self, kind: Kind, delay: int) -> None:
        self._ready.send(self._note(kind), delay)
        self._local = 0
        self._losses = []

    def _note(self, kind: Kind) -> Note:
        counts = kind in (Kind.AVERAGE, Kind.PREVIEW) or (kind == Kind.LEAVING and self._local > 0)
        work = self._local / self._whole if self.exchange.balance == "speed" and self._whole else 1.0
        return Note(
            weight=work if counts else 0.0,
            kind=kind,
            steps=self._step,
            local=self._local,
            lr=max(learning_rates(self.optimizer)),
            loss=fmean(self._losses) if self._losses else math.nan,
            transfer=self._transfer,
            pace=median(self._pace) if self._pace else 0.0,
        )

    def _apply(self) -> Notes | None:
        """Apply the exchange that is under way, if there is one."""
        pending = self._ready.pending
        if pending is None:
            return None
        with self._checkpoint_if_lost():
            merged = pending.result()
        self.bytes_sent += merged.bytes
        notes = Notes(merged.notes)
        if notes.preview:  # the others evaluate; this rank has left and only takes part
            self._ready.pending = None
            return notes
        self._transfer = merged.seconds
        self._ready.apply(self._step)
        if notes.came:
            self._tell_period(merged, notes, delay=self._step - pending.snapshot.step)
        return notes

    def _tell_period(self, merged: Merged, notes: Notes, delay: int) -> None:
        step = max(note.steps for note in notes.came)
        local = max(note.local for note in notes.came)
        # Ranks that follow the clock are at different places of their loops.
        lr = notes.lr if self._background is None else max(note.lr for note in notes.came)
        left_out = len(notes.came) - len(notes.counted)
        if left_out:
            log.warning("step %d: the change of %d ranks was not finite and is left out", step, left_out)
        if notes.counted:
            if not self.history:
                self._check_apart(merged, len(notes.counted))
            seen = Averaging(step, self._progress(step), lr, merged.spread, merged.movement, notes.loss, local)
            self.period.averaged(seen)
        if self.exchange.overlap == "auto":
            self._delay = notes.delay(WORTH_WAITING)
        self._speeds = (notes.all[self._rank].pace, notes.fastest)
        c2 = self.period.telemetry().get("c2")
        record = Record(step, local, merged.spread, lr, c2, merged.bytes, merged.seconds, delay, left_out)
        self.history.append(record)
        told = asdict(record)
        log.info("averaged %s", told)
        self._logs.tell({"local_steps": told.pop("period"), **told}, told.pop("step"))

    def log_to(self, log: Log) -> None:
        """Call ``log({"period/local_steps": ..., "period/spread": ..., ...}, step)`` at every averaging.

        ``hemiola.loggers`` has such functions for TensorBoard, Weights & Biases and MLflow.
        """
        self._logs.add(log)

    # ------------------------------------------------------------------------------------------ averagings by the clock

    def _rest(self, background: BackgroundAveraging, kind: Kind) -> None:
        """Wait until all ranks stand at the same weights."""
        with self._checkpoint_if_lost():
            arrived = background.rest(kind)
        self._recorded(arrived)

    def _recorded(self, arrived: list[Arrival]) -> None:
        for arrival in arrived:
            self.bytes_sent += arrival.merged.bytes
            if arrival.notes.came:
                self._tell_period(arrival.merged, arrival.notes, delay=0)

    def _check_apart(self, merged: Merged, counted: int) -> None:
        """Notice ranks that all took the same steps, which averaging cannot help; one line, on the first rank."""
        if counted > 1 and merged.movement > 0.0 and merged.spread <= ALIKE * merged.movement and self._rank == 0:
            log.warning(
                "all ranks have made the same change of the weights: either their gradients are all-reduced by "
                "something around this model (DeepSpeed, a hook, a wrapper made inside the block), or every rank "
                "trains on the same examples; averaging gains nothing then"
            )

    @contextmanager
    def _checkpoint_if_lost(self) -> Iterator[None]:
        try:
            yield
        except RankLostError as lost:
            if self._checkpoint is not None:
                lost.checkpoint = str(self._save(self._checkpoint))
                lost.args = (f"{lost}; the weights of the last averaging are in {lost.checkpoint}",)
            raise

    # ------------------------------------------------------------------------------------ consistent weights, and state

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The mean of all ranks' weights and buffers inside the block; training then goes on as if nothing had been.

        For evaluation and checkpoints at any moment. Every rank must enter it at the same step. Outside the averager's
        own context, and before the first step, all ranks hold the same weights and nothing is exchanged.
        """
        if self._entered and self._background is not None:
            self._rest(self._background, Kind.PREVIEW)
            try:
                yield self.model
            finally:
                self._background.go_on()
                self._clock = time.perf_counter()
            return
        if not self._entered or self._step == 0 or self._ready.alone:
            yield self.model
            return
        self._apart(Kind.PREVIEW)
        with self._checkpoint_if_lost():
            merged, mean, own = self._ready.preview(self._note(Kind.PREVIEW))
        self.bytes_sent += merged.bytes
        Notes(merged.notes).preview  # noqa: B018 - raises where ranks disagree
        self._ready.layout.scatter(*mean)
        try:
            yield self.model
        finally:
            self._ready.layout.scatter(*own)
            self._clock = time.perf_counter()

    def state_dict(self) -> State:
        """This rank's state, for an exact resume with the model's and the optimizer's own states. Not a collective."""
        if self._resumed is not None:
            return self._resumed
        return {
            "kind": self.KIND,
            "version": self.VERSION,
            "period": self.period.state_dict(),
            "exchange": asdict(self.exchange),
            "step": self._step,
            "local": self._local,
            "length": self._length,
            "whole": self._whole,
            "speeds": list(self._speeds),
            "delay": self._delay,
            "transfer": self._transfer,
            "losses": list(self._losses),
            "anchored": (self._background or self._ready).state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Take over a state saved by the same rank of a run with the same settings, before the context is entered."""
        own_state(state, self.KIND, self.VERSION)
        if self._entered:
            raise InputError("load the averager's state before `with averager:`, not inside")
        if state["exchange"] != asdict(self.exchange):
            raise InputError(f"this averager's state was saved with {state['exchange']}, not {asdict(self.exchange)}")
        self.period.load_state_dict(state["period"])
        self._step, self._local, self._length = state["step"], state["local"], state["length"]
        self._whole, self._speeds = state["whole"], (state["speeds"][0], state["speeds"][1])
        self._delay, self._transfer, self._losses = state["delay"], state["transfer"], list(state["losses"])
        self._resumed = state

    @property
    def _rank(self) -> int:
        """In the group."""
        return 0 if self._group is None else dist.get_rank(self._group)

    @property
    def _ready(self) -> Anchored:
        if self._anchored is None:
            raise InputError("this averager has not been entered yet: `with averager:`")
        return self._anchored

    def _save(self, folder: Path) -> Path:
        """Write the weights of the last averaging, which every rank holds alike, and this rank's own states."""
        if self._background is not None:
            self._background.take_shared()
        else:
            anchored = self._ready
            anchored.pending = None
            anchored.layout.scatter(anchored.anchor, anchored.exact_anchor)
        self._local, self._losses = 0, []
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{dist.get_rank()}.pt"
        partial = path.with_suffix(".partial")
        saved = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self._background is None:  # ranks that follow the clock have not all seen the same averagings
            saved["averager"] = self.state_dict()
        torch.save(saved, partial)
        partial.replace(path)
        return path


def _check_clocked(period: str, exchange: Exchange) -> None:
    """Refuse what needs a moment at which all ranks stand still."""
    given = {
        "momentum": exchange.momentum != "local",
        "overlap": exchange.overlap != 0,
        "balance": exchange.balance != "none",
    }
    for option, is_given in given.items():
        if is_given:
            raise InputError(f"{option} is not for period {period}, whose averagings follow the clock; leave it out")
