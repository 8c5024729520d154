"""Bound calls of device arrays: as `bound.bind`, on the path that the communicator uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.bound.bind import Call, bind
from collectives.calls import PASS
from collectives.calls.arguments import Rows, split_rows
from collectives.calls.counts import ANY_ROOM, check_room
from collectives.calls.movements import broadcast_signature, signature_of
from collectives.calls.objects import numbers_of_all
from collectives.calls.reductions import ReduceInput, reduce_scatter_signature
from collectives.consistency.signature import Signature
from collectives.cuda.interface import DeviceArray
from collectives.cuda.runtime import cuda
from collectives.execution.device_path import BoundCall, DevicePath, Kind, Move
from collectives.execution.engine import Engine
from collectives.reductions.reduction import ReduceOp
from collectives.transports.nccl_driver import NcclError

_BYTES = np.dtype(np.uint8)


class DeviceCalls:
    """Binds the calls of one communicator on one path, on GPU `number`."""

    def __init__(
        self,
        engine: Engine,
        path: DevicePath,
        number: int,
        failed: Callable[[NcclError], Exception],
    ) -> None:
        """`failed` converts an NCCL error."""
        self._engine, self._path, self._number, self._failed = engine, path, number, failed
        self._gpus = cuda()

    def bind(
        self, collective: str, array: DeviceArray, op: ReduceOp | str | None, root: int
    ) -> BoundCall | None:
        """A function (array, out) → result for arrays like this one, along axis 0.

        None where the path has no single call for it. The function returns PASS, before any side
        effect, for arguments that it does not support.
        """
        if not array.nbytes:
            return None
        if op is not None:
            return self._bind_reduction(collective, ReduceInput(array, op), root)
        if collective == "broadcast":
            move = self._path.bind(Kind(collective, None, _BYTES, (array.nbytes,), root))
            signature = broadcast_signature(array, root, None)
            return self._with_output(array, array.shape, signature, move, in_place=True)
        return self._bind_all_gather(array)

    def _bind_reduction(self, collective: str, given: ReduceInput, root: int) -> BoundCall | None:
        """all_reduce, reduce or reduce_scatter; None where elements must be converted."""
        array, shape, rank = given.array, given.shape, self._engine.rank
        if array.dtype != given.dtype:
            return None
        if collective == "all_reduce":
            move = self._path.bind(Kind(collective, given.op, given.dtype, (array.size,)))
            signature = given.signature(collective)
            return self._with_output(array, shape, signature, move, in_place=True)
        if collective == "reduce":
            move = self._path.bind(Kind(collective, given.op, given.dtype, (array.size,), root))
            signature = given.signature(collective, root)
            if rank != root:
                return self._refusing_capture(self._without_output(signature, move))
            bound = self._with_output(array, shape, signature, move, in_place=True)
            return self._refusing_capture(bound)
        if not shape:
            return None
        counts, rest = split_rows(shape[0], self._engine.size), shape[1:]
        lengths = [count * math.prod(rest) for count in counts]
        move = self._path.bind(Kind(collective, given.op, given.dtype, lengths))
        signature = reduce_scatter_signature(given, 0, None)
        return self._with_output(array, (counts[rank], *rest), signature, move, in_place=False)

    def _with_output(
        self,
        like: DeviceArray,
        shape: tuple[int, ...],
        signature: Signature,
        move: Move | None,
        *,
        in_place: bool,
    ) -> BoundCall | None:
        """A call whose result has this shape. `in_place`: `out` may be the array."""
        if move is None:
            return None
        dtype, empty, call = like.dtype, self._gpus.empty, self._call(signature, move)
        usable, fits = self._usable(), self._fits(dtype, shape.__eq__)

        def bound(array: DeviceArray, out: Any) -> Any:
            if not usable(array):
                return PASS
            if out is None:
                out = empty(shape, dtype)
            elif not (in_place and out is array) and not fits(out, array):
                return PASS
            return PASS if call(array, out) is PASS else out

        return bound

    def _without_output(self, signature: Signature, move: Move | None) -> BoundCall | None:
        """A call of which this rank gets no result, and of which the path uses no target."""
        if move is None:
            return None
        call, usable = self._call(signature, move), self._usable()

        def bound(array: DeviceArray, out: Any) -> Any:
            return call(array, array) if usable(array) else PASS

        return bound

    def _refusing_capture(self, bound: BoundCall | None) -> BoundCall | None:
        """PASS for a call that a graph captures: the general path refuses it on every rank."""
        if bound is None:
            return None
        current_stream = self._gpus.current_stream

        def checked(array: DeviceArray, out: Any) -> Any:
            return PASS if current_stream().capturing() else bound(array, out)

        return checked

    def _call(self, signature: Signature, move: Move) -> Call:
        failed = self._failed

        def run(source: DeviceArray, target: DeviceArray, index: int | None) -> None:
            try:
                move(source, target)
            except NcclError as error:
                raise failed(error) from error

        return bind(self._engine, signature.on_gpu(), run, path=self._path.name)

    def _bind_all_gather(self, like: DeviceArray) -> BoundCall | None:
        """The rows of each rank, whose numbers the ranks exchange in every call."""
        if not like.ndim:
            return None
        engine, path, failed, empty = self._engine, self._path, self._failed, self._gpus.empty
        count, rest, dtype = like.shape[0], like.shape[1:], like.dtype
        elements = math.prod(rest)
        known: list[list[int]] = []
        shape: tuple[int, ...] = ()
        lengths: list[int] = []
        move: Move | None = None

        def run(source: DeviceArray, target: DeviceArray | None, index: int | None) -> DeviceArray:
            nonlocal known, shape, lengths, move
            room = ANY_ROOM if target is None else target.shape[0]
            numbers = numbers_of_all(engine, count, room)
            if numbers != known:
                counts, rooms = zip(*numbers, strict=True)
                check_room(counts, rooms)
                shape, lengths = (sum(counts), *rest), [each * elements for each in counts]
                nbytes = [each * dtype.itemsize for each in lengths]
                move, known = path.bind(Kind("all_gather", None, _BYTES, nbytes)), numbers
            joined = empty(shape, dtype) if target is None else target
            if move is None:
                engine.run("all_gather", source.reshape(-1), joined.reshape(-1), lengths=lengths)
                return joined
            try:
                move(source, joined)
            except NcclError as error:
                raise failed(error) from error
            return joined

        signature = signature_of("all_gather", Rows(like, 0), None, None).on_gpu()
        call, usable = bind(engine, signature, run, path=path.name), self._usable()
        fits = self._fits(dtype, lambda given: len(given) > 0 and given[1:] == rest)

        def bound(array: DeviceArray, out: Any) -> Any:
            if not usable(array) or (out is not None and not fits(out, array)):
                return PASS
            return call(array, out)

        return bound

    def _usable(self) -> Callable[[DeviceArray], bool]:
        """Whether an array lies contiguous on the communicator's GPU, the current one."""
        number, current_device = self._number, self._gpus.current_device
        is_plain_on = self._gpus.is_plain_on

        def usable(array: DeviceArray) -> bool:
            return current_device() == number and is_plain_on(array, number)

        return usable

    def _fits(
        self, dtype: np.dtype[Any], matches: Callable[[tuple[int, ...]], bool]
    ) -> Callable[[Any, DeviceArray], bool]:
        """Whether `out` can take a result of a matching shape, apart from the array's memory."""
        kind, number = self._gpus.array_type, self._number
        is_plain_on, address = self._gpus.is_plain_on, self._gpus.address

        def fits(out: Any, array: DeviceArray) -> bool:
            if not (
                type(out) is kind
                and out.dtype == dtype
                and matches(out.shape)
                and is_plain_on(out, number)
            ):
                return False
            distance = address(out) - address(array)
            return bool(distance >= array.nbytes or -distance >= out.nbytes)

        return fits
