"""all_reduce_many of device arrays, through packed buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from collectives.arrays.kinds import Output, address, copied, flat, is_plain
from collectives.calls import Operation
from collectives.calls.many import describe_many, inputs_of, outputs_of, reached
from collectives.calls.reductions import ReduceInput
from collectives.consistency.signature import check_text
from collectives.cuda.interface import DeviceArray
from collectives.cuda.runtime import cuda, on_gpu
from collectives.execution.engine import Engine
from collectives.gpu.backend import Devices
from collectives.gpu.buckets import BucketMemory
from collectives.lifecycle.futures import Handle
from collectives.reductions.buckets import check_bucket_bytes, check_many
from collectives.reductions.reduction import ReduceOp, as_op

Started = TypeVar("Started")


def begins_on_gpu(arrays: Sequence[Any]) -> bool:
    """Whether the first array lies on a GPU, as all must then."""
    # An iterator would lose its first element. What isn't a list is refused later.
    listed = hasattr(arrays, "__getitem__") and not isinstance(arrays, Mapping)
    return listed and len(arrays) > 0 and on_gpu(arrays[0])


class ManyOnGpus:
    """The fused reductions of one communicator's device arrays."""

    def __init__(self, engine: Engine, devices: Devices) -> None:
        self._engine, self._devices = engine, devices
        self._memory: BucketMemory | None = None

    def reduce(
        self,
        arrays: Sequence[Any],
        op: ReduceOp | str,
        out: Sequence[Any] | None,
        bucket_bytes: int | None,
        what: str | None,
    ) -> list[Any]:
        """Reduce the arrays."""

        def perform(operation: Operation) -> list[Any]:
            reduced: list[Any] = self._engine.perform(operation.signature, operation.run)
            return reduced

        return self._engine.whole(self._start, perform, arrays, op, out, bucket_bytes, what)

    def submit(
        self,
        arrays: Sequence[Any],
        op: ReduceOp | str,
        out: Sequence[Any] | None,
        bucket_bytes: int | None,
        what: str | None,
    ) -> Handle[Any]:
        """Enqueue the reductions now; the handle waits for the GPU."""
        enqueue = self._devices.enqueue
        return self._engine.whole(self._start, enqueue, arrays, op, out, bucket_bytes, what)

    def _start(
        self,
        start: Callable[[Operation], Started],
        arrays: Sequence[Any],
        op: ReduceOp | str,
        out: Sequence[Any] | None,
        bucket_bytes: int | None,
        what: str | None,
    ) -> Started:
        arrays, out = check_many(arrays, out)
        check_text(what)
        reduction, limit = as_op(op), check_bucket_bytes(bucket_bytes)
        given = _inputs(arrays, reduction)
        outputs = outputs_of(given, out)
        self._devices.check("all_reduce", reduction.value, {each.dtype for each in given})
        if self._memory is None:
            self._memory = BucketMemory(cuda())
        with self._memory.turn():
            return start(_operation(self._memory, given, outputs, reduction, limit, what))


def _inputs(arrays: Sequence[Any], op: ReduceOp) -> list[ReduceInput]:
    for index, array in enumerate(arrays):
        if array is not None and not on_gpu(array):
            raise TypeError(
                f"arrays[{index}] lies on the CPU: must lie on a GPU, as arrays[0] does"
            )
    return inputs_of(arrays, op)


def _operation(
    memory: BucketMemory,
    given: list[ReduceInput],
    outputs: list[Output],
    op: ReduceOp,
    limit: int,
    what: str | None,
) -> Operation:
    """Pack all arrays first and unpack last, so that no output is written before it is read.

    Allocations, and steps that may fail on one rank alone, precede the ranks' synchronization.
    """
    kinds = tuple((each.shape, each.array.dtype) for each in given)
    used = memory.set_for(kinds, limit, op)
    flats = [[flat(given[index].array) for index in each.indices] for each in used.buckets]
    packs = [each.table(arrays) for each, arrays in zip(used.buckets, flats, strict=True)]
    unpacks = [each.table([outputs[i].buffer for i in each.indices]) for each in used.buckets]
    sources = _sources(used.alone, given, outputs)

    def perform(engine: Engine) -> list[Any]:
        # Copies must also be kept until they have been used.
        memory.keep(used, flats, packs, unpacks, sources, outputs)
        for bucket, table in zip(used.buckets, packs, strict=True):
            bucket.pack(table)
        for index, source in zip(used.alone, sources, strict=True):
            engine.run("all_reduce", source, outputs[index].buffer, op=op)
        for bucket in used.buckets:
            engine.run("all_reduce", None, bucket.flat, op=op)
        for bucket, table in zip(used.buckets, unpacks, strict=True):
            bucket.unpack(table)
        return [output.deliver() for output in outputs]

    nbytes = sum(output.buffer.nbytes for output in outputs)
    signature = describe_many("all_reduce_many", op, kinds, limit, nbytes, what).on_gpu()
    return Operation(signature, perform, on_gpu=True)


def _sources(
    alone: list[int], given: list[ReduceInput], outputs: list[Output]
) -> list[DeviceArray | None]:
    """The flat inputs of arrays outside buckets, copied if they overlap another's output."""
    inputs, targets = [given[index] for index in alone], [outputs[index] for index in alone]
    ranges = [_bounds(each.array) for each in inputs]
    for index in reached(ranges, [_bounds(each.buffer) for each in targets]):
        inputs[index].array = copied(inputs[index].array)
    return [each.source_for(output) for each, output in zip(inputs, targets, strict=True)]


def _bounds(array: DeviceArray) -> tuple[int, int]:
    if not is_plain(array):
        return 0, 0  # it is copied in any case
    start = address(array)
    return start, start + array.nbytes
