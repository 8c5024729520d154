"""Unsolicited messages between any two ranks, at any time: no receive is posted for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from collectives.consistency.signature import check_index
from collectives.errors import DeadlineExceededError, RankFailedError, UnusableError
from collectives.messaging.fair_lock import FairLock
from collectives.messaging.liveness import Processes
from collectives.messaging.message import IncomingMessage, Message, SendRequest, held, read, write
from collectives.transports.base import Bytes, Copied, MessageChannel
from collectives.waiting.wait_policy import WaitPolicy, check_timeout


class Mailbox:
    """One rank's end of a channel for messages, made by `Communicator.mailbox`.

    It may be used by several threads at once, beside calls of the communicator, where the MPI
    library allows threads. Messages move while some rank's thread is in a call of its mailbox: a
    large message arrives when the receiver calls `receive`.
    """

    def __init__(
        self, channel: MessageChannel, processes: Processes, rank: int, wait_policy: WaitPolicy
    ) -> None:
        """`wait_policy` is the communicator's."""
        self.rank, self.size = rank, processes.count
        self._channel, self._processes, self._wait_policy = channel, processes, wait_policy
        self._peers = [peer for peer in range(self.size) if peer != rank]
        self._fair_lock = FairLock()
        self._own: deque[IncomingMessage] = deque()
        self._writes_to_itself = self._own_is_due = False
        self._outstanding: dict[int, deque[SendRequest]] = {}
        channel.kept = self._outstanding
        self._ended: set[int] = set()
        self._finished: set[int] = set()
        self._end_sent = self._finish_sent = False
        self._ended_by: str | None = None

    def send(self, peer: int, header: Any, arrays: Iterable[Any] = ()) -> SendRequest:
        """Send a message to a rank, this one included; return at once.

        `header` is any small object, which travels by pickle. `arrays` are of any shape, strides
        and dtype of a fixed size (as in `Communicator.all_reduce`, and dates and strings), and must
        not be changed before the message is done; they arrive as NumPy arrays in C order. Messages
        between two ranks arrive in the order in which they were sent.

        Raises ValueError or TypeError for a wrong peer or array, RankFailedError where the peer has
        died or closed its mailbox, UnusableError after `close` or an exception within a transfer.
        """
        peer = check_index("peer", peer, self.size)
        buffers = write(header, arrays)
        with self._fair_lock:
            self._check_open()
            if peer == self.rank:
                self._writes_to_itself = True
                self._own.append(IncomingMessage.copied(peer, buffers))
                return SendRequest(self, peer, Copied(), ())
            if self._died(peer) or peer in self._ended:
                raise RankFailedError(f"{self._end_of(peer)}: nothing can be sent to it")
            return self._post_to(peer, buffers)

    def _post_to(self, peer: int, buffers: list[Bytes]) -> SendRequest:
        sent = SendRequest(self, peer, self._channel.send(buffers, peer), buffers)
        self._outstanding.setdefault(peer, deque()).append(sent)
        self._advance()
        return sent

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message of any rank, in order of arrival; its own alternate with the others'.

        Returns None if none arrives within `timeout` seconds (0: only what has arrived; None: no
        limit). Raises RankFailedError, only without `timeout`, if no rank is left that could send;
        UnusableError after `close`, ValueError or TypeError for a wrong `timeout`.
        """
        if (timeout := check_timeout(timeout)) is not None and not timeout >= 0:
            raise ValueError(f"timeout={timeout!r}: must be a number of seconds from 0, or None")
        incoming = self._take()
        if incoming is None and timeout != 0:
            incoming = self._await_message(timeout)
        return None if incoming is None else read(incoming)

    def _await_message(self, timeout: float | None) -> IncomingMessage | None:
        incoming: list[IncomingMessage] = []

        def arrived() -> bool:
            # The wait polls again after True: a second message would be lost.
            message = None if incoming else self._take()
            if message is not None:
                incoming.append(message)
            return bool(incoming)

        def check_senders() -> None:
            if timeout is None and self._no_sender_left() and not arrived():
                ends = ", ".join(map(self._end_of, self._peers))
                raise RankFailedError(f"receive: no rank is left that could send: {ends}")

        wait_policy = self._new_wait("receive", None)
        wait_policy.check_alive = check_senders
        try:
            with wait_policy.no_longer_than(timeout):
                wait_policy.spin_until(arrived, dict)
        except DeadlineExceededError:
            return None
        return incoming[0]

    def flush(self) -> None:
        """Return when all that this rank has sent is done.

        Raises RankFailedError where some of it was for a rank that has died, once the rest is done;
        DeadlineExceededError where that takes longer than the communicator's deadline.
        """
        with self._fair_lock:
            waiting = [sent for line in self._outstanding.values() for sent in line]

        def absent() -> dict[int, str]:
            return {sent.peer: "" for sent in waiting if not sent.done()}

        self.wait(lambda: all(sent.done() for sent in waiting), "mailbox: flush", absent)
        for sent in waiting:
            sent.wait()

    def alive(self, peer: int) -> bool:
        """False once the process of a rank is known to have died.

        For a rank of another machine, only the MPI library may report that.
        """
        peer = check_index("peer", peer, self.size)
        return not (peer in self._channel.failed or self._processes.died(peer))

    def all_alive(self) -> bool:
        """False once the process of any rank is known to have died."""
        return all(map(self.alive, range(self.size)))

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self.refusal is not None or self._end_sent

    @property
    def given_back(self) -> bool:
        """Whether `close` has finished."""
        return self._ended_by is not None

    def present(self, peer: int) -> bool:
        """False once a rank has died, or `receive` has found its mailbox closed: no more follow."""
        peer = check_index("peer", peer, self.size)
        return peer not in self._ended and self.alive(peer)

    @property
    def refusal(self) -> str | None:
        """Why there can be no more calls, if so."""
        return self._ended_by or self._channel.torn

    def close(self) -> None:
        """Release everything. A second call does nothing.

        Collective between the living ranks: what was sent arrives, or is dropped if no rank takes
        it. Raises DeadlineExceededError where another rank doesn't close its end within the
        communicator's deadline; `close` may be called again then.
        """
        if self.refusal is not None:
            return
        self.tell_end()
        what = "mailbox: close of a mailbox"
        self.wait(self._drained, what, lambda: dict.fromkeys(self._unfinished(), ""))
        self._end(together=not any(map(self._died, self._peers)))

    def tell_end(self) -> None:
        """Notify the others that this rank takes part no more; drop what has arrived."""
        with self._fair_lock:
            if self.refusal is None and not self._end_sent:
                self._notify_all()
                self._end_sent = True
        self._drained()

    def abandon(self, seconds: float) -> None:
        """End, without waiting longer than `seconds` for the other ranks."""
        if self.refusal is not None:
            return
        self.tell_end()
        wait_policy = self._new_wait("end", None)
        try:
            with wait_policy.no_longer_than(seconds):
                wait_policy.until(self._drained, dict)
        except DeadlineExceededError:
            held.append(self._outstanding)
        self._end(together=False)

    def forbid(self, reason: str) -> None:
        """Refuse every call from now on, without touching the transport."""
        # Another thread may have held it when the process was forked.
        self._fair_lock = FairLock()
        self._ended_by = reason

    def _end(self, *, together: bool) -> None:
        with self._fair_lock:
            # Another thread may have ended it.
            if self.refusal is None:
                self._channel.close(together=together)
                self._ended_by = "the mailbox is closed"

    def _check_open(self) -> None:
        if self.refusal is not None:
            raise UnusableError(self.refusal)
        if self._end_sent:
            raise UnusableError("the mailbox is being closed")

    def _take(self) -> IncomingMessage | None:
        """The next message that has arrived, if any."""
        with self._fair_lock:
            self._check_open()
            return self._poll()

    def _poll(self) -> IncomingMessage | None:
        self._advance()
        # In turn with those of others, which a rank that writes to itself would never receive.
        self._own_is_due = not self._own_is_due
        if self._own and self._own_is_due:
            return self._own.popleft()
        while (incoming := self._channel.poll()) is not None:
            source, buffers = incoming
            if buffers:
                return IncomingMessage(source, buffers)
            (self._finished if source in self._ended else self._ended).add(source)
        return self._own.popleft() if self._own else None

    def _advance(self) -> None:
        # Only the first to each rank: thousands may wait for one that receives none.
        for peer, line in list(self._outstanding.items()):
            while line and line[0].advance(self._processes):
                line.popleft()
            if not line:
                del self._outstanding[peer]
        if self._end_sent and not self._finish_sent and not self._outstanding:
            self._finish_sent = True
            self._notify_all()

    def _notify_all(self) -> None:
        """Twice: first no message follows, then all were received (receivers poll in between)."""
        for peer in self._peers:
            if not self._died(peer):
                # It may have died just now.
                with suppress(RankFailedError):
                    self._post_to(peer, [])

    def advance(self, sent: SendRequest) -> bool:
        """Advance a message; whether it is done or has failed."""
        with self._fair_lock:
            return self._ended_by is not None or sent.advance(self._processes)

    def _drained(self) -> bool:
        """Drop what has arrived; whether no message is on its way, in either direction."""
        with self._fair_lock:
            if self.refusal is not None:
                return True
            while self._poll() is not None:
                pass
            return not self._outstanding and not self._unfinished()

    def _no_sender_left(self) -> bool:
        if not self._peers or self._writes_to_itself:
            return False
        return all(peer in self._ended or self._died(peer) for peer in self._peers)

    def _unfinished(self) -> list[int]:
        """The ranks that may still need this one."""
        return [peer for peer in self._peers if peer not in self._finished and not self._died(peer)]

    def _end_of(self, peer: int) -> str:
        return f"rank {peer} has {'closed its mailbox' if peer in self._ended else 'died'}"

    def _died(self, peer: int) -> bool:
        return peer in self._channel.failed or self._processes.died_lately(peer)

    def wait(
        self,
        ready: Callable[[], bool],
        what: str,
        absent: Callable[[], dict[int, str]],
        check_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Return when `ready()`; DeadlineExceededError names `what` and the ranks in `absent()`."""
        if not ready():
            wait_policy = self._new_wait(what, self._wait_policy.deadline)
            wait_policy.check_alive = check_alive
            wait_policy.spin_until(ready, absent)

    def _new_wait(self, what: str, deadline: float | None) -> WaitPolicy:
        """The policy of a single wait: several threads may wait at the same time."""
        wait_policy = self._wait_policy.for_single_wait(what, deadline)
        if threading.current_thread() is not threading.main_thread():
            wait_policy.sleep_early()
        return wait_policy
