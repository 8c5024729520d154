"""Sends and receives between two ranks of a group, over MPI.

Tensors on a GPU are copied through the host's memory: MPI is not given a GPU's address.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from collectives.arrays.tensor_memory import TensorMemory
from collectives.consistency.signature import check_index
from collectives.errors import RankFailedError, ShapeMismatchError, UnusableError
from collectives.launching.start import start_mpi
from collectives.torch.collective_calls import stays_tensor
from collectives.torch.members import Members
from collectives.torch.works import PendingWork, gpus_of
from collectives.waiting.wait_policy import WaitPolicy

# How often the messages that no caller waits for make progress.
_POLL_SECONDS = 5e-4
_THREAD = "collectives-messages"
# Of the bytes of a message, in MPI before version 4.
_LARGEST_COUNT = (1 << 31) - 1
# For a message whose sender has closed the group since.
_GRACE_SECONDS = 1.0


class MessageWork(PendingWork):
    """One message that is sent or received. `peer` is None for a receive from any rank."""

    def __init__(
        self,
        messages: Messages,
        name: str,
        tensor: Any,
        on_host: Any,
        peer: int | None,
        *,
        receives: bool,
    ) -> None:
        """`on_host` is the tensor, or what stands for it on the host; it holds the message."""
        # A message that is sent is on the host already.
        gpus = gpus_of(tensor) if receives else []
        super().__init__([tensor if receives else on_host], name, gpus)
        self._on_host = on_host
        if self.gpus:
            # Of the copy, after what is enqueued now. The current stream would make it wait for
            # what the program enqueues until the message comes.
            self._stream = torch.cuda.Stream(self.gpus[0])
            self._stream.wait_stream(torch.cuda.current_stream(self.gpus[0]))
        self._messages, self._nbytes, self._peer = messages, tensor.nbytes, peer
        self.receives = receives
        self._status = messages.mpi.Status()
        # A callback may test the work again.
        self._testing = threading.RLock()
        self._ended_by: BaseException | None = None
        self._closed_since = math.inf
        self.request: Any = None

    def is_completed(self) -> bool:
        """Whether the tensor may be used, or `wait` would raise; makes progress."""
        return self.has_moved() and super().is_completed()

    def has_moved(self) -> bool:
        """Whether `wait` would return or raise at once; makes progress."""
        with self._testing:
            if self._finished:
                return True
            try:
                if not self.request.Test(self._status):
                    return False
                error = self._error_of_receive() if self.receives else None
            except self._messages.mpi.Exception as failed:
                error = self._described(failed)
            self.finish(error)
            return True

    def finish(self, error: BaseException | None) -> None:
        """Copy what was received to the GPU of the tensor."""
        (tensor,) = self._tensors
        copies = self.receives and error is None and self._on_host is not tensor
        try:
            with self._on_stream():
                if copies:
                    tensor.detach().copy_(self._on_host, non_blocking=True)
                if copies and self._stream is not None:
                    # Its memory may be freed before the copy is done.
                    tensor.record_stream(self._stream)
                super().finish(error)
        except Exception as failed:
            # CUDA's: the thread must go on with the other messages.
            if not self._finished:
                super().finish(failed)

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Context in which the stream of the copy, if there is one, is the current one."""
        if self._stream is None:
            return nullcontext()
        if threading.current_thread().name == _THREAD:
            # With another GPU current, CUDA would use that one, too.
            torch.cuda.set_device(self.gpus[0])
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def _error_of_receive(self) -> BaseException | None:
        if self._status.Is_cancelled():
            return self._ended_by
        count = self._status.Get_count(self._messages.mpi.BYTE)
        return None if count == self._nbytes else self._mismatch(f"{count}")

    def _described(self, error: Any) -> BaseException:
        if error.Get_error_class() == self._messages.mpi.ERR_TRUNCATE:
            return self._mismatch("more")
        return RuntimeError(f"{self._name}: {error}")

    def _mismatch(self, sent: str) -> BaseException:
        return ShapeMismatchError(
            f"{self._name}: {sent} bytes were sent, and the tensor holds {self._nbytes}"
        )

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor may be read, or changed if it was sent.

        Raises DeadlineExceededError after the timeout, or the group's, RankFailedError soon after
        the other rank has closed the group or ended its program, UnusableError where another thread
        aborts the group, and ShapeMismatchError for a message of another length. A receive ends
        with any of them.
        """
        seconds = timeout.total_seconds() if timeout else 0
        deadline = seconds if seconds > 0 else self._messages.deadline
        policy = self._messages.policy.for_single_wait(self._name, deadline)
        policy.check_alive = self._check_peer
        absent = {} if self._peer is None else {self._peer: ""}
        try:
            policy.spin_until(self.has_moved, lambda: absent)
        except TimeoutError as error:
            limit = f"Timed out waiting {(deadline or 0) * 1000:.0f}ms"
            error.args = (f"{limit} for {self._name} operation to complete: {error}",)
            if self._ends_by(error):
                raise
        except (RankFailedError, UnusableError) as error:
            if self._ends_by(error):
                raise
        return super().wait()

    def _check_peer(self) -> None:
        """RankFailedError or UnusableError where the message won't move any more."""
        self._messages.policy.check_alive()
        if self._messages.aborted:
            raise UnusableError(f"{self._name}: the group was aborted")
        if not self._messages.members.have_ended(self._peer):
            return
        # It has waited for what it sent, but the end of a message may be on its way.
        self._closed_since = min(self._closed_since, time.monotonic())
        if time.monotonic() - self._closed_since > _GRACE_SECONDS:
            who = "all other ranks have" if self._peer is None else f"rank {self._peer} has"
            raise RankFailedError(f"{self._name}: {who} closed the group")

    def _ends_by(self, error: BaseException) -> bool:
        """Whether the message has not moved in time. A later receive gets a message then."""
        with self._testing:
            if self._finished:
                return False
            if self.receives and self._ended_by is None:
                self._ended_by = error
                self.request.Cancel()
            return True

    def before_callbacks(self) -> None:
        """Wait for nothing: messages have no order that callbacks could change."""

    def source_rank(self) -> int:
        """The rank that has sent the message."""
        return int(self._status.Get_source())

    _source_rank = source_rank


class Messages:
    """The messages of one group, on an MPI communicator of their own.

    A thread makes the progress of pending messages: while this rank is in a collective over shared
    memory, or computes, MPI would move none.
    """

    def __init__(self, mpi_comm: Any, policy: WaitPolicy, members: Members) -> None:
        """`policy` has the group's deadline, and finds dead ranks."""
        self._comm, self.mpi, self.policy = mpi_comm, start_mpi(), policy
        self.deadline = policy.deadline
        """The group's; that of the policy may be one of a call that is being made."""
        self.aborted = False
        self._size = mpi_comm.size
        self._tags = 1 + mpi_comm.Get_attr(self.mpi.TAG_UB)
        self.members = members
        self._memory = TensorMemory()
        self._changed = threading.Condition()
        self._pending: list[MessageWork] = []
        self._thread: threading.Thread | None = None

    def send(self, tensor: Any, peer: int, tag: int) -> MessageWork:
        """Start to send the contiguous tensor."""
        on_host = tensor.detach().cpu() if stays_tensor(tensor) else tensor
        tag = check_index("tag", tag, self._tags)
        name = f"send to rank {check_index('dst', peer, self._size)} with tag {tag}"
        work = MessageWork(self, name, tensor, on_host, peer, receives=False)
        work.request = self._comm.Isend(self._bytes_of(on_host), peer, tag)
        return self._begun(work)

    def receive(self, tensor: Any, peer: int | None, tag: int) -> MessageWork:
        """Start to receive into the contiguous tensor, from any rank if `peer` is None."""
        on_host = tensor
        if stays_tensor(tensor):
            # Pinned, so that no copy waits for the GPU.
            on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        size = self._size
        source = "any rank" if peer is None else f"rank {check_index('src', peer, size)}"
        name = f"recv from {source} with tag {check_index('tag', tag, self._tags)}"
        work = MessageWork(self, name, tensor, on_host, peer, receives=True)
        number = self.mpi.ANY_SOURCE if peer is None else peer
        work.request = self._comm.Irecv(self._bytes_of(on_host), number, tag)
        return self._begun(work)

    def _bytes_of(self, on_host: Any) -> list[Any]:
        if self.mpi.Is_finalized():
            raise UnusableError("MPI.Finalize was called")
        content = self._memory.flat(on_host).view(np.uint8)
        if content.nbytes > _LARGEST_COUNT and self.mpi.Get_version() < (4, 0):
            raise ValueError(
                f"a message of {content.nbytes} bytes: this MPI counts to {_LARGEST_COUNT}: send"
                " the tensor in parts"
            )
        return [content, self.mpi.BYTE]

    def _begun(self, work: MessageWork) -> MessageWork:
        if work.has_moved():
            return work
        with self._changed:
            self._pending.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._progress, name=_THREAD, daemon=True)
                self._thread.start()
            self._changed.notify()
        return work

    def _progress(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._changed:
                if self._thread is not thread:
                    return
                pending = list(self._pending)
                if not pending:
                    self._changed.wait()
            ended = {id(work) for work in pending if work.has_moved()}
            with self._changed:
                self._pending = [work for work in self._pending if id(work) not in ended]
            time.sleep(_POLL_SECONDS)

    def finish_sends(self, seconds: float) -> None:
        """Wait for messages that were sent, no longer than that: nobody may receive them."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._changed:
                sends = [work for work in self._pending if not work.receives]
            if all(work.has_moved() for work in sends):
                return
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End the thread, and free MPI's communicator, whose pending messages end first."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None:
            thread.join()
        if not self.mpi.Is_finalized():
            self._comm.Free()
