"""The process group of torch.distributed over a communicator.

torch's names of the methods are kept. torch calls some of them from C++, by the names before
version 2.13 or after: both are there. A call takes torch's options; without any it is asynchronous.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from collectives.communicator import Communicator
from collectives.errors import DeadlineExceededError, MismatchError, UnusableError
from collectives.torch.arguments import as_list, as_lists, divides_alike, options_of, settled, split
from collectives.torch.call_queue import CallQueue, reword, reword_monitored
from collectives.torch.collective_calls import CollectiveCalls
from collectives.torch.members import Members
from collectives.torch.messages import Messages
from collectives.torch.names import Names
from collectives.torch.untraced import untraced
from collectives.torch.works import AllWorks, done, gpus_of

_c10d = dist.distributed_c10d
# How long `shutdown` waits for the other ranks, which may destroy their groups later or never.
_SHUTDOWN_SECONDS = 5.0
_is_profiled = torch.autograd._profiler_enabled
_UNSHOWN = nullcontext()


@untraced
class CollectivesProcessGroup(Names, dist.ProcessGroup):
    """A group of ranks whose tensors lie on the CPU or a GPU."""

    def __init__(
        self,
        backend: str,
        comm: Communicator,
        messages: Messages,
        queue: CallQueue,
        members: Members,
    ) -> None:
        """`backend` is the name under which torch knows this class."""
        # The constructor that takes a store does not work for subclasses.
        super().__init__(comm.rank, comm.size)
        self._comm, self._members = comm, members
        self._messages, self._queue, self._check = messages, queue, queue.scope.call_check
        self._calls = CollectiveCalls(comm)
        self._coalesced: list[Any] | None = None
        self._backend = backend
        comm.at_end(self.complete)

    def _run(
        self, options: Any, name: str, outputs: Any, call: Callable[..., None], *arguments: Any
    ) -> Any:
        """Make a call now, or in the order of those that are pending."""
        seconds = options.timeout.total_seconds()
        with record_function(f"collectives:{name}") if _is_profiled() else _UNSHOWN:
            later = options.asyncOp
            # The look for GPUs takes a microsecond.
            gpus = gpus_of(arguments) if torch.cuda.is_initialized() else []
            if not (later or self._queue.pending or gpus):
                self._perform(seconds, call, *arguments)
                return done(outputs)
            arguments = settled(arguments)
            action = partial(self._perform, seconds, call, *arguments)
            if gpus:
                work = self._queue.submit_on_gpu(outputs, name, action, arguments, gpus, later)
            else:
                work = self._queue.submit(outputs, name, action)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _perform(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        with self._queue.scope.lock:
            if self._messages.aborted:
                raise UnusableError(f"group {self._name!r} was aborted")
            check = self._check
            sequence = -1 if check is None else check.sequence
            try:
                wanted = seconds if seconds > 0 else self._messages.deadline
                if wanted == self._comm.deadline == self._messages.deadline:
                    call(*arguments)
                    return
                self._comm.deadline = wanted
                try:
                    call(*arguments)
                finally:
                    self._comm.deadline = self._messages.deadline
            except (DeadlineExceededError, MismatchError) as error:
                reword(error, self._name)
                sequence = -1  # one that was withdrawn is made again
                raise
            finally:
                if check is not None and check.sequence == sequence and check.intents is not None:
                    check.intents.unmade += 1

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce tensors, dense or sparse, in place."""
        tensors, opts = as_list(tensors), options_of(_c10d.AllreduceOptions, opts)
        return self._run(opts, "allreduce", tensors, self._calls.all_reduce, tensors, opts.reduceOp)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce tensors in place, in few messages."""
        tensors, opts = as_list(tensors), options_of(_c10d.AllreduceCoalescedOptions, opts)
        call = self._calls.all_reduce_many
        return self._run(opts, "allreduce_coalesced", tensors, call, tensors, opts.reduceOp)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> Any:
        """Reduce tensors into the root's."""
        tensors, opts = as_list(tensors), options_of(_c10d.ReduceOptions, opts, op)
        arguments = tensors, opts.reduceOp, opts.rootRank
        return self._run(opts, "reduce", tensors, self._calls.reduce, *arguments)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Copy the root's tensors into the others'."""
        tensors, opts = as_list(tensors), options_of(_c10d.BroadcastOptions, opts)
        return self._run(opts, "broadcast", tensors, self._calls.broadcast, tensors, opts.rootRank)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather inputs[i] of rank r in outputs[i][r]."""
        outputs, inputs = as_lists(outputs), as_list(inputs)
        opts, call = options_of(_c10d.AllgatherOptions, opts), self._calls.all_gather
        return self._run(opts, "allgather", outputs, call, outputs, inputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather inputs[i] of rank r in outputs[r][i]."""
        opts = options_of(_c10d.AllgatherOptions, opts)
        by_tensor, call = list(zip(*outputs, strict=True)), self._calls.all_gather
        return self._run(opts, "allgather_coalesced", outputs, call, by_tensor, inputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Gather the ranks' tensors one after the other in one."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """As `all_gather_single`, for each input."""
        opts, call = options_of(_c10d.AllgatherOptions, opts), self._calls.all_gather_single
        return self._run(opts, "all_gather_single", outputs, call, outputs, inputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce inputs[i][r] of all ranks into outputs[i] of rank r."""
        outputs, inputs = as_list(outputs), as_lists(inputs)
        opts, call = options_of(_c10d.ReduceScatterOptions, opts), self._calls.reduce_scatter
        return self._run(opts, "reduce_scatter", outputs, call, outputs, inputs, opts.reduceOp)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Reduce the ranks' tensors, and give each rank its part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """As `reduce_scatter_single`, for each input."""
        opts, call = options_of(_c10d.ReduceScatterOptions, opts), self._calls.reduce_scatter_single
        arguments = outputs, inputs, opts.reduceOp
        return self._run(opts, "reduce_scatter_single", outputs, call, *arguments)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather inputs[i] of rank r in the root's outputs[i][r]."""
        opts = options_of(_c10d.GatherOptions, opts)
        arguments = as_lists(outputs), as_list(inputs), opts.rootRank
        return self._run(opts, "gather", arguments[0], self._calls.gather, *arguments)

    def gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Gather the inputs in the root's output, one after the other."""
        opts = options_of(_c10d.GatherOptions, opts)
        flat = output.view(-1) if output.is_contiguous() else output
        parts = list(flat.chunk(self._comm.size)) if opts.rootRank == self._comm.rank else []
        return self.gather([parts], [input], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy inputs[i][r] of the root into outputs[i] of rank r."""
        opts = options_of(_c10d.ScatterOptions, opts)
        arguments = as_list(outputs), as_lists(inputs), opts.rootRank
        return self._run(opts, "scatter", arguments[0], self._calls.scatter, *arguments)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Send inputs[r] to rank r, and receive outputs[r] from it."""
        opts = options_of(_c10d.AllToAllOptions, opts)
        return self._run(opts, "alltoall", outputs, self._calls.all_to_all, outputs, inputs)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        """Send and receive the parts along the first dimension; of equal lengths if none given."""
        opts, size = options_of(_c10d.AllToAllOptions, opts), self._comm.size
        if not output_splits and not input_splits and divides_alike(output, input, size):
            call = self._calls.all_to_all_single
            return self._run(opts, "all_to_all_single", [output], call, output, input)
        outputs, inputs = split(output, output_splits, size), split(input, input_splits, size)
        call_all = self._calls.all_to_all
        return self._run(opts, "all_to_all_single", [output], call_all, outputs, inputs)

    def barrier(self, opts: Any = None) -> Any:
        """Synchronize all ranks."""
        return self._run(options_of(_c10d.BarrierOptions, opts), "barrier", [], self._comm.barrier)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Synchronize all ranks; DeadlineExceededError on every rank, with all that are absent."""
        opts = _c10d.BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = max(timeout, timedelta(milliseconds=1))
        try:
            self._run(opts, "monitored_barrier", [], self._comm.barrier).wait()
        except DeadlineExceededError as error:
            reword_monitored(error, self._comm.rank)
            raise

    # The names that torch uses elsewhere.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Messages.

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Start to send a tensor."""
        return self._message(tensors, self._messages.send, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Start to receive a tensor."""
        return self._message(tensors, self._messages.receive, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Start to receive a tensor from any rank; the work has the sender's number."""
        return self._message(tensors, self._messages.receive, None, tag)

    def _message(self, tensors: Any, begin: Callable[..., Any], *where: int | None) -> Any:
        (tensor,) = as_list(tensors)
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        work = begin(tensor, *where)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Any:
        works, self._coalesced = self._coalesced or [], None
        return AllWorks(works)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of calls from now on. ValueError unless it is positive."""
        self._comm.deadline = self._messages.deadline = timeout.total_seconds()

    def registered(self, nbytes: int) -> Any:
        """So many bytes of registered memory, as `Communicator.empty`. Collective."""
        made: list[Any] = []
        opts = _c10d.BarrierOptions()
        self._run(opts, "empty", made, lambda: made.append(self._comm.empty(nbytes, "u1"))).wait()
        return made[0]

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last calls of every rank to a file on rank 0, as `Communicator.trace`."""
        self._comm.trace(path)

    def complete(self) -> None:
        """Make the calls that are pending, and no call any more."""
        self._make_pending()
        self._members.end()

    def _make_pending(self) -> None:
        self._queue.drain()
        self._messages.finish_sends(_SHUTDOWN_SECONDS)

    def shutdown(self) -> None:
        """Complete pending calls, then close it if all ranks do, else at the program's end."""
        self._make_pending()
        self._members.begin_closing()
        if not self._comm.closed and self._members.await_all_closing(_SHUTDOWN_SECONDS):
            self._comm.close()
            self._messages.close()

    def abort(self) -> None:
        """As `shutdown`, but calls without a deadline of their own, and messages, end first."""
        before, self._messages.aborted = self._messages.deadline, True
        self.set_timeout(timedelta(milliseconds=1))
        try:
            self._make_pending()
            self._queue.await_running(_SHUTDOWN_SECONDS)
        finally:
            self._comm.deadline = self._messages.deadline = before
        self.shutdown()
