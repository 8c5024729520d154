"""Calls by Python come after those in the compiled programs that their thread has started.

JAX returns from a program before it has run. A call by Python would overtake a collective in it, on
one rank and not on another. A device runs the programs of one thread in the order in which they
were started: after one that does nothing, all of them are over.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax

from collectives.communicator import Communicator
from collectives.jax.host_calls import running


def keep_order(comm: Communicator) -> None:
    """Have calls of the communicator by Python wait for programs from now on."""
    engine = comm._engine
    if engine.size > 1 and engine.before_call is None:
        engine.before_call = partial(_finish_programs, engine.is_within_call)
        _State.ended = False


class _State:
    """Whether no program makes calls: before the first one is compiled, and after JAX's end."""

    ended = True


def _finish_programs(within_call: Callable[[], bool]) -> None:
    # A program waits for the calls that its host functions make, and for the communicator's lock.
    if not (running.count or within_call() or _State.ended):
        with jax.disable_jit(False):
            ends = [program(*arguments) for program, arguments in _programs()]
        for each in ends:
            each.block_until_ready()


@lru_cache(maxsize=1)
def _programs() -> list[tuple[Any, tuple[Any]]]:
    """For each device of this process a program, compiled now, that may be run while one traces."""
    made = []
    # Whatever the caller has chosen, who may be tracing.
    with jax.transfer_guard("allow"), jax.ensure_compile_time_eval():
        for device in dict.fromkeys([*jax.local_devices(), *jax.local_devices(backend="cpu")]):
            zero = jax.device_put(0, device)
            made.append((jax.jit(lambda each: each + 1).lower(zero).compile(), (zero,)))
    return made


@atexit.register
def _end() -> None:
    """Before JAX's exit handler, which was registered before this one, and would wait for ever."""
    _finish_programs(lambda: False)
    _State.ended = True
