"""Corner cases in which ranks could differ, or a rank could read freed memory."""

import dataclasses
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest

import collectives
from collectives import Communicator, DtypeMismatchError, ShapeMismatchError
from collectives.diagnostics import tuning
from collectives.shm.selector import PathSelector
from tests.slow import slow

on_two = [pytest.mark.mpi, pytest.mark.ranks(2)]
on_few = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


def marked(marks):
    def mark(test):
        for each in marks:
            test = each(test)
        return test

    return mark


# Arrays


@marked(on_few)
@pytest.mark.parametrize("itemsize", [400_000, 2_000_000])
def test_elements_as_large_as_a_stage(comm, itemsize):
    """They are moved as bytes: a buffer need not have room for an element of each rank."""
    dtype = np.dtype([("content", "u1", itemsize)])
    rows = np.zeros(2 * comm.size, dtype)
    rows["content"] = np.arange(2 * comm.size)[:, None]
    for way in (None, "staged"):
        given = rows if comm.rank == 0 else None
        part = comm.scatter(given, algorithm=way)
        assert (part["content"] == [[2 * comm.rank], [2 * comm.rank + 1]]).all()
        joined = comm.all_gather(part, algorithm=way)
        assert (joined["content"] == rows["content"]).all()
        block = rows[:1].copy() if comm.rank == 1 else np.ones(1, dtype)
        comm.broadcast(block, root=1, algorithm=way)
        assert not block["content"].any()


@marked(on_few)
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_means_of_complex_numbers(comm, dtype):
    expected = np.mean([1 + 2j * (rank + 1) for rank in range(comm.size)])
    for _ in range(3):
        scalar = comm.all_reduce(np.array(1 + 2j * (comm.rank + 1), dtype), "mean")
        assert abs(scalar - expected) < 1e-6
        out = np.zeros(6, dtype)[:: 2 if comm.rank == 0 else 1][:3]
        comm.all_reduce(np.full(3, 1 + 2j * (comm.rank + 1), dtype), "mean", out=out)
        np.testing.assert_allclose(out, expected, rtol=1e-6)


@marked(on_few)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.float16])
def test_a_strided_output_on_one_rank_gets_the_same_bits(comm, dtype):
    kind = {2: "<u2", 4: "<u4", 8: "<u8"}[np.dtype(dtype).itemsize]
    array = np.full(11, np.nan, dtype)
    array.view(kind)[:] += np.array(comm.rank + 1, kind)
    array[5:] = comm.rank
    for _ in range(3):
        out = np.zeros((11, 2), dtype)[:, 0] if comm.rank == 0 else np.zeros(11, dtype)
        comm.all_reduce(array, out=out)
        assert len(set(comm.all_gather_object(out.tobytes()))) == 1


@marked(on_few)
def test_rows_of_no_bytes_and_of_many_elements(comm):
    """NumPy counts the other lengths of an array without elements."""
    joined = comm.all_gather(np.empty((comm.rank + 1, 0, 1 << 30), "f4"))
    assert joined.shape == (comm.size * (comm.size + 1) // 2, 0, 1 << 30)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
def test_scalars_are_rows_of_their_own(comm):
    out = np.zeros(comm.size)
    for _ in range(2):
        assert comm.all_gather(np.array(comm.rank + 1.0), out=out) is out
        np.testing.assert_array_equal(out, np.arange(comm.size) + 1.0)
        for dtype in ("f8", "f2", ml_dtypes.bfloat16):
            part = comm.reduce_scatter(np.array(2, dtype))
            assert part.tolist() == [2.0 * comm.size] * (comm.rank == 0)


@marked(on_few)
@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_a_scalar_is_no_row_of_another_rank(comm, algorithm):
    """Neither call may be taken for the other, whichever was made before."""
    scalar, row = np.array(1.0), np.ones(1)
    for mine in (scalar, row):
        comm.reduce_scatter(mine, algorithm=algorithm)
        with pytest.raises(ShapeMismatchError):
            comm.reduce_scatter(scalar if comm.rank == 0 else row, algorithm=algorithm)
        for each in (scalar, row):
            part = comm.reduce_scatter(each, algorithm=algorithm)
            assert part.tolist() == [comm.size] * (comm.rank == 0)


@marked(on_few)
def test_ranks_without_rows(comm):
    """Of any shape, where others have some."""
    for rest in ((3,), (2, 0), (2, 3), ()):
        for has_rows in (comm.rank > 0, comm.rank == 0, False, True):
            own = np.full((2 * has_rows, *rest), comm.rank + 1.0)
            for _ in range(2):
                joined = comm.all_gather(own)
                assert joined.shape[1:] == rest
                assert comm.all_gather_object(own.tolist()) == [
                    each.tolist() for each in np.split(joined, ends(comm, len(own)))
                ]
                on_root = comm.gather(own)
                assert (on_root is None) == (comm.rank != 0)
                assert on_root is None or np.array_equal(on_root, joined)


def ends(comm, count):
    """Where the rows of the ranks end, but of the last one."""
    return np.cumsum(comm.all_gather_object(count))[:-1]


@marked(on_few)
@pytest.mark.parametrize(
    ("mine", "others"),
    [(">f4", "<f4"), ([("a", "<i4"), ("b", "<i4")], "<V8"), ("<i2", ml_dtypes.bfloat16)],
)
def test_dtypes_that_share_a_name_or_a_size_differ(comm, mine, others):
    given = np.zeros(4, np.dtype(mine if comm.rank == 0 else others))
    for call in (comm.broadcast, comm.all_gather, comm.gather):
        with pytest.raises(DtypeMismatchError):
            call(given)
    if mine == ">f4":
        given[:] = comm.rank + 1
        total = comm.size * (comm.size + 1) / 2
        np.testing.assert_array_equal(comm.all_reduce(given), np.full(4, total))


@marked(on_two)
@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")
def test_a_remembered_list_whose_arrays_were_reshaped(comm):
    arrays = [np.arange(6.0), np.arange(4.0)]
    for _ in range(4):
        comm.all_reduce_many(arrays)
    arrays[0].shape = (3, 2)
    results = comm.all_reduce_many(arrays)
    assert [each.shape for each in results] == [(3, 2), (4,)]
    np.testing.assert_array_equal(results[0], 2 * np.arange(6.0).reshape(3, 2))


@marked(on_two)
def test_arguments_of_fusion_and_registered_arrays(comm):
    with pytest.raises(TypeError, match="another dtype"):
        collectives.Fusion(comm, [((2,), "int32")], op="mean")
    with collectives_of(comm) as other:
        views = collectives.Fusion(other, [((2,), ">f4")]).views
        assert views[0].dtype == np.float32
        assert not other.zeros(3, "V8").tobytes().strip(b"\0")
        for wrong, error in ((2.5, TypeError), ("a", TypeError), ([1], TypeError), (0, ValueError)):
            with pytest.raises(error, match="bucket_bytes"):
                other.all_reduce_many([np.ones(3)], bucket_bytes=wrong)


# What was looked up


def collectives_of(comm, **arguments):
    """Another communicator of the same ranks."""
    from mpi4py import MPI

    return Communicator(MPI.COMM_WORLD, **arguments)


@marked(on_two)
@pytest.mark.parametrize("bucket_bytes", [None, 1 << 20])
def test_tune_reaches_what_all_reduce_many_remembers(comm, monkeypatch, bucket_bytes):
    """On rank 0 the list is known, on rank 1 it is a new one every time."""
    slow = {"shared_bandwidth": 1e8, "shared_start": 3e-6, "shared_latency": 0.5e-6}
    find = tuning.parameters_for
    with collectives_of(comm, deadline=10) as other:
        arrays = [np.ones(30_000), np.ones(20_000)]

        def reduce():
            given = arrays if comm.rank == 0 else [each.copy() for each in arrays]
            return other.all_reduce_many(given, bucket_bytes=bucket_bytes)

        for _ in range(4):
            reduce()
        monkeypatch.setattr(
            tuning, "parameters_for", lambda *a: dataclasses.replace(find(*a), **slow)
        )
        other.tune(save=False)
        for _ in range(4):
            assert [each[0] for each in reduce()] == [2.0, 2.0]


@marked(on_two)
def test_a_call_that_was_looked_up_before_the_first_registered_array(comm):
    """As by a thread that waits for the lock while another one creates that array."""
    with collectives_of(comm, deadline=10) as other:
        array = np.full(5000, comm.rank + 1.0)
        other.all_reduce(array)
        (bound,) = other._bound_calls.values()
        registered = other.zeros(8)
        if comm.rank == 0:
            other._bound_calls["sum", array.dtype, array.shape] = bound
        np.testing.assert_array_equal(other.all_reduce(array), np.full(5000, 3.0))
        assert not registered.any()


# Withdrawal and closing


def program(body):
    start = """
    import threading, time
    import numpy as np
    import collectives
    from mpi4py import MPI
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    """
    return [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(body)]


@pytest.mark.slow
def test_a_rank_that_its_leader_counts_on_makes_no_other_call(launch):
    """The leader of its node waits for another node, longer than this rank's deadline."""
    ended = launch(
        3,
        program("""
        comm = collectives.Communicator(MPI.COMM_WORLD, node_of=[0, 0, 1], deadline=30)
        comm.barrier()
        if rank == 1:
            comm.deadline = 0.5
            try:
                comm.all_reduce(np.ones(4))
            except collectives.DeadlineExceededError:
                pass
            else:
                raise AssertionError("no deadline")
            try:
                comm.broadcast(np.full(4, 77.0), root=1)
            except RuntimeError as error:
                print(error, flush=True)
            MPI.COMM_WORLD.send("refused", 2)
        if rank == 2:
            MPI.COMM_WORLD.recv(source=1)
        if rank != 1:
            comm.deadline = 20
            try:
                comm.all_reduce(np.ones(4))
            except (collectives.DeadlineExceededError, collectives.RankFailedError):
                pass
        import os
        os._exit(0)
        """),
        timeout=80,
    )
    assert "can't go on" in ended.stdout, ended.stderr


@pytest.mark.parametrize("call", ["all_gather(np.ones(50_000))", *slow("all_reduce(np.ones(8))")])
def test_a_call_that_waits_while_another_thread_closes(launch, call):
    ended = launch(
        2,
        program(f"""
        comm = collectives.world()
        comm.{call}
        if rank == 0:
            closing = threading.Thread(target=comm.close)
            closing.start()
            outcomes = []
            def late():
                try:
                    comm.{call}
                except RuntimeError as error:
                    outcomes.append(str(error))
            waiting = threading.Thread(target=late)
            time.sleep(0.3)
            waiting.start()
            closing.join()
            waiting.join()
            assert outcomes, "it was made"
        else:
            time.sleep(0.8)
            comm.close()
        """),
        timeout=80,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


@marked(on_two)
def test_the_arrays_of_a_call_that_ended_early_are_kept(comm):
    """The others may write into them until they are informed."""
    with collectives_of(comm) as other:
        route = other._engine.paths("broadcast", None, np.dtype(np.uint8))["shared"]
        assert isinstance(route, PathSelector)
        target = np.zeros(40_000, np.uint8)

        def interrupted(*arguments):
            raise KeyboardInterrupt

        ways = dict(route._paths)
        route._paths.update(dict.fromkeys(ways, interrupted))
        with pytest.raises(KeyboardInterrupt):
            route(None, target, (), 0)
        assert route._abandoned[1] is target
        route._paths.update(ways)


# Arguments that are wrong on one rank only


@marked(on_few)
@pytest.mark.parametrize("wrong", [{"deadline": -1}, {"node_of": [0]}, {"backend": "carrier"}])
def test_a_wrong_argument_of_one_rank_is_told_to_all(comm, wrong):
    given = wrong if comm.rank == comm.size - 1 else {}
    with pytest.raises(ValueError, match=rf"rank {comm.size - 1}: {next(iter(wrong))}"):
        collectives_of(comm, **given)


@marked(on_few)
def test_maps_of_nodes_that_differ_by_rank(comm):
    node_of = [0] * comm.size if comm.rank == 0 else list(range(comm.size))
    with pytest.raises(ValueError, match="node_of: rank 0 gave"):
        collectives_of(comm, node_of=node_of)


@marked(on_two)
@pytest.mark.parametrize(("key", "error"), [("a", TypeError), (1 << 40, ValueError)])
def test_a_wrong_key_of_split_is_refused_before_the_ranks_meet(comm, key, error):
    if comm.rank == 0:
        with pytest.raises(error, match="key="):
            comm.split(0, key)
    part = comm.split(0, -comm.rank)
    assert part.rank == comm.size - 1 - comm.rank
    part.close()
