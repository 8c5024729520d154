"""The bound broadcast: few bytes lie beside the root's arrival, or travel with the check."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from collectives import algorithms
from collectives.arrays.kinds import is_device, to_array
from collectives.bound.bind import Call, bind, component
from collectives.bound.calls import bound_operation, operation_on_gpu
from collectives.bound.exchanged_rows import ExchangedRows, room_of_row
from collectives.bound.small import Run, node_of_all, nothing, room_beside_arrival
from collectives.calls import PASS, Operation
from collectives.calls.movements import broadcast_output, broadcast_signature
from collectives.consistency.signature import Signature, check_index
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.shm import migratory
from collectives.shm.addresses import Publish
from collectives.shm.layout import ARRIVALS, DATA

_BYTES = np.dtype(np.uint8)


def bind_broadcast(
    engine: Engine,
    signature: Signature,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    algorithm: str | None = None,
) -> Call:
    """The function (None, array): the root's content in every rank's array; PASS where it can't.

    A forced algorithm moves all data itself.
    """
    forced, root, nbytes = algorithm is not None, signature.root or 0, signature.nbytes
    on_root = engine.rank == root
    most = -1 if forced else room_of_row(engine, 1)
    small = None if forced else small_broadcast(engine, dtype, shape, root)
    if small is not None:
        call = bind(engine, signature, *small)
    elif 0 < nbytes <= most:
        rows = ExchangedRows(engine, most, nbytes=nbytes if on_root else 0)

        def take(source: None, target: Array, index: int | None) -> None:
            if not on_root:
                target[...] = rows.joined()[:nbytes]

        call = bind(engine, signature, take, exchange=rows)
    else:
        run, publish = component(engine, "broadcast", None, _BYTES, nbytes, (), root, algorithm)
        call = bind(engine, signature, run, publish)
    whole = small is not None

    def broadcast(source: None, array: Array) -> Any:
        if not array.flags.carray:
            return PASS
        return call(None, array if whole else array.reshape(-1).view(_BYTES))

    return broadcast


def small_broadcast(
    engine: Engine, dtype: np.dtype[Any], shape: tuple[int, ...], root: int
) -> tuple[Run, Publish | None] | None:
    """What copies the root's array, and what publishes it on the root, for `bound.bind`.

    None where it has not few bytes.
    """
    node, nbytes = node_of_all(engine), math.prod(shape) * dtype.itemsize
    if node is None or not 0 < nbytes <= room_beside_arrival(node):
        return None
    slots = node.steps.memory.slots[root]
    places = {
        at + DATA: slots[parity][:nbytes].view(dtype).reshape(shape)
        for parity, at in enumerate(ARRIVALS)
    }

    def publish(index: int, source: Any, target: Any) -> None:
        places[index][...] = target

    take = migratory.taker(engine.size, places)

    def run(source: Any, target: Array, index: Any) -> None:
        target[...] = places[index]
        if take is not None:
            take(index)

    return (nothing, publish) if engine.rank == root else (run, None)


def broadcast(
    engine: Engine, array: Any, *, root: int = 0, algorithm: str | None = None
) -> Operation:
    """The root's content in every rank's array."""
    root = check_index("root", root, engine.size)
    detail = algorithms.forced("broadcast", algorithm)
    given = to_array(array)
    output = broadcast_output(given, array, on_root=engine.rank == root)
    signature, buffer = broadcast_signature(given, root, detail), output.buffer
    if is_device(given):
        how = {"root": root, "algorithm": algorithm}
        return operation_on_gpu(signature, None, buffer, output.deliver, **how)
    bind = partial(
        bind_broadcast,
        signature=signature,
        dtype=given.dtype,
        shape=given.shape,
        algorithm=algorithm,
    )
    key = "broadcast", None, given.dtype, given.shape, root
    target = buffer.reshape(given.shape)
    return bound_operation(
        signature, key, bind, None, target, lambda _: output.deliver(), algorithm
    )
