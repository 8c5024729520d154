"""all_reduce_many of device arrays, through packed buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np

from collectives.arrays.kinds import Output, address, copied, flat, is_plain
from collectives.caching import LRU
from collectives.calls import Operation
from collectives.calls.many import describe_many, inputs_of, outputs_of, reached
from collectives.calls.reductions import ReduceInput
from collectives.consistency.signature import Signature, check_text
from collectives.cuda.interface import DeviceArray
from collectives.cuda.runtime import cuda, on_gpu
from collectives.execution.engine import Engine
from collectives.gpu.backend import Devices
from collectives.gpu.buckets import BucketMemory, BucketSet, DeviceBucket, Table
from collectives.lifecycle.futures import Handle
from collectives.reductions.buckets import Kinds, check_bucket_bytes, check_many
from collectives.reductions.reduction import ReduceOp, as_op, reduction_for

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
        self._memories: dict[int, BucketMemory] = {}
        self._signatures: LRU[tuple[Kinds, ReduceOp, int, str | None], Signature] = LRU()

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

        turn = BucketMemory.turn
        return self._engine.whole(self._start, perform, turn, arrays, op, out, bucket_bytes, what)

    def submit(
        self,
        arrays: Sequence[Any],
        op: ReduceOp | str,
        out: Sequence[Any] | None,
        bucket_bytes: int | None,
        what: str | None,
    ) -> Handle[Any]:
        """Enqueue the reductions now; the handle waits for the GPU."""
        held: list[Operation] = []

        @contextmanager
        def turn(memory: BucketMemory) -> Iterator[None]:
            with self._devices.beside(held), memory.turn():
                yield

        def start(operation: Operation) -> Handle[Any]:
            held.append(operation)
            return self._devices.enqueue(operation)

        return self._engine.whole(self._start, start, turn, arrays, op, out, bucket_bytes, what)

    def _start(
        self,
        start: Callable[[Operation], Started],
        turn: Callable[[BucketMemory], AbstractContextManager[None]],
        arrays: Sequence[Any],
        op: ReduceOp | str,
        out: Sequence[Any] | None,
        bucket_bytes: int | None,
        what: str | None,
    ) -> Started:
        in_place = out is arrays
        arrays, out = check_many(arrays, out)
        if in_place:
            out = arrays
        check_text(what)
        reduction, limit = as_op(op), check_bucket_bytes(bucket_bytes)
        kinds = _plain_kinds(arrays, out, reduction)
        if kinds is not None:
            memory = self._memory_for(reduction, {dtype for _, dtype in kinds})
            with turn(memory):
                used = memory.set_for(kinds, limit, reduction)
                if not used.alone:
                    signature = self._signature(kinds, reduction, limit, what)
                    results = [memory.cuda.empty(*kind) for kind in kinds] if out is None else out
                    return start(
                        _plain_operation(memory, used, arrays, results, reduction, signature)
                    )
        given = _inputs(arrays, reduction)
        outputs = outputs_of(given, out)
        memory = self._memory_for(reduction, {each.dtype for each in given})
        with turn(memory):
            return start(_operation(memory, given, outputs, reduction, limit, what))

    def _memory_for(self, op: ReduceOp, dtypes: set[np.dtype[Any]]) -> BucketMemory:
        """On the current GPU, after the check of a call."""
        self._devices.check("all_reduce", op.value, dtypes)
        number = cuda().current_device()
        if number not in self._memories:
            self._memories[number] = BucketMemory(cuda())
        return self._memories[number]

    def _signature(self, kinds: Kinds, op: ReduceOp, limit: int, what: str | None) -> Signature:
        """As `describe_many`, which takes longer than the rest of the call."""
        key = kinds, op, limit, what
        found = self._signatures.recall(key)
        if found is None:
            nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds)
            made = describe_many("all_reduce_many", op, kinds, limit, nbytes, what)
            found = self._signatures.put(key, made.on_gpu())
        return found


def _plain_kinds(arrays: list[Any], out: list[Any] | None, op: ReduceOp) -> Kinds | None:
    """The kinds of device arrays that are reduced as they are, into such arrays; None of others.

    To convert thousands of arrays would take longer than to reduce them.
    """
    gpus = cuda()
    every = arrays if out is None or out is arrays else [*arrays, *out]
    if set(map(type, every)) != {gpus.array_type}:
        return None
    number = gpus.current_device()
    if not all(gpus.is_plain_on(each, number) for each in every):
        return None
    kinds = tuple((each.shape, each.dtype) for each in arrays)
    try:
        if any(
            reduction_for(op, each, True).dtype != each for each in {dtype for _, dtype in kinds}
        ):
            return None
    except TypeError:
        return None  # the general path names the array
    if every is not arrays and kinds != tuple((each.shape, each.dtype) for each in out or ()):
        return None
    return kinds


def _plain_operation(
    memory: BucketMemory,
    used: BucketSet,
    arrays: list[DeviceArray],
    results: list[DeviceArray],
    op: ReduceOp,
    signature: Signature,
) -> Operation:
    """As `_operation`, of arrays that all have places in buckets."""

    def tables(places: list[DeviceArray]) -> list[Table]:
        at = list(map(memory.cuda.address, places)).__getitem__
        return [
            each.table_at(tuple(map(at, each.indices)), each.flat.dtype) for each in used.buckets
        ]

    packs = tables(arrays)
    unpacks = packs if results is arrays else tables(results)

    def perform(engine: Engine) -> list[Any]:
        memory.keep(used, packs, unpacks, arrays, results)
        _reduce(engine, op, used.buckets, packs, unpacks)
        return list(results)

    return Operation(signature, perform, on_gpu=True)


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
        targets = [outputs[index].buffer for index in used.alone]
        alone = list(zip(sources, targets, strict=True))
        _reduce(engine, op, used.buckets, packs, unpacks, alone)
        return [output.deliver() for output in outputs]

    nbytes = sum(output.buffer.nbytes for output in outputs)
    signature = describe_many("all_reduce_many", op, kinds, limit, nbytes, what).on_gpu()
    return Operation(signature, perform, on_gpu=True)


def _reduce(
    engine: Engine,
    op: ReduceOp,
    buckets: list[DeviceBucket],
    packs: list[Table],
    unpacks: list[Table],
    alone: Sequence[tuple[DeviceArray | None, DeviceArray]] = (),
) -> None:
    """Reduce the buckets, and the pairs of source and target outside of them."""
    for bucket, table in zip(buckets, packs, strict=True):
        bucket.pack(table)
    for source, target in alone:
        engine.run("all_reduce", source, target, op=op)
    for bucket in buckets:
        engine.run("all_reduce", None, bucket.flat, op=op)
    for bucket, table in zip(buckets, unpacks, strict=True):
        bucket.unpack(table)


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
