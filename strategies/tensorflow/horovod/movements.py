"""Movements of tensors, by Horovod's names and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from collectives import Communicator
from collectives.horovod.joining import join as wait_for_all
from collectives.horovod.ops import text_of
from collectives.horovod.process_sets import ProcessSet, ranks_of, root_of
from collectives.horovod.rows import check_rows, lengths_of
from collectives.reductions.reduction import ReduceOp
from strategies.tensorflow.horovod.calls import (
    call_alone,
    call_for_one,
    compare,
    compare_given,
    names_of,
    rows_of,
    run_in_order,
)
from strategies.tensorflow.horovod.differentiation import (
    compare_gradient,
    name_of,
    reduced_gradients,
)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """The ranks' tensors, joined along axis 0, in which their lengths may differ.

    The gradient is the average of the ranks' gradients of these rows, as Horovod's.
    """
    comm = ranks_of(process_set)
    compare_given(comm, "allgather", text_of(name))
    return gather_rows(comm, tf.convert_to_tensor(tensor))


def gather_rows(comm: Communicator, tensor: Any, call: str | None = None) -> Any:
    """As `allgather`. Of a tensor without axes one row. `call` is as of `name_of`."""
    if tensor.shape.rank == 0:
        tensor = tensor[None]

    @tf.custom_gradient
    def gather(tensor: Any) -> Any:
        rows = call_for_one(comm, "allgather", comm.all_gather, [tensor], rows_of(tensor))
        name = name_of(comm, call)

        def gradient(given: Any) -> Any:
            (average,) = reduced_gradients(comm, [given], ReduceOp.MEAN, name)
            own = tf.shape(tensor)[:1]
            counts = call_for_one(comm, "allgather", comm.all_gather, [own], [comm.size])
            begin = tf.reduce_sum(counts[: comm.rank])
            return tf.ensure_shape(average[begin : begin + own[0]], tensor.shape)

        return rows, gradient

    return gather(tensor)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """`allgather` of each tensor; the ranks have equally many."""
    comm = ranks_of(process_set)
    compare(comm, f"grouped_allgather of {len(tensors)}")
    compare_given(comm, "grouped_allgather", text_of(name))
    return [allgather(each, process_set=process_set) for each in tensors]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """The root's tensor; the other ranks' have equal shape and dtype.

    `root_rank` is its number among all ranks, as in every call with a process set. The root's
    gradient is the average of the ranks' gradients, the others' is zero, as Horovod's.
    """
    comm, root = ranks_of(process_set), root_of(process_set, root_rank)

    @tf.custom_gradient
    def send(tensor: Any) -> Any:
        call = partial(_broadcast, comm, root)
        sent = call_for_one(comm, "broadcast", call, [tensor], tensor.shape)
        call_name = name_of(comm)

        def gradient(given: Any) -> Any:
            (average,) = reduced_gradients(comm, [given], ReduceOp.MEAN, call_name)
            # On every rank it depends on the average, whose own gradient is a call, too.
            return tf.where(comm.rank == root, average, tf.zeros_like(average))

        return sent, gradient

    compare_given(comm, "broadcast", text_of(name))
    return send(tf.convert_to_tensor(tensor))


def _broadcast(comm: Communicator, root: int, array: Any) -> Any:
    return comm.broadcast(array.copy(), root=root)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """Assign the root's values to the other ranks' variables; the values.

    Variables may be TensorFlow's or Keras's. A MismatchError on every rank where they differ in
    number, name, shape or dtype.
    """
    comm, root = ranks_of(process_set), root_of(process_set, root_rank)
    every = list(variables)

    def send(*arrays: Any) -> list[Any]:
        return [_broadcast(comm, root, each) for each in arrays]

    compare(comm, f"broadcast of {names_of(every)}")
    compare_given(comm, "broadcast", text_of(name))
    if not every:
        return []
    given = [tf.convert_to_tensor(each) for each in every]
    values = call_alone(comm, "broadcast_", send, given, [each.shape for each in given])
    for variable, value in zip(every, values, strict=True):
        variable.assign(value)
    return values


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet | None = None,
    inplace: bool = False,
) -> None:
    """As `broadcast_`, for example of `model.variables` or `optimizer.variables`."""
    broadcast_(variables, root_rank, process_set=process_set)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """Send splits[i] rows of the tensor to rank i, and join what the ranks sent.

    Without `splits` every rank gets as many rows. With them, returns the joined rows and how many
    of them each rank sent, an int32 tensor. ValueError if the rows can't be cut so.
    """
    comm = ranks_of(process_set)
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
        raise ValueError("alltoall: a tensor without axes: must have rows")
    compare_given(comm, "alltoall", text_of(name))
    lengths = tf.cast([] if splits is None else splits, tf.int32)
    rows, received = _exchange_rows(comm, tensor, lengths)
    return rows if splits is None else (rows, received)


def _exchange_rows(
    comm: Communicator, tensor: Any, lengths: Any, call: str | None = None
) -> tuple[Any, Any]:
    @tf.custom_gradient
    def exchange(tensor: Any, lengths: Any) -> Any:
        shapes, inputs = [rows_of(tensor), tf.TensorShape([comm.size])], [tensor, lengths]
        rows, received = call_alone(comm, "alltoall", partial(_exchange, comm), inputs, shapes)
        name = name_of(comm, call)

        def gradient(given: Any, _: Any) -> Any:
            following = compare_gradient(comm, name)
            back, _ = _exchange_rows(comm, tf.convert_to_tensor(given), received, following)
            return tf.ensure_shape(back, tensor.shape), None

        return (rows, received), gradient

    found: tuple[Any, Any] = exchange(tensor, lengths)
    return found


def _exchange(comm: Communicator, array: Any, lengths: Any) -> tuple[Any, Any]:
    given = lengths_of(len(array), lengths if len(lengths) else None, comm.size)
    received = comm.all_to_all(np.split(array, np.cumsum(given)[:-1]))
    check_rows(received)
    return np.concatenate(received), np.array(list(map(len, received)), np.int32)


def join() -> Any:
    """Wait until every rank has joined; the last one that did, an int32 tensor. Collective.

    For ranks with fewer batches than others: `allreduce`, `grouped_allreduce`,
    `DistributedGradientTape` and `DistributedOptimizer` get zeros from the ranks that have joined,
    for dense tensors of all ranks' calls by Sum or Average. "Average" still divides by the number
    of all ranks, as Horovod's.
    """
    return run_in_order(lambda _: [np.int32(wait_for_all())], [tf.constant(0)])[0]
