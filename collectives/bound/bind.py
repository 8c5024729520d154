"""Bound calls: what a kind of call needs is looked up once and kept in a function.

As MPI-4's persistent collectives (MPI 4.1, section 6.13), but the function takes new buffers at
every call. All ranks of one node bind the same calls, since the data path follows from what the
ranks agree on, never from one rank's arguments: arrays that are not contiguous, or of another
library, are made contiguous first (`bound.calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.bound.small import Run, node_of_all
from collectives.calls import PASS
from collectives.consistency.call_check import CallCheck
from collectives.consistency.dissemination import Exchange
from collectives.consistency.flight_recorder import CALLS_KEPT, clock
from collectives.consistency.signature import Signature, fingerprint
from collectives.execution.engine import Engine
from collectives.execution.executor import PlanKey
from collectives.reductions.reduction import Array, ReduceOp
from collectives.schedules.paths import DISSEMINATION, FORCED, SLOTS
from collectives.shm.addresses import Publish
from collectives.shm.layout import ARRIVALS, DATA
from collectives.shm.node import Node
from collectives.shm.node_barrier import SEQUENCE_BITS, SEQUENCE_MASK
from collectives.shm.selector import PathSelector

_LAST = CALLS_KEPT - 1

Call = Callable[[Any, Any], Any]
Make = Callable[[Any, Any, int], Any]
"""A function (source, target, sequence) → the index for `Run`, None where there is none.

It counts the call, and returns once all ranks make it.
"""


def bind(
    engine: Engine,
    signature: Signature,
    run: Run,
    publish: Publish | None = None,
    exchange: Exchange | None = None,
    path: str = "",
) -> Call:
    """A function (source, target) that makes the call, and returns what `run` returns.

    publish(index, source, target) stores what other ranks read, before they can see the call, from
    word `index` of this rank's segment on. run(source, target, index) is called once all ranks have
    made it; index is None where the ranks don't all share memory, and nothing was published: there
    `exchange` sends data with the check. The function returns PASS, having done nothing, where the
    first registered array was made after the call was bound: bind it again. `path` is the data's,
    for the flight recorder, where neither the node's memory nor the check moves them.
    """
    check = engine.call_check
    if check is None:
        return _bind_alone(engine, signature, run, path)
    node, base = node_of_all(engine), fingerprint(signature.agreed) << SEQUENCE_BITS
    if node is not None:
        make = _made_on_node(engine, node, check, signature, base, publish)
        path = path or SLOTS
    else:
        make = _made_between_nodes(check, signature, base, exchange)
        path = path if exchange is None else DISSEMINATION
    return checked_call(engine, check, signature, make, run, path)


def checked_call(
    engine: Engine, check: CallCheck, signature: Signature, make: Make, run: Run, path: str
) -> Call:
    """A function (source, target) that makes the call by `make` and `run`, and records it."""
    acquire, release, recorder = engine.lock.acquire, engine.lock.release, engine.recorder

    # As `CallScope.whole`, in half of the time.
    def call(source: Any, target: Any) -> Any:
        inside, made, sequence, start = False, False, -1, 0
        if engine.before_call is not None:
            engine.before_call()
        try:
            acquire()
            try:
                inside, sequence = True, check.sequence + 1
                if engine.broken is not None:
                    raise engine.refusal()
                start, engine.path = clock(), path
                index = make(source, target, sequence)
                if index is PASS:
                    return PASS
                result = run(source, target, index)
                ring, position = recorder.ring, recorder.position
                ring[position & _LAST] = sequence, signature, engine.path, start, clock()
                recorder.position, made = position + 1, True
                return result
            except BaseException as error:
                engine.fail_bound(error, sequence, signature, start)
                raise
            finally:
                release()
        except BaseException as error:
            engine.unlock(error, inside, made)
            raise

    return call


def _bind_alone(engine: Engine, signature: Signature, run: Run, path: str) -> Call:
    """As `Engine.perform` of a rank alone, in one function."""

    def call(source: Any, target: Any) -> Any:
        if engine.before_call is not None:
            engine.before_call()
        with engine.lock:
            if engine.broken is not None:
                raise engine.refusal()
            engine.path, start = path, clock()
            try:
                return run(source, target, None)
            finally:
                engine.recorder.add((0, signature, engine.path, start, clock()))

    return call


def _made_on_node(
    engine: Engine,
    node: Node,
    check: CallCheck,
    signature: Signature,
    base: int,
    publish: Publish | None,
) -> Make:
    memory, pool, in_use = node.steps.memory, node.pool, node.pool.in_use
    own, peer, fence, arrive = memory.own, memory.others[0], memory.fence, check.check_at
    # With two ranks and ordered stores, the peer's equal word proves that both have arrived.
    one_word, waiting = engine.size == 2 and fence is None, engine.wait_policy.call

    def make(source: Any, target: Any, sequence: int) -> Any:
        if in_use is not pool.in_use:
            return PASS
        index, word = ARRIVALS[sequence & 1], base | sequence & SEQUENCE_MASK
        if publish is not None:
            publish(index + DATA, source, target)
        if fence is not None:
            fence()
        check.sequence, own[index] = sequence, word
        if not one_word or peer[index] != word:
            arrive(signature, word, sequence)
        else:
            # For messages: moving the data may wait, too.
            waiting.what, waiting.sequence = signature, sequence
        return index + DATA

    return make


def _made_between_nodes(
    check: CallCheck, signature: Signature, base: int, exchange: Exchange | None
) -> Make:
    def make(source: Any, target: Any, sequence: int) -> None:
        if exchange is None:
            check.check_word(signature, base)
            return
        exchange.source, exchange.target = source, target
        try:
            check.check_word(signature, base, exchange)
        finally:
            # The arrays are the caller's: no reference may outlive the call.
            exchange.source = exchange.target = None

    return make


def of_shape(
    call: Call,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    gets: bool = True,
    part: tuple[int, ...] | None = None,
) -> Callable[[Array, Any], Any]:
    """A call on flat buffers as one on arrays: (array, out) → result, of that shape and dtype.

    `array` is any NumPy array of the shape. PASS where `out` can't take the result as it comes. A
    rank that doesn't get the result returns None. `part` is the shape of what each rank gets of it.
    """
    ndarray, empty, overlap = np.ndarray, np.empty, np.may_share_memory
    result, flat = shape if part is None else part, len(shape) == 1

    def call_with(array: Array, out: Any) -> Any:
        flags = array.flags
        source: Array | None
        if array.dtype == dtype and flags.c_contiguous and flags.aligned:
            source = array if flat else array.reshape(-1)
        else:
            source = array.astype(dtype, order="C").reshape(-1)
        if not gets:
            return PASS if call(source, None) is PASS else None
        if out is None:
            out = empty(result, dtype)
        elif type(out) is not ndarray or not out.flags.carray or out.dtype != dtype:
            return PASS
        elif out is array and part is None:
            source = None
        elif (
            out is array
            or out.shape != result
            or ((out.base is not None or array.base is not None) and overlap(array, out))
        ):
            return PASS
        return PASS if call(source, out if flat else out.reshape(-1)) is PASS else out

    return call_with


def component(
    engine: Engine,
    collective: str,
    op: ReduceOp | None,
    dtype: np.dtype[Any],
    nbytes: int,
    lengths: Sequence[int] = (),
    root: int = 0,
    algorithm: str | None = None,
) -> tuple[Run, Publish | None]:
    """What moves and folds the data of a collective of so many bytes, and what it publishes."""
    paths, errstate = engine.paths(collective, op, dtype), engine.errstate.run
    name = algorithm or engine.choose(collective, nbytes, paths) if engine.size > 1 else ""
    path = paths.get(name) if algorithm is None else None

    if path is None:
        if name and name not in FORCED and not lengths:
            key = PlanKey(collective, name, nbytes // dtype.itemsize, dtype, op, root, False)
            bound = engine.bind_schedule(key)
            if bound is not None:
                return bound, None

        def run(source: Array | None, target: Array, index: int | None) -> None:
            engine.run(
                collective,
                source,
                target,
                lengths=lengths or None,
                op=op,
                root=root,
                algorithm=algorithm,
            )

        return run, None

    if engine.node is None or not isinstance(path, PathSelector) or not path.exchanges(nbytes):

        def run_path(source: Array | None, target: Array, index: int | None) -> None:
            engine.path = errstate(path, source, target, lengths, root) or name

        return run_path, None

    read, select = engine.node.addresses.read, path.run

    def run_selected(source: Array | None, target: Array, index: int | None) -> None:
        assert index is not None
        addresses, _, _ = read(index)
        engine.path = errstate(select, addresses, nbytes, source, target, lengths, root)

    publish = engine.node.addresses.publisher(nbytes)
    return run_selected, publish
