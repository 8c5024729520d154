"""Which ranks share a node, and the set-up of their shared memory. All functions are collective."""

from __future__ import annotations

import operator
import os
import pickle
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from collectives.calls import Operation
from collectives.calls.objects import gather_pickles, make_on_all, numbers_of_all
from collectives.consistency.call_check import CallCheck, ranks_of
from collectives.consistency.signature import Signature, mismatch
from collectives.consistency.uncaught import raised_on_all
from collectives.errors import ENDED, MismatchError
from collectives.execution.cost_model import Layout
from collectives.execution.engine import Engine
from collectives.lifecycle.setup import check_backend
from collectives.shm.layout import SEGMENT_BYTES, NodeMemory, clear
from collectives.shm.levels import Levels
from collectives.shm.node import Node
from collectives.shm.node_barrier import NodeBarrier
from collectives.shm.processes import boot_id
from collectives.shm.progress import ProgressCounters
from collectives.shm.verdict_barrier import VerdictBarrier
from collectives.transports.base import Transport
from collectives.waiting.wait_policy import check_deadline, warn_once

_ENDS = ("close", "exit")
_between_nodes = threading.Event()
"""Set once a communicator of this process connects several nodes."""


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
    def members(self) -> list[list[int]]:
        """The ranks of each node."""
        members: list[list[int]] = [[] for _ in range(self.nodes)]
        for rank, number in enumerate(self.node_of):
            members[number].append(rank)
        return members

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


def agree_on_start(
    engine: Engine, backend: Any, deadline: Any, node_of: Sequence[int] | None
) -> list[int] | None:
    """Check the arguments of a new communicator on all ranks; returns the map of nodes.

    Raises ValueError or TypeError on every rank for a wrong argument of any rank, ValueError if the
    maps or the backends differ.
    """

    def check() -> tuple[str, list[int] | None]:
        check_backend(backend)
        engine.wait_policy.deadline = check_deadline(deadline)
        labels = None if node_of is None else _check_node_of(node_of, engine.size)
        return backend, labels

    given: list[tuple[str, list[int] | None]] = make_on_all(engine, check)
    for name, position in (("backend", 0), ("node_of", 1)):
        first = given[0][position]
        for rank, each in enumerate(given):
            if each[position] != first:
                problem = f"{name}: rank 0 gave {first}, rank {rank} {each[position]}"
                raise raised_on_all(ValueError(problem), engine.rank)
    return given[0][1]


def _check_node_of(node_of: Sequence[int], size: int) -> list[int]:
    """A map given by the caller: one node number per rank; ValueError or TypeError otherwise."""
    labels = [operator.index(label) for label in node_of]
    if len(labels) != size:
        raise ValueError(f"node_of={list(node_of)!r}: must have one entry for each of {size} ranks")
    return labels


def find_topology(engine: Engine, labels: Sequence[int] | None) -> Topology:
    """The topology of a given map, or of the ranks that share memory."""
    if labels is None:
        labels = gather_labels(engine, engine.transport.node_leader())
    numbers: dict[int, int] = {}
    for label in labels:
        numbers.setdefault(label, len(numbers))
    return Topology(tuple(numbers[label] for label in labels), engine.rank)


def gather_labels(engine: Engine, label: int) -> list[int]:
    """Every rank's label, in rank order."""
    return [label for label, _ in numbers_of_all(engine, label)]


def split(color: int | None, key: int) -> Operation:
    """The transport between the ranks of equal color; None where color is None."""
    return Operation(Signature("split"), lambda engine: engine.transport.split(color, key))


def settle(engine: Engine, where: Topology) -> None:
    """Set up shared memory within each node, and check every call from now on.

    Where ranks share no memory a check by messages stays: a second one would get its messages.
    """
    if engine.size == 1:
        return
    part = engine.transport.split(where.node, engine.rank)
    assert part is not None
    part.ranks = where.members[where.node]
    node = _engine_of_some(engine, part)
    engine.layout = _layout(engine, where)
    if engine.layout.oversubscription > 1:
        # Every poll yields the core.
        engine.wait_policy.spins = 0
    segments = _share(engine, node)
    if segments is None:
        part.close()
        if engine.call_check is None:
            agree_by_messages(engine)
        return
    members = where.members
    memory = NodeMemory(segments, part.rank, part.fence)
    own = members[where.node]
    if len(members) == 1:
        node_barrier = NodeBarrier(memory, engine.wait_policy, own)
    else:
        ranks_of_nodes = partial(ranks_of, members)
        node_barrier = VerdictBarrier(memory, engine.wait_policy, own, ranks_of_nodes)
    engine.join(
        _join(engine, node, where, ProgressCounters(memory, engine.wait_policy, own), segments)
    )
    leaders = _leaders(engine, where)
    describe = partial(_describe, engine)
    if engine.call_check is not None:
        engine.call_check.close()
    engine.call_check = CallCheck(engine.wait_policy, node_barrier, leaders, members, describe)


def agree_by_messages(engine: Engine) -> None:
    """Treat each rank as a node, and check every call from now on."""
    if engine.size > 1:
        wait_policy, members = engine.wait_policy, [[rank] for rank in range(engine.size)]
        describe = partial(_describe, engine)
        engine.call_check = CallCheck(wait_policy, None, engine.transport, members, describe)


def _layout(engine: Engine, where: Topology) -> Layout:
    """Number of ranks on each node, and the oversubscription of the cores."""
    own = sorted(os.sched_getaffinity(0))
    # What the ranks on the cores of one machine have in common, also in several containers.
    machine = boot_id() or f"node {where.node}"
    given = gather_pickles(engine, pickle.dumps((machine, own)))
    cores: dict[str, set[int]] = {}
    for name, each in given:
        cores.setdefault(name, set()).update(each)
    ranks = Counter(name for name, _ in given)
    ratios = [ranks[each] / (len(cores[each]) or os.cpu_count() or 1) for each in ranks]
    return Layout(tuple(map(len, where.members)), max(1.0, *ratios))


def _share(engine: Engine, node: Engine) -> list[memoryview] | None:
    """The node's segments, if every node has some, because the ranks must choose paths alike."""
    # Ranks assigned to a node by the caller may be on different hosts.
    leaders = gather_labels(node, engine.transport.node_leader())
    together = len(set(leaders)) == 1
    segments = node.transport.share(SEGMENT_BYTES) if together else None
    ready = segments is not None and node.transport.reserve(segments[node.rank])
    if segments is not None and ready:
        clear(segments[node.rank], node.transport.fence)
    elif together and node.transport.shares and node.size > 1 and node.rank == 0:
        warn_once("no memory is left that ranks can share (/dev/shm): calls go by messages instead")
    shared, sizes = zip(*numbers_of_all(engine, int(ready), node.size), strict=True)
    if all(shared) and max(sizes) > 1:
        return segments
    if segments is not None:
        node.transport.free(segments)
    return None


def _join(
    engine: Engine,
    node: Engine,
    where: Topology,
    steps: ProgressCounters,
    segments: list[memoryview],
) -> Node:
    """The node's shared memory, ready for use, and its connection to the other nodes."""
    steps.memory.publish_process()
    steps.barrier()

    def gather(numbers: list[int]) -> list[list[int]]:
        return gather_pickles(node, pickle.dumps(numbers))

    levels = None
    if where.nodes > 1:
        _between_nodes.set()
        across = _across(engine, where)
        levels = Levels(where.members, engine.rank, across, engine.work, steps.exchange_numbers)
    engine.wait_policy.progress = partial(_progress, engine.transport)
    return Node(
        node.transport,
        segments,
        steps,
        gather,
        levels=levels,
        oversubscribed=engine.layout.oversubscription > 1,
    )


def _progress(transport: Transport) -> None:
    # On a single node calls may be made while another thread is inside of MPI.
    if _between_nodes.is_set():
        transport.progress()


def _across(engine: Engine, where: Topology) -> Engine | None:
    """The ranks of equal local rank on all nodes; None where a node has no such rank."""
    takes_part = where.local_rank < min(map(len, where.members))
    transport = engine.transport.split(where.local_rank if takes_part else None, where.node)
    if transport is None:
        return None
    transport.ranks = [ranks[where.local_rank] for ranks in where.members]
    across = _engine_of_some(engine, transport)
    across.layout = Layout(across.layout.local_sizes, engine.layout.oversubscription)
    return across


def _engine_of_some(engine: Engine, transport: Transport) -> Engine:
    """Of some of the ranks; what ends the job names the rank and the calls of the whole group."""
    made = Engine(transport, engine.wait_policy)
    made.watchdog = transport.watchdog = engine.watchdog
    return made


def _leaders(engine: Engine, where: Topology) -> Transport | None:
    """The transport between the lowest ranks of all nodes; None on other ranks."""
    if where.nodes == 1:
        return None
    leaders = engine.transport.split(0 if where.local_rank == 0 else None, where.node)
    if leaders is not None:
        leaders.wait_policy, leaders.watchdog = engine.wait_policy, engine.watchdog
    return leaders


def _describe(engine: Engine, signature: Signature) -> MismatchError:
    named = signature._replace(scope=signature.scope or engine.wait_policy.call.scope)
    # The end of a program has no line of its own.
    ended = str(named).startswith(ENDED)
    line = "" if ended else engine.wait_policy.current_line()
    called, lines = zip(*gather_pickles(engine, pickle.dumps((named, line))), strict=True)
    # A rank that closes at its program's end may have no caller to show the error.
    running = (rank for rank, each in enumerate(called) if each.collective not in _ENDS)
    return raised_on_all(mismatch(called, lines), engine.rank, next(running, 0))
