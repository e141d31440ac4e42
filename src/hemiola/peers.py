"""The other ranks: do they agree, who is waited for, and who is lost.

A collective that fails says little: the process that died closes its sockets, its neighbours see "connection closed",
others only a time-out; and one that waits says nothing at all. So every rank writes a **heartbeat** into the job's
key-value store, twice a second and from a thread of its own: "alive, and come as far as exchange number n". Whoever
waits too long, or sees an exchange fail, reads them: a rank without a heartbeat is gone (or stopped), one with a
smaller number is late.

Used by the torch cluster and by loops of one's own alike.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from hemiola.errors import InputError

log = logging.getLogger("hemiola.peers")


class RankLostError(RuntimeError):
    """A rank did not come to an exchange; the message names it.

    Attributes:
        ranks: The global ranks that are missing.
        checkpoint: File written before this was raised; None if no checkpoint folder was given.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.checkpoint: str | None = None


def check_started(how: str) -> bool:
    """Whether torch.distributed runs; refuses a process that a launcher started as one of several if it does not."""
    if dist.is_available() and dist.is_initialized():
        return True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            f"this process is one of {os.environ['WORLD_SIZE']} (WORLD_SIZE) but torch.distributed is not running; "
            f"call init_process_group() {how}"
        )
    return False


def new_group(timeout: float | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """A process group of our own, of all ranks, so that exchanges never mix with the loop's. Called on every rank."""
    _leave_groups_to_their_process()
    group: dist.ProcessGroup = dist.new_group(
        timeout=None if timeout is None else timedelta(seconds=timeout), backend=backend
    )
    return group


@cache
def _leave_groups_to_their_process() -> None:
    """See to it that no forked process ever collects what is garbage in this one.

    A group that nobody uses any more may be part of a cycle. Where the garbage collector finds that in a forked
    process, such as a worker of a DataLoader, the group waits for threads that are not there: it hangs or dies.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


# ---------------------------------------------------------------------------------------------------------- agreement


def everyone(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's plain value, on every rank. All ranks of the group must call this."""
    device = group_device(group)
    payload = pack(value).to(device)
    sizes = torch.empty(dist.get_world_size(group), 1, dtype=torch.int64, device=device)
    dist.all_gather(list(sizes), torch.tensor([payload.numel()], device=device), group=group)
    padded = torch.nn.functional.pad(payload, (0, int(sizes.max()) - payload.numel()))
    received = torch.empty(len(sizes), padded.numel(), dtype=torch.uint8, device=device)
    dist.all_gather(list(received), padded, group=group)
    return [unpack(row[:size].cpu()) for row, size in zip(received, sizes.flatten().tolist(), strict=True)]


def check_same(
    mine: dict[str, Any],
    difference: Callable[[dict[str, Any], dict[str, Any], int, int], str],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise the same `InputError` on every rank if ranks differ in these facts.

    Args:
        mine: This rank's facts, plain values.
        difference: Says in one line how the first rank's facts differ from another's, given both and both ranks; empty
            where they do not.
        group: The ranks; None for all.
    """
    found = everyone(mine, group)
    ranks = dist.get_process_group_ranks(group)
    for rank, other in zip(ranks[1:], found[1:], strict=True):
        if problem := difference(found[0], other, ranks[0], rank):
            raise InputError(problem)


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must lie to be sent within this group."""
    nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def pack(value: Any) -> Tensor:
    """A plain value as bytes."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpack(payload: Tensor) -> Any:
    """The plain value; with ``weights_only``, because peers send numbers, not code."""
    return torch.load(io.BytesIO(payload.numpy().tobytes()), weights_only=True)


# ------------------------------------------------------------------------------------------------- waiting and losing

_opened: Counter[str] = Counter()


class Attendance:
    """Who has come to which exchange of a process group, and who is alive.

    Args:
        group: The ranks.
        say: Takes the line that says who is waited for.
    """

    BEAT = 0.5  # seconds between heartbeats
    GRACE = 5.0  # seconds without one after which a rank is gone
    PATIENCE = 60.0  # seconds after which a rank that waits says for whom

    def __init__(self, group: dist.ProcessGroup, say: Callable[[str], None] = log.warning) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank()
        self._say = say
        self._number = 0
        self._waiting: tuple[str, float] | None = None  # where, and since when
        # Every rank opens the attendance of a group for the same purposes in the same order, so they agree on this.
        _opened[group.group_name] += 1
        self._store = _store(f"hemiola/{group.group_name}/{_opened[group.group_name]}/")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hemiola-heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside the store while the interpreter ends would abort the process

    @contextmanager
    def exchange(self, where: str) -> Iterator[None]:
        """Around collectives of the group, in the same order on every rank.

        Args:
            where: Completes "rank 2 did not come to ...".

        Raises:
            RankLostError: In place of what the backend raised.
        """
        self._number += 1
        self._waiting = where, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self._lost(where, error) from error
        finally:
            self._waiting = None

    def leave(self, reason: str) -> None:
        """This rank leaves because of an exception."""
        with suppress(RuntimeError):  # the process that holds the store is gone as well; nobody is left to tell
            self._store.set(f"left/{self.rank}", reason)
        self.close()

    def close(self) -> None:
        """No more heartbeats."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self.GRACE)
        atexit.unregister(self.close)

    # --------------------------------------------------------------------------------------------------- the heartbeat

    def _beat(self) -> None:
        said = 0
        with suppress(RuntimeError):  # the store is gone: the next exchange will find out why
            while not self._closed.is_set():
                self._sign()
                waiting, number = self._waiting, self._number
                if waiting is not None and number > said and time.monotonic() - waiting[1] > self.PATIENCE:
                    said = number
                    self._tell_who_is_missing(*waiting)
                self._closed.wait(self.BEAT)

    def _sign(self) -> None:
        self._store.set(f"beat/{self.rank}", f"{self._number} {time.monotonic()}")

    def _tell_who_is_missing(self, where: str, since: float) -> None:
        """Say it once, on the first of the ranks that wait."""
        try:
            silent, late, left = self._silent(hurry=False), self._late(), self._reasons()
        except RuntimeError:
            self._say(f"{where} has waited {time.monotonic() - since:.0f} s, and the job's store does not answer")
            raise
        missing = sorted({*silent, *late})
        if self._waiting is None or not missing or self.rank != min(set(self.ranks) - set(missing)):
            return
        how = "gives no sign of life (stopped, or gone)" if silent == missing else "is alive and still computing"
        if silent and silent != missing:
            how = f"has not come; {_names(silent)} gives no sign of life"
        if left:
            how = f"has not come: {left}"
        self._say(f"{where} has waited {time.monotonic() - since:.0f} s for {_names(missing)}, which {how}")

    # ------------------------------------------------------------------------------------------------------- the loss

    def _lost(self, where: str, error: Exception) -> RankLostError:
        """Find out who is missing from an exchange that failed here; takes a few seconds."""
        try:
            self._sign()
            # Whoever noticed before may have left by now for that very reason: those it named are the ones.
            missing = self._who("left") or self._named_by_others() or self._silent(hurry=True) or self._late()
            missing = self._named_by_others() or missing
            self._store.set(f"named/{self.rank}", ",".join(map(str, missing)))
            left = self._reasons()
        except RuntimeError:
            return RankLostError(
                f"the job's store is gone, with rank 0 or its launcher, at {where}: {_line(error)}", [0]
            )
        if not missing:
            return RankLostError(f"{where} failed although every rank is alive: {_line(error)}", [])
        return RankLostError(f"{_names(missing)} did not come to {where}: {left or _line(error)}", missing)

    def _who(self, said: str) -> list[int]:
        return [r for r in self.ranks if self._read(f"{said}/{r}")]

    def _reasons(self) -> str:
        return "; ".join(f"rank {r} left: {self._read(f'left/{r}')}" for r in self._who("left"))

    def _named_by_others(self) -> list[int]:
        named = [self._read(f"named/{r}").split(",") for r in self._who("named")]
        return sorted({int(r) for ranks in named for r in ranks})

    def _silent(self, hurry: bool) -> list[int]:
        """Ranks without a heartbeat; in a hurry, where someone must be gone, the last one that is not heard of."""
        began = time.monotonic()
        first = {r: self._read(f"beat/{r}") for r in self.ranks if r != self.rank}
        silent = list(first)
        while silent and (waited := time.monotonic() - began) < self.GRACE:
            if hurry and len(silent) == 1 < len(first) and waited > 3 * self.BEAT:
                break
            time.sleep(self.BEAT / 5)
            self._sign()  # others may be asking the same
            silent = [r for r in silent if self._read(f"beat/{r}") == first[r]]
        return silent

    def _late(self) -> list[int]:
        """Ranks that have not come as far as this one."""
        return [r for r in self.ranks if int((self._read(f"beat/{r}") or "0").split()[0]) < self._number]

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _store(prefix: str) -> PrefixStore:
    """The job's key-value store; a server's on a connection of our own, where torch can make one.

    The default connection may be held for minutes by a process group that is being made. A file needs none, and must
    not be cloned: each clone that goes signs off one of its users, and the last one deletes it.
    """
    store = _get_default_store()
    innermost = store
    while isinstance(innermost, PrefixStore):
        innermost = innermost.underlying_store
    if type(innermost).__name__ == "TCPStore" and hasattr(store, "clone"):
        store = store.clone()
        store.set_timeout(timedelta(seconds=Attendance.GRACE / 2))
    return PrefixStore(prefix, store)


def _names(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
