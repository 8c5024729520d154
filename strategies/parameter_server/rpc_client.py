"""One worker's connection to the parameter servers: requests, pushes, and the errors of pushes."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from collectives import RankFailedError
from collectives.messaging.buffers import SendWindow
from collectives.messaging.mailbox import Mailbox
from collectives.messaging.remote_error import RemoteTracebackError, rebuild
from collectives.messaging.rpc import Call, Endpoint, PendingAnswer
from strategies.core.values import Array
from strategies.parameter_server.requests import PushFailed, Request, Roles

_MOST_PUSHES_UNDER_WAY = 256
_MOST_BYTES_UNDER_WAY = 256 << 20
_FAILED = "these parts failed, and may be half changed; all other parts were changed:"


class RpcClient:
    """Requests to the servers, which are numbered from 0, and pushes, which have no answer.

    A push is on its way when it returns, and its arrays may be changed. Its error is raised by a
    later `prepare`, `poll` or `wait`. Waits raise RankFailedError where a server that is waited for
    has died, and DeadlineExceededError after the communicator's deadline.
    """

    def __init__(self, mailbox: Mailbox, roles: Roles) -> None:
        self._mailbox, self._ranks = mailbox, roles.servers
        self.servers = len(roles.servers)
        self.endpoint = Endpoint(
            mailbox, self._note_failure, roles.name, "has ended, or never called `serve()`"
        )
        self._window = SendWindow(_MOST_PUSHES_UNDER_WAY, _MOST_BYTES_UNDER_WAY)
        self._errors: list[PushFailed] = []
        self.failures: Counter[int] = Counter()
        """How many pushes to each shard are known to have failed."""
        self.has_left = False
        self._refusal: str | None = None
        self.lock = threading.RLock()
        """Held during every exchange with the servers: one thread at a time."""

    def request(self, server: int, body: Request, arrays: Sequence[Array] = ()) -> PendingAnswer:
        """Send a request; the arrays must not be changed before its answer."""
        self._check_usable()
        return self.endpoint.request(self._ranks[server], body, arrays)

    def push(self, server: int, body: Request, arrays: Iterable[Array] = ()) -> None:
        """Send a notification with copies of the arrays.

        It doesn't raise errors of earlier pushes, so that all pushes of one step are sent: call
        `prepare` before the first one.
        """
        self._check_usable()
        rank = self._ranks[server]
        self._window.send(lambda copies: self.endpoint.notify(rank, body, copies), arrays)

    def wait(self, ready: Callable[[], bool], server: int, what: str) -> None:
        """Return when `ready()`, which depends on the server; raise errors of pushes."""
        self._wait(ready, self._ranks[server], what)

    def _wait(self, ready: Callable[[], bool], rank: int, what: str) -> None:
        self.endpoint.wait(ready, [rank], what)
        self._raise_errors()

    def poll(self) -> None:
        """Raise errors of pushes that have arrived. RuntimeError after `leave`."""
        self._check_usable()
        self.endpoint.drain()
        self._raise_errors()

    def prepare(self) -> None:
        """Before pushes: as `poll`; waits while too much is under way."""
        self.poll()
        self._window.make_room(lambda push: self._wait(push.done, push.peer, "a push"))

    def check_present(self, server: int) -> None:
        """RankFailedError where a server has ended, as polled a short while ago."""
        self.endpoint.check_present(self._ranks[server])

    def _note_failure(self, call: Call) -> None:
        failed: PushFailed = call.body
        self._errors.append(failed)
        if failed.shard is not None:
            self.failures[failed.shard] += 1

    def _raise_errors(self) -> None:
        """Raise the first one; its cause has the tracebacks of all."""
        if self._errors:
            errors, self._errors = [each.failure for each in self._errors], []
            traces = "\n".join([_FAILED, *(f"{each.place}: {each.traceback}" for each in errors)])
            raise rebuild(errors[0]) from RemoteTracebackError("parameter servers", traces)

    @contextlib.contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """Within it every exchange with the servers raises RuntimeError, but for `leave`."""
        before, self._refusal = self._refusal, reason
        try:
            yield
        finally:
            self._refusal = before

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        if self.has_left:
            raise RuntimeError(
                "this worker has left the parameter servers: use variables before `shutdown`"
            )

    def leave(self) -> None:
        """Notify all servers that live. A second call does nothing."""
        with self.lock:
            if self.has_left or self._mailbox.closed:
                return
            for rank in self._ranks:
                with contextlib.suppress(RankFailedError):
                    self.endpoint.notify(rank, Request("leave"))
            self.has_left = True
            with contextlib.suppress(RankFailedError):
                self._mailbox.flush()
