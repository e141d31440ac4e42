"""Links: strings are read strictly, and times are what one computes by hand."""

import pytest

from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
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
    assert server.upload(0.0, 1000, 0) == 1.5
    assert server.upload(0.2, 1000, 1) == 2.5  # waits for the first
    assert server.download(0.2, 1000, 0) == pytest.approx(1.7)  # the other direction is free
    server.clear(0.3)
    assert server.upload(0.3, 1000, 0) == pytest.approx(1.8)


# Two workers in the first group, one in the second, and a slow line between them.
REGIONS = {"bandwidth": [["8 kbit/s", "2 kbit/s"], ["1 kbit/s", "8 kbit/s"]], "groups": [2, 1]}


def test_a_ring_is_as_fast_as_its_slowest_hop():
    link = Link.parse(**REGIONS)
    assert link.bits_per_second == 1000  # from the last worker back to the first
    assert link.ring_seconds(300, 3) == pytest.approx(4 * 8 * 100 / 1000)
    assert [link.group_of(worker) for worker in range(3)] == [0, 0, 1]
    alike = Link.parse(bandwidth=[["5 kbit/s"]], groups=[3])
    assert alike.ring_seconds(300, 3) == Link.parse(bandwidth="5 kbit/s").ring_seconds(300, 3)


def test_a_server_stands_in_the_first_group():
    server = ServerLink(Link.parse(**REGIONS))
    assert server.upload(0.0, 1000, 0) == 1.0
    assert server.upload(0.0, 1000, 2) == 1.0 + 8.0
    assert server.download(0.0, 1000, 2) == 4.0
    assert not server.link.free


@pytest.mark.parametrize(
    ("link", "message"),
    [
        (
            {"bandwidth": [["1 Gbit/s", "1 Mbit/s"], ["1 Gbit/s"]], "groups": [4, 4]},
            "must be a square matrix, got 2 rows",
        ),
        ({"bandwidth": [["1 Gbit/s"]]}, "how many workers each of the 1 groups has, at least 1, got None"),
        ({"bandwidth": [["1 Gbit/s"]], "groups": [0]}, "at least 1, got .0."),
        ({"bandwidth": "1 Gbit/s", "groups": [8]}, "needs a bandwidth from each group to each"),
        ({"bandwidth": [["0 bit/s"]], "groups": [8]}, "bandwidth must be above 0"),
        ({"bandwidth": [["1 Gbit/s"]], "groups": [7]}, "must add up to the 8 workers of the run, got .7."),
    ],
)
def test_bad_groups_are_one_clear_line(link, message):
    with pytest.raises(InputError, match=message):
        Experiment({"task": "digits-logistic", "cluster": {"name": "simulated", "link": link}}).cells[0].parts()
