"""all_reduce_many: the reduction of many arrays, fused into few messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from collectives.arrays import Output
from collectives.engine import Engine
from collectives.fusion import Bucket, Kinds, check_bucket_bytes, check_many, make_plan
from collectives.operations import Operation
from collectives.operations.reductions import ReduceInput
from collectives.reduction import Array, ReduceOp, as_op, finish
from collectives.signature import Signature


def all_reduce_many(
    arrays: Sequence[Any],
    op: ReduceOp | str,
    out: Sequence[Any] | None,
    bucket_bytes: int | None,
) -> Operation:
    """The reductions of many arrays, one collective for each bucket."""
    check_many(arrays, out)
    reduction, limit = as_op(op), check_bucket_bytes(bucket_bytes)
    given = [ReduceInput(array, reduction) for array in arrays]
    outs = out if out is not None else [None] * len(given)
    outputs = [each.output(place) for each, place in zip(given, outs, strict=True)]
    kinds = tuple((each.shape, each.dtype) for each in given)
    plan = make_plan(kinds, limit)
    if out is not None and len(plan.buckets) > 1:
        _keep_inputs(given, outputs)

    def perform(engine: Engine) -> list[Any]:
        for bucket in plan.buckets:
            if len(bucket.slots) == 1:
                _reduce_alone(engine, reduction, given, outputs, bucket.slots[0].index)
            else:
                _reduce_packed(engine, reduction, given, outputs, bucket)
        return [output.deliver() for output in outputs]

    nbytes = sum(output.buffer.nbytes for output in outputs)
    return Operation(_signature(reduction, kinds, limit, nbytes), perform)


def _keep_inputs(given: list[ReduceInput], outputs: list[Output]) -> None:
    """Copy each input that lies in another array's output, which may be written before."""
    starts, stops = np.array([byte_bounds(each.buffer) for each in outputs]).T
    for index, each in enumerate(given):
        start, stop = byte_bounds(each.array)
        overlapping = (starts < stop) & (start < stops)
        overlapping[index] = False
        if overlapping.any():
            each.array = each.array.copy()


def _signature(op: ReduceOp, kinds: Kinds, bucket_bytes: int, nbytes: int) -> Signature:
    """The call: all shapes, and the dtypes with how many arrays in a row have each."""
    runs = [(name, len(list(run))) for name, run in groupby(dtype.name for _, dtype in kinds)]
    dtypes = "+".join(name if count == 1 else f"{count}×{name}" for name, count in runs)
    shapes = tuple(shape for shape, _ in kinds)
    detail = f"{len(kinds)} arrays, bucket_bytes={bucket_bytes}"
    return Signature("all_reduce_many", op.value, dtypes, shapes, None, detail, nbytes)


def _reduce_alone(
    engine: Engine, op: ReduceOp, given: list[ReduceInput], outputs: list[Output], index: int
) -> None:
    target = outputs[index].buffer
    engine.run("all_reduce", given[index].source_for(outputs[index]), target, op=op)
    finish(op, target, engine.size)


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
    finish(op, packed, engine.size)
    for slot in bucket.slots:
        outputs[slot.index].buffer[...] = packed[slot.start : slot.stop]
