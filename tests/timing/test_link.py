"""Links: strings are read strictly, and times are what one computes by hand."""

import pytest

from hemiola.errors import InputError
from hemiola.timing.link import Link, ServerLink, ring_bytes


def test_quantities_are_read_with_their_units():
    link = Link.parse("10 Gbit/s", "50 us")
    assert (link.bits_per_second, link.latency) == pytest.approx((1e10, 50e-6))
    assert Link.parse("2 MB/s").bits_per_second == 16e6
    assert Link.parse().free


@pytest.mark.parametrize("text", ["10", "fast", "10 Gb", "-1 Gbit/s", "0 Gbit/s", "1e999 bit/s", "1.2.3 bit/s"])
def test_a_bandwidth_that_makes_no_sense_is_refused(text):
    with pytest.raises(InputError, match=r"link\.bandwidth"):
        Link.parse(text)


def test_a_ring_all_reduce_by_hand():
    # 4 workers, 8000 bytes: 6 messages of 2000 bytes = 16000 bits each at 1 Mbit/s and 1 ms latency.
    link = Link(1e6, 1e-3)
    assert link.ring_seconds(8000, 4) == pytest.approx(6 * (0.016 + 0.001))
    assert ring_bytes(8000, 4) == pytest.approx(6 * 2000)
    assert link.ring_seconds(8000, 1) == 0


def test_reports_queue_at_the_server():
    server = ServerLink(Link(8e3, 0.5))  # 1000 bytes take one second
    assert server.upload(0.0, 1000) == 1.5
    assert server.upload(0.2, 1000) == 2.5  # waits for the first
    assert server.download(0.2, 1000) == pytest.approx(1.7)  # the other direction is free
    server.clear(0.3)
    assert server.upload(0.3, 1000) == pytest.approx(1.8)
