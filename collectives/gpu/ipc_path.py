"""Device arrays of ranks that share one GPU, which NCCL does not support, over CUDA IPC.

Each rank has an arena that its peers have opened as well. A collective runs in rounds: every rank
copies what others need of its array into its own arena, the host waits for this copy and for all
other hosts, and then every rank reads what it needs from the arenas.

An arena has two halves, used alternately, so that a round needs one barrier. A rank that arrives at
a barrier has waited for its own stream, and so for its reads of the round before: after the barrier
no rank reads that round's half any more, and the next round may overwrite it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.cuda.interface import Cuda, DeviceArray
from collectives.cuda.runtime import wait_for
from collectives.errors import BackendUnavailableError, in_step
from collectives.execution.device_path import DevicePath, Request
from collectives.gpu.stream_work import SideStream
from collectives.reductions.reduction import Reduction
from collectives.transports.parts import blocks_of, parts_by_rank

ARENA_BYTES = 32 << 20
"""Per rank. A multiple of 2 MiB, CUDA's mapping granularity, so that nothing else is shared."""

# Alignment of the slots in bytes: sufficient for every dtype, and fast to copy.
_ALIGNMENT = 16

# These collectives write one part for each rank.
_ONE_FOR_EACH = ("scatter", "all_to_all")

# Up to this size, folding everything once per rank is estimated from a GPU's bandwidth (not
# measured) to take less time than another barrier.
_SMALL_BYTES = 256 << 10


class _Round(NamedTuple):
    """The pieces that all ranks have written, readable until the next round."""

    piece: slice
    """The range of each part."""
    halves: list[DeviceArray]
    """The current half of every rank's arena."""
    most: int
    """Elements per slot; a half has one slot for each part."""

    def at(self, peer: int, slot: int, length: int) -> DeviceArray:
        """The elements in a peer's slot."""
        return self.halves[peer][slot * self.most :][:length]

    def of_all(self, slot: int, length: int) -> list[DeviceArray]:
        """The elements in that slot of every rank."""
        return [self.at(peer, slot, length) for peer in range(len(self.halves))]


class IpcPath(DevicePath):
    """Path over CUDA IPC. The host waits for its own GPU's work and for the other ranks."""

    name = "ipc"

    def __init__(
        self,
        cuda: Cuda,
        rank: int,
        size: int,
        *,
        barrier: Callable[[], object],
        gather: Callable[[bytes], list[bytes]],
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        """Open all ranks' arenas; BackendUnavailableError on every rank if any rank can't.

        `barrier` waits for all ranks, `gather` returns every rank's bytes in rank order; both raise
        if a rank does not arrive.
        """
        self._cuda, self._barrier, self._gather = cuda, barrier, gather
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
        """The first rank's problem, or None."""
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
        """Run the rounds; return after the last barrier, before the arenas are read."""
        if request.algorithm not in (None, self.name):
            problem = f"device arrays over CUDA IPC have {self.name!r} alone"
            raise in_step(ValueError(f"algorithm={request.algorithm!r}: {problem}"))
        reduction = request.reduction()
        if request.empty:
            return self.name
        with self._side.work(request.source, request.target):
            if reduction is None:
                self._move(request)
            elif request.collective == "reduce_scatter":
                self._reduce_scatter(request, reduction)
            else:
                self._reduce(request, reduction)
        return self.name

    def check_capture(self, collective: str, op: str | None, dtype: np.dtype[Any]) -> None:
        """Refuse every capture, because the host takes part in every call."""
        raise RuntimeError(
            "a graph can't capture collectives over CUDA IPC, in which the hosts synchronize:"
            " NCCL's can be captured"
        )

    # rounds

    def _rounds(
        self, sends: Sequence[DeviceArray], longest: int, slots: int, dtype: np.dtype[Any]
    ) -> Iterator[_Round]:
        """Write pieces of the parts into their slots, until the longest part is complete.

        All ranks pass the same numbers, and therefore make the same number of rounds.
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
        """The half of every arena that is written before the next barrier."""
        start = self._turn % 2 * self._half_bytes
        return [arena[start : start + self._half_bytes].view(dtype) for arena in self._arenas]

    def _arrive(self) -> None:
        """Wait until every rank has written its half, and has read the one before."""
        wait_for(self._stream.record())
        self._barrier()
        self._turn += 1

    def _fold(self, reduction: Reduction, pieces: Sequence[DeviceArray], out: DeviceArray) -> None:
        """Fold the ranks' pieces in rank order, and finish; none of them is `out`."""
        first = pieces[0]
        if len(pieces) == 1:
            _copy(first, out)
        for piece in pieces[1:]:
            self._cuda.fold(reduction.folds_as, first, piece, out)
            first = out
        if reduction.divides:
            self._cuda.divide(out, self._size)

    # reductions

    def _reduce(self, request: Request, reduction: Reduction) -> None:
        """Let one rank fold alone, because all ranks' kernels run on the same GPU.

        In an all_reduce of two ranks, or of few bytes, every rank folds, which saves a barrier.
        """
        target, everywhere = request.target, request.collective == "all_reduce"
        share = everywhere and self._size > 2 and target.nbytes > _SMALL_BYTES
        folds = self._rank == request.root or (everywhere and not share)
        for current in self._rounds([request.given], target.size, 1, target.dtype):
            out = target[current.piece]
            # The shared result goes into the other half, which is not read before the next barrier.
            folded = self._halves(target.dtype)[request.root][: out.size] if share else out
            if folds:
                self._fold(reduction, current.of_all(0, out.size), folded)
            if share:
                self._arrive()
                _copy(folded, out)

    def _reduce_scatter(self, request: Request, reduction: Reduction) -> None:
        """Each rank folds its part. The target may be this rank's part of the source."""
        target, lengths = request.target, request.lengths or ()
        parts = parts_by_rank(request.source, lengths)
        for current in self._rounds(parts, max(lengths), self._size, target.dtype):
            out = target[current.piece]
            if out.size:
                self._fold(reduction, current.of_all(self._rank, out.size), out)

    # movements

    def _move(self, request: Request) -> None:
        """Move the elements as bytes."""
        collective, target = request.collective, request.target
        lengths = [length * target.itemsize for length in request.lengths or [target.size]]
        longest, slots = max(lengths), self._size if collective in _ONE_FOR_EACH else 1
        if collective == "all_to_all":
            longest = max(int(length) for length in self._gather(str(longest).encode()))
        sends, receives = self._sends_and_receives(request, lengths)
        for current in self._rounds(sends, longest, slots, np.dtype(np.uint8)):
            for peer, slot, part in receives:
                # In place, the own part is already in the target.
                if peer != self._rank or request.source is not None:
                    out = part[current.piece]
                    _copy(current.at(peer, slot, out.size), out)

    def _sends_and_receives(
        self, request: Request, lengths: Sequence[int]
    ) -> tuple[list[DeviceArray], list[tuple[int, int, DeviceArray]]]:
        """The parts that this rank writes, by slot; and (peer, slot, part) of those it reads."""
        rank, size, root = self._rank, self._size, request.root
        source, target = request.given.view(np.uint8), request.target.view(np.uint8)
        if request.collective == "scatter":
            # The target is this rank's part alone.
            sends = parts_by_rank(source, lengths) if rank == root else []
            return sends, [(root, rank, target)]
        if request.collective == "gather" and rank != root:
            return [source], []
        given = parts_by_rank(source, lengths)
        parts = parts_by_rank(target, lengths)
        if request.collective == "broadcast":
            return given if rank == root else [], [(root, 0, parts[0])]
        if request.collective == "all_to_all":
            # The own part is already among the incoming ones.
            given[rank] = given[size + rank]
            return given[:size], [(peer, rank, parts[size + peer]) for peer in range(size)]
        # The source is this rank's part alone.
        own = given[rank] if request.source is None else source
        return [own], [(peer, 0, parts[peer]) for peer in range(size)]

    # End

    def close(self) -> None:
        """Free the own arena after all other ranks have closed it."""
        wait_for(self._stream.record())
        self._close_opened()
        self._barrier()
        own, self._arenas[self._rank] = self._arenas[self._rank], None
        if own is not None:
            self._cuda.free_arena(own)

    def _close_opened(self) -> None:
        for peer, arena in enumerate(self._arenas):
            if peer != self._rank and arena is not None:
                self._arenas[peer] = None
                self._cuda.close_arena(arena)

    def abandon(self) -> None:
        """Keep the own arena until the process ends, because peers may still read it."""
        # After the error that led here, the GPU may refuse every call.
        with contextlib.suppress(Exception):
            wait_for(self._stream.record())
        with contextlib.suppress(Exception):
            self._close_opened()


def _copy(source: DeviceArray, target: DeviceArray) -> None:
    """Enqueue a copy on the current stream."""
    if source.size:
        target[...] = source
