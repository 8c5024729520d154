"""The transport that the documentation adds, as it stands there, carries everything."""

import itertools
import re
import socket
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from collectives import (
    BackendUnavailableError,
    Communicator,
    DeadlineExceededError,
    RankFailedError,
)
from collectives.transports.base import Transport
from collectives.transports.local import run
from tests.collectives.oracle import reduced, value, values

PATH = Path(__file__).parents[2] / "docs" / "how-to" / "add-transport.md"
PAGE = PATH.read_text(encoding="utf-8")


def names_in(heading):
    """The attributes and methods in the first column of the table below a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


METHODS = names_in("What it must have")
OPTIONAL = names_in("What it may have")


def example():
    """The page's file, imported."""
    source = re.search(r'^```python title="socket_transport.py"\n(.*?)^```$', PAGE, re.M | re.S)
    module = ModuleType("socket_transport")
    exec(compile(source[1], str(PATH), "exec"), vars(module))
    return module


EXAMPLE = example()


def over_own(size, function):
    """Call the function in a thread for each rank, with its communicator."""
    with ExitStack() as stack:
        sockets = [{} for _ in range(size)]
        for one, other in itertools.combinations(range(size), 2):
            pair = socket.socketpair()
            sockets[one][other], sockets[other][one] = pair
            for each in pair:
                # The thread that reads it ends.
                stack.callback(each.close)
                stack.callback(each.shutdown, socket.SHUT_RDWR)

        def body(rank):
            connections = EXAMPLE.Connections(sockets[rank])
            own = EXAMPLE.SocketTransport(connections, list(range(size)), rank)
            return function(Communicator(own, deadline=30))

        return run(size, lambda threads: body(threads.rank))


def test_it_names_what_there_is():
    assert set(Transport.__abstractmethods__) == METHODS
    there = {name for name in dir(Transport) if not name.startswith("_")} - METHODS
    assert there == OPTIONAL


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective(size):
    shape = (6, 2)
    total = reduced("sum", values(size, shape))

    def body(comm):
        rank, own = comm.rank, value(comm.rank, shape)
        np.testing.assert_array_equal(comm.all_reduce(own), total)
        np.testing.assert_array_equal(comm.all_reduce_async(own).wait(), total)
        np.testing.assert_array_equal(comm.all_reduce_many([own, own[:1]])[1], total[:1])
        reduction = comm.reduce(own)
        np.testing.assert_array_equal(reduction, None if rank else total)
        part = comm.reduce_scatter(own)
        np.testing.assert_array_equal(part, np.array_split(total, size)[rank])
        np.testing.assert_array_equal(comm.broadcast(own.copy()), value(0, shape))
        joined = np.concatenate(values(size, shape))
        np.testing.assert_array_equal(comm.all_gather(own), joined)
        np.testing.assert_array_equal(comm.gather(own), None if rank else joined)
        block = comm.scatter(joined if rank == 0 else None)
        np.testing.assert_array_equal(block, np.array_split(joined, size)[rank])
        received = comm.all_to_all([own + peer for peer in range(size)])
        for peer, each in enumerate(received):
            np.testing.assert_array_equal(each, value(peer, shape) + rank)
        if size > 1 and rank < 2:
            given = own.copy()
            comm.send(own, 1, tag=3) if rank == 0 else comm.recv(given, 0, tag=3)
            np.testing.assert_array_equal(given, value(0, shape))
        assert comm.all_gather_object({"rank": rank}) == [{"rank": peer} for peer in range(size)]
        part = comm.split(rank % 2)
        assert part.all_gather(np.array([rank])).tolist() == list(range(rank % 2, size, 2))
        part.close()
        assert comm.empty(3).shape == (3,)
        assert (comm.nodes, comm.empty_shared(3).shape) == (size, (3,))
        comm.barrier()
        comm.close()
        return True

    assert all(over_own(size, body))


def test_what_it_has_not_is_refused_on_every_rank_and_the_next_call_works():
    def body(comm):
        with pytest.raises(
            BackendUnavailableError, match=r"mailbox\(\): SocketTransport carries no such"
        ):
            comm.mailbox()
        with pytest.raises(ValueError, match="there is no such all_reduce"):
            comm.all_reduce(np.ones(3), algorithm="native")
        assert comm.all_reduce(np.ones(3))[0] == 3
        return True

    assert all(over_own(3, body))


def test_the_threads_name_the_rank_that_ended_first():
    texts = []

    def body(threads):
        if threads.rank == 0:
            raise ValueError("rank 0 is ill")
        for _ in range(2):
            with pytest.raises(RankFailedError) as caught:
                threads.exchange([], [(0, bytearray(1))])
            texts.append(str(caught.value))
            # As the others do where they end by that error.
            threads._switchboard.fail(threads.rank)

    with pytest.raises(ValueError, match="rank 0 is ill"):
        run(3, body)
    assert texts == ["rank 0 ended with an exception"] * 4


def test_a_rank_that_does_not_come_is_named():
    def body(comm):
        comm.deadline = 0.2 if comm.rank else 30
        if comm.rank:
            with pytest.raises(DeadlineExceededError) as caught:
                comm.barrier()
            assert 0 in caught.value.absent
        return True

    assert all(over_own(2, body))
