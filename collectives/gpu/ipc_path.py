"""Device arrays of ranks that share one GPU, which NCCL refuses to serve.

Each rank has an arena that its peers have open as well. A collective goes in rounds: every rank
lays down in its own arena what others need of its array, the host waits until it is there and for
all the other hosts, and then every rank reads from the arenas what it needs.

An arena has two halves, which are used in turn, so that the ranks meet once in a round. Whoever
comes to a meeting has waited for its own stream first, and so for what it read in the round before:
after the meeting nobody reads that round's half any more, and it may be written in the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.cuda.interface import Cuda, DeviceArray, Event
from collectives.cuda.runtime import wait_for
from collectives.errors import BackendUnavailableError, in_step
from collectives.execution.device_path import DevicePath, Request
from collectives.gpu.side_stream import SideStream
from collectives.reductions.reduction import ReduceOp, check_reducible
from collectives.shm.copy_in_copy_out import blocks_of
from collectives.transports.base import parts_by_rank

ARENA_BYTES = 32 << 20
"""Of each rank. A multiple of 2 MiB: what CUDA maps, so that nothing else is shared with it."""

# Where slots begin: at any element's place, and where copies are quick.
_ALIGNMENT = 16

# These lay down a part for each rank.
_ONE_FOR_EACH = ("scatter", "all_to_all")

# Up to here it takes a GPU less time to fold everything once for each rank than the ranks to meet
# once more. An estimate from a GPU's bandwidth, not a measurement.
_SMALL_BYTES = 256 << 10


class _Round(NamedTuple):
    """What all ranks have laid down, to be read until the next one."""

    piece: slice
    """What it is of each part."""
    halves: list[DeviceArray]
    """Of the ranks' arenas."""
    most: int
    """The elements that a slot can hold: a half has one for each part."""

    def at(self, peer: int, slot: int, length: int) -> DeviceArray:
        """The elements in a peer's slot."""
        return self.halves[peer][slot * self.most :][:length]

    def of_all(self, slot: int, length: int) -> list[DeviceArray]:
        """The elements in every rank's slot of that number."""
        return [self.at(peer, slot, length) for peer in range(len(self.halves))]


class IpcPath(DevicePath):
    """Through CUDA IPC. The host waits for its own GPU's work and for the other ranks."""

    name = "ipc"

    def __init__(
        self,
        cuda: Cuda,
        rank: int,
        size: int,
        *,
        meet: Callable[[], object],
        gather: Callable[[bytes], list[bytes]],
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        """Open all ranks' arenas. BackendUnavailableError on every rank where any can't.

        `meet` waits for all ranks, `gather` gives every rank's bytes in rank order; both raise
        where a rank doesn't come.
        """
        self._cuda, self._meet, self._gather = cuda, meet, gather
        self._rank, self._size, self._half_bytes = rank, size, arena_bytes // 2
        self._side, self._turn = SideStream(cuda), 0
        self._stream = self._side.stream
        self._arenas: list[DeviceArray] = [None] * size
        try:
            problem = self._open_arenas(arena_bytes)
            if problem is not None:
                self.close()
                raise BackendUnavailableError(f"CUDA IPC: {problem}")
        except BaseException:
            self.abandon()
            raise

    def _open_arenas(self, nbytes: int) -> str | None:
        """What went wrong, on whichever rank."""
        problem, handle = "", b""
        try:
            arena = self._arenas[self._rank] = self._cuda.allocate_arena(nbytes)
            handle = self._cuda.export_arena(arena)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        handles = self._gather(handle)
        try:
            for peer in range(self._size if all(handles) else 0):
                if peer != self._rank:
                    self._arenas[peer] = self._cuda.open_arena(handles[peer], nbytes)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problems = [text.decode() for text in self._gather(problem.encode())]
        return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), None)

    def run(self, request: Request) -> str:
        """Take part in rounds; return when all have met in the last one, before it is read."""
        if request.algorithm not in (None, self.name):
            there = f"device arrays over CUDA IPC have {self.name!r} alone"
            raise in_step(ValueError(f"algorithm={request.algorithm!r}: {there}"))
        if request.op is not None:
            try:
                check_reducible(request.op, request.target.dtype)
            except TypeError as error:
                raise in_step(error) from None
        if request.empty:
            return self.name
        with self._side.work(request.source, request.target):
            if request.op is None:
                self._move(request)
            elif request.collective == "reduce_scatter":
                self._reduce_scatter(request, request.op)
            else:
                self._reduce(request, request.op)
        return self.name

    def check_capture(self, collective: str, op: str | None, dtype: np.dtype[Any]) -> None:
        """The host takes part in every call."""
        raise RuntimeError("a graph can't capture ranks that meet: NCCL's collectives can be")

    # rounds

    def _rounds(
        self, sends: Sequence[DeviceArray], longest: int, slots: int, dtype: np.dtype[Any]
    ) -> Iterator[_Round]:
        """Lay down a piece of each part in the slot of its number, until the longest is through.

        All ranks give the same numbers, and so meet equally often.
        """
        most = self._half_bytes // slots // _ALIGNMENT * _ALIGNMENT // dtype.itemsize
        for piece in blocks_of(longest, most):
            current = _Round(piece, self._halves(dtype), most)
            for slot, part in enumerate(sends):
                content = part[piece]
                _copy(content, current.at(self._rank, slot, content.size))
            self._arrive()
            yield current

    def _halves(self, dtype: np.dtype[Any]) -> list[DeviceArray]:
        """Of all ranks' arenas, those that are written before the next meeting."""
        start = self._turn % 2 * self._half_bytes
        return [arena[start : start + self._half_bytes].view(dtype) for arena in self._arenas]

    def _arrive(self) -> None:
        """Wait until everybody's half is written, and the one before it read."""
        wait_for(self._stream.record())
        self._meet()
        self._turn += 1

    def _fold(self, op: ReduceOp, pieces: Sequence[DeviceArray], out: DeviceArray) -> None:
        """Fold the ranks' pieces, none of which is `out`, in rank order."""
        first = pieces[0]
        if len(pieces) == 1:
            _copy(first, out)
        for piece in pieces[1:]:
            self._cuda.fold(op, first, piece, out)
            first = out
        if op is ReduceOp.MEAN:
            self._cuda.divide(out, self._size)

    # reductions

    def _reduce(self, request: Request, op: ReduceOp) -> None:
        """One rank folds alone: it is the same GPU, whichever rank's kernels run on it.

        Of an all_reduce of two ranks, or of a few bytes, both fold, instead of meeting once more.
        """
        target, everywhere = request.target, request.collective == "all_reduce"
        share = everywhere and self._size > 2 and target.nbytes > _SMALL_BYTES
        folds = self._rank == request.root or (everywhere and not share)
        for current in self._rounds([_given(request)], target.size, 1, target.dtype):
            place = target[current.piece]
            # What is shared goes into the other half: nobody reads that before the next meeting.
            folded = self._halves(target.dtype)[request.root][: place.size] if share else place
            if folds:
                self._fold(op, current.of_all(0, place.size), folded)
            if share:
                self._arrive()
                _copy(folded, place)

    def _reduce_scatter(self, request: Request, op: ReduceOp) -> None:
        """The target may be this rank's part of the source."""
        target, lengths = request.target, request.lengths or ()
        parts = parts_by_rank(request.source, lengths)
        for current in self._rounds(parts, max(lengths), self._size, target.dtype):
            place = target[current.piece]
            if place.size:
                self._fold(op, current.of_all(self._rank, place.size), place)

    # movements

    def _move(self, request: Request) -> None:
        """Bytes, of whatever dtype."""
        collective, target = request.collective, request.target
        lengths = [length * target.itemsize for length in request.lengths or [target.size]]
        longest, slots = max(lengths), self._size if collective in _ONE_FOR_EACH else 1
        if collective == "all_to_all":
            longest = max(int(length) for length in self._gather(str(longest).encode()))
        sends, receives = self._sends_and_receives(request, lengths)
        for current in self._rounds(sends, longest, slots, np.dtype(np.uint8)):
            for peer, slot, part in receives:
                # In place the own part is there already.
                if peer != self._rank or request.source is not None:
                    place = part[current.piece]
                    _copy(current.at(peer, slot, place.size), place)

    def _sends_and_receives(
        self, request: Request, lengths: Sequence[int]
    ) -> tuple[list[DeviceArray], list[tuple[int, int, DeviceArray]]]:
        """What this rank lays down, slot by slot; the peer and the slot of what it reads."""
        rank, size, root = self._rank, self._size, request.root
        source = _given(request).view(np.uint8)
        given = parts_by_rank(source, lengths)
        parts = parts_by_rank(request.target.view(np.uint8), lengths)
        if request.collective == "broadcast":
            return given if rank == root else [], [(root, 0, parts[0])]
        if request.collective == "scatter":
            return given if rank == root else [], [(root, rank, parts[rank])]
        if request.collective == "all_to_all":
            # The own part lies among the incoming ones from the beginning.
            given[rank] = given[size + rank]
            return given[:size], [(peer, rank, parts[size + peer]) for peer in range(size)]
        everything = [(peer, 0, parts[peer]) for peer in range(size)]
        if request.collective == "all_gather":
            # A source is this rank's part alone.
            return [given[rank] if request.source is None else source], everything
        return [given[rank]], everything if rank == root else []

    # the end

    def wait(self, name: str, event: Event, timeout: float | None) -> None:
        """The ranks are through already: what is left is this GPU's own work."""
        wait_for(event, timeout)

    def close(self) -> None:
        """The own arena is freed when all others have closed it."""
        wait_for(self._stream.record())
        self._close_opened()
        self._meet()
        own, self._arenas[self._rank] = self._arenas[self._rank], None
        if own is not None:
            self._cuda.free_arena(own)

    def _close_opened(self) -> None:
        for peer, arena in enumerate(self._arenas):
            if peer != self._rank and arena is not None:
                self._arenas[peer] = None
                self._cuda.close_arena(arena)

    def abandon(self) -> None:
        """The own arena stays until the process ends: peers may still read it."""
        # Whatever led here may have left a GPU that refuses everything.
        with contextlib.suppress(Exception):
            wait_for(self._stream.record())
        with contextlib.suppress(Exception):
            self._close_opened()


def _given(request: Request) -> DeviceArray:
    """Where the input lies."""
    return request.target if request.source is None else request.source


def _copy(source: DeviceArray, target: DeviceArray) -> None:
    """Put a copy on the current stream."""
    if source.size:
        target[...] = source
