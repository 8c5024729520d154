"""Messages between two ranks on their way: their progress, their order, and the waits for them.

A thread makes progress while handles are pending, whatever the program does meanwhile, so that no
rank depends on another one's waits. A waiting thread makes progress itself, which is faster.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from collectives.calls.point_to_point import Incoming, Outgoing, Transfer
from collectives.errors import DeadlineExceededError, MismatchError, UnusableError
from collectives.execution.engine import Engine
from collectives.lifecycle.futures import Handle
from collectives.transports.base import Receiving
from collectives.waiting.wait_policy import WaitPolicy, calling_line, check_timeout, log

Result = TypeVar("Result")
Key = tuple[int, int]
"""A peer and a tag."""

_POLL_SECONDS = 0.5e-3
# How many pending messages a poll advances besides the one that is waited for.
_ADVANCED = 16


class MessageHandle(Handle[Any]):
    """The future result of a message between two ranks."""

    def __init__(self, messages: Messages, transfer: Transfer) -> None:
        self._messages, self._transfer = messages, transfer
        self._lock = threading.RLock()

    def done(self) -> bool:
        """Whether `wait` would return or raise at once; the array holds the message then."""
        done = self._messages.poll(self._transfer)
        if done and self._transfer.moved:
            # `wait` raises what this raises.
            with suppress(Exception):
                self._deliver()
        return done

    def wait(self, timeout: float | None = None) -> Any:
        """None for a sent message, the array for a received one; every call returns the same.

        Raises ShapeMismatchError or DtypeMismatchError if a received message differs from the
        array; TimeoutError after `timeout` seconds, and DeadlineExceededError, which names the
        peer, after the communicator's deadline, counted from the beginning of this wait. After
        either of the two the message remains in transit, and `wait` may be called again.
        """
        self._messages.wait(self._transfer, timeout)
        return self._deliver()

    def _deliver(self) -> Any:
        # A thread that delivers late would overwrite what another one has stored since.
        with self._lock:
            return self._transfer.deliver()


class Messages:
    """One rank's messages on one communicator."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._transport = engine, engine.transport
        # The transport allows one thread at a time.
        self._lock = threading.Lock()
        self.pending: deque[Transfer] = deque()
        self._unmatched: dict[Key, deque[Incoming]] = {}
        self._left: dict[Key, deque[Receiving]] = {}
        self._late: dict[Key, Outgoing] = {}
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, transfer: Transfer) -> Handle[Any]:
        """Start to send or receive, without a wait."""
        transfer.line = calling_line()
        # Once the message is on its way, nothing may be raised before the handle is returned.
        handle = MessageHandle(self, transfer)
        self._guarded(self._begin_and_keep, transfer)
        return handle

    def send(self, outgoing: Outgoing) -> None:
        """Send a message, unless it is the one that exceeded a deadline, and is on its way."""
        late = self._late.pop(outgoing.key, None)
        if late is not None and late.repeats(outgoing):
            outgoing = late
        elif self._guarded(self._begin, outgoing):
            return
        try:
            self.wait(outgoing)
        except DeadlineExceededError:
            self._late[outgoing.key] = outgoing
            self._keep(outgoing)
            raise

    def receive(self, incoming: Incoming) -> Any:
        """Receive a message; if that exceeds the deadline, the next receive gets it."""
        try:
            if not self._guarded(self._begin, incoming):
                self.wait(incoming)
            return incoming.deliver()
        except MismatchError:
            raise
        except BaseException:
            self._withdraw(incoming)
            raise

    def poll(self, transfer: Transfer) -> bool:
        """Whether `wait` would end at once; makes progress on others if not. Does not wait."""
        refused = self._engine.broken is not None
        return transfer.moved or refused or self._guarded(self._poll, transfer)

    def wait(self, transfer: Transfer, timeout: float | None = None) -> None:
        """Return when it has moved. TimeoutError or DeadlineExceededError if it takes too long."""
        timeout = check_timeout(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        if not transfer.moved and not self._guarded(self._wait, transfer, end):
            raise TimeoutError(f"not done after {timeout} s")

    def complete(self) -> None:
        """Wait for all messages that have been started."""
        while self.pending:
            with self._lock:
                first = self.pending[0] if self.pending else None
            if first is not None:
                self.wait(first)
                with self._lock:
                    self._advance_pending()

    def finish(self, seconds: float) -> bool:
        """Stop the thread, and drop receives without a message; whether nothing is on its way.

        Waits no longer than `seconds` for the rest.
        """
        self.stop()
        end = time.monotonic() + seconds
        while self.pending and self._engine.broken is None and not self._transport.ended:
            self._advance_or_break_off()
            if time.monotonic() >= end:
                return not self.pending
            time.sleep(_POLL_SECONDS)
        return True

    def stop(self) -> None:
        """Stop the thread, and end the receives for which no message has arrived."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._some.set()
            thread.join()
        for queue in self._unmatched.values():
            for incoming in queue:
                if self._engine.broken is None:
                    line = f" ({incoming.line})" if incoming.line else ""  # none of a `recv`
                    log.warning("%s: closed before a message came%s", incoming.call, line)
                incoming.refuse(UnusableError(f"{incoming.call}: the communicator is closed"))
        self._unmatched.clear()

    def _guarded(self, step: Callable[..., Result], *arguments: Any) -> Result:
        """Run a step, which may be repeated after a deadline but not after another error."""
        if self._engine.broken is not None:
            raise self._engine.refusal()
        try:
            result = step(*arguments)
        except DeadlineExceededError:
            raise
        except BaseException as error:
            # Part of a message may have been moved: the next one would be taken for the rest.
            self._engine.break_off(error)
            raise
        return result

    def _begin(self, transfer: Transfer) -> bool:
        """Start it; whether it has moved already."""
        with self._lock:
            if isinstance(transfer, Outgoing):
                transfer.start(self._transport)
            elif isinstance(transfer, Incoming):
                self._unmatched.setdefault(transfer.key, deque()).append(transfer)
            return self._advance(transfer)

    def _begin_and_keep(self, transfer: Transfer) -> None:
        if not self._begin(transfer):
            self._keep(transfer)

    def _keep(self, transfer: Transfer) -> None:
        """Make progress on a message until it has moved."""
        with self._lock:
            # Without a thread, no other call may remove them.
            while self.pending and self.pending[0].moved:
                self.pending.popleft()
            self.pending.append(transfer)
            if self._thread is None and self._transport.threads:
                self._thread = threading.Thread(
                    target=self._work, name="collectives-messages", daemon=True
                )
                self._thread.start()
        self._some.set()

    def _withdraw(self, incoming: Incoming) -> None:
        """Leave the message to the next receive; `close` waits for what has begun to arrive."""
        with self._lock:
            if incoming.receiving is None:
                if incoming in (queue := self._unmatched.get(incoming.key, deque())):
                    queue.remove(incoming)
                return
            self._left.setdefault(incoming.key, deque()).append(incoming.receiving)
        self._keep(incoming)

    def _poll(self, transfer: Transfer) -> bool:
        with self._lock:
            if (transfer.arrived or self._match(transfer)) and transfer.advance():
                return True
            if self.pending:
                self._advance_pending()
            return False

    def _advance(self, transfer: Transfer) -> bool:
        return (transfer.arrived or self._match(transfer)) and transfer.advance()

    def _match(self, transfer: Transfer) -> bool:
        """Give the messages of a key that arrive to the receives, both in their order.

        Whether this one has a message now.
        """
        key = transfer.key
        queue, left = self._unmatched.get(key), self._left.get(key)
        while queue:
            if left:
                queue.popleft().take(left.popleft())
                continue
            receiving = self._transport.receive(queue[0].buffer, *key)
            if receiving is None:
                break
            queue.popleft().take(receiving)
        return transfer.arrived

    def _advance_pending(self) -> None:
        """Make progress on some messages, on others the next time."""
        pending = self.pending
        for _ in range(min(len(pending), _ADVANCED)):
            if self._advance(pending[0]):
                pending.popleft()
            else:
                pending.rotate(-1)

    def _wait(self, transfer: Transfer, end: float | None) -> bool:
        for _ in range(self._engine.wait_policy.spins):
            if self._poll(transfer):
                return True

        def ready() -> bool:
            if self._engine.broken is not None:
                raise self._engine.refusal()
            return self._poll(transfer) or (end is not None and time.monotonic() >= end)

        self._wait_policy(transfer).until(ready, lambda: {transfer.peer: self._note(transfer)})
        return transfer.moved

    def _note(self, transfer: Transfer) -> str:
        """On the rank that is waited for: whether it has sent with another tag."""
        if isinstance(transfer, Outgoing) or transfer.arrived:
            return ""
        with self._lock:
            tag = self._transport.other_tag(transfer.peer)
        return "" if tag in (None, transfer.tag) else f", which has sent a message with tag={tag}"

    def _wait_policy(self, transfer: Transfer) -> WaitPolicy:
        """One of its own, because several threads may wait at once."""
        common = self._engine.wait_policy
        wait_policy = common.for_single_wait(transfer.call, common.deadline)
        wait_policy.check_alive, wait_policy.before_raise = common.check_alive, common.before_raise
        wait_policy.line, wait_policy.call.scope = transfer.line, common.call.scope
        return wait_policy

    def _work(self) -> None:
        """Make progress until the communicator is closed."""
        while self._thread is not None:
            self._some.wait()
            # A message that the program waits for at once needs no help.
            time.sleep(_POLL_SECONDS)
            if self._engine.broken is not None or self._transport.ended:
                return
            self._advance_or_break_off()

    def _advance_or_break_off(self) -> None:
        """Make progress where no error can be raised: the next wait reports it."""
        with self._lock:
            try:
                self._advance_pending()
            except BaseException as error:
                self._engine.break_off(error)
            if not self.pending:
                self._some.clear()
