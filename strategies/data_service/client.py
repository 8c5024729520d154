"""A training rank's side of the data service: it requests batches and takes them."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from collectives import Mailbox, RankFailedError
from collectives.messaging.rpc import Call, Endpoint, PendingAnswer
from strategies.data_service.server import Closed, Leave, Next
from strategies.input import DatasetError, batches

_Wanted: TypeAlias = tuple[int, PendingAnswer | None]
"""A dataset rank, and the request for a batch; None where that rank receives none any more."""


class DatasetClient:
    """The batches that the dataset ranks deal to this rank."""

    def __init__(self, box: Mailbox, servers: Sequence[int], credits: int) -> None:
        """`credits` is how many batches of each dataset rank it may hold."""
        self._box, self._servers, self._credits = box, servers, credits
        self._endpoint = Endpoint(box, self._note_closed, "the data task of rank {}".format)
        self._epoch = -1
        self._closed: dict[int, Closed] = {}
        self._callers: set[int] = set()
        self._leaves: deque[tuple[int, Leave]] = deque()
        """What is yet to be sent."""

    def next_epoch(self) -> Generator[Any, None, None]:
        """The batches of the next epoch; the iteration of an earlier one ends."""
        self._epoch += 1
        return self._batches(self._epoch)

    def _batches(self, epoch: int) -> Generator[Any, None, None]:
        self._refuse_earlier(epoch)
        servers = [server for server in self._servers for _ in range(self._credits)]
        dealing = set(servers)
        wanted: deque[_Wanted] = deque()
        try:
            wanted.extend(self._request(server, Next(epoch)) for server in servers)
            while wanted:
                server, answer, arrays = self._await_any(wanted, epoch)
                if answer is None:
                    dealing.discard(server)
                    continue
                number, header = answer
                wanted.append(self._request(server, Next(epoch, number)))
                yield batches.unpack(pickle.loads(header), arrays)
                self._refuse_earlier(epoch)
        finally:
            for _, request in wanted:
                if request is not None:
                    self._endpoint.withdraw(request)
            self._leaves.extend((server, Leave(epoch)) for server in dealing)
            # The garbage collector may end an iteration within a call of another one.
            if threading.get_ident() not in self._callers:
                self._send_leaves()

    def _refuse_earlier(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise RuntimeError("another iteration of the dataset has begun: this one has ended")

    def _note_closed(self, call: Call) -> None:
        self._closed[call.source] = call.body

    def _request(self, server: int, body: Next) -> _Wanted:
        """Messages that a data task sent before it ended are handled first."""
        self._send_leaves()
        if server not in self._closed:
            with suppress(RankFailedError), self._calling():
                return server, self._endpoint.request(server, body)
        return server, None

    def _send_leaves(self) -> None:
        while self._leaves:
            try:
                server, leave = self._leaves.popleft()
            except IndexError:  # another thread has sent the last one meanwhile
                return
            if not self._box.closed:
                with suppress(RankFailedError), self._calling():
                    self._endpoint.notify(server, leave)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """A context in which this thread may be in the mailbox, which it must not enter again."""
        caller = threading.get_ident()
        nested = caller in self._callers
        self._callers.add(caller)
        try:
            yield
        finally:
            if not nested:
                self._callers.discard(caller)

    def _await_any(self, wanted: deque[_Wanted], epoch: int) -> tuple[int, Any, list[Any]]:
        """The first answer: its source, and the batch, or None at the end of the epoch there."""

        def settled(each: _Wanted) -> bool:
            server, request = each
            return server in self._closed or (request is not None and request.done())

        servers = {server for server, _ in wanted}
        with self._calling():
            self._endpoint.wait(lambda: any(map(settled, wanted)), servers, "the next batch")
        first = next(filter(settled, wanted))
        wanted.remove(first)
        server, request = first
        if request is not None and request.done():
            answer, arrays = request.result()
            return server, answer, list(arrays)
        closed = self._closed[server]
        if epoch >= closed.epoch:
            raise DatasetError(closed.reason)
        return server, None, []
