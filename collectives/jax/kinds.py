"""The table of collectives in compiled programs: shapes, what runs, and transposes.

All work along the first axis of an array, and have one result for each array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from collectives.communicator import Communicator
from collectives.consistency.signature import check_index
from collectives.jax.host_calls import HostFunction
from collectives.world import given

LINEAR = ("sum", "mean")

MESSAGES = ("send", "recv", "sendrecv")

_REDUCING = ("all_reduce", "reduce_scatter", "reduce")

PVARY = "pvary"
"""The transpose of `all_reduce`: each rank gets the cotangent of the total, which all ranks have.

As `jax.lax.pvary`, whose transpose is a sum over the ranks again. It is no call at all.
"""


@dataclass(frozen=True)
class Call:
    """A collective call without its arrays: the static parameters of the primitive."""

    kind: str
    comm: Communicator
    op: str = "sum"
    root: int = 0
    source: int | None = None
    dest: int | None = None
    tag: int = 0
    kept: bool = False
    """Whether the call runs even if the program uses none of its results."""
    by: HostFunction | None = None
    """What reduces the arrays in the place of `all_reduce_many`."""
    what: str | None = None
    """What must be equal on the ranks, where the arrays don't show it."""

    def comparing(self, text: str) -> Call:
        """The call, whose ranks compare this text, too."""
        what = text if self.what is None else f"{self.what}, {text}"
        return replace(self, what=what) if text else self


def rank_of(name: str, rank: int, comm: Communicator | None) -> int:
    """The argument, if it is a rank; ValueError or TypeError otherwise."""
    return check_index(name, rank, given(comm).size)


Bind = Callable[[Sequence[Any], Call], list[Any]]
"""Makes a call in a program."""


@dataclass(frozen=True)
class Kind:
    """One collective.

    run(call, source, target) fills one array from one other; without, arrays are passed on.
    length(n, size) is the length of the result's first axis.
    transpose(call, cotangents, bind) are the cotangents of the arrays.
    """

    run: Callable[[Call, Any, Any], object] | None
    transpose: Callable[[Call, list[Any], Bind], list[Any]] | None
    length: Callable[[int, int], int] = lambda length, size: length
    in_place: bool = False
    """Whether the result may lie in the memory of the array."""
    kept: bool = False
    """Whether every such call is kept: ranks use its results differently."""


def _scaled(call: Call, arrays: list[Any]) -> list[Any]:
    return [each / call.comm.size for each in arrays] if call.op == "mean" else arrays


def _to(kind: str) -> Callable[[Call, list[Any], Bind], list[Any]]:
    def transposed(call: Call, cotangents: list[Any], bind: Bind) -> list[Any]:
        dtypes = [each.dtype for each in cotangents]
        if kind in _REDUCING:
            cotangents = [
                each.astype(jnp.float32) if is_small_float(each.dtype) else each
                for each in cotangents
            ]
        found = _scaled(call, bind(cotangents, replace(call, kind=kind, op="sum")))
        return [each.astype(dtype) for each, dtype in zip(found, dtypes, strict=True)]

    return transposed


def is_small_float(dtype: Any) -> bool:
    """Whether it is a float of 8 bits, which is reduced in float32."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize == 1


def _of_higher_ranks(call: Call, cotangents: list[Any], bind: Bind) -> list[Any]:
    rows = bind([each[None] for each in cotangents], replace(call, kind="all_gather"))
    return [each[call.comm.rank :].sum(0) for each in rows]


def _back(call: Call, cotangents: list[Any], bind: Bind) -> list[Any]:
    return bind(cotangents, replace(call, source=call.dest, dest=call.source))


def _reduce(call: Call, source: Any, target: Any) -> None:
    if call.comm.rank == call.root:
        call.comm.reduce(source, call.op, root=call.root, out=target)
    else:
        call.comm.reduce(source, call.op, root=call.root)
        target[...] = 0


def _broadcast(call: Call, source: Any, target: Any) -> None:
    if call.comm.rank == call.root:
        _copy(call, source, target)
    call.comm.broadcast(target, root=call.root)


def _copy(call: Call, source: Any, target: Any) -> None:
    if source.ctypes.data != target.ctypes.data:
        np.copyto(target, source)


def _exchange(call: Call, source: Any, target: Any) -> None:
    if call.source == call.dest == call.comm.rank:
        np.copyto(target, source)
        return
    sent = None if call.dest is None else call.comm.isend(source.copy(), call.dest, call.tag)
    if call.source is None:
        target[...] = 0
    else:
        _recv(call, source, target)
    if sent is not None:
        sent.wait()


def _send(call: Call, source: Any, target: Any) -> None:
    assert call.dest is not None
    call.comm.send(source.copy(), call.dest, call.tag)
    _copy(call, source, target)


def _recv(call: Call, source: Any, target: Any) -> None:
    assert call.source is not None
    # A message that fails may still be in transit, when XLA has freed its arrays.
    own = np.empty_like(target)
    target[...] = call.comm.recv(own, call.source, call.tag)


KINDS = {
    "all_reduce": Kind(
        lambda call, source, target: call.comm.all_reduce(
            source, call.op, out=target, what=call.what
        ),
        _to(PVARY),
        in_place=True,
    ),
    PVARY: Kind(None, _to("all_reduce")),
    "all_gather": Kind(
        lambda call, source, target: call.comm.all_gather(source, out=target),
        _to("reduce_scatter"),
        lambda length, size: length * size,
    ),
    "reduce_scatter": Kind(
        lambda call, source, target: call.comm.reduce_scatter(source, call.op, out=target),
        _to("all_gather"),
        lambda length, size: length // size,
    ),
    "broadcast": Kind(_broadcast, _to("reduce"), in_place=True),
    "reduce": Kind(_reduce, _to("broadcast"), in_place=True, kept=True),
    "all_to_all": Kind(
        lambda call, source, target: call.comm.all_to_all(source, out=target), _to("all_to_all")
    ),
    "scan": Kind(
        lambda call, source, target: call.comm.scan(source, call.op, out=target),
        _of_higher_ranks,
        in_place=True,
    ),
    "sendrecv": Kind(_exchange, _back, kept=True),
    "send": Kind(_send, None, in_place=True, kept=True),
    "recv": Kind(_recv, None, in_place=True, kept=True),
    "barrier": Kind(None, lambda call, cotangents, bind: cotangents, in_place=True, kept=True),
}


@cache
def function_of(call: Call, count: int) -> HostFunction:
    """What makes a call on `count` arrays of this rank. Collective, but for messages."""
    each_run, fused = KINDS[call.kind].run, call.kind == "all_reduce" and call.by is None
    if fused and count != 1:
        return _Fused(call)
    if call.what is not None and not fused:
        text, plain = f"{call.kind}, {call.what}", function_of(replace(call, what=None), count)
        return partial(_run_compared, call.comm, text, plain)
    if count == 1 and each_run is not None and call.by is None:
        # Small arrays take this one: what runs is looked up once.
        return lambda sources, targets: each_run(call, sources[0], targets[0])
    return partial(_run, call)


def _run_compared(
    comm: Communicator, what: str, run: HostFunction, sources: Sequence[Any], targets: Sequence[Any]
) -> None:
    """Make a call after a barrier whose text compares it between the ranks."""
    comm.barrier(what)
    run(sources, targets)


class _Fused:
    """all_reduce of several arrays as one `all_reduce_many`."""

    def __init__(self, call: Call) -> None:
        self._comm, self._op, self._what = call.comm, call.op, call.what

    def __call__(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Make the call."""
        self._comm.all_reduce_many(sources, self._op, out=targets, what=self._what)

    def prepare(self, sources: list[Any], targets: list[Any]) -> Callable[[], object]:
        """A persistent call."""
        return self._comm.persistent_all_reduce_many(
            sources, self._op, out=targets, what=self._what
        )


def _run(call: Call, sources: Sequence[Any], targets: Sequence[Any]) -> None:
    if call.by is not None:
        call.by(sources, targets)
        return
    if call.kind == "barrier":
        call.comm.barrier()
    each_run = KINDS[call.kind].run or _copy
    for source, target in zip(sources, targets, strict=True):
        each_run(call, source, target)


def slope(call: Call, array: Any, bind: Bind) -> Any:
    """The derivative of each element of the reduction by this rank's; for "min", "max", "product".

    That of equal elements is shared by the ranks that hold them.
    """
    comm = call.comm
    if call.op == "product":
        # Not the result divided by the array, whose elements may be zero.
        (rows,) = bind([array[None]], Call("all_gather", comm))
        others = [rows[: comm.rank], rows[comm.rank + 1 :]]
        return jnp.concatenate(others).prod(0)
    (reduced,) = bind([array], Call("all_reduce", comm, call.op))
    holds = (array == reduced).astype(array.dtype)
    (count,) = bind([holds], Call("all_reduce", comm))
    return holds / count
