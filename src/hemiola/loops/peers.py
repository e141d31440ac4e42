"""Who is still here: names the rank that left when a collective fails."""

from __future__ import annotations

import time
from collections import Counter

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

_meetings: Counter[str] = Counter()


class RankLostError(RuntimeError):
    """A rank did not come to an averaging; the message names it.

    Attributes:
        ranks: The global ranks that are missing.
        checkpoint: File written before this was raised; None if no checkpoint folder was given.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.checkpoint: str | None = None


class Roster:
    """Every rank signs in the job's key-value store before each exchange: one small one-way message.

    A failed collective says little: the process that died closes its sockets, its neighbours see "connection closed",
    others only a time-out. The signatures say who did not come.
    """

    # After a broken connection, how long a rank that did come gets to say that it is still here.
    GRACE = 5.0

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank()
        self.timeout = timeout
        # Every rank of a group meets for the same averagers in the same order, so they agree on this number.
        _meetings[group.group_name] += 1
        name = f"hemiola/{group.group_name}/{_meetings[group.group_name]}/"
        self._store = PrefixStore(name, _get_default_store())

    def sign(self, exchange: int) -> None:
        """This rank comes to exchange number ``exchange``."""
        self._store.set(f"at/{self.rank}", str(exchange))

    def leave(self, reason: str) -> None:
        """This rank leaves because of an exception."""
        try:
            self._store.set(f"left/{self.rank}", reason)
        except RuntimeError:  # the process that holds the store is gone as well; nobody is left to tell
            return

    def explain(self, exchange: int, step: int, error: Exception) -> RankLostError:
        """Find out who is missing from an exchange that failed here. Takes no longer than the time-out."""
        deadline = time.monotonic() + self.timeout
        try:
            self._store.set(f"alive/{exchange}/{self.rank}", "yes")
            missing = self._absent(exchange)
            while len(missing) != 1 and time.monotonic() < deadline:
                if not missing:
                    missing = self._silent(exchange)
                    break
                time.sleep(0.05)
                missing = self._absent(exchange)
            reasons = {r: self._read(f"left/{r}") for r in missing}
        except RuntimeError:
            who = self.ranks[0]
            return RankLostError(
                f"rank {who}, which holds the job's store, left before step {step}: {_line(error)}", [who]
            )
        if not missing:
            return RankLostError(f"the averaging at step {step} failed although every rank is here: {_line(error)}", [])
        told = "; ".join(f"rank {r} left: {why}" for r, why in reasons.items() if why)
        names = ", ".join(str(r) for r in missing)
        noun = "rank" if len(missing) == 1 else "ranks"
        return RankLostError(
            f"{noun} {names} did not come to the averaging at step {step}: {told or _line(error)}", missing
        )

    def _absent(self, exchange: int) -> list[int]:
        """Ranks that have not signed this exchange, or said that they leave."""
        return [r for r in self.ranks if int(self._read(f"at/{r}") or -1) < exchange or self._read(f"left/{r}")]

    def _silent(self, exchange: int) -> list[int]:
        """Everyone came, the connection broke under way: those who do not notice that it failed are gone."""
        deadline = time.monotonic() + min(self.GRACE, self.timeout)
        while True:
            silent = [r for r in self.ranks if not self._read(f"alive/{exchange}/{r}")]
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(0.05)

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
