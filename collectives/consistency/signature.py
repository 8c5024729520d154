"""What a rank calls, in a form that ranks can compare: everything that must be alike on all."""

from __future__ import annotations

import hashlib
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
"""In a signature's shape: an axis along which lengths may differ by rank."""

_SHOWN = 8


class Signature(NamedTuple):
    """One call. What a collective lets the ranks choose freely is left out of its signature."""

    collective: str
    op: str | None = None
    dtype: str | None = None
    shape: tuple[object, ...] | None = None
    root: int | None = None
    detail: str | None = None
    nbytes: int = 0
    """For the record alone: ranks may differ in it."""
    scope: str | None = None
    """What it is made for, as messages tell: ranks may differ in it."""

    @property
    def agreed(self) -> tuple[object, ...]:
        """What is compared."""
        return self[:-2]

    def on_gpu(self) -> Signature:
        """The call of arrays on a GPU: those of all ranks must lie on GPUs."""
        detail = "on a GPU" if self.detail is None else f"{self.detail}, on a GPU"
        return self._replace(detail=detail)

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
    """What tells a NumPy dtype from all others; NumPy takes two microseconds to find it."""
    name: str = dtype.name if dtype.isnative and dtype.kind != "V" else str(dtype)
    return name


def forced(algorithm: str | None) -> str | None:
    """How a signature tells that an algorithm was named: all ranks must name the same."""
    return None if algorithm is None else f"algorithm={algorithm}"


# In the order in which a difference is named where there are several.
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
    """A positive number of 48 bits; ranks that agree have the same one.

    Two calls that differ have the same one in 1 of 3e14 cases.
    """
    digest = hashlib.blake2b(repr(agreed).encode(), digest_size=FINGERPRINT_BITS // 8).digest()
    return int.from_bytes(digest, "little") or 1


def mismatch(signatures: Sequence[Signature]) -> MismatchError:
    """The error that all ranks raise, from what each of them called, in rank order."""
    calls = tuple(map(str, signatures))
    for field, error, difference in _ERRORS:
        if len({getattr(each, field) for each in signatures}) > 1:
            return error(f"the ranks called {difference}", calls)
    return MismatchError("the ranks made different numbers of calls", calls)
