"""Errors of collectives inside of a `tf.function` reach the caller as themselves.

TensorFlow keeps only the text of an exception that a Python operation raises, in an UnknownError or
InvalidArgumentError. The original is kept here under a number that the text contains, and one
function of TensorFlow, which executes a function's graph, is wrapped: it raises the original in
place of an exception with such a text. XLA's error for a collective in a function that it compiles
is raised as a ValueError that names `jit_compile`. Others pass unchanged.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from tensorflow.python.eager import execute
from tensorflow.python.framework import errors

from collectives.caching import LRU

OPERATION = "strategies_collective"
"""The name of the Python operations that collectives are in a graph."""

_KEPT = 16
_MARK = re.compile(r"\[collective failure (\d+)\]")

_failed = 0

_lock = threading.Lock()
_originals: LRU[int, Exception] = LRU(_KEPT)
_count = 0


class CollectiveFailureError(Exception):
    """Carries the number of an error through TensorFlow's runtime."""


class StepsOverlapError(RuntimeError):
    """A step of parameter servers began while another thread's was not complete."""


def failed() -> int:
    """How many executions of functions have failed in this process, but by StepsOverlapError."""
    return _failed


def carried(error: Exception) -> CollectiveFailureError:
    """The exception to raise in a Python operation instead of the error."""
    global _count
    with _lock:
        _count += 1
        number = _count
        _originals.put(number, error)
    return CollectiveFailureError(f"{type(error).__name__}: {error} [collective failure {number}]")


def original(text: str) -> Exception | None:
    """The error whose number the text contains; None without one."""
    for number in map(int, _MARK.findall(text)):
        with _lock:
            error = _originals.pop(number, None)
        if error is not None:
            return error
    return None


def _of_compilation(text: str) -> Exception | None:
    """The error of XLA's refusal to compile a collective; None for other texts."""
    if OPERATION not in text:
        return None
    return ValueError(
        "a function with jit_compile=True contains a collective of strategies.tensorflow (reduce,"
        " gather, all_reduce, an optimizer's apply), which XLA cannot compile: remove jit_compile"
        " there (Keras: compile(..., jit_compile=False)), or set it on an inner function that only"
        " computes the loss and its gradients"
    )


def _restoring(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def execute_restoring(executed: Any, /, *args: Any, **kwargs: Any) -> Any:
        global _failed
        error, complete = None, False
        try:
            result = plain(executed, *args, **kwargs)
            complete = True
            return result
        except errors.OpError as failure:
            error = original(failure.message)
            if error is None and "unsupported operations" in failure.message:
                error = _of_compilation(failure.message)
            if error is None:
                raise
            raise error from None
        finally:
            # The names of functions, unlike those of operations, begin so.
            function = str(executed).startswith("__")
            if function and not complete and not isinstance(error, StepsOverlapError):
                with _lock:
                    _failed += 1

    return execute_restoring


@cache
def install() -> None:
    """Wrap TensorFlow's function that executes operations, once."""
    execute.execute = _restoring(execute.execute)
