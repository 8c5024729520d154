"""Bound calls: what a kind of call needs is looked up once and kept in a function.

As MPI-4's persistent collectives (MPI 4.1, section 6.13), but the function takes new buffers at
every call. All ranks of one node bind the same calls, since the data path follows from what the
ranks agree on, never from one rank's arguments: arrays that are not contiguous, or of another
library, are made contiguous first (`bound_calls`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.calls import PASS
from collectives.calls.bound_small import (
    DATA,
    node_of_all,
)
from collectives.consistency.call_check import CallCheck
from collectives.consistency.dissemination import Exchange
from collectives.consistency.flight_recorder import CALLS_KEPT, clock
from collectives.consistency.signature import Signature, fingerprint
from collectives.execution.engine import Engine
from collectives.schedules.paths import DISSEMINATION, SHARED
from collectives.shm.addresses import Publish
from collectives.shm.layout import ARRIVALS
from collectives.shm.node import Node
from collectives.shm.node_barrier import SEQUENCE_BITS, SEQUENCE_MASK

_LAST = CALLS_KEPT - 1

Run = Callable[[Any, Any, int | None], Any]
Call = Callable[[Any, Any], Any]
Make = Callable[[Any, Any, int], Any]
"""A function (source, target, sequence) that returns the index for `Run` once all have called."""


def bind(
    engine: Engine,
    signature: Signature,
    run: Run,
    publish: Publish | None = None,
    exchange: Exchange | None = None,
    path: str = SHARED,
) -> Call:
    """A function (source, target) that makes the call, and returns what `run` returns.

    publish(index, source, target) stores what other ranks read, at that word of this rank's
    segment, before they can see the call. run(source, target, index) is called once all ranks have
    made it; index is None where the ranks don't all share memory, and nothing was published: there
    `exchange` sends data with the check. PASS where a first registered array has been made since.
    """
    check = engine.call_check
    if check is None:
        return _bind_alone(engine, signature, run, path)
    node, base = node_of_all(engine), fingerprint(signature.agreed) << SEQUENCE_BITS
    if node is not None:
        make = _made_on_node(engine, node, check, signature, base, publish)
    else:
        make = _made_between_nodes(check, signature, base, exchange)
        path = path if exchange is None else DISSEMINATION
    acquire, release, recorder = engine.lock.acquire, engine.lock.release, engine.recorder

    # As `CallScope.whole`, in half of the time.
    def call(source: Any, target: Any) -> Any:
        inside, made, sequence, start = False, False, -1, 0
        try:
            acquire()
            try:
                inside, sequence = True, check.sequence + 1
                if engine.broken is not None:
                    raise engine.refusal()
                start = clock()
                index = make(source, target, sequence)
                if index is PASS:
                    return PASS
                engine.path = path
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
    def call(source: Any, target: Any) -> Any:
        def act(engine: Engine) -> Any:
            engine.path = path
            return run(source, target, None)

        return engine.perform(signature, act)

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
    one_word = engine.size == 2 and fence is None  # is then proof that both ranks have arrived

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
            check.check_word(signature, base, None, exchange)
        finally:
            # The arrays are the caller's: they live no longer than it wants.
            exchange.source = exchange.target = None

    return make
