"""Every call of the communicator over MPI, with values that depend on the rank."""

import itertools
import pickle
import threading
from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import algorithms
from tests.collectives.oracle import DTYPES, PAIRS, case, reduced, value, values

pytestmark = pytest.mark.mpi


FLOATS = ("float16", "float32", "bfloat16")


def dtypes_of(names):
    """The dtypes of these names, bfloat16 included."""
    return [dtype for dtype in DTYPES if dtype.name in names]


def paths(collective):
    """Every way to run it: automatic, each algorithm, MPI's own, and shared memory."""
    return [None, *algorithms.names(collective), "native", "shared"]


@pytest.mark.parametrize("algorithm", algorithms.names("all_reduce"))
def test_all_reduce_of_every_dtype(comm, algorithm):
    for op, dtype in PAIRS:
        largest = 2 if op == "product" else 5
        expected = reduced(op, values(comm.size, (3, 7), dtype, largest))
        array = value(comm.rank, (3, 7), dtype, largest)
        with case(op, dtype):
            result = comm.all_reduce(array, op, algorithm=algorithm)
            assert result.dtype == expected.dtype
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("path", paths("all_reduce"))
def test_all_reduce_on_every_path(comm, path):
    for length in (0, 1, 3, 1000, 100_003):
        with case("length", length):
            array = value(comm.rank, length)
            expected = reduced("sum", values(comm.size, length))
            np.testing.assert_array_equal(comm.all_reduce(array, algorithm=path), expected)
            out = np.full(length, -1.0)
            assert comm.all_reduce(array, out=out, algorithm=path) is out
            np.testing.assert_array_equal(out, expected)
            np.testing.assert_array_equal(array, value(comm.rank, length))
            assert comm.all_reduce(array, out=array, algorithm=path) is array
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
def test_a_nan_on_any_rank_reaches_all(comm, op):
    for dtype, holder in itertools.product(dtypes_of(FLOATS), (0, comm.size - 1)):
        array = value(comm.rank, 40, dtype, largest=2 if op == "product" else 5)
        if comm.rank == holder:
            array[7] = np.nan
        with case(dtype, "rank", holder):
            result = comm.all_reduce(array, op).astype(float)
            assert np.isnan(result[7])
            assert np.isfinite(np.delete(result, 7)).all()


@pytest.mark.parametrize("path", [None, *algorithms.names("all_reduce")])
def test_all_ranks_end_with_the_same_bits(comm, path):
    for dtype in dtypes_of([*FLOATS, "complex64"]):
        array = (np.random.default_rng(comm.rank).standard_normal(1001) * 100).astype(dtype)
        result = comm.all_reduce(array, algorithm=path)
        assert len(set(comm.all_gather_object(result.tobytes()))) == 1, dtype


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_sums_round_once_per_hop(comm, dtype):
    """Two ranks: one hop, so the float32 sum rounded once; three: either order of two hops."""
    dtype = next(each for each in DTYPES if each.name == dtype)
    arrays = [
        np.random.default_rng(rank).standard_normal(500).astype(dtype) for rank in range(comm.size)
    ]

    def hop(first, second):
        return (first.astype(np.float32) + second.astype(np.float32)).astype(dtype)

    result = comm.all_reduce(arrays[comm.rank], algorithm="doubling")
    # Doubling folds the rank beyond the power of two into rank 0 first.
    expected = hop(hop(arrays[0], arrays[2]), arrays[1]) if comm.size == 3 else hop(*arrays)
    np.testing.assert_array_equal(result.view(np.uint16), expected.view(np.uint16))


def test_integers_wrap(comm):
    """Long enough for the vector loops of the MPIs, one of which saturates."""
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "int64"):
        array = np.full(257, np.iinfo(dtype).max - 5, dtype)
        expected = reduced("sum", [array] * comm.size)
        with case(dtype):
            np.testing.assert_array_equal(comm.all_reduce(array), expected)
            block = np.array_split(expected, comm.size)[comm.rank]
            np.testing.assert_array_equal(comm.reduce_scatter(array), block)
            total = comm.reduce(array, root=comm.size - 1)
            if comm.rank == comm.size - 1:
                np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("path", paths("broadcast"))
def test_the_roots_memory_is_never_written(comm, path, tmp_path):
    """A read-only mapping: a write to it ends the process, or the call."""
    content = value(comm.rank, 4096)
    content.tofile(tmp_path / "content")
    mapped = np.memmap(tmp_path / "content", np.float64, mode="r")
    for root in range(comm.size):
        array = mapped if comm.rank == root else np.empty(4096)
        comm.broadcast(array, root=root, algorithm=path)
        np.testing.assert_array_equal(array, value(root, 4096))


@pytest.mark.parametrize("path", paths("reduce"))
def test_reduce_to_every_root(comm, path):
    expected = reduced("max", values(comm.size, (4, 3), np.int32))
    for root in range(comm.size):
        result = comm.reduce(value(comm.rank, (4, 3), np.int32), "MAX", root=root, algorithm=path)
        np.testing.assert_array_equal(result, expected if comm.rank == root else None)


def test_reduce_into_out(comm):
    out = np.empty(9)
    result = comm.reduce(value(comm.rank, 9), "mean", root=comm.size - 1, out=out)
    if comm.rank == comm.size - 1:
        assert result is out
        np.testing.assert_array_equal(out, reduced("mean", values(comm.size, 9)))
    else:
        assert result is None


@pytest.mark.parametrize("path", paths("broadcast"))
def test_broadcast_from_every_root(comm, path):
    for dtype, root in itertools.product(DTYPES, range(comm.size)):
        array = value(comm.rank, (5, 2), dtype)
        with case(dtype, "from rank", root):
            assert comm.broadcast(array, root=root, algorithm=path) is array
            np.testing.assert_array_equal(array, value(root, (5, 2), dtype))


@pytest.mark.parametrize("path", paths("all_gather"))
def test_all_gather_along_axes_of_differing_length(comm, path):
    def own(rank, axis):
        shape = [2, 3, 2]
        shape[axis] = (rank * 2 + 1) % 4
        return value(rank, shape)

    for axis in (0, 1, -1):
        expected = np.concatenate([own(rank, axis) for rank in range(comm.size)], axis=axis)
        with case("axis", axis):
            result = comm.all_gather(own(comm.rank, axis), axis=axis, algorithm=path)
            assert result.flags.c_contiguous
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("path", paths("gather"))
def test_gather_to_every_root(comm, path):
    own = [value(rank, (rank % 3, 2), np.float32) for rank in range(comm.size)]
    for root in range(comm.size):
        result = comm.gather(own[comm.rank], root=root, algorithm=path)
        np.testing.assert_array_equal(result, np.concatenate(own) if comm.rank == root else None)


@pytest.mark.parametrize("path", paths("scatter"))
def test_scatter_from_every_root(comm, path):
    for axis, root in itertools.product((0, 1), range(comm.size)):
        whole = value(root + 1, (5, 11), np.int16)
        given = whole if comm.rank == root else None
        with case("axis", axis, "from rank", root):
            block = comm.scatter(given, root=root, axis=axis, algorithm=path)
            np.testing.assert_array_equal(block, np.array_split(whole, comm.size, axis)[comm.rank])
            assert not np.shares_memory(block, whole)
    # About what the other ranks get with the check of the call, and in place.
    rows = (64 << 10) // 8 // max(1, comm.size - 1)
    for length, root in itertools.product(range(rows - 40, rows + 3, 6), range(comm.size)):
        whole = np.arange(length * comm.size, dtype=np.int64) * (root + 1)
        blocks = np.array_split(whole, comm.size)
        given = whole.copy() if comm.rank == root else None
        first = min(3, len(whole) - length)
        out = np.empty(length, np.int64) if given is None else given[first : first + length]
        comm.scatter(given, root=root, out=out, algorithm=path)
        with case("rows", length, "from rank", root):
            np.testing.assert_array_equal(out, blocks[comm.rank])


@pytest.mark.parametrize("path", paths("reduce_scatter"))
def test_reduce_scatter(comm, path):
    for op, axis in (("sum", 0), ("sum", 1), ("max", 0)):
        # MPI's MAX of floats may lose a NaN, so it isn't offered.
        dtype = np.int64 if path == "native" and op == "max" else np.float64
        whole = reduced(op, values(comm.size, (7, 5), dtype))
        array = value(comm.rank, (7, 5), dtype)
        with case(op, "axis", axis):
            block = comm.reduce_scatter(array, op, axis=axis, algorithm=path)
            np.testing.assert_array_equal(block, np.array_split(whole, comm.size, axis)[comm.rank])


@pytest.mark.parametrize("path", paths("all_to_all"))
def test_all_to_all_of_blocks_that_all_differ(comm, path):
    def block(source, target):
        dtype = DTYPES[(source + 2 * target) % len(DTYPES)]
        return value(source + 3 * target, (source % 3, target + 1), dtype)

    blocks = [block(comm.rank, peer) for peer in range(comm.size)]
    for peer, received in enumerate(comm.all_to_all(blocks, algorithm=path)):
        expected = block(peer, comm.rank)
        assert received.dtype == expected.dtype
        np.testing.assert_array_equal(received, expected)
        assert not np.shares_memory(received, blocks[peer])


def test_zero_dimensional_arrays(comm):
    assert comm.all_reduce(np.float64(comm.rank)) == sum(range(comm.size))
    assert comm.all_reduce(np.array(comm.rank + 1)).shape == ()
    np.testing.assert_array_equal(comm.all_gather(np.array(comm.rank)), np.arange(comm.size))
    block = comm.reduce_scatter(np.array(comm.rank))
    np.testing.assert_array_equal(block, [sum(range(comm.size))] if comm.rank == 0 else [])


LAYOUTS = {
    "Fortran order": np.asfortranarray,
    "every second element": lambda array: np.repeat(array, 2, axis=1)[:, ::2],
    "backwards": lambda array: np.ascontiguousarray(array[::-1])[::-1],
    "broadcast rows": lambda array: np.broadcast_to(array[:1], array.shape),
    "the other byte order": lambda array: array.astype(array.dtype.newbyteorder()),
}


def test_any_layout_goes_in(comm):
    for name, layout in LAYOUTS.items():
        arrays = [layout(value(rank, (4, 6), np.float32)) for rank in range(comm.size)]
        array = arrays[comm.rank]
        array.flags.writeable = False
        with case(name):
            np.testing.assert_array_equal(comm.all_reduce(array), reduced("sum", arrays))
            np.testing.assert_array_equal(comm.all_gather(array), np.concatenate(arrays))


def test_out_of_any_layout_is_filled(comm):
    expected = reduced("sum", values(comm.size, (4, 6)))
    for out in (np.empty((4, 6), order="F"), np.empty((4, 12))[:, ::2], np.empty((8, 6))[::-2]):
        assert comm.all_reduce(value(comm.rank, (4, 6)), out=out) is out
        np.testing.assert_array_equal(out, expected)


def test_out_that_overlaps_the_input(comm):
    memory = np.zeros(30)
    memory[:20] = value(comm.rank, 20)
    comm.all_reduce(memory[:20], out=memory[10:], algorithm="ring")
    np.testing.assert_array_equal(memory[10:], reduced("sum", values(comm.size, 20)))


def test_broadcast_fills_any_layout(comm):
    array = np.asfortranarray(value(comm.rank, (4, 6)))
    assert comm.broadcast(array, root=comm.size - 1) is array
    np.testing.assert_array_equal(array, value(comm.size - 1, (4, 6)))


@pytest.mark.ranks(2, 3)
def test_a_message_of_another_dtype_is_told_to_its_receiver(comm):
    if comm.rank == 0:
        comm.send(np.ones(4), 1, tag=5)
        comm.send(np.ones(4), 1, tag=5)
    elif comm.rank == 1:
        with pytest.raises(
            collectives.DtypeMismatchError,
            match="the message has dtype float64, the receiving array int64",
        ):
            comm.recv(np.zeros(4, np.int64), 0, tag=5)
        assert (comm.recv(np.zeros(4), 0, tag=5) == 1).all()


@pytest.mark.ranks(2)
def test_a_message_that_does_not_come_is_named(comm):
    from mpi4py import MPI

    with collectives.Communicator(MPI.COMM_WORLD, deadline=30) as other:
        if comm.rank == 0:
            other.deadline = 0.3
            with pytest.raises(
                collectives.DeadlineExceededError, match=r"^recv\(from rank 1, tag=3\), waited"
            ):
                other.recv(np.zeros(4), 1, tag=3)
            other.deadline = 30
        comm.barrier()


@pytest.mark.ranks(2)
def test_memory_that_is_never_there_leaves_the_communicator_as_it_is(comm):
    with pytest.raises(MemoryError):
        comm.zeros(10**14)
    assert comm.all_reduce(np.ones(3))[0] == 2


def test_send_and_recv_round_the_ring(comm):
    if comm.size == 1:
        with pytest.raises(ValueError, match="peer=0: must be another rank"):
            comm.send(np.ones(1), 0)
        return
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for tag, dtype in enumerate(DTYPES):
        outgoing, incoming = value(comm.rank, 9, dtype), np.zeros(9, dtype)
        first, second = (comm.send, comm.recv) if comm.rank % 2 == 0 else (comm.recv, comm.send)
        for call in (first, second):
            if call == comm.send:
                comm.send(outgoing, following, tag)
            else:
                assert comm.recv(incoming, previous, tag) is incoming
        np.testing.assert_array_equal(incoming, value(previous, 9, dtype))


@pytest.mark.ranks(2)
def test_a_message_of_another_length_is_refused_and_the_next_one_works(comm):
    for sent, expected in ((5, 3), (3, 5)):
        if comm.rank == 0:
            comm.send(np.arange(sent), 1)
            comm.send(np.arange(4), 1)
        else:
            with pytest.raises(
                collectives.ShapeMismatchError,
                match=f"{sent} elements of int64, the receiving array {expected}",
            ):
                comm.recv(np.empty(expected, int), 0)
            np.testing.assert_array_equal(comm.recv(np.empty(4, int), 0), np.arange(4))


def test_objects(comm):
    own = {"rank": comm.rank, "text": "x" * comm.rank * 1000}
    gathered = comm.all_gather_object(own)
    assert [each["rank"] for each in gathered] == list(range(comm.size))
    assert [len(each["text"]) for each in gathered] == [1000 * rank for rank in range(comm.size)]
    for root in range(comm.size):
        received = comm.broadcast_object(own if comm.rank == root else None, root)
        assert received["rank"] == root
        assert received is not own


def test_ranks_that_cannot_be_joined_raise_alike_and_the_next_call_works(comm):
    if comm.size == 1:
        assert comm.all_gather(np.ones((2, 3))).shape == (2, 3)
        return
    odd = comm.rank == comm.size - 1
    with pytest.raises(collectives.ShapeMismatchError) as caught:
        comm.all_gather(np.ones((2, 4 if odd else 3)))
    assert len(caught.value.calls) == comm.size
    with pytest.raises(collectives.DtypeMismatchError, match=f"rank {comm.size - 1}: .*int64"):
        comm.all_gather(np.ones((2, 3), np.int64 if odd else np.float64))
    np.testing.assert_array_equal(comm.all_gather(np.array([comm.rank])), np.arange(comm.size))


class OddError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


class SpeechlessError(Exception):
    """Its text can't be made."""

    def __str__(self):
        return "code " + self.args[0]


def _raise_on(kind, rank):
    if MPI.COMM_WORLD.rank == rank:
        raise kind("missing here")


class Unpicklable:
    """Raises a SpeechlessError when it is pickled."""

    def __reduce__(self):
        raise SpeechlessError(7)


class Missing:
    """Can't be unpickled on one rank."""

    def __init__(self, *given):
        self._given = given

    def __reduce__(self):
        return _raise_on, self._given


def test_what_cannot_be_unpickled_is_raised_everywhere_and_the_next_call_works(comm):
    root = comm.size - 1
    array = Unreadable(OddError("this", "that"))
    with pytest.raises(RuntimeError, match="OddError: this and that"):
        comm.scatter(array if comm.rank == root else None, root=root)
    with pytest.raises(TypeError, match="'other'"):
        comm.broadcast_object(OddError("this", "that"), root)
    with pytest.raises(TypeError, match="'other'"):
        comm.all_gather_object(OddError("this", "that"))
    # What is missing on one rank, such as a device.
    for kind in (RuntimeError, FileNotFoundError, ZeroDivisionError, MemoryError, SpeechlessError):
        with pytest.raises(kind) if comm.rank == root else nullcontext():
            comm.broadcast_object(Missing(kind, root), 0)
    with pytest.raises(RuntimeError, match="SpeechlessError, whose text can't be made: TypeError"):
        comm.all_gather_object(Unpicklable() if comm.rank == root else 0)
    # Only the last rank's object can't be pickled.
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"):
        comm.all_gather_object((lambda: 0) if comm.rank == root else 0)
    for error in (OSError(28, "No space"), UnicodeDecodeError("ascii", b"x", 0, 1, "not ascii")):
        own, named = Failing(error) if comm.rank == root else 0, f"rank {root}: " * (root > 0)
        with pytest.raises(type(error), match=f"{named}No space|not ascii"):
            comm.all_gather_object(own)
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))


class Failing:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


def test_what_only_the_root_can_see_is_raised_everywhere(comm):
    root = comm.size - 1
    with pytest.raises(ValueError, match="axis=2"):
        comm.scatter(np.ones((2, 2)) if comm.rank == root else None, root=root, axis=2)
    with pytest.raises(TypeError, match="object"):
        comm.scatter(np.array([{}]) if comm.rank == root else None, root=root)
    array = Unreadable(RuntimeError("it can't be read"))
    with pytest.raises(RuntimeError, match="can't be read"):
        comm.scatter(array if comm.rank == root else None, root=root)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        comm.broadcast_object(lambda: 1, root)
    comm.barrier()


class Unreadable:
    def __init__(self, error):
        self.error = error

    def __array__(self, dtype=None, copy=None):
        raise self.error


def test_axes_counted_from_either_end_are_the_same(comm):
    array = value(comm.rank, (2, 3))
    joined = comm.all_gather(array, axis=1 if comm.rank else -1)
    np.testing.assert_array_equal(joined, np.concatenate(values(comm.size, (2, 3)), axis=1))


def test_complex_means_keep_infinities_apart(comm):
    mean = comm.all_reduce(np.array([complex(np.inf, 0), (comm.rank + 1) * (1 + 1j)]), "mean")
    np.testing.assert_array_equal(mean.view(float), [np.inf, 0, *[(comm.size + 1) / 2] * 2])


@pytest.mark.ranks(2)
def test_a_thread_that_waits_for_a_message_stops_nobody_else(comm):
    received = np.zeros(3)
    thread = threading.Thread(target=comm.recv, args=(received, 1 - comm.rank, 5), daemon=True)
    thread.start()
    comm.barrier()
    comm.send(value(comm.rank, 3), 1 - comm.rank, 5)
    thread.join(30)
    np.testing.assert_array_equal(received, value(1 - comm.rank, 3))


def test_split_by_color_and_key(comm):
    part = comm.split(comm.rank % 2, key=-comm.rank)
    members = [rank for rank in reversed(range(comm.size)) if rank % 2 == comm.rank % 2]
    assert part.size == len(members)
    assert members[part.rank] == comm.rank
    np.testing.assert_array_equal(part.all_gather(np.array(comm.rank)), members)
    part.close()
    part.close()
    with pytest.raises(RuntimeError, match="closed"):
        part.barrier()


def test_split_without_a_color_gives_none(comm):
    part = comm.split(None if comm.rank == 0 else 1)
    assert (part is None) == (comm.rank == 0)
    if part is not None:
        assert part.all_reduce(np.array(1)) == comm.size - 1
        part.close()


def test_over_any_mpi_communicator(comm):
    from mpi4py import MPI

    mpi_comm = MPI.COMM_WORLD.Split(0, key=-MPI.COMM_WORLD.rank)
    with collectives.Communicator(mpi_comm) as reversed_world:
        assert reversed_world.rank == comm.size - 1 - comm.rank
        gathered = reversed_world.all_gather(np.array(comm.rank))
        np.testing.assert_array_equal(gathered, np.arange(comm.size)[::-1])
        if comm.size > 1:
            # The user's own messages, posted before and completed after ours, must not interfere.
            peer = (mpi_comm.rank + 1) % comm.size
            request = mpi_comm.Isend(np.full(1, mpi_comm.rank), peer, 0)
            reversed_world.all_reduce(value(comm.rank, 10))
            received = np.empty(1, int)
            mpi_comm.Recv(received, (mpi_comm.rank - 1) % comm.size, 0)
            request.Wait()
            assert received[0] == (mpi_comm.rank - 1) % comm.size
    mpi_comm.Free()


def test_nodes_of_this_machine_and_imitated_ones(comm):
    assert (comm.node, comm.nodes) == (0, 1)
    assert (comm.local_rank, comm.local_size) == (comm.rank, comm.size)
    from mpi4py import MPI

    node_of = [7 if rank % 2 else 3 for rank in range(comm.size)]
    with collectives.Communicator(MPI.COMM_WORLD, node_of=node_of) as spread:
        assert spread.node == comm.rank % 2
        assert spread.nodes == min(comm.size, 2)
        assert spread.local_rank == comm.rank // 2
        assert spread.local_size == node_of.count(node_of[comm.rank])
        part = spread.split(0, key=-spread.rank)
        assert part.nodes == spread.nodes
        assert part.node == (comm.rank % 2 + (comm.size - 1) % 2) % 2
        part.close()


def test_the_choice_is_visible(comm):
    text = comm.explain("all_reduce", 1 << 20)
    if comm.size == 1:
        assert text == "a copy runs"
    else:
        # Ranks that share cores use the memory's paths without measurement.
        assert "staged" in text or "shared" in text
        assert "native" in comm.explain("all_gather", 1 << 27)
        assert "in one step" in comm.explain("reduce_scatter", 4096)
        assert "doubling" in comm.explain("scan", 1 << 20)
    assert comm.empty((2, 3)).dtype == np.float32
    assert not comm.zeros(4, "int8").any()


def test_what_is_to_come_before_the_next_call_does_whatever_the_call_is(comm):
    """Also where the call is bound already; once."""
    part = comm.split(0)
    array, out, everything = np.zeros(2), np.zeros(2), np.zeros(2 * comm.size)
    ring = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    calls = {
        "all_reduce": lambda: part.all_reduce(array),
        "all_reduce out": lambda: part.all_reduce(array, out=out),
        "all_reduce_many": lambda: part.all_reduce_many([array, out]),
        "broadcast": lambda: part.broadcast(array),
        "all_gather": lambda: part.all_gather(array, out=everything),
        "reduce_scatter": lambda: part.reduce_scatter(everything, out=out),
        "barrier": part.barrier,
        "objects": lambda: part.all_gather_object(None),
        "async": lambda: part.all_reduce_async(array).wait(),
        "messages": lambda: comm.size > 1 and (part.send(out, ring[0]), part.recv(out, ring[1])),
        "registered": lambda: part.zeros(2),
        "close": part.close,
    }
    for name, call in calls.items():
        for _ in range(2 if name != "close" else 0):
            call()
        done = []
        part.before_next_call(lambda done=done: done.append(part.all_gather_object(comm.rank)))
        assert not done
        call()
        call()
        called = comm.size > 1 or name != "messages"
        assert done == [list(range(comm.size))] * called, name
