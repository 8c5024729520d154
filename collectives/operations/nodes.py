"""Which ranks share a node, agreed between them."""

from __future__ import annotations

from collections.abc import Sequence

from collectives import topology
from collectives.engine import Engine
from collectives.operations.objects import numbers_of_all


def find_topology(engine: Engine, node_of: Sequence[int] | None) -> topology.Topology:
    """The map given by hand, or that of the ranks that share memory. Collective."""
    if node_of is not None:
        labels = topology.check_node_of(node_of, engine.size)
    else:
        labels = gather_labels(engine, engine.transport.node_leader())
    return topology.from_labels(labels, engine.rank)


def gather_labels(engine: Engine, label: int) -> list[int]:
    """Every rank's label. Collective."""
    labels: list[int] = numbers_of_all(engine, [label])[:, 0].tolist()
    return labels
