"""A transport that has what the README asks for, and nothing else, carries everything."""

import re
from pathlib import Path

import numpy as np
import pytest

from collectives import BackendUnavailableError, Communicator, DeadlineExceededError
from collectives.transports.base import Transport
from collectives.transports.local import run
from tests.collectives.oracle import reduced, value, values

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
RECIPE = README.split("### How to add a transport")[1]


def names_after(words):
    """What the README names from these words to the end of the sentence."""
    (sentence,) = re.findall(rf"{words}([^.]*)\.", RECIPE)
    return re.findall(r"`(\w+)`", sentence)


METHODS = names_after("six methods,")
OPTIONAL = names_after("The rest is optional:")


def delegate(name):
    def method(self, *arguments):
        result = getattr(self.inner, name)(*arguments)
        return Own(result) if name == "split" and result is not None else result

    return method


class Own(Transport):
    """Threads of this process, by another's queues."""

    one_process = True

    def __init__(self, inner):
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size


def as_the_readme_says():
    """The class, with the methods that it names."""
    for name in METHODS:
        setattr(Own, name, delegate(name))
    Own.__abstractmethods__ = Transport.__abstractmethods__ - set(METHODS)
    return Own


def over_own(size, function):
    own = as_the_readme_says()
    return run(size, lambda inner: function(Communicator(own(inner), deadline=30)))


def test_it_names_what_there_is():
    assert len(METHODS) == 6
    assert set(METHODS) == set(Transport.__abstractmethods__)
    there = {name for name in dir(Transport) if not name.startswith("_")} - set(METHODS)
    # What only tells of a transport has no part in the recipe.
    assert there - set(OPTIONAL) == {"abort", "ended", "fence", "library", "threads"}
    assert set(OPTIONAL) <= there


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
        with pytest.raises(BackendUnavailableError, match=r"mailbox\(\): Own carries no such"):
            comm.mailbox()
        with pytest.raises(ValueError, match="there is no such all_reduce"):
            comm.all_reduce(np.ones(3), algorithm="native")
        assert comm.all_reduce(np.ones(3))[0] == 3
        return True

    assert all(over_own(3, body))


def test_a_rank_that_does_not_come_is_named():
    def body(comm):
        comm.deadline = 0.2 if comm.rank else 30
        if comm.rank:
            with pytest.raises(DeadlineExceededError) as caught:
                comm.barrier()
            assert 0 in caught.value.absent
        return True

    assert all(over_own(2, body))
