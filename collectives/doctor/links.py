"""`doctor --links`: latency and bandwidth between each pair of nodes, and what is odd about them.

One rank of each node takes part. A round measures disjoint pairs at the same time, each in both
directions, so that n nodes need n - 1 rounds (n if n is odd). The messages use MPI directly.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from collectives.doctor.machine import RankFacts
from collectives.doctor.report import Report, ranks_by

_PINGS = 50
_MESSAGES = 8
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 22
# The messages of one measurement are as long as this takes.
_MESSAGE_SECONDS = 0.02
_ACKNOWLEDGE = 1
_POLL_SECONDS = 1e-3

# A link is slow below this part of the median bandwidth, or above this multiple of the latency.
_SLOW_BANDWIDTH, _SLOW_LATENCY = 1 / 3, 3.0
# Where ranks outnumber cores, the scheduler alone halves the bandwidth of single messages.
_UNSTEADY = 4.0
# The counts include other programs of the hosts, and healthy networks drop a segment at times.
_MOST_REPEATED = 5e-3
_SEGMENTS = ("OutSegs", "RetransSegs")


@dataclass(frozen=True)
class Link:
    """Measurements of the link from one node to another."""

    source: int
    target: int
    latency: float
    """Seconds of a small message, one way: the least, which waits for no scheduler."""
    bandwidths: tuple[float, ...]
    """Bytes per second of each large message."""
    sent: int
    """TCP segments of both hosts during the measurement, of all programs."""
    repeated: int
    """Those of them that TCP has sent again."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second: median."""
        return statistics.median(self.bandwidths)


def report_links(report: Report, mpi: Any, facts: Sequence[RankFacts]) -> None:
    """Measure and report the links between the nodes. Collective."""
    report.section("Links")
    leaders = [ranks[0] for ranks in ranks_by(each.node for each in facts).values()]
    if len(leaders) < 2:
        report.row("links", "none: all ranks are on one node")
        return
    hosts = [f"{facts[rank].host} (node {facts[rank].node})" for rank in leaders]
    comm = mpi.COMM_WORLD.Dup()
    own: list[Link] = []
    for pairs in rounds(len(leaders)):
        _wait_for_all(comm)
        for first, second in pairs:
            if comm.rank in (leaders[first], leaders[second]):
                for source, target in ((first, second), (second, first)):
                    own += _measure(comm, source, target, leaders)
    _wait_for_all(comm)
    links = sorted(
        (link for links in comm.allgather(own) for link in links),
        key=lambda link: (link.source, link.target),
    )
    comm.Free()
    for link in links:
        report.row(
            f"node {link.source} to node {link.target}",
            f"{1e6 * link.latency:.0f} µs, {link.bandwidth / 1e9:.3g} GB/s"
            f" ({hosts[link.source]} to {hosts[link.target]})",
        )
        for problem in problems_of(link, links):
            report.warn(problem)


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of so many nodes once, in rounds of disjoint pairs, by the circle method."""
    ring = [*range(count), *([-1] if count % 2 else [])]
    half, found = len(ring) // 2, []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        ring[1:] = [ring[-1], *ring[1:-1]]
    return found


def problems_of(link: Link, links: Sequence[Link]) -> list[str]:
    """What is odd about a link, by itself and compared with all links."""
    problems = []
    usual = statistics.median(each.bandwidth for each in links)
    if link.bandwidth < _SLOW_BANDWIDTH * usual:
        problems.append(f"slow: the median of all links is {usual / 1e9:.3g} GB/s")
    usual = statistics.median(each.latency for each in links)
    if link.latency > _SLOW_LATENCY * usual:
        problems.append(f"slow: the median latency of all links is {1e6 * usual:.0f} µs")
    if link.bandwidth > _UNSTEADY * min(link.bandwidths):
        problems.append(f"unsteady: a message had {min(link.bandwidths) / 1e9:.3g} GB/s")
    if link.repeated > _MOST_REPEATED * link.sent:
        problems.append(f"lossy: TCP has repeated {link.repeated} of {link.sent} segments")
    return problems


def _wait_for_all(comm: Any) -> None:
    """Wait without using a core that a measurement of the same node may need."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(_POLL_SECONDS)


def _measure(comm: Any, source: int, target: int, leaders: Sequence[int]) -> list[Link]:
    """Measure one direction: the link on the sender, nothing on the receiver."""
    sends = comm.rank == leaders[source]
    peer = leaders[target if sends else source]
    before = _segments()
    small = np.zeros(1, np.uint8)
    latency = min(_exchange(comm, peer, small, small, sends=sends) for _ in range(_PINGS))
    # The size doubles until messages last long enough; the receiver follows the sender.
    size, bandwidths = _LEAST_BYTES, []
    while True:
        message = np.zeros(size, np.uint8)
        seconds = _exchange(comm, peer, message, small, sends=sends)
        decided = comm.sendrecv(seconds, peer, source=peer)
        if (seconds if sends else decided) > _MESSAGE_SECONDS or size >= _MOST_BYTES:
            break
        size *= 2
    for _ in range(_MESSAGES):
        bandwidths.append(size / _exchange(comm, peer, message, small, sends=sends))
    counts = [now - old for now, old in zip(_segments(), before, strict=True)]
    theirs = comm.sendrecv(counts, peer, source=peer)
    if not sends:
        return []
    sent, repeated = (a + b for a, b in zip(counts, theirs, strict=True))
    return [Link(source, target, latency / 2, tuple(bandwidths), sent, repeated)]


def _exchange(comm: Any, peer: int, message: Any, answer: Any, *, sends: bool) -> float:
    """Send a message and receive the answer, or the reverse; the seconds of both."""
    start = time.perf_counter()
    if sends:
        comm.Send(message, peer)
        comm.Recv(answer, peer, _ACKNOWLEDGE)
    else:
        comm.Recv(message, peer)
        comm.Send(answer, peer, _ACKNOWLEDGE)
    return time.perf_counter() - start


def _segments() -> list[int]:
    """TCP segments that this host has sent, and sent again; zeros where they aren't counted."""
    try:
        lines = Path("/proc/net/snmp").read_text(encoding="ascii").splitlines()
    except OSError:
        return [0, 0]
    names, values = (line.split()[1:] for line in lines if line.startswith("Tcp:"))
    counts = dict(zip(names, values, strict=True))
    return [int(counts.get(name, 0)) for name in _SEGMENTS]
