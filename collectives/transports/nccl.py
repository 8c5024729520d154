"""NCCL collectives and messages between the GPUs of a group of ranks.

All work is enqueued on `NcclTransport.stream`, and nothing waits for it. NCCL's reductions are not
offered where they differ from this package's guarantees: MIN and MAX of floating-point numbers lose
a NaN, and there is no product of complex numbers, no reduction of 16-bit integers and none of bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np

from collectives.transports.base import Native, PointToPoint
from collectives.transports.nccl_driver import NcclDriver, NcclError
from collectives.transports.parts import others, parts_by_rank

_BYTE = 1
_SUM, _PRODUCT, _MAX, _MIN, _AVERAGE = range(5)
_OPS = {"sum": _SUM, "mean": _AVERAGE, "product": _PRODUCT, "min": _MIN, "max": _MAX}
_INTEGERS = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5}
_FLOATS = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_FLOAT8S = {"float8_e4m3fn": 10, "float8_e5m2": 11}
_COMPLEX = {"complex64": 7, "complex128": 8}
# `or` and `and` of bytes that are 0 or 1.
_BOOL_OPS = {"sum": _MAX, "max": _MAX, "bitwise_or": _MAX}
_BOOL_OPS |= {"product": _MIN, "min": _MIN, "bitwise_and": _MIN}

Array = Any
Lengths = Sequence[int]
Kind = tuple[int, int, int]
"""NCCL's type, its number per element, and NCCL's op."""
Enqueue = Callable[[int, int], None]
"""Takes the addresses of source and target, which are equal in place."""

_MOVED: Kind = (_BYTE, 1, _SUM)


@lru_cache(maxsize=256)
def reduction_of(op: str, dtype: np.dtype[Any], *, float8: bool) -> Kind | None:
    """The reduction in NCCL's terms; None if NCCL has no equivalent."""
    name = dtype.name
    if name == "bool":
        return (_BYTE, 1, _BOOL_OPS[op]) if op in _BOOL_OPS else None
    if op not in _OPS:
        return None
    if name in _INTEGERS:
        return (_INTEGERS[name], 1, _OPS[op]) if op != "mean" else None
    if op in ("min", "max"):
        return None
    if name in _COMPLEX:
        return (_COMPLEX[name], 2, _OPS[op]) if op != "product" else None
    floats = _FLOATS | _FLOAT8S if float8 else _FLOATS
    return (floats[name], 1, _OPS[op]) if name in floats else None


class NcclTransport(PointToPoint):
    """One rank's end of an NCCL communicator, which it owns."""

    def __init__(
        self,
        driver: NcclDriver,
        comm: Any,
        rank: int,
        size: int,
        *,
        address: Callable[[Array], int],
        float8: bool,
    ) -> None:
        """`address` returns an array's address.

        `float8` says whether all ranks' GPUs and libraries reduce 8-bit floats.
        """
        self._driver, self._comm, self.rank, self.size = driver, comm, rank, size
        self._address, self._float8 = address, float8
        self.stream = 0
        """The handle of the stream that receives the next calls."""
        self._enqueue = partial(driver.enqueue, comm)
        self.ended = False

    def exchange(
        self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]
    ) -> None:
        """One group of messages, each a flat array of bytes."""
        messages = [("send", *each) for each in sends] + [("receive", *each) for each in receives]
        with self._group():
            for function, peer, buffer in messages:
                if buffer.size:
                    address = self._address(buffer)
                    self._enqueue(function, address, buffer.size, _BYTE, peer, self.stream)

    def native(self, collective: str, op: str | None, dtype: np.dtype[Any]) -> Native | None:
        """NCCL's own collective, or a group of messages; None if NCCL can't reduce the dtype."""
        if op is None:
            move: Native = getattr(self, f"_{collective}")
            return move
        kind = reduction_of(op, dtype, float8=self._float8)
        return None if kind is None else partial(getattr(self, f"_{collective}"), kind)

    @contextmanager
    def _group(self) -> Iterator[None]:
        """A group of calls. NCCL stays in it until its end, so an exception must end it too."""
        self._driver.group_start()
        try:
            yield
        finally:
            self._driver.group_end()

    def bind(
        self,
        collective: str,
        op: str | None,
        dtype: np.dtype[Any],
        lengths: Lengths,
        root: int,
    ) -> Enqueue | None:
        """NCCL's function of that name, for parts of these lengths (bytes where op is None).

        None unless the lengths are equal, above 0, and NCCL reduces the dtype.
        """
        kind = _MOVED if op is None else reduction_of(op, dtype, float8=self._float8)
        alike = len(set(lengths)) == 1 and lengths[0] > 0
        return self._single(collective, kind, lengths[0], root) if kind and alike else None

    def _single(self, collective: str, kind: Kind, count: int, root: int) -> Enqueue:
        dtype, factor, op = kind
        last = {"reduce": (op, root), "broadcast": (root,), "all_gather": ()}.get(collective, (op,))
        enqueue, rest = self._enqueue, (count * factor, dtype, *last)

        def function(source: int, target: int) -> None:
            enqueue(collective, source, target, *rest, self.stream)

        return function

    def _all_reduce(self, kind: Kind, source: Array, target: Array, _: Lengths, root: int) -> None:
        self._single("all_reduce", kind, target.size, root)(*self._ends(source, target))

    def _reduce(self, kind: Kind, source: Array, target: Array, _: Lengths, root: int) -> None:
        self._single("reduce", kind, target.size, root)(*self._ends(source, target))

    def _reduce_scatter(
        self, kind: Kind, source: Array, target: Array, lengths: Lengths, root: int
    ) -> None:
        start, place = self._ends(source, target)
        if len(set(lengths)) == 1:
            self._single("reduce_scatter", kind, lengths[0], root)(start, place)
            return
        with self._group():
            for rank, length in enumerate(lengths):
                if length:
                    self._single("reduce", kind, length, rank)(start, place)
                start += length * source.itemsize

    def _broadcast(self, source: Array, target: Array, _: Lengths, root: int) -> None:
        self._single("broadcast", _MOVED, target.size, root)(*self._ends(None, target))

    def _all_gather(self, source: Array, target: Array, lengths: Lengths, root: int) -> None:
        parts = parts_by_rank(target, lengths)
        own = parts[self.rank] if source is None else source
        if len(set(lengths)) == 1:
            self._single("all_gather", _MOVED, lengths[0], root)(*self._ends(own, target))
            return
        peers = [peer for peer in range(self.size) if source is not None or peer != self.rank]
        self.exchange([(peer, own) for peer in peers], [(peer, parts[peer]) for peer in peers])

    def _ends(self, source: Array | None, target: Array) -> tuple[int, int]:
        """The addresses of source and target, which are equal in place."""
        place = self._address(target)
        return place if source is None else self._address(source), place

    def _gather(self, source: Array, target: Array, lengths: Lengths, root: int) -> None:
        parts = parts_by_rank(target, lengths) if self.rank == root else []
        self.exchange([(root, source)], list(enumerate(parts)))

    def _scatter(self, source: Array, target: Array, lengths: Lengths, root: int) -> None:
        parts = parts_by_rank(source, lengths) if self.rank == root else []
        self.exchange(list(enumerate(parts)), [(root, target)])

    def _all_to_all(self, source: Array, target: Array, lengths: Lengths, root: int) -> None:
        parts = parts_by_rank(target, lengths)
        outgoing, incoming = parts[: self.size], parts[self.size :]
        self.exchange(
            [(peer, outgoing[peer]) for peer in others(self.rank, self.size)],
            [(peer, incoming[peer]) for peer in others(self.rank, self.size)],
        )

    def failure(self) -> NcclError | None:
        """The error of the calls started so far, as far as this rank has detected it."""
        return None if self.ended else self._driver.async_error(self._comm)

    def abort(self) -> None:
        """End the communicator and its running work, on this rank alone."""
        if not self.ended:
            self.ended = True
            self._driver.abort(self._comm)

    def abandon(self) -> None:
        """Release nothing, because the process is about to end."""
        if not self.ended:
            self.ended = True
            # The object must not be garbage-collected: that would destroy the communicator.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._comm))

    def close(self) -> None:
        """Destroy the communicator. Collective; no work may run on it. May be called twice."""
        if not self.ended:
            self.ended = True
            self._driver.destroy(self._comm)
