"""An exchange under way: begun with a snapshot of the weights, applied some local steps later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hemiola.wire.group_mean import Merged


@dataclass(frozen=True)
class Snapshot:
    """This rank's numbers when the exchange began.

    Attributes:
        lossy: The lossy vector of `Layout`.
        exact: The exact vector.
        step: Steps taken by then.
        local_steps: Length of the stint that had ended.
    """

    lossy: Tensor
    exact: Tensor
    step: int
    local_steps: int


class Pending:
    """Runs ``exchange`` at once, or in a thread of its own while training goes on.

    The thread is a daemon: a process that leaves because of an exception must not wait for ranks that never answer.

    Attributes:
        snapshot: What was sent.
        due: The step after which the result is applied.
        applied: The change of the parameters that is applied in place of the merged one, once it is known.
    """

    def __init__(self, exchange: Callable[[], Merged], snapshot: Snapshot, due: int) -> None:
        self.snapshot = snapshot
        self.due = due
        self.applied: Tensor | None = None
        self._exchange = exchange
        self._merged: Merged | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if due > snapshot.step:
            self._thread = threading.Thread(target=self._run, name="hemiola-averaging", daemon=True)
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._merged = self._exchange()
        except Exception as error:  # raised again where the result is asked for
            self._error = error

    def result(self) -> Merged:
        """Wait for the result."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._merged is not None
        return self._merged
