"""Options that the tables of several clusters share: delays, and what keeps a real run alive."""

from __future__ import annotations

from pathlib import Path

from hemiola.errors import InputError
from hemiola.timing.delays import DelayStreams, parse_delay


class Delays:
    """The options ``delay`` and ``slow``, checked.

    Args:
        base: Folder of the experiment file; a law may name a file there.
        workers: How many there are.
        delay: Law of the seconds of a local step; None for no delays.
        slow: Factors on the delays of some workers, by number.
    """

    def __init__(self, base: Path, workers: int, delay: str | None, slow: dict[str, float] | None):
        if slow and delay is None:
            raise InputError(f"slow = {slow} multiplies delays, and there are none; give delay = '...' as well")
        self._workers = workers
        self._law = None if delay is None else parse_delay(delay, base)
        self._factors = slow_factors(slow or {})
        self.streams(0)

    def streams(self, seed: int) -> DelayStreams | None:
        """Every worker's delays in a run of this seed; None if there are none."""
        return None if self._law is None else DelayStreams(self._law, self._workers, seed, self._factors)


def slow_factors(table: dict[str, float]) -> dict[int, float]:
    """Read ``slow = { 3 = 5.0 }``; TOML keys are strings."""
    try:
        return {int(worker): float(factor) for worker, factor in table.items()}
    except ValueError:
        raise InputError(f"slow: must map worker numbers to factors, as in {{ 3 = 5.0 }}, got {table}") from None


def check_upkeep(
    max_restarts: int, checkpoint_every_updates: int | None, checkpoint_every_seconds: float, **limits: float
) -> None:
    """Refuse impossible restarts and checkpoints, and limits in seconds that nothing could keep or exceed."""
    if max_restarts < 0:
        raise InputError(f"max_restarts must be at least 0, got {max_restarts}")
    if checkpoint_every_updates is not None and checkpoint_every_updates < 1:
        raise InputError(f"checkpoint_every_updates must be at least 1, got {checkpoint_every_updates}")
    if not checkpoint_every_seconds > 0:
        raise InputError(f"checkpoint_every_seconds must be above 0, got {checkpoint_every_seconds}")
    for name, seconds in limits.items():
        if not 0 < seconds < float("inf"):
            raise InputError(f"{name} must be above 0 and finite, got {seconds}")
