"""Errors of collectives inside of a `tf.function` reach the caller as themselves.

TensorFlow keeps only the text of an exception that a Python operation raises, in an UnknownError or
InvalidArgumentError. The original is kept here under a number that the text contains, and one
function of TensorFlow, which turns a status into an exception, is replaced: for such a text it
returns the original. All other statuses pass through it unchanged.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from tensorflow.python.eager import core

_KEPT = 16
_MARK = re.compile(r"\[collective failure (\d+)\]")

_lock = threading.Lock()
_originals: OrderedDict[int, Exception] = OrderedDict()
_count = 0


class CollectiveFailure(Exception):
    """Carries the number of an error through TensorFlow's runtime."""


def carried(error: Exception) -> CollectiveFailure:
    """The exception to raise in a Python operation instead of the error."""
    global _count
    with _lock:
        _count += 1
        number = _count
        _originals[number] = error
        while len(_originals) > _KEPT:
            _originals.popitem(last=False)
    return CollectiveFailure(f"{type(error).__name__}: {error} [collective failure {number}]")


def original(text: str) -> Exception | None:
    """The error whose number the text contains; None without one."""
    for number in map(int, _MARK.findall(text)):
        with _lock:
            error = _originals.get(number)
        if error is not None:
            return error
    return None


def _restoring(plain: Callable[[Any], Exception]) -> Callable[[Any], Exception]:
    def to_exception(status: Any) -> Exception:
        error = original(status.message)
        return plain(status) if error is None else error

    return to_exception


_installed = False


def install() -> None:
    """Replace TensorFlow's function, once."""
    global _installed
    if not _installed:
        core._status_to_exception = _restoring(core._status_to_exception)
        _installed = True
