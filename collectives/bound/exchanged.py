"""all_reduce of few bytes between nodes: they travel with the check of the call.

As `CallCheck.check_counted` in most calls, written out: its calls of Python functions would take as
long as the messages. Where anything is unusual, `check_counted` goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.bound.between_nodes import Arrays, ReductionExchange
from collectives.bound.bind import Make, checked_call
from collectives.calls import PASS
from collectives.consistency.call_check import CallCheck
from collectives.consistency.dissemination import FIRST_BLOCK, LENGTH_AT, padded
from collectives.consistency.nodes_check import NodesCheck
from collectives.consistency.signature import Signature, fingerprint
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, Reduction
from collectives.schedules.paths import DISSEMINATION
from collectives.shm.layout import ARRIVALS, VERDICTS
from collectives.shm.node_barrier import SEQUENCE_BITS, SEQUENCE_MASK
from collectives.shm.verdict_barrier import ALIKE

_ALIKE = ALIKE << SEQUENCE_BITS


def bind_exchanged(
    engine: Engine, signature: Signature, reduction: Reduction, shape: tuple[int, ...]
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → result.

    `array` is any NumPy array of the shape whose elements are converted to the dtype. PASS where
    `out` can't take the result as it comes.
    """
    check, dtype, size = engine.call_check, reduction.dtype, engine.size
    assert check is not None
    nodes_check = check.nodes_check
    base = fingerprint(signature.agreed) << SEQUENCE_BITS
    exchange = ReductionExchange(engine, reduction, math.prod(shape))
    if nodes_check is None:
        move = _of_a_follower(check, signature, base, exchange, shape)
    elif exchange.slots:
        move = _of_a_leader(engine, check, nodes_check, signature, base, exchange, shape)
    else:
        move = _between_lone_ranks(check, signature, base, exchange)
        if size == 2:
            move = _in_one_message(
                engine, check, nodes_check, signature, base, reduction, shape, move
            )
    errstate, divides, finish = engine.errstate.run, reduction.divides, reduction.finish
    ndarray, empty = np.ndarray, np.empty

    def run(array: Array, out: Array, index: Any) -> Array:
        if divides:
            errstate(finish, out.reshape(-1), size)
        return out

    call = checked_call(engine, check, signature, move, run, DISSEMINATION)

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
        return call(array, out)

    return all_reduce


def _of_a_follower(
    check: CallCheck,
    signature: Signature,
    base: int,
    exchange: ReductionExchange,
    shape: tuple[int, ...],
) -> Make:
    """Of a rank that shares its node's memory with others, and doesn't lead it."""
    assert check.verdicts is not None
    stores, results = _slots_of(exchange, shape)
    memory, poll, check_counted = check.verdicts.memory, check.verdicts.poll, check.check_counted
    own, leader, fence = memory.own, memory.words[0], memory.fence

    def move(array: Array, out: Array, sequence: int) -> None:
        parity, number = sequence & 1, sequence & SEQUENCE_MASK
        stores[parity][...] = array
        check.sequence, word = sequence, base | number
        if fence is not None:
            fence()
        own[ARRIVALS[parity]] = word
        if poll(leader, VERDICTS[parity], _ALIKE | number):
            if fence is not None:
                fence()
        else:
            check_counted(signature, word, exchange)
        out[...] = results[parity]

    return move


def _of_a_leader(
    engine: Engine,
    check: CallCheck,
    nodes_check: NodesCheck,
    signature: Signature,
    base: int,
    exchange: ReductionExchange,
    shape: tuple[int, ...],
) -> Make:
    """Of a rank that leads its node."""
    assert check.verdicts is not None
    verdicts, rounds, check_counted = check.verdicts, nodes_check.rounds, check.check_counted
    own, fence = verdicts.memory.own, verdicts.memory.fence
    collect_soon, publish_verdict = verdicts.collect_soon, verdicts.publish_verdict
    on_time, complete = nodes_check.lateness.on_time, nodes_check.complete
    swap, take, end_swap = rounds.swap, rounds.take, rounds.end_swap
    waiting = engine.wait_policy.call
    swaps, (stores, results) = rounds.count == 1, _slots_of(exchange, shape)

    def move(array: Array, out: Array, sequence: int) -> None:
        exchange.parity = parity = sequence & 1
        number = sequence & SEQUENCE_MASK
        stores[parity][...] = array
        check.sequence, word = sequence, base | number
        if fence is not None:
            fence()
        own[ARRIVALS[parity]] = word
        if not (swaps and collect_soon(word, sequence) and on_time()):
            check_counted(signature, word, exchange)
        elif not (swap(word, exchange) and complete(number)):
            check_counted(signature, word, exchange, swapped=True)
        else:
            take(exchange)
            publish_verdict(ALIKE, sequence)
            if not end_swap():
                waiting.what, waiting.sequence = signature, sequence
                nodes_check.wait_until_sent(number)
                verdicts.publish_missing([])
        out[...] = results[parity]

    return move


def _slots_of(
    exchange: ReductionExchange, shape: tuple[int, ...]
) -> tuple[list[Array], list[Array]]:
    """Where this rank stores its array, and where it reads the result, by parity of the call."""
    stores = [slots[exchange.rank].reshape(shape) for slots in exchange.slots]
    return stores, [slots[0].reshape(shape) for slots in exchange.slots]


def _between_lone_ranks(
    check: CallCheck, signature: Signature, base: int, exchange: ReductionExchange
) -> Callable[..., None]:
    """Of a rank alone on its node: (array, out, sequence), or after the message of a swap."""

    def move(array: Array, out: Array, sequence: int, *, swapped: bool = False) -> None:
        try:
            exchange.source, exchange.target = array.reshape(-1), out.reshape(-1)
            check.sequence = sequence
            word = base | sequence & SEQUENCE_MASK
            check.check_counted(signature, word, exchange, swapped=swapped)
        finally:
            # The arrays are the caller's: no reference may outlive the call.
            exchange.source = exchange.target = None

    return move


def _in_one_message(
    engine: Engine,
    check: CallCheck,
    nodes_check: NodesCheck,
    signature: Signature,
    base: int,
    reduction: Reduction,
    shape: tuple[int, ...],
    move_slowly: Callable[..., None],
) -> Make:
    """Of two ranks alone on their nodes, as `Dissemination.swap` without yields; else slowly."""
    fold, errstate = reduction.plain_fold, engine.errstate.run
    assert fold is not None
    rounds, dtype = nodes_check.rounds, reduction.dtype
    wait_policy, waiting = engine.wait_policy, engine.wait_policy.call
    on_time, complete = nodes_check.lateness.on_time, nodes_check.complete
    channel = rounds.channels[0]
    outgoing_of, send, arrived = channel.outgoing, channel.send, channel.arrived
    nbytes, received = math.prod(shape) * dtype.itemsize, channel.incoming.words
    length, views = FIRST_BLOCK + padded(nbytes), Arrays(nbytes, dtype, shape)
    theirs, comes_first = views[channel.incoming, FIRST_BLOCK], engine.rank == 0

    def move(array: Array, out: Array, sequence: int) -> None:
        number, here = sequence & SEQUENCE_MASK, False
        check.sequence = sequence
        if not on_time():
            move_slowly(array, out, sequence)
            return
        word, outgoing = base | number, outgoing_of()
        rounds.outgoing = outgoing
        own, words = views[outgoing, FIRST_BLOCK], outgoing.words
        own[...] = array
        words[0], words[1], words[LENGTH_AT] = word, rounds.nanoseconds, nbytes
        send(length)
        for _ in range(wait_policy.spins or 1):
            if arrived():
                here = received[0] == word
                break
        if not here or not complete(number):
            move_slowly(array, out, sequence, swapped=True)
            return
        if comes_first:
            errstate(fold, own, theirs, out)
        else:
            errstate(fold, theirs, own, out)
        if not rounds.end_swap():
            waiting.what, waiting.sequence = signature, sequence
            nodes_check.wait_until_sent(number)

    return move
