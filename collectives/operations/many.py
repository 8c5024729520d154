"""all_reduce_many: the reduction of many arrays, fused into few messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import Output
from collectives.engine import Engine
from collectives.fusion import Bucket, check_bucket_bytes, check_many, plan_buckets
from collectives.operations import Operation
from collectives.operations.reductions import ReduceInput
from collectives.reduction import Array, ReduceOp, as_op, finish


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
    buckets = plan_buckets(tuple((each.shape, each.dtype) for each in given), limit)

    def perform(engine: Engine) -> list[Any]:
        for bucket in buckets:
            if len(bucket.slots) == 1:
                _reduce_alone(engine, reduction, given, outputs, bucket.slots[0].index)
            else:
                _reduce_packed(engine, reduction, given, outputs, bucket)
        return [output.deliver() for output in outputs]

    return perform


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
