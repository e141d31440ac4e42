"""How long messages take: latency plus bytes over bandwidth.

Two shapes of traffic, because the algorithms differ in nothing else:

* everyone waits for everyone: a ring all-reduce, 2 (P - 1) messages of 1/P of the vector each, one after the other,
  and where the order wants sketches a ring all-gather of them, P - 1 messages of one worker's sketches each;
* an update waits for some: every report and every new version passes the server's one full-duplex link, in turn; or,
  with ``reports = "ring"``, K reports begin a ring all-reduce among all workers, behind the computation of those that
  are not in it.

Machines may stand in groups, such as regions, with another bandwidth from each group to each. A ring goes through the
workers by number and is as fast as its slowest hop; a server stands in the first group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from hemiola.errors import InputError
from hemiola.options import SECONDS, one_of, quantity

_BITS = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "Tbit/s": 1e12}
_BYTES = {"B/s": 8.0, "kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9}


@dataclass(frozen=True)
class Link:
    """A link between machines.

    Attributes:
        bits_per_second: Bandwidth; infinite for a link that costs nothing.
            Of a ring's slowest hop, where machines stand in groups.
        latency: Seconds a message takes beside its size.
        groups: How many workers each group has, by number; none where all machines are alike.
        between: Bandwidth from each group to each.
        reports: How reports travel where an update does not wait for all: ``"server"`` or ``"ring"``.
    """

    bits_per_second: float = float("inf")
    latency: float = 0.0
    groups: tuple[int, ...] = ()
    between: tuple[tuple[float, ...], ...] = ()
    reports: str = "server"

    @classmethod
    def parse(
        cls,
        bandwidth: str | list[list[str]] | None = None,
        latency: str | None = None,
        groups: list[int] | None = None,
        reports: str = "server",
    ) -> Link:
        """Read the experiment file's strings."""
        one_of("link.reports", reports, ["server", "ring"])
        seconds = 0.0 if latency is None else quantity("link.latency", latency, SECONDS)
        if isinstance(bandwidth, list):
            return replace(cls._matrix(bandwidth, seconds, groups), reports=reports)
        if groups is not None:
            raise InputError(f"link.groups = {groups} needs a bandwidth from each group to each, got {bandwidth!r}")
        return cls(float("inf") if bandwidth is None else _bits(bandwidth), seconds, reports=reports)

    @classmethod
    def _matrix(cls, rows: list[list[str]], latency: float, groups: list[int] | None) -> Link:
        lengths = [len(row) for row in rows]
        if not rows or lengths != [len(rows)] * len(rows):
            raise InputError(f"link.bandwidth must be a square matrix, got {len(rows)} rows of {lengths} values")
        if groups is None or len(groups) != len(rows) or min(groups) < 1:
            raise InputError(
                f"link.groups must say how many workers each of the {len(rows)} groups has, at least 1, got {groups}"
            )
        between = tuple(tuple(_bits(cell) for cell in row) for row in rows)
        owners = [group for group, count in enumerate(groups) for _ in range(count)]
        hops = [between[a][b] for a, b in zip(owners, [*owners[1:], owners[0]], strict=True)]
        return cls(min(hops), latency, tuple(groups), between)

    def check(self, workers: int) -> None:
        """Refuse groups that are not those of so many workers."""
        if self.groups and sum(self.groups) != workers:
            raise InputError(f"link.groups must add up to the {workers} workers of the run, got {list(self.groups)}")

    def group_of(self, worker: int) -> int:
        """In which group a worker stands."""
        return next(group for group, end in enumerate(accumulate(self.groups)) if worker < end)

    @property
    def free(self) -> bool:
        """Whether messages take no time."""
        return self.bits_per_second == float("inf") and self.latency == 0 and not self.groups

    def occupied(self, size: float) -> float:
        """Seconds ``size`` bytes keep the link busy."""
        return 8 * size / self.bits_per_second

    def to_server(self, size: float, worker: int) -> float:
        """Seconds a report of ``size`` bytes keeps the server's link busy."""
        return 8 * size / self.between[self.group_of(worker)][0] if self.groups else self.occupied(size)

    def from_server(self, size: float, worker: int) -> float:
        """Seconds weights of ``size`` bytes keep the server's link busy."""
        return 8 * size / self.between[0][self.group_of(worker)] if self.groups else self.occupied(size)

    def ring_seconds(self, size: float, workers: int) -> float:
        """Seconds of a ring all-reduce of ``size`` bytes."""
        if workers == 1:
            return 0.0
        return 2 * (workers - 1) * (self.latency + self.occupied(size / workers))

    def gather_seconds(self, size: float, workers: int) -> float:
        """Seconds of a ring all-gather to which every worker adds ``size`` bytes; nothing is sent where that is 0."""
        return (workers - 1) * (self.latency + self.occupied(size)) if size else 0.0


def _bits(bandwidth: str) -> float:
    bits = quantity("link.bandwidth", bandwidth, _BITS | _BYTES)
    if bits == 0:
        raise InputError(f"link.bandwidth must be above 0, got {bandwidth!r}")
    return bits


def ring_bytes(size: float, workers: int) -> float:
    """Bytes each worker sends in a ring all-reduce of ``size`` bytes."""
    return 2 * (workers - 1) / workers * size


def gather_bytes(size: float, workers: int) -> float:
    """Bytes each worker sends in a ring all-gather of ``size`` bytes from each."""
    return (workers - 1) * size


class ServerLink:
    """The server's one link: messages in one direction follow each other.

    Attributes:
        down_free: When the outgoing direction is free again.
        up_free: When the incoming direction is free again.
    """

    def __init__(self, link: Link):
        self.link = link
        self.down_free = 0.0
        self.up_free = 0.0

    def download(self, now: float, size: float, worker: int) -> float:
        """When weights asked for now have arrived at a worker."""
        self.down_free = max(self.down_free, now) + self.link.from_server(size, worker)
        return self.down_free + self.link.latency

    def upload(self, now: float, size: float, worker: int) -> float:
        """When a report sent now has arrived at the server."""
        self.up_free = max(self.up_free, now) + self.link.to_server(size, worker)
        return self.up_free + self.link.latency

    def clear(self, now: float) -> None:
        """Messages still waiting were cancelled."""
        self.clear_down(now)
        self.up_free = min(self.up_free, now)

    def clear_down(self, now: float) -> None:
        """Weights still waiting were cancelled, reports were not."""
        self.down_free = min(self.down_free, now)
