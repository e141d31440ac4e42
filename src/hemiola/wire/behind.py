"""Exchanges behind a computation: a thread that runs them one after the other, while its rank computes on.

The exchange itself is where the ranks meet, not a step of theirs; so nobody waits for anybody. Two things need a moment
at which all ranks stand still at the same exchange: consistent weights, and the end. A rank that wants one says so in
what it sends (its `Stance`) and adds nothing from then on, while its thread goes on; the first exchange in which all
ranks want it is that moment, and everything that anybody found is in it or in those before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar


class Stance(IntEnum):
    """What a rank is about, as it says in every exchange."""

    COMPUTING = 0
    RESTING = 1  # it waits until all ranks stand still
    LEAVING = 2  # it is through, and waits until all are


Sent = TypeVar("Sent")
Content = TypeVar("Content")


@dataclass(frozen=True)
class Came(Generic[Content]):
    """What an exchange gave.

    Attributes:
        content: Whatever it is.
        stances: Those of all ranks.
        pace: Seconds of a step of the fastest rank, before which there is nothing new to send; 0 if that is not known.
    """

    content: Content
    stances: frozenset[Stance]
    pace: float


class Behind(Generic[Sent, Content]):
    """The thread, and what has come of its exchanges.

    Args:
        snapshot: Takes what this rank sends, given its stance; called with ``lock`` held.
        exchange: Sends it and waits for all ranks.
        every: Least seconds between the beginnings of two exchanges.

    Attributes:
        lock: To be held while what ``snapshot`` takes is changed.
        at_rest: All ranks stand still, and no exchange begins.
    """

    def __init__(
        self, snapshot: Callable[[Stance], Sent], exchange: Callable[[Sent], Came[Content]], every: float
    ) -> None:
        self.lock = threading.Condition()
        self.at_rest = False
        self._snapshot, self._exchange, self._every = snapshot, exchange, every
        self._arrived: list[Content] = []
        self._stance = Stance.COMPUTING
        self._over = False
        self._error: Exception | None = None
        # A daemon: a process that leaves because of an exception must not wait for ranks that never answer.
        self._thread = threading.Thread(target=self._run, name="hemiola-averaging", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin no further exchange: this rank leaves because of an exception."""
        with self.lock:
            self._over = True
            self.lock.notify_all()

    # ------------------------------------------------------------------------------------------------ the rank's side

    def arrived(self) -> list[Content]:
        """What has come since the last call; raises what ended the thread."""
        with self.lock:
            return self._taken()

    def wait(self) -> list[Content]:
        """The same, but wait until something has come, or all ranks stand still."""
        with self.lock:
            self.lock.wait_for(lambda: self._arrived or self.at_rest or self._error is not None)
            return self._taken()

    def want(self, stance: Stance) -> None:
        """Say so from the next exchange on, and add nothing until all ranks have."""
        with self.lock:
            self._stance = stance
            self.lock.notify_all()

    def rest(self, stance: Stance) -> list[Content]:
        """Want this, wait until all ranks do, and return what has come meanwhile."""
        self.want(stance)
        with self.lock:
            self.lock.wait_for(lambda: self.at_rest or self._error is not None)
            return self._taken()

    def go_on(self) -> None:
        """After a rest."""
        with self.lock:
            self.at_rest = False
            self.lock.notify_all()

    def _taken(self) -> list[Content]:
        if self._error is not None:
            raise self._error
        arrived, self._arrived = self._arrived, []
        return arrived

    # ----------------------------------------------------------------------------------------------- the thread's side

    def _run(self) -> None:
        began, interval = float("-inf"), self._every
        try:
            while True:
                with self.lock:
                    self._wait_until(began + interval)
                    if self._over:
                        return
                    sent = self._snapshot(self._stance)
                began = time.monotonic()
                came = self._exchange(sent)
                interval = max(self._every, came.pace)
                if self._hand_over(came):
                    return
        except Exception as error:  # raised again in the rank's own thread
            with self.lock:
                self._error = error
                self.lock.notify_all()

    def _wait_until(self, begin: float) -> None:
        """Wait for the time of the next exchange, unless this rank waits for one; and as long as all rest."""
        while not self._over and (self.at_rest or (self._stance == Stance.COMPUTING and time.monotonic() < begin)):
            self.lock.wait(None if self.at_rest else begin - time.monotonic())

    def _hand_over(self, came: Came[Content]) -> bool:
        """Give the rank what has come; returns whether all ranks are through."""
        with self.lock:
            self._arrived.append(came.content)
            if Stance.COMPUTING not in came.stances:
                self.at_rest = self._stance != Stance.LEAVING or Stance.RESTING not in came.stances
                if self._stance == Stance.RESTING:
                    self._stance = Stance.COMPUTING
            self.lock.notify_all()
            return came.stances == {Stance.LEAVING}
