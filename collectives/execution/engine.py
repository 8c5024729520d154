"""Runs calls: makes the ranks agree on each, picks the path of its collectives, keeps the plans.

`bound/` and `calls/` handle kinds of arrays, shapes and axes; the executor, the transport and the
node handle schedules, messages and the node's memory.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from collectives import algorithms
from collectives.arrays.kinds import empty, is_device
from collectives.caching import LRU
from collectives.consistency.call_scope import CallScope
from collectives.consistency.flight_recorder import FlightRecorder, clock
from collectives.consistency.signature import Signature
from collectives.errors import RankFailedError, in_step
from collectives.execution.cost_model import (
    BUILT_IN,
    PRICED,
    Choice,
    CostParameters,
    Layout,
    bucket_of,
    choose,
)
from collectives.execution.device_path import OnDevices, Request
from collectives.execution.executor import PlanKey, Plans
from collectives.execution.host_memory import HostMemory
from collectives.reductions.reduction import Array, ReduceOp, Reduction, reduction_for
from collectives.schedules.paths import FORCED, NATIVE, QUICKEST
from collectives.shm.node import Node
from collectives.shm.selector import LARGEST_NATIVE, LEAST_BYTES
from collectives.shm.two_levels import Path
from collectives.transports.base import Actions, Native, Transport
from collectives.waiting.wait_policy import WaitPolicy
from collectives.waiting.watchdog import Watchdog


class Engine(CallScope):
    """One rank's calls over one transport. One thread at a time runs on it."""

    def __init__(self, transport: Transport, wait_policy: WaitPolicy | None = None) -> None:
        self.transport = transport
        if wait_policy is None:
            wait_policy = WaitPolicy()
            wait_policy.before_raise = self._fail
        self.wait_policy = transport.wait_policy = wait_policy
        if not transport.ranks:
            # Else messages give the numbers of the whole group, whose policy this is.
            wait_policy.world_ranks = lambda: transport.world_ranks
        if transport.one_process:
            wait_policy.sleep_early()
        self.rank = transport.rank
        super().__init__(transport.size, Watchdog(wait_policy, self.end_job))
        transport.watchdog = self.watchdog
        self.recorder = FlightRecorder(self.rank)
        self.node: Node | None = None
        self.devices: OnDevices | None = None
        self.layout = Layout((1,) * self.size)
        self.costs, self.costs_source = CostParameters(), BUILT_IN
        self.path = ""
        self.forked = False
        self.errstate = contextvars.copy_context()
        self.errstate.run(np.seterr, all="ignore")
        self._memory = HostMemory()
        self._plans = Plans(transport, self._memory)
        self._chosen: LRU[tuple[Any, ...], str] = LRU()
        self.bound_calls: LRU[Any, Callable[..., Any]] = LRU()
        """By what was asked for (`bound.calls`)."""
        self._paths: LRU[tuple[str, ReduceOp | None, np.dtype[Any]], dict[str, Path]] = LRU()

    def perform(self, signature: Signature, run: Callable[[Engine], Any]) -> Any:
        """Agree on a call with all ranks and run it to its end, before any other."""
        return self.whole(self._perform, signature, run)

    def _perform(self, signature: Signature, run: Callable[[Engine], Any]) -> Any:
        if self.broken is not None:
            raise self.refusal()
        check, start = self.call_check, clock()
        before = -1 if check is None else check.sequence
        self.path = ""
        try:
            if check is not None:
                check.check(signature)
            return run(self)
        finally:
            number = 0 if check is None else check.sequence
            # A call that was withdrawn counts as not made.
            if number != before:
                self.recorder.add((number, signature, self.path, start, clock()))

    def fail_bound(
        self, error: BaseException, sequence: int, signature: Signature, start: int
    ) -> None:
        """Record a bound call that an exception ended, unless it was withdrawn or never made."""
        if self.call_check is not None and self.call_check.sequence == sequence:
            self.recorder.add((sequence, signature, self.path, start, clock()))
            self.leave(error)

    def forbid(self) -> None:
        """Refuse every call, in a process that is forked off the rank."""
        # Another thread may have held it when the process was forked.
        self.lock, self.before_call = threading.RLock(), None
        self.watchdog = self.transport.watchdog = Watchdog(self.wait_policy, self.end_job)
        self.broken, self.forked = RuntimeError("this process is a forked child of the rank"), True

    def close(self) -> None:
        """Give back what the engine holds. Collective."""
        # A thread may wait for the lock, in front of memory that is gone when it gets it.
        self.broken = RuntimeError("it is closed")
        if self.call_check is not None:
            self.call_check.close()
        if self.node is not None:
            self.node.close()
        self.transport.close()

    def _fail(self, error: BaseException) -> None:
        """Keep the last calls in a file, and name it in the error."""
        if isinstance(error, RankFailedError):
            self.broken = error
        error.args = (f"{error.args[0]}; {self._record(str(error))}",)

    def _record(self, reason: str) -> str:
        """Keep the last calls in a file; where."""
        try:
            return f"this rank's last calls are in {self.recorder.dump(reason)}"
        except OSError as problem:
            return f"this rank's last calls could not be written ({problem})"

    def end_job(self, reason: str) -> None:
        """The last resort, where no error can be raised."""
        text = f"collectives: rank {self.rank}: {reason}; {self._record(reason)}"
        # The stream may be closed or broken.
        with suppress(OSError, ValueError):
            if sys.stderr is not None:
                print(text, file=sys.stderr, flush=True)
        self.transport.abort()

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
        overlapped: Actions | None = None,
    ) -> None:
        """Take part in a collective on flat, contiguous buffers of equal dtype.

        `lengths` are the elements of each chunk where the collective fixes the chunks; elsewhere
        the buffer is cut evenly. Where source is None the input lies in the target. Which buffers
        are this rank's part alone: `transports.base.Native`. Device arrays are put on their way:
        what the caller's stream does next comes after it.

        Some actions of `overlapped` may run while messages are in transit. A schedule is taken
        then, since a native collective returns only at its end.
        """
        if is_device(target):
            assert self.devices is not None
            request = Request(collective, source, target, lengths, op, root, algorithm)
            self.path = self.devices.run(request)
            return
        if self.size == 1:
            if source is not None:
                np.copyto(target, source)
            return
        if op is None:
            # Elements may be of any size, also larger than a stage.
            itemsize, target = target.itemsize, target.view(np.uint8)
            source = None if source is None else source.view(np.uint8)
            lengths = None if lengths is None else [length * itemsize for length in lengths]
        paths = self.paths(collective, op, target.dtype) if overlapped is None else {}
        if algorithm is None:
            nbytes = target.nbytes if lengths is None else sum(lengths) * target.itemsize
            algorithm = self.choose(collective, nbytes, paths)
        self.path = algorithm
        if algorithm in paths:
            went = self.errstate.run(paths[algorithm], source, target, lengths or (), root)
            self.path = went or algorithm
        elif algorithm in FORCED:
            kind = "" if op is None else f" for {op.value} of {target.dtype}"
            there = [name for name in FORCED if name in paths] + algorithms.names(collective)
            text = f"there is no such {collective}{kind} here; there is {', '.join(there)}"
            raise in_step(ValueError(f"algorithm={algorithm!r}: {text}"))
        else:
            run = partial(self._plans.run, collective, algorithm, source, target)
            self.errstate.run(run, lengths, op, root, overlapped)
            if op is not None:
                reduction = reduction_for(op, target.dtype)
                self.errstate.run(self._finish, collective, reduction, target, root)

    def bind_schedule(self, key: PlanKey) -> Callable[[Array | None, Array, object], None] | None:
        """The function (source, target, _), as `run` by a schedule on buffers in host memory.

        None where `run` tries several ways.
        """
        move, errstate, algorithm = self._plans.bind(key), self.errstate.run, key.algorithm
        if move is None:
            return None
        reduction = None if key.op is None else reduction_for(key.op, key.dtype)

        def run(source: Array | None, target: Array, _: object) -> None:
            self.path = algorithm
            errstate(move, source, target)
            if reduction is not None and reduction.divides:
                errstate(self._finish, key.collective, reduction, target, key.root)

        return run

    def join(self, node: Node) -> None:
        """Use the node's memory from now on."""
        self.node = node
        self._paths.clear()
        self.use(self.costs, self.costs_source)

    def use(self, costs: CostParameters, name: str) -> None:
        """Choose by these cost parameters from now on: all ranks between the same calls."""
        self.costs, self.costs_source = costs, name
        self._chosen.clear()
        self.bound_calls.clear()
        if self.node is not None and self.node.across is not None:
            self.node.across.use(costs, name)

    def choose(self, collective: str, nbytes: int, paths: dict[str, Path]) -> str:
        """The path for so many bytes, of those and the schedules."""
        large = nbytes >= LEAST_BYTES or collective == "all_to_all"
        if large and QUICKEST in paths and self.node and self.node.addresses.worthwhile:
            return QUICKEST
        key = (collective, nbytes, *paths)
        chosen = self._chosen.get(key)
        return chosen or self._chosen.put(key, self.price(collective, nbytes, paths).algorithm)

    def price(self, collective: str, nbytes: int, paths: dict[str, Path]) -> Choice:
        """What those paths and the schedules are expected to take, and the best."""
        # The ranks of an all_to_all may hold different amounts, and yet must choose alike.
        bucket = 0 if collective == "all_to_all" else bucket_of(nbytes)
        there = tuple(n for n in PRICED if n in paths and (n != NATIVE or bucket <= LARGEST_NATIVE))
        return choose(collective, bucket, self.layout, there, self.costs)

    def work(self, length: int, dtype: np.dtype[Any], beside: Array | None = None) -> Array:
        """A flat buffer for intermediate results; the next operation uses the same memory.

        It lies on a GPU where `beside` does, and is new then.
        """
        if beside is not None and is_device(beside):
            return empty(length, dtype, beside)
        return self._memory.work(length, dtype)

    def paths(self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any]) -> dict[str, Path]:
        """What can do it beside the schedules, by name; the target then holds the result."""
        key = (collective, op, dtype)
        found = self._paths.get(key)
        if found is None:
            found = self._paths.put(key, self._find_paths(collective, op, dtype))
        return found

    def _find_paths(
        self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any]
    ) -> dict[str, Path]:
        reduction = None if op is None else reduction_for(op, dtype)
        folds_as = None if reduction is None else reduction.folds_as.value
        native = self.transport.native(collective, folds_as, dtype)
        guarded = (
            None if native is None else partial(self._run_native, native, collective, reduction)
        )
        found: dict[str, Path] = {} if guarded is None else {NATIVE: guarded}
        return found | (self.node.paths(collective, op, dtype, guarded) if self.node else {})

    def _run_native(
        self,
        native: Native,
        collective: str,
        reduction: Reduction | None,
        source: Array | None,
        target: Array,
        lengths: Sequence[int],
        root: int,
    ) -> None:
        with self.watchdog:
            native(source, target, lengths, root)
        if reduction is not None:
            self._finish(collective, reduction, target, root)

    def _finish(self, collective: str, reduction: Reduction, folded: Array, root: int) -> None:
        """After a fold that leaves it undone, where the result is."""
        if collective != "reduce" or self.rank == root:
            reduction.finish(folded, self.size)
