"""The calls that send a message to one rank, or receive one (MPI 4.1, sections 3.2 and 3.7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.asynchronous.messages import Messages
from collectives.calls.point_to_point import Incoming, Outgoing
from collectives.consistency.signature import check_peer
from collectives.execution.engine import Engine
from collectives.lifecycle.futures import Handle


class PointToPointCalls:
    """The part of a communicator that sends messages between two ranks. Not collective."""

    _messages: Messages
    _engine: Engine
    _check_open: Callable[[], None]

    def _peer(self, rank: Any, name: str = "peer") -> int:
        self._check_open()
        if self._engine.before_call is not None:
            self._engine.before_call()
        return check_peer(rank, self._engine.rank, self._engine.size, name)

    def send(self, array: Any, peer: int, tag: int = 0) -> None:
        """Send the array's elements to rank `peer`, which receives them with `recv` or `irecv`.

        The array may have any shape and dtype; `tag` is an integer from 0 to 32000. The send of a
        large array returns when it is received. Raises ValueError or TypeError for a wrong peer
        (this rank included), tag or array.

        After DeadlineExceededError the message remains in transit: do not change the array until
        the same `send`, repeated, has returned. Repeating it does not send the message twice.
        """
        self._messages.send(Outgoing("send", array, self._peer(peer), tag))

    def recv(self, out: Any, peer: int, tag: int = 0) -> Any:
        """Receive the elements that rank `peer` sends with this tag into `out`, and return `out`.

        `out` is a writable array with the message's dtype and number of elements; shapes are not
        compared. Raises ShapeMismatchError or DtypeMismatchError if the message has others (`out`
        may then hold a part of it), ValueError or TypeError for a wrong peer, tag or `out`. After
        DeadlineExceededError the next receive of this rank and tag gets the message; do not use
        `out` before that receive has returned: the message may arrive in its memory.
        """
        return self._messages.receive(Incoming("recv", out, self._peer(peer), tag))

    def isend(self, array: Any, dest: int, tag: int = 0) -> Handle[Any]:
        """Start to send the array's elements, of any shape and dtype, to another rank.

        `dest` is the rank, `tag` an integer from 0 to 32000. Any number of messages may be pending
        in any order; those to the same rank with the same tag arrive in the order in which they
        were started. The array may not be changed before the handle is done. The handle's `wait`
        returns None. It raises DeadlineExceededError, which names the rank, after the deadline;
        the message remains in transit, and `wait` may be called again.

        Raises ValueError or TypeError for a wrong rank, tag or array. As MPI_Isend (MPI 4.1, 3.7).
        """
        return self._messages.start(Outgoing("isend", array, self._peer(dest, "dest"), tag))

    def irecv(self, array: Any, source: int, tag: int = 0) -> Handle[Any]:
        """Start to receive the elements that another rank sends with `send` or `isend`.

        The array holds them, and the handle's `wait` returns it, once the handle is done. Receives
        of the same rank and tag get the messages in the order in which they were started, together
        with `recv`. `wait` raises ShapeMismatchError if the message has another number of bytes
        than the array, DtypeMismatchError if it has another dtype, and DeadlineExceededError, which
        names the rank, after the deadline; the receive continues then, and `wait` may be called
        again. `close` waits for every message that was started.

        Raises ValueError or TypeError for a wrong rank, tag or array. As MPI_Irecv (MPI 4.1, 3.7).
        """
        return self._messages.start(Incoming("irecv", array, self._peer(source, "source"), tag))
