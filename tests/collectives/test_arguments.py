"""Errors that one rank can detect locally are raised before any message is sent."""

from dataclasses import replace

import numpy as np
import pytest

from collectives import Communicator, Fusion, ScheduleError, algorithms, register_algorithm
from collectives.schedules.schedule import Recv, Reduce, Send, one_chunk
from collectives.transports.base import LARGEST_TAG
from collectives.transports.local import LocalTransport, run


class SilentTransport(LocalTransport):
    """Allows the creation of a communicator, and no messages after it, or those of checks alone."""

    silent = checks = False

    def exchange(self, sends, receives):
        assert not self.silent, "a message was sent before the argument was refused"
        super().exchange(sends, receives)

    def send(self, buffer, peer, tag, kind):
        self.check(tag)
        return super().send(buffer, peer, tag, kind)

    def receive(self, buffer, peer, tag):
        self.check(tag)
        return super().receive(buffer, peer, tag)

    def check(self, tag):
        assert self.checks, "a message was sent before the argument was refused"
        assert tag > LARGEST_TAG, "data was sent"

    split = None


ARRAY = np.arange(6.0).reshape(2, 3)
READ_ONLY = np.zeros((2, 3))
READ_ONLY.flags.writeable = False

REFUSED = {
    "root too large": (lambda c: c.broadcast(ARRAY, root=2), ValueError, r"root=2: .*0 to 1"),
    "root negative": (lambda c: c.reduce(ARRAY, root=-1), ValueError, r"root=-1: .*0 to 1"),
    "root a float": (lambda c: c.gather(ARRAY, root=0.5), TypeError, r"root=0\.5: .*integer"),
    "root a string": (lambda c: c.scatter(ARRAY, root="0"), TypeError, r"root='0'"),
    "root of an object": (lambda c: c.broadcast_object(1, 7), ValueError, r"root=7"),
    "unknown op": (lambda c: c.all_reduce(ARRAY, "avg"), ValueError, r"op='avg': .*'mean'"),
    "op no string": (lambda c: c.reduce(ARRAY, 3), ValueError, r"op=3"),
    "unknown algorithm": (
        lambda c: c.all_reduce(ARRAY, algorithm="rign"),
        ValueError,
        r"algorithm='rign': all_reduce has 'ring', .*'native'",
    ),
    "another collective's algorithm": (
        lambda c: c.broadcast(ARRAY, algorithm="ring"),
        ValueError,
        r"algorithm='ring': broadcast has 'binomial'",
    ),
    "no such native": (
        lambda c: c.all_reduce(ARRAY, algorithm="native"),
        ValueError,
        r"algorithm='native': there is no such all_reduce for sum of float64",
    ),
    "a list for an algorithm": (
        lambda c: c.all_reduce(ARRAY, algorithm=["ring"]),
        ValueError,
        r"algorithm=\['ring'\]: all_reduce has",
    ),
    "a number for a text": (lambda c: c.all_reduce(ARRAY, what=3), TypeError, r"what=3: .*str"),
    "a text of a barrier": (lambda c: c.barrier(3), TypeError, r"what=3: .*str"),
    "a text of a list": (lambda c: c.all_reduce_many([ARRAY], what=3), TypeError, r"what=3"),
    "no list": (lambda c: c.all_reduce_many(None), TypeError, r"arrays is a NoneType: .*list"),
    "no list of outputs": (
        lambda c: c.all_reduce_many([ARRAY], out={"a": ARRAY}),
        TypeError,
        r"out is a dict: .*list",
    ),
    "no parts": (lambda c: c.all_to_all(None), TypeError, r"arrays is a NoneType: .*list"),
    "no list to fuse": (lambda c: Fusion(c, None), TypeError, r"like is a NoneType: .*list"),
    "one of several": (
        lambda c: c.all_reduce_many([ARRAY.astype(int), ARRAY], "bitwise_or"),
        TypeError,
        r"arrays\[1\]: .*bitwise_or",
    ),
    "a handle": (
        lambda c: c.all_reduce(c.all_reduce_async(ARRAY)),
        TypeError,
        r"array is a \w*Handle, .*wait\(\)",
    ),
    "a shape of letters": (lambda c: c.empty("x"), TypeError, r"shape='x': .*integer"),
    "an unknown dtype": (lambda c: c.zeros(2, "float33"), TypeError, r"dtype='float33': .*NumPy"),
    "a dtype of arrays": (lambda c: c.empty(4, "(2,)f4"), TypeError, r"holds fixed-size numbers"),
    "objects": (lambda c: c.all_reduce([{}]), TypeError, r"dtype object: .*broadcast_object"),
    "strings": (lambda c: c.all_gather(np.array(["a"])), TypeError, r"dtype <U1"),
    "ordered complex": (lambda c: c.all_reduce(ARRAY + 0j, "min"), TypeError, r"op='min'.*order"),
    "structured sums": (lambda c: c.all_reduce(np.zeros(2, "i4,f4")), TypeError, r"can't be red"),
    "long double sums": (lambda c: c.all_reduce(np.ones(2, "g")), TypeError, r"can't be reduced"),
    "axis too large": (lambda c: c.all_gather(ARRAY, axis=2), ValueError, r"axis=2: .*-2 to 1"),
    "axis a float": (lambda c: c.reduce_scatter(ARRAY, axis=0.0), TypeError, r"axis=0\.0"),
    "out of another shape": (
        lambda c: c.all_reduce(ARRAY, out=np.zeros((3, 2))),
        ValueError,
        r"out has shape \(3, 2\): .*\(2, 3\)",
    ),
    "out of another dtype": (
        lambda c: c.all_reduce(ARRAY, out=np.zeros((2, 3), np.float32)),
        TypeError,
        r"out has dtype float32: .*float64",
    ),
    "integer mean into integers": (
        lambda c: c.all_reduce(np.ones(3, int), "mean", out=np.ones(3, int)),
        TypeError,
        r"out has dtype int64: .*float64",
    ),
    "out read-only": (lambda c: c.all_reduce(ARRAY, out=READ_ONLY), ValueError, r"out is read-"),
    "out a list": (lambda c: c.all_reduce(ARRAY, out=[0.0]), TypeError, r"out is a list"),
    "out a number": (lambda c: c.recv(3.0, 1 - c.rank), TypeError, r"out is a float"),
    "peer too large": (lambda c: c.send(ARRAY, 2), ValueError, r"peer=2: .*0 to 1"),
    "tag negative": (lambda c: c.send(ARRAY, 1 - c.rank, -1), ValueError, r"tag=-1"),
    "tag too large": (lambda c: c.send(ARRAY, 1 - c.rank, 40_000), ValueError, r"tag=40000"),
    "too few blocks": (lambda c: c.all_to_all([ARRAY]), ValueError, r"arrays has 1 .*2 ranks"),
    "a block of objects": (
        lambda c: c.all_to_all([ARRAY, [{}]]),
        TypeError,
        r"arrays\[1\] of dtype object",
    ),
    "outputs missing": (
        lambda c: c.all_reduce_many([ARRAY, ARRAY], out=[ARRAY]),
        ValueError,
        r"out has 1 entries: .*2 arrays",
    ),
    "no bucket": (
        lambda c: c.all_reduce_many([ARRAY], bucket_bytes=0),
        ValueError,
        r"bucket_bytes=0",
    ),
    "async root": (lambda c: c.broadcast_async(ARRAY, root=9), ValueError, r"root=9"),
    "color negative": (lambda c: c.split(-1), ValueError, r"color=-1"),
    "explained bytes": (lambda c: c.explain("reduce", 1e6), TypeError, r"nbytes=1000000\.0"),
    "dates": (lambda c: c.all_gather(np.zeros(1, "M8[s]")), TypeError, r"its view\('i8'\)"),
    "texts": (lambda c: c.all_gather(np.zeros(1, "S3")), TypeError, r"its view\('u1'\)"),
    "explained text": (lambda c: c.explain("reduce", 8, "S3"), TypeError, r"can't be reduced"),
    "unknown collective": (lambda c: c.explain("gather_all", 8), ValueError, r"'gather_all'"),
}


# Refused once the ranks have agreed on the call.
AFTER_THE_CHECK = ("no such native",)


@pytest.mark.parametrize("fault", REFUSED)
def test_refused_before_any_message(fault):
    call, error, message = REFUSED[fault]

    def one_rank(transport):
        comm = Communicator(transport)
        transport.__class__ = SilentTransport
        transport.silent, transport.checks = True, fault in AFTER_THE_CHECK
        with pytest.raises(error, match=message):
            call(comm)

    run(2, one_rank)


def test_the_name_of_a_collective_is_no_op():
    def one_rank(transport):
        comm, array = Communicator(transport), ARRAY + transport.rank
        comm.all_to_all(array)
        comm.broadcast(array)
        with pytest.raises(ValueError, match="op='all_to_all': must be"):
            comm.all_reduce(array[:1], "all_to_all")
        with pytest.raises(ValueError, match="op='all_to_all': must be"):
            comm.all_reduce(array, "all_to_all")
        with pytest.raises(TypeError, match="what=0: must be"):
            comm.all_reduce(array, "broadcast", what=0)
        np.testing.assert_array_equal(comm.all_reduce(ARRAY + transport.rank), 2 * ARRAY + 1)

    run(2, one_rank)


def test_only_the_root_sees_a_read_only_array_as_fine():
    def one_rank(transport):
        comm = Communicator(transport)
        if comm.rank == 0:
            assert comm.broadcast(READ_ONLY) is READ_ONLY
        else:
            with pytest.raises(ValueError, match="array is read-only"):
                comm.broadcast(READ_ONLY)
            comm.broadcast(np.empty((2, 3)))

    run(2, one_rank)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"backend": "gloo"}, ValueError, "backend='gloo': must be 'auto', 'mpi' or 'nccl'"),
        ({"backend": None}, ValueError, "backend=None: must be 'auto', 'mpi' or 'nccl'"),
        ({"node_of": [0]}, ValueError, r"node_of=\[0\]: .*2 ranks"),
        ({"node_of": ["a", "b"]}, TypeError, "integer"),
    ],
)
def test_a_communicator_that_cannot_be_made(keywords, error, message):
    def one_rank(transport):
        with pytest.raises(error, match=message):
            Communicator(transport, **keywords)

    run(2, one_rank)


@pytest.mark.parametrize(("name", "schedule"), [("x", 3), (None, iter), (3, iter)])
def test_what_can_be_no_algorithm_is_refused(name, schedule):
    with pytest.raises(TypeError, match="must be a string and a callable"):
        register_algorithm("all_reduce", name, schedule)


@pytest.mark.parametrize("source", [5, "world", None])
def test_what_can_be_no_communicator_is_refused(source):
    with pytest.raises(TypeError, match="must be an mpi4py Intracomm or a Transport"):
        Communicator(source)


@pytest.mark.parametrize("name", ["ring", "native", "auto"])
def test_a_taken_name_is_refused(name):
    with pytest.raises(ValueError, match=f"name='{name}'"):
        register_algorithm("all_reduce", name, lambda rank, size: iter(()))


def with_if(rank, size):
    if rank == 0:
        yield [Send(0, peer) for peer in range(1, size)]
    else:
        yield [Recv(0, 0)]


def without_receives(rank, size):
    yield [Send(0, peer, when=rank == 0) for peer in range(1, size)]


def up_to_ten(rank, size):
    yield [
        *[Send(0, peer, when=rank == 0) for peer in range(1, min(size, 10))],
        Recv(0, 0 * rank, when=(rank > 0) & (rank < 10)),
    ]


def correct(rank, size):
    yield [*without_receives(rank, size).__next__(), Recv(0, 0, when=rank != 0)]


@pytest.mark.parametrize(
    ("schedule", "chunks", "error", "message"),
    [
        (with_if, one_chunk, ValueError, "'wrong' of broadcast on 2 ranks: ValueError.*when="),
        (without_receives, one_chunk, ScheduleError, "round 0"),
        (up_to_ten, one_chunk, ScheduleError, "on 11 ranks: .*rank 10"),
        (correct, lambda size: 0, ValueError, "chunks gave 0"),
        (correct, 1, TypeError, "chunks=1"),
    ],
)
def test_a_wrong_schedule_is_refused_and_changes_nothing(schedule, chunks, error, message):
    before = dict(algorithms._TABLE), algorithms.names("broadcast")
    with pytest.raises(error, match=message):
        register_algorithm("broadcast", "wrong", schedule, chunks=chunks)
    assert (dict(algorithms._TABLE), algorithms.names("broadcast")) == before


def test_the_root_of_a_scatter_without_an_array_is_named():
    def one_rank(transport):
        comm = Communicator(transport)
        with pytest.raises(TypeError, match="array is None on the root, rank 1"):
            comm.scatter(None, root=1)
        np.testing.assert_array_equal(comm.scatter(np.arange(2.0)), [comm.rank])

    run(2, one_rank)


def test_an_algorithm_from_outside_is_verified_priced_and_run(monkeypatch):
    import collectives
    from collectives.execution import cost_model

    def through_one(rank, size):
        """Every rank sends its whole buffer to rank 0, which reduces all and sends the result."""
        others = range(1, size)
        yield [Send(0, 0 * rank, when=rank > 0)] + [Reduce(0, r, when=rank == 0) for r in others]
        yield [Send(0, r, when=rank == 0) for r in others] + [Recv(0, 0 * rank, when=rank > 0)]

    monkeypatch.setattr(algorithms, "_TABLE", dict(algorithms._TABLE))
    names = {collective: list(names) for collective, names in algorithms._NAMES.items()}
    monkeypatch.setattr(algorithms, "_NAMES", names)
    layout, figures = cost_model.Layout((4,)), cost_model.CostParameters()
    assert "flat" not in cost_model.choose("all_reduce", 8, layout, (), figures).seconds
    register_algorithm("all_reduce", "flat", through_one, chunks=lambda size: 1)
    for size in (1, 2, 5, 300):
        collectives.verify("all_reduce", "flat", size)
    link = collectives.Link(1e-6, 1e9, 1e9)
    assert collectives.estimate("all_reduce", "flat", 4, 1000, link) > 0
    assert "flat" in cost_model.choose("all_reduce", 8, layout, (), figures).seconds

    def one_rank(transport):
        array = np.arange(5.0) * (transport.rank + 1)
        return Communicator(transport).all_reduce(array, algorithm="flat")

    for result in run(4, one_rank):
        np.testing.assert_array_equal(result, np.arange(5.0) * 10)
    # As it is compared between ranks: the same schedule in other words, and another one.
    argument = algorithms.forced("all_reduce", "flat")

    def halves(rank, size):
        for steps in through_one(rank, size):
            yield [replace(each, count=2) for each in steps]

    for schedule, chunks in ((through_one, 1), (halves, 2)):
        algorithms._TABLE.pop(("all_reduce", "flat"))
        register_algorithm("all_reduce", "flat", schedule, chunks=lambda size, n=chunks: n)
        assert (algorithms.forced("all_reduce", "flat") == argument) == (chunks == 1)
