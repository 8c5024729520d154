"""Networks of two levels, in the parameters of LogGP (Alexandrov et al. 1995).

LogGP: Incorporating Long Messages into the LogP Model, doi:10.1145/215399.215427. A message of n
bytes costs each end `overhead` seconds of its processor, occupies a port for `gap` seconds, or for
n × `gap_per_byte` where that is longer, and arrives `latency` seconds later. (The original
counts n − 1 bytes.) The fifth parameter, P, is the number of ranks.

The parameters are assumptions, from these sources:

- Overhead of a message, bandwidth within a node of CPUs, folds on CPUs, shared memory: the
  built-in parameters of the cost model, measured (docs/figures.md). A message's latency there
  is mostly Python's work, here half of it at each end.
- 1 Gbit Ethernet: 1448 bytes of payload in 1538 bytes on the wire at an MTU of 1500 (IEEE
  802.3, TCP with timestamps); the gap is that of the smallest frame, 84 bytes; 20 µs for both
  kernels and the switch, in the middle of the 10 to 30 µs that sockets cost in one direction.
- 100 Gbit RoCE: 4096 bytes of payload in 4178 (Ethernet, IPv4, UDP, base transport header,
  checksums, preamble and gap); 1.5 µs for two network cards (0.3 to 0.8 µs each) and one
  Ethernet switch (0.4 to 0.6 µs). The ranges of this and of sockets:
  https://kentino.com/cs/pages/latency-dissection-where-every-microsecond-goes-in-an-ai-cluster-network
- NVLink + NDR: nodes of eight H100 with a port of 400 Gbit/s (ConnectX-7) for each, 2 % of it
  headers (NVIDIA DGX H100 User Guide, network modules). From NCCL's own cost model: 6.6 µs to
  start, latencies of 0.6 and 2.7 µs (src/graph/tuning.cc, ring, protocol LL; its protocols for
  large messages have higher ones), 360 GB/s over NVLink (symmetric kernels, Hopper). A fold moves
  three bytes for each, at the 3.35 TB/s of HBM3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from collectives import Link
from collectives.execution.cost_model import CostParameters, Layout

_CPU = CostParameters()
_BYTES_PER_GBIT = 1e9 / 8


@dataclass(frozen=True)
class LogGP:
    """One level of a network; seconds, and seconds per byte."""

    latency: float
    overhead: float
    gap: float
    gap_per_byte: float

    def __post_init__(self) -> None:
        """Raise ValueError for a latency without which events of one time have no order."""
        if self.latency <= 0 or min(self.overhead, self.gap, self.gap_per_byte) < 0:
            raise ValueError(f"{self}: must not be negative, and the latency not zero")


@dataclass(frozen=True)
class Network:
    """Nodes of equal size; `ports` of each, shared by its ranks, lead to the other nodes.

    Every rank has a port of its own to the ranks of its node. `reduction` is bytes folded per
    second; `memory` has the parameters of shared memory in a node.
    """

    name: str
    ranks_per_node: int
    ports: int
    inside: LogGP
    between: LogGP
    reduction: float
    memory: CostParameters = _CPU

    def layout(self, ranks: int) -> Layout:
        """The ranks on full nodes, or on a part of one; ValueError if a node would be left over."""
        if ranks > self.ranks_per_node and ranks % self.ranks_per_node:
            raise ValueError(f"{ranks} ranks don't fill nodes of {self.ranks_per_node}")
        local = min(ranks, self.ranks_per_node)
        return Layout((local,) * (ranks // local))

    def costs(self, ranks: int) -> CostParameters:
        """What the cost model knows of the network: one level, the slowest that is used."""
        link = self.between if ranks > self.ranks_per_node else self.inside
        return replace(
            self.memory,
            schedule_latency=link.latency + 2 * link.overhead,
            schedule_bandwidth=1 / link.gap_per_byte,
            reduction=self.reduction,
        )


def uniform(link: Link) -> Network:
    """A network of one level on which a message costs what it costs in the cost model."""
    level = LogGP(link.latency, 0, 0, 1 / link.bandwidth)
    return Network("uniform", 1, 1, level, level, link.reduction)


_GBIT = 1448 / 1538 * _BYTES_PER_GBIT
_ROCE = 4096 / 4178 * 100 * _BYTES_PER_GBIT
_NDR = 0.98 * 400 * _BYTES_PER_GBIT
_NVLINK = 360e9
_HALF = _CPU.schedule_latency / 2
_SHARED = LogGP(_CPU.shared_latency, _HALF, 0, 1 / _CPU.schedule_bandwidth)

# Of a buffer of n bytes, 7/8 cross NVLink in a reduce-scatter and 7/8 in an all-gather. The cost
# model counts 35/8 and 2 bytes touched: with this bandwidth the sum of both takes as long.
_TOUCHED_PER_BYTE = (35 / 8 + 2) / (7 / 4)
_GPU = CostParameters(
    shared_latency=0.6e-6, shared_bandwidth=_TOUCHED_PER_BYTE * _NVLINK, schedule_start=6.6e-6
)

NETWORKS = {
    network.name: network
    for network in (
        Network(
            "1 Gbit Ethernet",
            ranks_per_node=4,
            ports=1,
            inside=_SHARED,
            between=LogGP(20e-6, _HALF, 84 / 125e6, 1 / _GBIT),
            reduction=_CPU.reduction,
        ),
        Network(
            "100 Gbit RoCE",
            ranks_per_node=8,
            ports=1,
            inside=_SHARED,
            between=LogGP(1.5e-6, _HALF, 84 / 12.5e9, 1 / _ROCE),
            reduction=_CPU.reduction,
        ),
        Network(
            "NVLink + NDR",
            ranks_per_node=8,
            ports=8,
            inside=LogGP(0.6e-6, 0, 0, 1 / _NVLINK),
            between=LogGP(2.7e-6, 0, 0, 1 / _NDR),
            reduction=3.35e12 / 3,
            memory=_GPU,
        ),
    )
}
