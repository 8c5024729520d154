"""Runs collectives on flat buffers: picks the path, keeps the plans.

Everything above (array kinds, shapes, axes) is the operations' business, everything below
(schedules, messages) the executor's and the transport's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from collectives import selection
from collectives.executor import Call, Plan
from collectives.reduction import Array, ReduceOp, check_reducible
from collectives.spec import spec_of
from collectives.transports.base import Native, Transport

Result = TypeVar("Result")

_PLANS_KEPT = 64
_PLAN_BYTES_KEPT = 1 << 28
_WORK_BYTES_KEPT = 1 << 26
# An MPI 3 library counts in 31 bits; our own schedules send longer messages in parts.
_LARGEST_NATIVE = (1 << 31) - 1


class Engine:
    """One rank's collectives over one transport. One thread at a time runs on it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self._plans: OrderedDict[Call, Plan] = OrderedDict()
        self._plan_bytes = 0
        self._natives: dict[tuple[str, str | None, np.dtype[Any]], Native | None] = {}
        self._work = np.empty(0, np.uint8)
        self._lock = threading.RLock()

    def perform(self, operation: Callable[[Engine], Result]) -> Result:
        """Run an operation to its end, with all messages it consists of, before any other."""
        with self._lock:
            return operation(self)

    def run(
        self,
        collective: str,
        source: Array | None,
        target: Array,
        *,
        lengths: Sequence[int] | None = None,
        op: ReduceOp | None = None,
        root: int = 0,
        algorithm: str | None = None,
    ) -> None:
        """Take part in a collective on flat, contiguous buffers of equal dtype.

        `lengths` are the elements of each chunk where the collective fixes the chunks; elsewhere
        the buffer is cut evenly. Where source is None the input lies in the target.
        """
        if self.size == 1:
            if source is not None:
                np.copyto(target, source)
            return
        native = self._native(collective, op, target.dtype, target.nbytes)
        if algorithm is None:
            algorithm = self._choose(collective, target.nbytes, native).algorithm
        if algorithm == "native":
            if native is None:
                what = target.dtype if op is None else f"{op.value} of {target.dtype}"
                owner = type(self.transport).__name__
                raise ValueError(f"algorithm='native': {owner} has no {collective} for {what}")
            native(source, target, lengths or (), root)
        else:
            shape = target.size if lengths is None else tuple(lengths)
            dtype, has_source = target.dtype, source is not None
            call = Call(collective, algorithm, shape, dtype, op, root, has_source)
            with np.errstate(all="ignore"):
                self._plan(call).run(source, target)

    def explain(self, collective: str, nbytes: int, dtype: np.dtype[Any]) -> str:
        """What `run` would choose for a SUM or a movement of that dtype, and why."""
        op = ReduceOp.SUM if spec_of(collective).reduces else None
        if op is not None:
            check_reducible(op, dtype)
        return str(self._choose(collective, nbytes, self._native(collective, op, dtype, nbytes)))

    def _choose(self, collective: str, nbytes: int, native: Native | None) -> selection.Choice:
        # The ranks of an all_to_all may hold different amounts, and yet must choose alike.
        bucket = 0 if collective == "all_to_all" else selection.bucket_of(nbytes)
        return selection.choose(collective, bucket, self.size, native is not None)

    def own_part(self, buffer: Array, lengths: Sequence[int]) -> Array:
        """This rank's part, as a view, of a buffer that holds one for each rank."""
        start = sum(lengths[: self.rank])
        return buffer[start : start + lengths[self.rank]]

    def work(self, length: int, dtype: np.dtype[Any]) -> Array:
        """A flat buffer for intermediate results; the next operation uses the same memory."""
        nbytes = length * dtype.itemsize
        if nbytes > _WORK_BYTES_KEPT:
            return np.empty(length, dtype)
        if nbytes > self._work.nbytes:
            self._work = np.empty(selection.bucket_of(nbytes), np.uint8)
        return self._work[:nbytes].view(dtype)

    def _native(
        self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any], nbytes: int
    ) -> Native | None:
        if nbytes > _LARGEST_NATIVE and collective != "all_to_all":
            return None
        # By the op's text: an enum member's hash is computed in Python.
        key = (collective, None if op is None else op.value, dtype)
        try:
            return self._natives[key]
        except KeyError:
            found = self._natives[key] = self.transport.native(*key)
            return found

    def _plan(self, call: Call) -> Plan:
        plan = self._plans.get(call)
        if plan is not None:
            self._plans.move_to_end(call)
            return plan
        plan = self._plans[call] = Plan(self.transport, call)
        self._plan_bytes += plan.nbytes
        while len(self._plans) > _PLANS_KEPT or (
            self._plan_bytes > _PLAN_BYTES_KEPT and len(self._plans) > 1
        ):
            self._plan_bytes -= self._plans.popitem(last=False)[1].nbytes
        return plan
