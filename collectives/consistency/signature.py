"""Arguments of a call: what a rank checks alone, and what must be equal on all ranks.

A signature holds the latter in comparable form. Integers are checked before any message is sent.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from collectives.errors import (
    CollectiveMismatchError,
    DtypeMismatchError,
    MismatchError,
    OpMismatchError,
    RootMismatchError,
    ShapeMismatchError,
)

FINGERPRINT_BITS = 48

ANY_LENGTH = -1
"""In a signature's shape: an axis whose length may differ by rank."""

_SHOWN, _SHOWN_CHARACTERS = 8, 200


class Signature(NamedTuple):
    """One call, without the arguments that may differ by rank."""

    collective: str
    op: str | None = None
    dtype: str | None = None
    shape: tuple[object, ...] | None = None
    root: int | None = None
    detail: str | None = None
    nbytes: int = 0
    """For the flight recorder and for waits: may differ by rank."""
    scope: str | None = None
    """The enclosing operation, for messages only: may differ by rank."""

    @property
    def agreed(self) -> tuple[object, ...]:
        """The fields that are compared."""
        return self[:-2]

    def on_gpu(self) -> Signature:
        """The same call with arrays on a GPU: all ranks' arrays must lie on GPUs."""
        return self._replace(detail=detail_of(self.detail, "on a GPU"))

    def __str__(self) -> str:
        kind = None if self.dtype is None else f"{self.dtype}{_shown(self.shape or ())}"
        root = None if self.root is None else f"root={self.root}"
        given = [each for each in (self.op, kind, root, self.detail) if each is not None]
        call = f"{self.collective}({', '.join(given)})"
        return call if self.scope is None else f"{self.scope}: {call}"


def _shown(shape: tuple[object, ...]) -> str:
    parts = ["*" if each == ANY_LENGTH else str(each) for each in shape[:_SHOWN]]
    return f"[{', '.join(parts + ['…'] * (len(shape) > _SHOWN))}]"


@lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """Unique name of a NumPy dtype; cached, because NumPy needs two microseconds for it."""
    name: str = dtype.name if dtype.isnative and dtype.kind != "V" else str(dtype)
    return name


def detail_of(*parts: str | None) -> str | None:
    """A signature's detail: the parts that are given; None where there are none."""
    return ", ".join(part for part in parts if part is not None) or None


# In the order of reporting if several fields differ.
_ERRORS: tuple[tuple[str, type[MismatchError], str], ...] = (
    ("collective", CollectiveMismatchError, "different collectives"),
    ("root", RootMismatchError, "different roots"),
    ("op", OpMismatchError, "different reductions"),
    ("shape", ShapeMismatchError, "arrays of different shapes"),
    ("dtype", DtypeMismatchError, "arrays of different dtypes"),
    ("detail", MismatchError, "different arguments"),
)


@lru_cache(maxsize=1024)
def fingerprint(agreed: tuple[object, ...]) -> int:
    """A number of 48 bits, 3 or more, equal on ranks whose calls agree.

    Two different calls collide with a probability of 1 in 3e14.
    """
    digest = hashlib.blake2b(repr(agreed).encode(), digest_size=FINGERPRINT_BITS // 8).digest()
    return max(int.from_bytes(digest, "little"), 3)


def mismatch(signatures: Sequence[Signature], lines: Sequence[str]) -> MismatchError:
    """The error that all ranks raise, from every rank's signature and line, in rank order."""
    calls = tuple(map(str, signatures))
    for field, error, difference in _ERRORS:
        if len({getattr(each, field) for each in signatures}) > 1:
            return error(f"the ranks called {difference}", calls, lines)
    return MismatchError("the ranks made different numbers of calls", calls, lines)


def check_index(name: str, value: Any, limit: int, least: int = 0, also: str = "") -> int:
    """`value` as an integer from `least` to limit − 1; TypeError or ValueError otherwise.

    `also` is what else the error says to be allowed.
    """
    problem = f"{name}={value!r}: must be an integer from {least} to {limit - 1}{also}"
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(problem) from None
    if not least <= index < limit:
        raise ValueError(problem)
    return index


def check_text(what: Any) -> str | None:
    """`what` as a plain text, or None; TypeError otherwise.

    The `repr` of subclasses, which ranks compare, may differ: a text of NumPy equals one of Python.
    """
    if what is None:
        return None
    if not isinstance(what, str):
        raise TypeError(f"{what=}: must be a str, or None")
    return str.__str__(what)


def shortened(parts: Sequence[str]) -> str:
    """The parts as text to be compared: a long one is cut, and ends with a digest of the whole."""
    text = ", ".join(parts)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[:_SHOWN_CHARACTERS]}… of digest {digest}"


def check_peer(peer: Any, rank: int, size: int, name: str) -> int:
    """`peer` as the number of another rank; TypeError or ValueError otherwise."""
    index = check_index(name, peer, size)
    if index == rank:
        raise ValueError(f"{name}={peer!r}: must be another rank than this one")
    return index
