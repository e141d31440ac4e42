"""When a cell writes a checkpoint."""

from __future__ import annotations

import time

from hemiola.plan import ClusterFactory


class Cadence:
    """Says when a checkpoint is due: after so many updates or so many seconds, whichever comes first.

    Args:
        every_seconds: Since the last one, or the start.
        every_updates: The same in updates; None for no limit.
        version: Updates at the start.
    """

    def __init__(self, every_seconds: float, every_updates: int | None, version: int = 0) -> None:
        self.every_seconds = every_seconds
        self.every_updates = every_updates
        self.saved(version)

    @classmethod
    def of(cls, factory: ClusterFactory, version: int) -> Cadence:
        """As the cluster's options say."""
        return cls(factory.checkpoint_every_seconds, factory.checkpoint_every_updates, version)

    def saved(self, version: int) -> None:
        """One was written."""
        self._version, self._at = version, time.monotonic()

    def by_updates(self, version: int) -> bool:
        """Whether one is due; the same on every rank."""
        return self.every_updates is not None and version - self._version >= self.every_updates

    def by_time(self) -> bool:
        """Whether one is due by this process's clock."""
        return time.monotonic() >= self._at + self.every_seconds
