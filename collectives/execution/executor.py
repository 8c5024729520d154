"""Executor of schedules: one rank's rounds, resolved once to byte ranges, over any transport.

A `Plan` is made for one (collective, algorithm, lengths, dtype, op, root) and serves every call of
that kind.

Buffers are bound by address: the views made for a pair of buffers serve every later call with
buffers at the same addresses. The views never keep a buffer alive, and are used only in calls that
pass a live buffer at that address.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives import algorithms
from collectives.caching import LRU
from collectives.execution.plan import Fold, Piece, Resolver
from collectives.execution.rounds import BoundRound
from collectives.reductions.reduction import Action, Array, ReduceOp
from collectives.schedules.schedule import for_rank, rooted_at, split_lengths
from collectives.schedules.spec import ANYTHING, spec_of
from collectives.shm.online_tuning import PathTimes
from collectives.transports.base import Actions, PointToPoint, abandoned
from collectives.transports.parts import own_part

_BINDINGS_KEPT = 8
_PLANS_KEPT = 64
_PLAN_BYTES_KEPT = 1 << 28


class Memory(Protocol):
    """Memory that holds the buffers: the host's, or a GPU's."""

    segment_bytes: int
    """Bytes of the segments in which large messages may go, or 0 if they never do."""

    def empty(self, length: int, dtype: np.dtype[Any]) -> Any:
        """New memory as a flat array."""

    def work(self, length: int, dtype: np.dtype[Any]) -> Any:
        """Like `empty`, for intermediate results; the next operation may reuse the memory."""

    def address(self, array: Any) -> int:
        """Address of the array's first element."""

    def at(self, address: int, length: int, dtype: np.dtype[Any]) -> Any:
        """Memory at an address as a flat array that does not own it."""

    def message(self, array: Any) -> Any:
        """The array's bytes, in the form that the transport takes."""

    def copy(self, origin: Any, copied: Any) -> Action:
        """An action that copies an array into another."""

    def fold(self, op: ReduceOp, first: Any, second: Any, out: Any) -> Action:
        """An action that folds two arrays into `out`, which may be one of them."""


class PlanKey(NamedTuple):
    """A kind of call, the key of its plan.

    `shape` is the number of elements of each chunk, or of the whole buffer if the algorithm cuts it
    evenly. The target holds all chunks, one after the other. With `has_source` the input is in a
    separate buffer of the same layout, and the target need not be initialised. Otherwise the input
    is in the target.
    """

    collective: str
    algorithm: str
    shape: int | tuple[int, ...]
    dtype: np.dtype[Any]
    op: ReduceOp | None
    root: int
    has_source: bool


class Plan:
    """One rank's plan for one kind of call."""

    def __init__(self, transport: PointToPoint, memory: Memory, call: PlanKey) -> None:
        rank, size = transport.rank, transport.size
        algorithm, root = algorithms.find(call.collective, call.algorithm), call.root
        lengths = call.shape
        if isinstance(lengths, int):
            lengths = tuple(split_lengths(lengths, algorithm.chunks(size)))
        spec, chunks = spec_of(call.collective), len(lengths)
        schedule = algorithm.schedule
        if spec.rooted and root:
            schedule = rooted_at(schedule, root, chunks)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        resolver = Resolver(rank, offsets, call.has_source)
        rounds = map(resolver.resolve, for_rank(schedule, rank, size))
        self._rounds = [each for each in rounds if each.sends or each.receives]
        after = spec.after((rank - root) % size, (np.arange(chunks) - root) % chunks, size)
        wanted = np.broadcast_to(after, chunks) != ANYTHING
        self._uncopied = resolver.remaining_in_source(wanted.tolist())
        self._transport, self._memory = transport, memory
        self._op, self._dtype = call.op, call.dtype
        self._length = offsets[-1]
        self._scratch = memory.empty(resolver.scratch_needed, call.dtype)
        self._bindings: LRU[tuple[int, int], list[BoundRound]] = LRU(_BINDINGS_KEPT)

    @property
    def nbytes(self) -> int:
        """Bytes that the plan holds between calls."""
        kept: int = self._scratch.nbytes
        return kept

    def run(
        self,
        source: Array | None,
        target: Array,
        overlapped: Actions | None = None,
        segment_bytes: int = 0,
    ) -> None:
        """Run the collective once. Both buffers are flat and contiguous.

        Some actions of `overlapped` may run while messages are in transit. Messages go in segments
        of so many bytes, unless that is 0, each after the one before has arrived.
        """
        exchange = self._transport.exchange
        if overlapped is not None:
            exchange = partial(self._transport.exchange_beside, overlapped=overlapped)
        rounds = self._bound_to(source, target)
        try:
            for bound in rounds:
                for action in bound.before:
                    action()
                if segment_bytes:
                    for sends, receives in bound.in_segments(segment_bytes):
                        exchange(sends, receives)
                else:
                    exchange(bound.sends, bound.receives)
                for action in bound.after:
                    action()
        except BaseException:
            # Messages that have begun go on, over views that do not keep the buffers alive.
            abandoned.append((source, target))
            raise
        for piece in self._uncopied:
            assert source is not None
            if source is not target:
                target[piece.start : piece.stop] = source[piece.start : piece.stop]

    def _bound_to(self, source: Array | None, target: Array) -> list[BoundRound]:
        address = self._memory.address
        target_address = address(target)
        key = (target_address if source is None else address(source), target_address)
        bound = self._bindings.get(key)
        return self._bindings.put(key, self._bind(*key)) if bound is None else bound

    def _bind(self, source: int, target: int) -> list[BoundRound]:
        memory = self._memory
        buffers = {
            "source": memory.at(source, self._length, self._dtype),
            "target": memory.at(target, self._length, self._dtype),
            "scratch": self._scratch,
        }

        def view(piece: Piece) -> Any:
            return buffers[piece.buffer][piece.start : piece.stop]

        def copy(origin: Piece, copied: Piece) -> Action:
            return memory.copy(view(origin), view(copied))

        def fold(each: Fold) -> Action:
            assert self._op is not None
            return memory.fold(self._op, view(each.first), view(each.second), view(each.out))

        return [
            BoundRound(
                before=[copy(*pair) for pair in resolved.packs],
                sends=[(peer, memory.message(view(piece))) for peer, piece in resolved.sends],
                receives=[(peer, memory.message(view(piece))) for peer, piece in resolved.receives],
                after=[
                    *(copy(*pair) for pair in resolved.unpacks),
                    *(fold(each) for each in resolved.folds),
                ],
            )
            for resolved in self._rounds
        ]


class Plans:
    """Cache of the plans of one rank, least recently used first."""

    def __init__(self, transport: PointToPoint, memory: Memory) -> None:
        """Plans for buffers in this memory."""
        self._transport, self._memory = transport, memory
        self._plans: OrderedDict[PlanKey, Plan] = OrderedDict()
        self._times: LRU[tuple[str, np.dtype[Any], int], PathTimes] = LRU()
        """Of whole and of segmented messages, by collective, dtype and about the size."""
        self._nbytes = 0

    def find(self, call: PlanKey) -> Plan:
        """The plan for calls of that kind, made on first use."""
        plan = self._plans.get(call)
        if plan is not None:
            self._plans.move_to_end(call)
            return plan
        plan = self._plans[call] = Plan(self._transport, self._memory, call)
        self._nbytes += plan.nbytes
        while len(self._plans) > _PLANS_KEPT or (
            self._nbytes > _PLAN_BYTES_KEPT and len(self._plans) > 1
        ):
            self._nbytes -= self._plans.popitem(last=False)[1].nbytes
        return plan

    def run(
        self,
        collective: str,
        algorithm: str,
        source: Any,
        target: Any,
        lengths: Sequence[int] | None,
        op: ReduceOp | None,
        root: int,
        overlapped: Actions | None = None,
    ) -> None:
        """Run a collective as `Engine.run` does: a schedule works on buffers of all parts."""
        whole, rank = target, self._transport.rank
        if collective == "reduce_scatter" or (collective in ("gather", "scatter") and rank != root):
            whole = self._memory.work(sum(lengths or ()), target.dtype)
        if collective == "scatter" and source is not None:
            whole, source = source, None
        elif collective in ("all_gather", "gather") and source is not None:
            own_part(whole, lengths or (), rank)[:] = source
            source = None
        shape = whole.size if lengths is None else tuple(lengths)
        call = PlanKey(collective, algorithm, shape, whole.dtype, op, root, source is not None)
        if self._may_be_segmented(call, whole.nbytes):
            self._run_faster(call, source, whole, overlapped)
        else:
            self.find(call).run(source, whole, overlapped)
        if collective in ("reduce_scatter", "scatter"):
            target[:] = own_part(whole, lengths or (), rank)

    def bind(self, in_place: PlanKey) -> Callable[[Any, Any], None] | None:
        """The function (source, target), of calls in place or out of place on whole buffers.

        None for messages that may go in segments.
        """
        assert isinstance(in_place.shape, int)
        if self._may_be_segmented(in_place, in_place.shape * in_place.dtype.itemsize):
            return None
        out_of_place, find = in_place._replace(has_source=True), self.find

        def run(source: Any, target: Any) -> None:
            find(in_place if source is None else out_of_place).run(source, target)

        return run

    def _may_be_segmented(self, call: PlanKey, nbytes: int) -> bool:
        """Whether the messages are large, and go to another rank than they come from.

        On links with long queues the acknowledgements of what a rank receives wait behind what it
        sends. With large messages in both directions that limits the rate: between 4 hosts a ring
        of 16 MiB took 290 to 310 ms in place of 213 (bench/results/README.md).
        """
        size, least = self._transport.size, self._memory.segment_bytes
        return call.algorithm == "ring" and size > 2 and 0 < least * size < nbytes

    def _run_faster(
        self, call: PlanKey, source: Any, target: Any, overlapped: Actions | None
    ) -> None:
        """Run with whole or segmented messages, what was faster lately. The bits are the same."""
        # Only what all ranks agree on: whether there is a source may differ.
        key = call.collective, call.dtype, target.nbytes.bit_length()
        times = self._times.get(key) or self._times.put(key, PathTimes(("whole", "segmented")))
        plan = self.find(call)

        def run(way: str) -> None:
            segment_bytes = self._memory.segment_bytes if way == "segmented" else 0
            plan.run(source, target, overlapped, segment_bytes)

        times.run(run, self._longest)

    def _longest(self, nanoseconds: int) -> int:
        """The longest of all ranks' times."""
        word = np.array([nanoseconds])
        self.run("all_reduce", "doubling", None, word, None, ReduceOp.MAX, 0)
        return int(word[0])
