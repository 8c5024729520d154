"""Persistent calls: what is done once for the arrays of a call that is made again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from collectives.bound.many import ManyReducer
from collectives.reductions.reduction import ReduceOp


class PersistentCalls:
    """The part of a communicator that makes them."""

    all_reduce_many: Callable[..., list[Any]]
    _many: ManyReducer

    def persistent_all_reduce_many(
        self,
        arrays: Sequence[Any],
        op: ReduceOp | str = "sum",
        *,
        out: Sequence[Any] | None = None,
        what: str | None = None,
    ) -> Callable[[], list[Any]]:
        """Return a function without arguments that makes this call of `all_reduce_many`.

        Making the function is not collective. Each call of it is, and the ranks compare it. The
        arrays must keep their memory, shapes and dtypes, which this rank reads once, as it does the
        lists: what is put into them later is not reduced. Like MPI's persistent collectives (MPI
        4.1, section 6.13), but blocking. Each call returns and raises what `all_reduce_many` does.
        """
        given = _copied(arrays)
        results = given if out is arrays else _copied(out)
        make = partial(self.all_reduce_many, given, op, out=results, what=what)
        return self._many.persistent(given, op, results, what, make)


def _copied(arrays: Any) -> Any:
    """A copy of the list; anything else is refused by the call, on all ranks."""
    return list(arrays) if isinstance(arrays, list | tuple) else arrays
