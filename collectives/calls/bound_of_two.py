"""The reduction of few bytes by two ranks alone on their nodes: one message in each direction.

As `bound.bind`, `NodesCheck.agree` and `ReductionExchange`, written out: calls of Python functions
would take as long as the message.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.calls import PASS
from collectives.calls.bound_between_nodes import Arrays, ReductionExchange
from collectives.consistency.dissemination import FIRST_BLOCK, LENGTH_AT, padded
from collectives.consistency.flight_recorder import CALLS_KEPT, clock
from collectives.consistency.signature import Signature, fingerprint
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, Reduction
from collectives.schedules.paths import DISSEMINATION
from collectives.shm.node_barrier import SEQUENCE_BITS, SEQUENCE_MASK


def bind_of_two(
    engine: Engine, signature: Signature, reduction: Reduction, shape: tuple[int, ...]
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → result.

    `array` is any NumPy array of the shape whose elements are converted to the dtype. PASS where
    `out` can't take the result as it comes.
    """
    check, dtype, fold = engine.call_check, reduction.dtype, reduction.plain_fold
    assert check is not None
    assert check.alone is not None
    assert fold is not None
    alone, rounds, nbytes = check.alone, check.alone.rounds, math.prod(shape) * dtype.itemsize
    channel, base = rounds.channels[0], fingerprint(signature.agreed) << SEQUENCE_BITS
    on_time, complete = alone.lateness.on_time, alone.complete
    outgoing_of, send, arrived = channel.outgoing, channel.send, channel.arrived
    length, received = FIRST_BLOCK + padded(nbytes), channel.incoming.words
    views, comes_first = Arrays(nbytes, dtype, shape), engine.rank == 0
    theirs = views[channel.incoming, FIRST_BLOCK]
    acquire, release, errstate = engine.lock.acquire, engine.lock.release, engine.errstate.run
    recorder, ring, last = engine.recorder, engine.recorder.ring, CALLS_KEPT - 1
    wait_policy, divides, ndarray, empty = (
        engine.wait_policy,
        reduction.divides,
        np.ndarray,
        np.empty,
    )

    def check_slowly(word: int, array: Array, out: Array, swapped: bool) -> None:
        exchange = ReductionExchange(engine, reduction, math.prod(shape))
        exchange.source, exchange.target = array.reshape(-1), out.reshape(-1)
        check.check_counted(signature, word, None, exchange, swapped=swapped)

    def all_reduce(array: Array, out: Any) -> Any:
        if out is None:
            out = empty(shape, dtype)
        elif (
            type(out) is not ndarray
            or not out.flags.carray
            or (out is not array and out.shape != shape)
            or out.dtype != dtype
        ):
            return PASS
        inside = made = False
        sequence, start = -1, 0
        try:
            if engine.before_call is not None:
                engine.before_call()
            acquire()
            try:
                inside, sequence = True, check.sequence + 1
                if engine.broken is not None:
                    raise engine.refusal()
                start = clock()
                number, here = sequence & SEQUENCE_MASK, False
                word = base | number
                check.sequence = sequence
                if swapped := on_time():
                    rounds.outgoing = outgoing = outgoing_of()
                    own, words = views[outgoing, FIRST_BLOCK], outgoing.words
                    own[...] = array
                    words[0], words[1], words[LENGTH_AT] = word, rounds.nanoseconds, nbytes
                    send(length)
                    for _ in range(wait_policy.spins or 1):
                        if arrived():
                            here = received[0] == word
                            break
                if here and complete(number):
                    if comes_first:
                        errstate(fold, own, theirs, out)
                    else:
                        errstate(fold, theirs, own, out)
                    rounds.end_swap(word, alone.answer_request)
                else:
                    check_slowly(word, array, out, swapped)
                if divides:
                    errstate(reduction.finish, out.reshape(-1), 2)
                position = recorder.position
                ring[position & last] = (sequence, signature, DISSEMINATION, start, clock())
                recorder.position, made = position + 1, True
                return out
            except BaseException as error:
                engine.fail_bound(error, sequence, signature, start)
                raise
            finally:
                release()
        except BaseException as error:
            engine.unlock(error, inside, made)
            raise

    return all_reduce
