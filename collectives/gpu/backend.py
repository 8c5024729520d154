"""Selection of the path of a communicator's device arrays, at the first such array."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays.kinds import assign
from collectives.calls import PASS, Operation
from collectives.calls.objects import gather_pickles, numbers_of_all
from collectives.consistency.signature import Signature
from collectives.cuda.interface import Cuda, DeviceArray, Event
from collectives.cuda.runtime import cuda, on_gpu, wait_for
from collectives.errors import BackendUnavailableError, CollectiveError, in_step, is_in_step
from collectives.execution.device_path import BoundCall, DevicePath, Request
from collectives.execution.engine import Engine
from collectives.gpu import probe
from collectives.gpu.device_calls import DeviceCalls
from collectives.gpu.host_path import HostPath
from collectives.gpu.ipc_path import IpcPath
from collectives.gpu.nccl_path import NcclPath, start_nccl
from collectives.gpu.probe import Verdict, judge
from collectives.lifecycle.failures import failures
from collectives.lifecycle.futures import Handle, run_into
from collectives.reductions.reduction import ReduceOp, as_op, reduction_for
from collectives.transports.nccl_driver import NcclError
from collectives.waiting.wait_policy import log


class Devices:
    """The device arrays of one communicator."""

    def __init__(self, engine: Engine, backend: str, local_rank: int) -> None:
        """`backend` is "auto", "mpi" or "nccl"."""
        self._engine, self.backend, self._local_rank = engine, backend, local_rank
        self._path: DevicePath | None = None
        self._device: int | None = None

    @property
    def over_host(self) -> bool:
        """Whether arrays are staged through the host, whatever the ranks support."""
        return self.backend == "mpi"

    @property
    def gpus_requested(self) -> bool:
        """Whether the caller requested GPUs, and therefore new arrays on them."""
        return self.backend == "nccl"

    def start(self) -> None:
        """Start NCCL if the caller requested it. Collective.

        Raises BackendUnavailableError on every rank if any rank can't.
        """
        if not self.gpus_requested:
            return
        found, verdict = self._examine(lambda gpus: self._local_rank % gpus.device_count())
        if found is None or verdict.problem is not None:
            raise in_step(BackendUnavailableError(f"backend='nccl': {verdict.problem}"))
        found.cuda.use_device(found.device)
        self._use(self._over_nccl(found, verdict), found)

    def room(self, length: int, dtype: np.dtype[Any]) -> DeviceArray:
        """New memory on this rank's GPU, for a rank that has no array there yet. Collective.

        Raises BackendUnavailableError on every rank if any rank has no GPU.
        """
        if self._path is None:
            self._choose(None)
        return cuda().empty(length, dtype)

    def run(self, request: Request) -> str:
        """Run the collective; the name of the path and algorithm."""
        if self._engine.size == 1 and self._path is None:
            if request.source is not None:
                assign(request.target, request.source)
            return "copy"
        path = self._path or self._choose(request.target)
        try:
            return path.run(request)
        except NcclError as error:
            raise self._failed(error) from error
        except BaseException as error:
            # Other ranks may be in the call: the next one would be matched with it.
            if not is_in_step(error):
                self.give_up(error)
            raise

    def _failed(self, error: NcclError) -> CollectiveError:
        failure = CollectiveError(f"{self._engine.wait_policy.call}: {error}")
        self.give_up(failure)
        return failure

    def bind(
        self, collective: str, array: DeviceArray, op: ReduceOp | str | None, root: int
    ) -> BoundCall | None:
        """A function (array, out) → result for device arrays like the given one, or None.

        It returns PASS, before any side effect, for arguments that it does not support.
        """
        if self._path is None or self._device is None:
            return None
        calls = DeviceCalls(self._engine, self._path, self._device, self._failed)
        return calls.bind(collective, array, op, root)

    def submit(self, operation: Operation) -> Handle[Any]:
        """Enqueue the call now; the handle waits for the GPU."""
        return self._engine.whole(self._submit, operation)

    def _submit(self, operation: Operation) -> Handle[Any]:
        self.check_call(operation.signature)
        with self.beside(operation):
            return self.enqueue(operation._replace(signature=operation.signature.on_gpu()))

    def serve(self, array: Any) -> bool:
        """Whether it lies on a GPU, and a path was chosen."""
        return self._path is not None and on_gpu(array)

    def start_bound(self, call: Callable[[], Any]) -> Handle[Any] | None:
        """Enqueue a bound call now, as `submit`; None where it returns PASS.

        Its errors are those of the call: the handle raises them.
        """
        return self._engine.whole(self._start_bound, call)

    def _start_bound(self, call: Callable[[], Any]) -> Handle[Any] | None:
        failures.report()
        future: Future[Any] = Future()
        number = failures.begin()
        with self.beside(None):
            try:
                result = call()
            except Exception as error:
                failures.fail(future, error, number)
            else:
                if result is PASS:
                    return None
                future.set_result(result)
            return self._handle(future, self._engine.recorder.last())

    def beside(self, held: object) -> AbstractContextManager[None]:
        """As `DevicePath.beside`; no effect in the first call, and in one that `check` refuses."""
        if self._path is None or cuda().current_device() != self._device:
            return nullcontext()
        return self._path.beside(held)

    def as_torch(self) -> AbstractContextManager[None]:
        """As `Cuda.as_torch`, where this process has CuPy."""
        try:
            return cuda().as_torch()
        except BackendUnavailableError:
            return nullcontext()  # the call refuses the array

    def enqueue(self, operation: Operation) -> Handle[Any]:
        """Like `submit`, for an operation that was checked and is marked as one on a GPU."""
        failures.report()
        future: Future[Any] = Future()
        run_into(future, self._engine, operation, failures.begin())
        return self._handle(future, operation.signature)

    def _handle(self, future: Future[Any], call: Signature | None) -> Handle[Any]:
        """The handle of a call that was enqueued on the current stream, or has failed."""
        stream, event = cuda().current_stream(), None
        if future.exception() is None and not stream.capturing():
            event = stream.record()  # a captured one can't be queried
        return DeviceHandle(future, event, partial(_wait, self._path, call))

    def check(self, collective: str, op: str | None, dtypes: Iterable[np.dtype[Any]]) -> None:
        """Check a call of these dtypes on this rank, before the ranks synchronize.

        Raises TypeError if the current GPU is not the communicator's, and RuntimeError if a CUDA
        graph can't capture the call.
        """
        gpus = cuda()
        number = gpus.current_device()
        if self._device not in (None, number):
            raise TypeError(
                f"the current GPU is {number}: this rank's communicator uses GPU {self._device}"
            )
        if self._engine.size == 1 and self._path is None:
            return
        if gpus.current_stream().capturing():
            if self._path is None:
                raise RuntimeError("a graph can't capture a communicator's first call: make one")
            for dtype in dtypes:
                self._path.check_capture(collective, op, dtype)

    def check_call(self, signature: Signature) -> None:
        """Like `check`, for the call of a signature."""
        names, op = [] if signature.dtype is None else [signature.dtype], signature.op
        plain = (np.dtype(name) for name in names)
        dtypes = (
            plain
            if op is None
            else (reduction_for(as_op(op), dtype, True).dtype for dtype in plain)
        )
        # A schedule needs temporary memory, unlike the native collectives that can be captured.
        forced = "algorithm=" in (signature.detail or "")
        self.check("a schedule" if forced else signature.collective, op, dtypes)

    def _choose(self, array: DeviceArray | None) -> DevicePath:
        """Select the path together with all other ranks, which make the same call. Collective."""
        if self.over_host:
            self._path = HostPath(cuda(), self._engine)
            return self._path
        found, verdict = self._examine(
            lambda gpus: gpus.current_device() if array is None else gpus.device_of(array)
        )
        if found is None or not verdict.gpus:
            raise in_step(BackendUnavailableError(f"arrays on GPUs: {verdict.problem}"))
        if verdict.problem is None:
            return self._use(self._over_nccl(found, verdict), found)
        if self._engine.rank == 0:
            path = "CUDA IPC" if verdict.one_gpu else "the host's memory"
            log.warning("arrays on GPUs go by way of %s: %s", path, verdict.problem)
        return self._use(self._without_nccl(found.cuda, verdict), found)

    def _without_nccl(self, gpus: Cuda, verdict: Verdict) -> DevicePath:
        engine = self._engine
        if verdict.one_gpu:
            try:
                return IpcPath(
                    gpus,
                    engine.rank,
                    engine.size,
                    barrier=lambda: numbers_of_all(engine, 0),
                    gather=lambda content: gather_pickles(engine, pickle.dumps(content)),
                )
            except BackendUnavailableError as error:
                if engine.rank == 0:
                    log.warning("CUDA IPC can't be used, the host's memory is: %s", error)
        return HostPath(gpus, engine)

    def _use(self, path: DevicePath, found: probe.Found) -> DevicePath:
        self._path, self._device = path, found.device
        return path

    def _examine(self, choose: Callable[[Cuda], int]) -> tuple[probe.Found | None, Verdict]:
        """This rank's GPU, and the verdict of all ranks. Collective."""
        found, health = probe.find_gpu(choose)
        return found, judge(gather_pickles(self._engine, pickle.dumps(health)))

    def _over_nccl(self, found: probe.Found, verdict: Verdict) -> NcclPath:
        return start_nccl(self._engine, found, self.give_up, float8=verdict.float8)

    def give_up(self, error: BaseException) -> None:
        """End the running work after an error that other ranks may not have."""
        self._engine.break_off(error)
        self.abandon()

    def abandon(self) -> None:
        """Release what one rank alone can release."""
        path, self._path = self._path, None
        if path is not None:
            path.abandon()

    def close(self) -> None:
        """Release all resources. Collective."""
        if self._path is not None:
            self._path.close()  # an error leaves it to `abandon`
            self._path = None


def _wait(
    path: DevicePath | None, call: Signature | None, event: Event, timeout: float | None
) -> None:
    """Wait for a call of this path, also once it is closed or abandoned."""
    wait = wait_for if path is None else partial(path.wait, str(call))
    wait(event, timeout)


class DeviceHandle(Handle[Any]):
    """The future result of a call that a GPU executes.

    The call itself was enqueued at once, in program order, as NCCL requires.
    """

    def __init__(
        self, future: Future[Any], event: Event | None, wait: Callable[[Event, float | None], None]
    ) -> None:
        """`event` follows the call on its stream; None if the call failed or is captured."""
        super().__init__(future)
        self._event, self._wait = event, wait

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._event is None or self._event.done()

    def wait(self, timeout: float | None = None) -> Any:
        """The result, once the GPU has finished; every call returns the same object."""
        result = super().wait(timeout)
        if self._event is not None:
            self._wait(self._event, timeout)
        return result
