"""Errors that travel between ranks."""

from __future__ import annotations

import pickle
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)


def portable(error: Error) -> Error | RuntimeError:
    """The error if it can be pickled and comes back as one of its class, else its text."""
    try:
        same = type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # an exception's own way of being pickled may raise anything
        same = False
    return error if same else RuntimeError(f"{type(error).__name__}: {error}")
