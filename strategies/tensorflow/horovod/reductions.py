"""Reductions of tensors, by Horovod's names and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from collectives import Communicator
from collectives.consistency.signature import detail_of
from collectives.horovod.ops import Op, op_of, text_of
from collectives.horovod.process_sets import ProcessSet, ranks_of
from collectives.reductions.reduction import ReduceOp
from strategies.core.nest import map_by_kind
from strategies.tensorflow.horovod.calls import call_for_one, compare, compare_given, rows_of
from strategies.tensorflow.horovod.compression import Compression, Compressor, check_compressor
from strategies.tensorflow.horovod.differentiation import (
    LINEAR,
    compare_gradient,
    name_of,
    reduced,
)
from strategies.tensorflow.horovod.movements import gather_rows


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
) -> Any:
    """The ranks' tensors reduced, by default averaged, as a tensor of the same shape and dtype.

    Averages of integers, and their products with a factor, are rounded towards zero. Rows of
    IndexedSlices are joined. The gradient is reduced by the same op, Sum or Average; others have
    none. Raises ValueError for both `average` and `op`, and NotImplementedError for IndexedSlices
    with another op or a factor.
    """
    given = average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor
    return grouped_allreduce([tensor], *given, process_set, ignore_name_scope, name)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """`allreduce` of many tensors, in few messages."""
    comm = ranks_of(process_set)
    if not tensors:
        compare(comm, "allreduce of no tensors")
    reduce = partial(
        reduce_all,
        op=op_of(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        comm=comm,
        compression=compression,
    )
    what, apart = text_of(name), list(map(_is_exact, tensors))
    if check_compressor(compression).wire_dtype is None or len(set(apart)) < 2:
        return reduce(tensors, what=what)
    # Averages of floats that are compressed are sums of quotients.
    places = [place for place, each in enumerate(apart) if each]
    reduce = partial(reduce, what=detail_of(what, f"not compressed: {places}"))
    return map_by_kind(tensors, _is_exact, reduce, reduce)


def reduce_all(
    tensors: Sequence[Any],
    op: ReduceOp,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    comm: Communicator,
    compression: Compressor,
    what: str | None = None,
    call: str | None = None,
) -> list[Any]:
    """As `grouped_allreduce`. `what` is a text that must be equal on all ranks.

    `call` is as of `name_of`. With a compression all tensors but slices are floats, or none is.
    """
    compression = check_compressor(compression)
    slices = [each for each in tensors if _is_slices(each)]
    plain = [tf.convert_to_tensor(each) for each in tensors if not _is_slices(each)]
    factors = prescale_factor, postscale_factor
    if slices and (op not in LINEAR or factors != (1.0, 1.0)):
        raise NotImplementedError(
            "allreduce of IndexedSlices: must be by Sum or Average, without factors"
        )
    op_of_plain, wire = op, compression.wire_dtype
    if op is ReduceOp.MEAN and wire is not None and not all(map(_is_exact, plain)):
        # Before they are compressed, since their sum might overflow.
        op_of_plain = ReduceOp.SUM
        plain = [_divided(each, comm.size) for each in plain]
        what = detail_of(what, f"{op.value} of what is compressed to {wire.name}")
    # `what` gets all that the reduced tensors don't show.
    if factors != (1.0, 1.0):
        what = detail_of(what, f"factors {factors}")
    if slices:
        places = [place for place, each in enumerate(tensors) if _is_slices(each)]
        what = detail_of(what, f"{op.value}, IndexedSlices at {places}")
    pairs = [compression.compress(_scaled(each, prescale_factor)) for each in plain]
    given = [sent for sent, _ in pairs]
    if given:
        totals = reduced(comm, given, op_of_plain, what, call)
    else:
        totals = []
        compare_given(comm, "allreduce", what)
    results = iter(
        _scaled(compression.decompress(each, kept), postscale_factor)
        for each, (_, kept) in zip(totals, pairs, strict=True)
    )
    joined = iter([_joined_slices(comm, each, op, call) for each in slices])
    return [next(joined if _is_slices(each) else results) for each in tensors]


def _divided(tensor: Any, count: int) -> Any:
    """In the same dtype; integers are rounded towards zero."""
    wide = tf.float64 if tensor.dtype.is_integer else tensor.dtype
    return tf.cast(tf.cast(tensor, wide) / tf.cast(count, wide), tensor.dtype)


def _is_slices(tensor: Any) -> bool:
    return isinstance(tensor, tf.IndexedSlices)


def _is_exact(tensor: Any) -> bool:
    """Whether compression leaves it as it is."""
    return not (_is_slices(tensor) or tf.convert_to_tensor(tensor).dtype.is_floating)


def _joined_slices(comm: Communicator, slices: Any, op: ReduceOp, call: str | None) -> Any:
    name = "allreduce of IndexedSlices"

    def join(indices: Any, *shape: Any) -> Any:
        if shape:
            comm.barrier(f"{name} of shape {shape[0].tolist()}")
        return comm.all_gather(indices)

    own = tf.convert_to_tensor(slices.indices)
    shape = [] if slices.dense_shape is None else [tf.convert_to_tensor(slices.dense_shape)]
    indices = call_for_one(comm, name, join, [own, *shape], rows_of(own))
    values = gather_rows(comm, tf.convert_to_tensor(slices.values), call)
    if op is ReduceOp.MEAN:
        values = _divided(values, comm.size)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _scaled(tensor: Any, factor: float) -> Any:
    if factor == 1.0:
        return tensor
    narrow = tensor.dtype in (tf.float16, tf.bfloat16)
    wide = tf.float32 if narrow else tf.float64 if tensor.dtype.is_integer else tensor.dtype
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), tensor.dtype)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: Op = ReduceOp.MEAN,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduced, by default averaged, tensors; the first ranks get one more.

    The gradient is the gathered one, times the number of ranks for Sum, as Horovod's; other ops
    than Sum and Average have none. ValueError for a tensor without axes.
    """
    op, comm, compression = op_of(op, None), ranks_of(process_set), check_compressor(compression)
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
        raise ValueError("reducescatter: a tensor without axes: must have rows")

    def call(array: Any) -> Any:
        return comm.reduce_scatter(array, op).astype(array.dtype, copy=False)

    @tf.custom_gradient
    def scatter(sent: Any) -> Any:
        rows = call_for_one(comm, "reducescatter", call, [sent], rows_of(sent))
        call_name = name_of(comm)

        def gradient(given: Any) -> Any:
            if op not in LINEAR:
                raise NotImplementedError(f"reducescatter by {op.value}: has no gradient")
            factor = comm.size if op is ReduceOp.SUM else 1.0
            dense = _scaled(tf.convert_to_tensor(given), factor)
            return gather_rows(comm, dense, compare_gradient(comm, call_name))

        return rows, gradient

    compare_given(comm, "reducescatter", text_of(name, prescale_factor, postscale_factor))
    sent, kept = compression.compress(_scaled(tensor, prescale_factor))
    return _scaled(compression.decompress(scatter(sent), kept), postscale_factor)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: Op = ReduceOp.MEAN,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`reducescatter` of each tensor; the ranks have equally many."""
    compare(ranks_of(process_set), f"grouped_reducescatter of {len(tensors)}")
    return [
        reducescatter(
            each,
            compression=compression,
            op=op,
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        for each in tensors
    ]
