"""Bound calls: what a kind of call needs is looked up once and kept in a function.

As MPI-4's persistent collectives (MPI 4.1, section 6.13), but the function takes new buffers at
every call. All ranks of one node bind the same calls, since the data path follows from what the
ranks agree on, never from one rank's arguments: arrays that are not contiguous, or of another
library, are made contiguous first (`call_cache`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.consistency.call_check import CallCheck
from collectives.consistency.flight_recorder import clock
from collectives.consistency.signature import Signature, fingerprint
from collectives.execution.engine import Engine
from collectives.schedules.paths import SHARED
from collectives.shm.addresses import Publish
from collectives.shm.layout import ARRIVALS
from collectives.shm.node import Node
from collectives.shm.node_barrier import SEQUENCE_BITS, SEQUENCE_MASK

PASS = object()
"""What a bound call returns, before it did anything, for arguments that it can't take."""

# Words between that of the arrival and the rank's data (`shm.layout`).
_DATA = 2

Run = Callable[[Any, Any, int | None], Any]
Call = Callable[[Any, Any], Any]


def bind(
    engine: Engine,
    signature: Signature,
    run: Run,
    publish: Publish | None = None,
    path: str = SHARED,
) -> Call:
    """A function (source, target) that makes the call, and returns what `run` returns.

    publish(index, source, target) stores what other ranks read, at that word of this rank's
    segment, before they can see the call. run(source, target, index) is called once all ranks have
    made it; index is None where the ranks don't all share memory, and nothing was published. PASS
    where a first registered array has been made since.
    """
    node, check = engine.node, engine.call_check
    base = fingerprint(signature.agreed) << SEQUENCE_BITS
    if node is not None and check is not None and node.memory_is_all:
        return _bind_on_node(engine, node, check, signature, base, run, publish, path)

    def call(source: Any, target: Any) -> Any:
        return engine.perform_bound(signature, base, path, run, source, target, None)

    return call


def _bind_on_node(
    engine: Engine,
    node: Node,
    check: CallCheck,
    signature: Signature,
    base: int,
    run: Run,
    publish: Publish | None,
    path: str,
) -> Call:
    memory, pool, in_use = node.steps.memory, node.pool, node.pool.in_use
    own, peer, fence, record = memory.own, memory.others[0], memory.fence, engine.recorder.add
    # Two ranks on a machine that orders stores see by one word that both have arrived.
    one_word = engine.size == 2 and fence is None
    acquire, release, arrive = engine.lock.acquire, engine.lock.release, check.check_at

    def call(source: Any, target: Any) -> Any:
        # As `CallScope.whole`, in half of the time.
        inside, made, sequence, start = False, False, -1, 0
        try:
            acquire()
            try:
                inside, sequence = True, check.sequence + 1
                if engine.broken is not None:
                    raise engine.refusal()
                if in_use is not pool.in_use:
                    return PASS
                start, index = clock(), ARRIVALS[sequence & 1]
                word = base | sequence & SEQUENCE_MASK
                if publish is not None:
                    publish(index + _DATA, source, target)
                if fence is not None:
                    fence()
                check.sequence = sequence
                own[index] = word
                if not one_word or peer[index] != word:
                    arrive(signature, word, sequence)
                engine.path = path
                result = run(source, target, index + _DATA)
                record((sequence, signature, engine.path, start, clock()))
                made = True
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
