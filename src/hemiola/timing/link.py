"""How long messages take: latency plus bytes over bandwidth.

Two shapes of traffic, because the algorithms differ in nothing else:

* everyone waits for everyone: a ring all-reduce, 2 (P - 1) messages of 1/P of the vector each, one after the other,
  and where the order wants sketches a ring all-gather of them, P - 1 messages of one worker's sketches each;
* an update waits for some: every report and every new version passes the server's one full-duplex link, in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from hemiola.errors import InputError
from hemiola.options import SECONDS, quantity

_BITS = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "Tbit/s": 1e12}
_BYTES = {"B/s": 8.0, "kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9}


@dataclass(frozen=True)
class Link:
    """A link between machines.

    Attributes:
        bits_per_second: Bandwidth; infinite for a link that costs nothing.
        latency: Seconds a message takes beside its size.
    """

    bits_per_second: float = float("inf")
    latency: float = 0.0

    @classmethod
    def parse(cls, bandwidth: str | None = None, latency: str | None = None) -> Link:
        """Read the experiment file's strings."""
        bits = float("inf") if bandwidth is None else quantity("link.bandwidth", bandwidth, _BITS | _BYTES)
        if bits == 0:
            raise InputError(f"link.bandwidth must be above 0, got {bandwidth!r}")
        return cls(bits, 0.0 if latency is None else quantity("link.latency", latency, SECONDS))

    @property
    def free(self) -> bool:
        """Whether messages take no time."""
        return self.bits_per_second == float("inf") and self.latency == 0

    def occupied(self, size: float) -> float:
        """Seconds ``size`` bytes keep the link busy."""
        return 8 * size / self.bits_per_second

    def ring_seconds(self, size: float, workers: int) -> float:
        """Seconds of a ring all-reduce of ``size`` bytes."""
        if workers == 1:
            return 0.0
        return 2 * (workers - 1) * (self.latency + self.occupied(size / workers))

    def gather_seconds(self, size: float, workers: int) -> float:
        """Seconds of a ring all-gather to which every worker adds ``size`` bytes; nothing is sent where that is 0."""
        return (workers - 1) * (self.latency + self.occupied(size)) if size else 0.0


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

    def download(self, now: float, size: float) -> float:
        """When weights asked for now have arrived at a worker."""
        self.down_free = max(self.down_free, now) + self.link.occupied(size)
        return self.down_free + self.link.latency

    def upload(self, now: float, size: float) -> float:
        """When a report sent now has arrived at the server."""
        self.up_free = max(self.up_free, now) + self.link.occupied(size)
        return self.up_free + self.link.latency

    def clear(self, now: float) -> None:
        """Messages still waiting were cancelled."""
        self.down_free = min(self.down_free, now)
        self.up_free = min(self.up_free, now)
