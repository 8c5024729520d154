"""Topology: which ranks share a node."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Nodes are numbered from 0 in the order of their lowest ranks, local ranks within a node."""

    node_of: tuple[int, ...]
    rank: int

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.node_of[self.rank]

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(set(self.node_of))

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its node."""
        return self.node_of[: self.rank].count(self.node)

    @property
    def local_size(self) -> int:
        """The number of ranks on this rank's node."""
        return self.node_of.count(self.node)


def from_labels(labels: Sequence[int], rank: int) -> Topology:
    """The topology in which ranks with equal labels share a node."""
    numbers: dict[int, int] = {}
    for label in labels:
        numbers.setdefault(label, len(numbers))
    return Topology(tuple(numbers[label] for label in labels), rank)


def check_node_of(node_of: Sequence[int], size: int) -> list[int]:
    """A map given by the caller: one node number per rank; ValueError or TypeError otherwise."""
    labels = [operator.index(label) for label in node_of]
    if len(labels) != size:
        raise ValueError(f"node_of={list(node_of)!r}: must have one entry for each of {size} ranks")
    return labels
