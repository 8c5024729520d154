"""all_reduce_many: the reduction of many arrays, fused into few messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from collectives.arrays.kinds import Output
from collectives.caching import LRU
from collectives.calls import Operation
from collectives.calls.reductions import ReduceInput
from collectives.consistency.signature import Signature, check_text
from collectives.execution.cost_model import bucket_of
from collectives.execution.engine import Engine
from collectives.reductions.buckets import (
    DEFAULT_BUCKET_BYTES,
    Bucket,
    Kinds,
    check_bucket_bytes,
    check_many,
    make_buckets,
)
from collectives.reductions.reduction import Array, ReduceOp, as_op
from collectives.schedules.paths import PACKED, QUICKEST, SHARED
from collectives.shm.layout import STAGE_BYTES
from collectives.shm.packed import SharedBucket

# A bucket's fixed costs may take this part of its time.
_FIXED = 0.05
# Of a bucket in the node's memory: once all have packed, and once all have folded.
_WAITS, _TOUCHED = 2, 5

_on_gpu: Callable[[ReduceInput], bool] = attrgetter("on_gpu")


Part = SharedBucket | Bucket


class Parts:
    """The buckets of the lists that one engine reduces, and the memory in which it does."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._costs = engine, engine.costs
        self._kept: LRU[tuple[Kinds, int, ReduceOp], list[Part]] = LRU()

    def forget(self) -> None:
        """Cut into buckets anew, and select their paths anew."""
        self._kept.clear()

    def find(self, kinds: Kinds, limit: int, op: ReduceOp) -> list[Part]:
        """The buckets for arrays of these kinds; the same on all ranks."""
        if self._costs is not self._engine.costs:
            self._costs = self._engine.costs
            self.forget()
        key = (kinds, limit, op)
        parts = self._kept.recall(key)
        if parts is None:
            parts = [self._part(each, op) for each in make_buckets(kinds, limit)]
            self._kept.put(key, parts)
        return parts

    def _part(self, bucket: Bucket, op: ReduceOp) -> Part:
        """The path of a bucket, which all ranks select alike."""
        engine, node = self._engine, self._engine.node
        nbytes = bucket.length * bucket.dtype.itemsize
        if node is None or not node.memory_is_all or not 0 < nbytes <= STAGE_BYTES:
            return bucket
        paths = engine.paths("all_reduce", op, bucket.dtype)
        if engine.choose("all_reduce", nbytes, paths) not in (SHARED, QUICKEST):
            return bucket
        return SharedBucket(node.packed(op, bucket.dtype), bucket)


class Many:
    """The fused reductions of one communicator."""

    def __init__(self, engine: Engine) -> None:
        """`engine` makes the blocking calls; another one may run the operations as well."""
        self._engine = engine
        self._parts: dict[Engine, Parts] = {engine: Parts(engine)}

    def bucket_bytes(self, given: int | None) -> int:
        """The most that a bucket holds: as given, or else what the ranks' connection asks for."""
        limit = check_bucket_bytes(given)
        node = self._engine.node
        if given is not None or node is None or not node.memory_is_all:
            return limit
        costs = self._engine.costs
        fixed = costs.shared_start + _WAITS * costs.shared_latency * self._engine.size
        enough = fixed / _FIXED * costs.shared_bandwidth / _TOUCHED
        return min(bucket_of(int(enough)), STAGE_BYTES, DEFAULT_BUCKET_BYTES)

    def forget(self) -> None:
        """Cut the lists of blocking calls into buckets anew, and select their paths anew."""
        self._parts[self._engine].forget()

    def _parts_on(self, engine: Engine) -> Parts:
        """An engine has memory of its own, which only its own buckets use."""
        found = self._parts.get(engine)
        return self._parts.setdefault(engine, Parts(engine)) if found is None else found

    def operation(
        self,
        arrays: Sequence[Any],
        op: ReduceOp | str,
        out: Sequence[Any] | None,
        bucket_bytes: int | None,
        what: str | None = None,
    ) -> tuple[Operation, list[Part]]:
        """The reductions of many arrays, one collective for each bucket; and its buckets."""
        arrays, out = check_many(arrays, out)
        check_text(what)
        reduction, limit = as_op(op), self.bucket_bytes(bucket_bytes)
        given = inputs_of(arrays, reduction)
        if any(map(_on_gpu, given)):
            raise TypeError("some of the arrays lie on a GPU, and some on the CPU: must lie on one")
        outputs = outputs_of(given, out)
        kinds = tuple((each.shape, each.dtype) for each in given)
        parts = self._parts[self._engine].find(kinds, limit, reduction)
        # Arrays of different dtypes may have means of the same one.
        called = tuple((each.shape, each.array.dtype) for each in given)
        if out is not None and len(parts) > 1:
            inputs, buffers = [each.array for each in given], [each.buffer for each in outputs]
            for index in overlapping(inputs, buffers):
                given[index].array = given[index].array.copy()

        def perform(engine: Engine) -> list[Any]:
            blocking = engine is self._engine
            own = parts if blocking else self._parts_on(engine).find(kinds, limit, reduction)
            for part in own:
                if isinstance(part, SharedBucket):
                    engine.path = PACKED
                    engine.errstate.run(_reduce_in_stage, part, given, outputs)
                elif len(part.slots) == 1:
                    index = part.slots[0].index
                    source, target = given[index].source_for(outputs[index]), outputs[index].buffer
                    engine.run("all_reduce", source, target, op=reduction)
                else:
                    _reduce_packed(engine, reduction, given, outputs, part)
            return [output.deliver() for output in outputs]

        nbytes = sum(output.buffer.nbytes for output in outputs)
        signature = describe_many("all_reduce_many", reduction, called, limit, nbytes, what)
        return Operation(signature, perform), parts


def inputs_of(arrays: Sequence[Any], op: ReduceOp) -> list[ReduceInput]:
    """The arrays, each of which errors name by its position."""
    return [ReduceInput(array, op, f"arrays[{index}]") for index, array in enumerate(arrays)]


def outputs_of(given: list[ReduceInput], out: Sequence[Any] | None) -> list[Output]:
    """Where the results go: into the arrays of `out` if there are such, else into new ones."""
    if out is None:
        return [each.output(None) for each in given]
    pairs = enumerate(zip(given, out, strict=True))
    return [each.output(place, f"out[{index}]") for index, (each, place) in pairs]


def overlapping(inputs: list[Array], outputs: list[Array]) -> list[int]:
    """The inputs that lie in another array's output, which may be written before they are read."""
    bounds = list(map(_bounds, outputs))
    return reached(bounds if inputs is outputs else list(map(_bounds, inputs)), bounds)


def reached(inputs: list[tuple[int, int]], outputs: list[tuple[int, int]]) -> list[int]:
    """As `overlapping`, of arrays between addresses."""
    starts, stops = np.array(outputs, np.int64).reshape(-1, 2).T
    first, end = np.array(inputs, np.int64).reshape(-1, 2).T
    # Of all outputs those that begin before the input's end, without those that end before it.
    inside = np.searchsorted(np.sort(starts), end) - np.searchsorted(np.sort(stops), first, "right")
    own = (starts < end).astype(int) - (stops <= first)
    found: list[int] = np.flatnonzero(inside > own).tolist()
    return found


def _bounds(array: Array) -> tuple[int, int]:
    if not array.flags.c_contiguous:
        return byte_bounds(array)
    # A third of the time that NumPy's function takes.
    start: int = array.__array_interface__["data"][0]
    return start, start + array.nbytes


def describe_many(
    collective: str,
    op: ReduceOp,
    kinds: Kinds,
    bucket_bytes: int,
    nbytes: int = 0,
    what: str | None = None,
) -> Signature:
    """The call: all shapes, and the dtypes with how many arrays in a row have each."""
    runs = [(name, len(list(run))) for name, run in groupby(dtype.name for _, dtype in kinds)]
    dtypes = "+".join(name if count == 1 else f"{count}×{name}" for name, count in runs)
    shapes = tuple(shape for shape, _ in kinds)
    detail = f"{len(kinds)} array{'s' * (len(kinds) != 1)}, bucket_bytes={bucket_bytes}"
    if what is not None:
        detail = f"{detail}, {what}"
    return Signature(collective, op.value, dtypes, shapes, None, detail, nbytes)


def _reduce_in_stage(bucket: SharedBucket, given: list[ReduceInput], outputs: list[Output]) -> None:
    views = bucket.reduce([each.converted() for each in bucket.pick(given)])
    for output, view in zip(bucket.pick(outputs), views, strict=True):
        output.buffer[...] = view.reshape(-1)


def _reduce_packed(
    engine: Engine,
    op: ReduceOp,
    given: list[ReduceInput],
    outputs: list[Output],
    bucket: Bucket,
) -> None:
    packed: Array = engine.work(bucket.length, bucket.dtype)
    flats = [given[slot.index].flat() for slot in bucket.slots]
    np.concatenate(flats, out=packed)
    engine.run("all_reduce", None, packed, op=op)
    for slot in bucket.slots:
        outputs[slot.index].buffer[...] = packed[slot.start : slot.stop]
