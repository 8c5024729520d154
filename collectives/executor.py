"""Runs a schedule: one rank's rounds, resolved once to byte ranges, over any transport.

A `Plan` is made for one (collective, algorithm, lengths, dtype, op, root) and used for every call
of that kind.

Buffers are bound by address: the views made for a pair of buffers serve every later call whose
buffers lie at the same place. They never keep a buffer alive and are used only in calls that were
given a live buffer at that address.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives import algorithms
from collectives.reduction import Action, Array, ReduceOp, bind_fold
from collectives.resolve import Fold, Piece, Resolver
from collectives.schedule import for_rank, rooted_at, split_lengths
from collectives.spec import ANYTHING, spec_of
from collectives.transports.base import Message, Transport

_BINDINGS_KEPT = 8
_PLANS_KEPT = 64
_PLAN_BYTES_KEPT = 1 << 28


@dataclass(frozen=True)
class _BoundRound:
    before: list[Action]
    sends: list[Message]
    receives: list[Message]
    after: list[Action]


class Call(NamedTuple):
    """A kind of call: what a plan is made for, and found by.

    `shape` is the elements of each chunk, or of the whole buffer where the algorithm cuts it
    evenly. The target holds all chunks, one after the other. With `has_source` the input comes in a
    buffer of its own, laid out as the target, which need not be initialised; without, it lies in
    the target.
    """

    collective: str
    algorithm: str
    shape: int | tuple[int, ...]
    dtype: np.dtype[Any]
    op: ReduceOp | None
    root: int
    has_source: bool


class Plan:
    """One rank's part in one kind of call."""

    def __init__(self, transport: Transport, call: Call) -> None:
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
        self._left_behind = resolver.left_behind(wanted.tolist())
        self._transport, self._op, self._dtype = transport, call.op, call.dtype
        self._length = offsets[-1]
        self._scratch = np.empty(resolver.scratch_needed, call.dtype)
        self._bindings: OrderedDict[tuple[int, int], list[_BoundRound]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """The bytes that the plan keeps between calls."""
        return self._scratch.nbytes

    def run(self, source: Array | None, target: Array) -> None:
        """Take part in the collective once. Both buffers are flat and contiguous."""
        for bound in self._bound_to(source, target):
            for action in bound.before:
                action()
            self._transport.exchange(bound.sends, bound.receives)
            for action in bound.after:
                action()
        for piece in self._left_behind:
            assert source is not None
            if source is not target:
                target[piece.start : piece.stop] = source[piece.start : piece.stop]

    def _bound_to(self, source: Array | None, target: Array) -> list[_BoundRound]:
        place = _address(target)
        key = (place if source is None else _address(source), place)
        bound = self._bindings.get(key)
        if bound is None:
            bound = self._bindings[key] = self._bind(*key)
            if len(self._bindings) > _BINDINGS_KEPT:
                self._bindings.popitem(last=False)
        return bound

    def _bind(self, source: int, target: int) -> list[_BoundRound]:
        buffers = {
            "source": _at_address(source, self._length, self._dtype),
            "target": _at_address(target, self._length, self._dtype),
            "scratch": self._scratch,
        }

        def view(piece: Piece) -> Array:
            return buffers[piece.buffer][piece.start : piece.stop]

        def copy(origin: Piece, copied: Piece) -> Action:
            return partial(np.copyto, view(copied), view(origin))

        def fold(each: Fold) -> Action:
            assert self._op is not None
            return bind_fold(self._op, view(each.first), view(each.second), view(each.out))

        return [
            _BoundRound(
                before=[copy(*pair) for pair in resolved.packs],
                sends=[(peer, _bytes(view(piece))) for peer, piece in resolved.sends],
                receives=[(peer, _bytes(view(piece))) for peer, piece in resolved.receives],
                after=[
                    *(copy(*pair) for pair in resolved.unpacks),
                    *(fold(each) for each in resolved.folds),
                ],
            )
            for resolved in self._rounds
        ]


class Plans:
    """The plans of one rank, made when they are first asked for; those used lately are kept."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._plans: OrderedDict[Call, Plan] = OrderedDict()
        self._nbytes = 0

    def find(self, call: Call) -> Plan:
        """The plan for calls of that kind."""
        plan = self._plans.get(call)
        if plan is not None:
            self._plans.move_to_end(call)
            return plan
        plan = self._plans[call] = Plan(self._transport, call)
        self._nbytes += plan.nbytes
        while len(self._plans) > _PLANS_KEPT or (
            self._nbytes > _PLAN_BYTES_KEPT and len(self._plans) > 1
        ):
            self._nbytes -= self._plans.popitem(last=False)[1].nbytes
        return plan


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class _Memory:
    """Memory at an address as NumPy sees it, without a claim on its life."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _at_address(address: int, length: int, dtype: np.dtype[Any]) -> Array:
    if not length:
        return np.empty(0, dtype)
    return np.asarray(_Memory(address, length * dtype.itemsize)).view(dtype)


def _bytes(array: Array) -> memoryview:
    return array.view(np.uint8).data
