"""Device arrays over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from collectives import algorithms
from collectives.calls.objects import broadcast_pickle, make_on_all
from collectives.cuda.interface import Cuda, DeviceArray, Event
from collectives.errors import CollectiveError, in_step, is_in_step
from collectives.execution.device_path import DevicePath, Kind, Move, Request
from collectives.execution.engine import Engine
from collectives.execution.executor import Plans
from collectives.gpu.conversions import Conversion, conversion_of
from collectives.gpu.ordered_memory import OrderedMemory
from collectives.gpu.probe import Found
from collectives.gpu.stream_work import StreamWork
from collectives.reductions.reduction import Action, ReduceOp
from collectives.schedules.paths import FORCED, NATIVE
from collectives.transports.base import Native, abandoned
from collectives.transports.nccl import NcclTransport
from collectives.transports.nccl_driver import NcclDriver, NcclError

# Schedules for reductions that NCCL lacks, chosen for few messages or few bytes.
_SCHEDULES = {"all_reduce": "ring", "reduce": "binomial", "reduce_scatter": "ring"}

# The other collectives allocate temporary memory on some ranks, which a graph can't capture.
_CAPTURED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


class NcclPath(DevicePath):
    """NCCL's own collectives by default; a named schedule runs over NCCL's messages."""

    name = "nccl"

    def __init__(self, cuda: Cuda, transport: NcclTransport, launches: StreamWork) -> None:
        """`launches` chooses the streams of the transport's calls."""
        self._cuda, self._transport, self._launches = cuda, transport, launches
        self._memory = _DeviceMemory(cuda)
        self._plans = Plans(transport, self._memory)

    def run(self, request: Request) -> str:
        """Enqueue the collective on the current stream, or where a graph captures that."""
        algorithm = request.algorithm
        if algorithm in FORCED and algorithm != NATIVE:
            problem = ValueError(
                f"algorithm={algorithm!r}: device arrays over NCCL have {NATIVE!r} and"
                f" {', '.join(map(repr, algorithms.names(request.collective)))}"
            )
            raise in_step(problem)
        if request.empty:
            return self.name
        if request.op is None:
            request = _as_bytes(request)
        elif algorithm not in (None, NATIVE):
            request.reduction()  # raises TypeError for what no kernel folds
        with self._launches.launch(request.source, request.target) as stream:
            self._transport.stream = stream.handle
            if algorithm in (None, NATIVE):
                used = self._run_native(request)
            else:
                used = self._run_schedule(request, str(algorithm))
        return self.name if used == NATIVE else f"{self.name} {used}"

    def check_capture(self, collective: str, op: str | None, dtype: np.dtype[Any]) -> None:
        """A graph can't capture temporary memory, which has another use when the graph runs."""
        if collective not in _CAPTURED or self._transport.native(collective, op, dtype) is None:
            call = collective if op is None else f"{collective} (op={op!r})"
            raise RuntimeError(
                f"{call} of {dtype} needs temporary memory: a graph can capture"
                f" {', '.join(_CAPTURED)}, of ops and dtypes that NCCL reduces itself"
            )

    def _run_native(self, request: Request) -> str:
        collective, op, target = request.collective, request.op, request.target
        native = self._native(request, target.dtype)
        if native is not None:
            native(request.source, request.target, request.lengths or (), request.root)
            return NATIVE
        conversion = None if op is None else conversion_of(op, target.dtype)
        native = conversion and self._native(request, conversion.dtype)
        if conversion is None or native is None:
            request.reduction()  # raises TypeError for what no kernel folds
            return self._run_schedule(request, _SCHEDULES[collective])
        self._run_converted(request, conversion, native)
        return NATIVE

    def _native(self, request: Request, dtype: np.dtype[Any]) -> Native | None:
        op = None if request.op is None else request.op.value
        return self._transport.native(request.collective, op, dtype)

    def _run_converted(self, request: Request, conversion: Conversion, native: Native) -> None:
        """Reduce a converted copy in place."""
        source, target = None, conversion.convert(request.given)
        if request.collective == "reduce_scatter":
            source, target = target, self._cuda.empty(request.target.size, conversion.dtype)
        native(source, target, request.lengths or (), request.root)
        if request.collective != "reduce" or self._transport.rank == request.root:
            conversion.convert_back(target, request.target)

    def _run_schedule(self, request: Request, algorithm: str) -> str:
        with self._memory.turn():
            self._plans.run(
                request.collective,
                algorithm,
                request.source,
                request.target,
                request.lengths,
                request.op,
                request.root,
            )
        if request.op is ReduceOp.MEAN:
            self._cuda.divide(request.target, self._transport.size)
        return algorithm

    def bind(self, kind: Kind) -> Move | None:
        """NCCL's own function, if it takes equal parts without a conversion."""
        op = None if kind.op is None else kind.op.value
        function = self._transport.bind(kind.collective, op, kind.dtype, kind.lengths, kind.root)
        if function is None:
            return None
        begin, end, address = self._launches.begin, self._launches.end, self._cuda.address
        transport = self._transport

        def move(source: DeviceArray, target: DeviceArray) -> None:
            begun = begin()
            transport.stream = begun[0].handle
            function(address(source), address(target))
            nbytes = target.nbytes if source is target else source.nbytes + target.nbytes
            end(begun, (source, target), nbytes)

        return move

    def beside(self, held: object) -> AbstractContextManager[None]:
        """A context of calls on the communicator's own stream."""
        return self._launches.beside(held)

    def wait(self, name: str, event: Event, timeout: float | None) -> None:
        """Block the host; also raises NCCL's errors."""
        self._launches.wait(name, event, timeout)

    def close(self) -> None:
        """Destroy the communicator after its last work."""
        self._launches.finish()
        if self._launches.captured:
            # Destroying it would wait for the graphs that use it, which may live for ever.
            self._transport.abandon()
        else:
            self._transport.close()

    def abandon(self) -> None:
        """Abort the running work."""
        self._launches.ended = True
        if self._launches.captured:
            # Aborting it would wait for the graphs that use it: NCCL may write on.
            self._transport.abandon()
            abandoned.append(self._launches)
        else:
            self._transport.abort()
            self._launches.forget()


def start_nccl(
    engine: Engine, found: Found, give_up: Callable[[BaseException], None], *, float8: bool
) -> NcclPath:
    """NCCL's path between all ranks, each of which has found its GPU and NCCL. Collective.

    `give_up` ends the communicator's work after an error. `float8`: all ranks reduce 8-bit floats.
    """
    gpus = found.cuda
    made: list[StreamWork] = []

    def make() -> None:
        made.append(StreamWork(gpus, found.device, engine.wait_policy, give_up, engine.end_job))

    make_on_all(engine, make)
    launches = made[0]
    try:
        comm = _connect(engine, found.driver)
    except NcclError as error:
        problem = CollectiveError(f"NCCL did not start: {error}")
        # An error that the ranks have exchanged is raised by all of them.
        raise (in_step(problem) if is_in_step(error) else problem) from error
    transport = NcclTransport(
        found.driver,
        comm,
        engine.rank,
        engine.size,
        address=gpus.address,
        float8=float8,
    )
    launches.failure = transport.failure
    return NcclPath(gpus, transport, launches)


def _connect(engine: Engine, driver: NcclDriver) -> Any:
    """NCCL's communicator of all ranks, on the current GPU; any rank's error is every rank's."""
    unique_id = broadcast_pickle(engine, driver.unique_id)
    made: list[Any] = []

    def make() -> None:
        # NCCL blocks if a rank ends inside it.
        with engine.watchdog:
            made.append(driver.init_rank(engine.size, unique_id, engine.rank))

    try:
        make_on_all(engine, make)
    except BaseException:
        for comm in made:
            # The other ranks have none: destroying it would wait for them.
            driver.abort(comm)
        raise
    return made[0]


def _as_bytes(request: Request) -> Request:
    """The request as bytes, because a movement does not depend on the dtype."""
    itemsize = request.target.itemsize
    return request._replace(
        source=None if request.source is None else request.source.view("u1"),
        target=request.target.view("u1"),
        lengths=request.lengths and [length * itemsize for length in request.lengths],
    )


class _DeviceMemory(OrderedMemory):
    """`executor.Memory` on the current GPU; all work is enqueued on the current stream."""

    segment_bytes = 0

    def __init__(self, cuda: Cuda) -> None:
        super().__init__(cuda)
        self.work, self.address, self.at = cuda.empty, cuda.address, cuda.at

    def message(self, array: DeviceArray) -> DeviceArray:
        return array.view(np.uint8)

    def copy(self, origin: DeviceArray, copied: DeviceArray) -> Action:
        return partial(_assign, copied, origin)

    def fold(
        self, op: ReduceOp, first: DeviceArray, second: DeviceArray, out: DeviceArray
    ) -> Action:
        return partial(self.cuda.fold, op, first, second, out)


def _assign(target: DeviceArray, source: DeviceArray) -> None:
    target[...] = source
