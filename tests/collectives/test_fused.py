"""Fused reductions of recurring arrays, and arrays that are created in buckets."""

import gc
import operator
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import (
    Communicator,
    DtypeMismatchError,
    Fusion,
    MismatchError,
    OpMismatchError,
    ShapeMismatchError,
)
from collectives.transports.local import run
from tests.collectives.oracle import PAIRS, case, reduced, value, values

SHAPES = [(3,), (0,), (2, 3), (), (500,), (4, 1, 5)]


def check(results, ranks, op="sum"):
    """Compare the results with the arrays of all ranks, as lists in rank order."""
    for result, *each in zip(results, *ranks, strict=True):
        expected = reduced(op, [np.atleast_1d(array) for array in each])
        assert (result.dtype, result.shape) == (expected.dtype, np.shape(each[0]))
        np.testing.assert_array_equal(np.atleast_1d(result), expected)


def lists(size, step=0, dtype=np.float32, shapes=SHAPES):
    return [
        [np.array(value(rank + step + place, each, dtype)) for place, each in enumerate(shapes)]
        for rank in range(size)
    ]


def repeated(comm, arrays, step, **named):
    """The call on the same arrays with other values, at least three times."""
    for each in range(step, step + 4):
        ranks = lists(comm.size, each, arrays[0].dtype, [array.shape for array in arrays])
        for array, content in zip(arrays, ranks[comm.rank], strict=True):
            array[...] = content
        results = comm.all_reduce_many(arrays, **named)
        check(results, ranks, named.get("op", "sum"))
    return results


# --- recurring arrays ----------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_bytes", [None, 1, 100])
@pytest.mark.parametrize("form", ["fresh", "out", "in place"])
def test_the_same_arrays_again(comm, form, bucket_bytes):
    arrays = lists(comm.size)[comm.rank]
    outs = [np.empty_like(array) for array in arrays]
    out = {"fresh": None, "out": outs, "in place": arrays}[form]
    results = repeated(comm, arrays, 0, out=out, bucket_bytes=bucket_bytes)
    if out is not None:
        assert all(result is each for result, each in zip(results, out, strict=True))


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_overflow_is_no_error_in_whatever_mode_of_numpy(comm):
    """As in the other reductions: the rank that sums these elements would raise it alone."""
    arrays = [np.full(3, np.finfo(np.float32).max), np.ones(4, np.float32)]
    with np.errstate(all="raise"):
        for _ in range(3):
            blocking = comm.all_reduce_many(arrays)
        handle = comm.all_reduce_many_async(arrays)
    for first, second in (blocking, handle.wait()):
        np.testing.assert_array_equal(first, np.inf)
        np.testing.assert_array_equal(second, 2)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_every_op_and_dtype_comes_again(comm):
    for op, dtype in PAIRS:
        with case(op, dtype):
            repeated(comm, lists(comm.size, 0, dtype)[comm.rank], 0, op=op)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@settings(max_examples=20)
@given(
    kinds=st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=3).map(tuple),
            st.sampled_from(["float32", "int8", "float64"]),
        ),
        min_size=1,
        max_size=20,
    ),
    bucket_bytes=st.none() | st.integers(1, 2000),
)
def test_mixed_kinds_come_again_in_their_order(comm, kinds, bucket_bytes):
    ranks = [
        [value(rank + place, *kind) for place, kind in enumerate(kinds)]
        for rank in range(comm.size)
    ]
    for _ in range(3):
        check(comm.all_reduce_many(ranks[comm.rank], bucket_bytes=bucket_bytes), ranks)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_dtypes_that_take_turns_come_again_in_their_order(comm):
    ranks = [
        [value(rank + place, 3 + place, ("f4", "i8")[place % 2]) for place in range(7)]
        for rank in range(comm.size)
    ]
    for _ in range(4):
        check(comm.all_reduce_many(ranks[comm.rank]), ranks)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("form", ["fresh", "out", "in place"])
def test_a_persistent_call_is_bound_anew(comm, form, monkeypatch):
    shapes = [(3,), (2, 3), (), (len(form),)]  # of this form alone: they aren't known yet
    arrays = lists(comm.size, 0, shapes=shapes)[comm.rank]
    outs = [np.empty_like(array) for array in arrays]
    out = {"fresh": None, "out": outs, "in place": arrays}[form]
    unbound, ran, general = [], [], comm.all_reduce_many
    monkeypatch.setattr(
        comm, "all_reduce_many", lambda *_, **named: (unbound.append(step), general(*_, **named))[1]
    )
    call = comm.persistent_all_reduce_many(arrays, "sum", out=out)
    for step in range(12):
        if step == 4:
            registered = comm.empty(10)
        if step == 8:
            comm.before_next_call(partial(ran.append, registered))
        ranks = lists(comm.size, step, shapes=shapes)
        for array, content in zip(arrays, ranks[comm.rank], strict=True):
            array[...] = content
        results = call()
        check(results, ranks)
        assert out is None or all(map(operator.is_, results, out))
        assert bool(ran) == (step >= 8)
    # A list is bound when it comes for the second time.
    assert unbound == [0, 1, 4, 5, 8, 9]


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_persistent_call_of_other_lists(comm):
    """A tuple, and lists that overlap, which are not bound."""
    memory = np.zeros(8)
    pairs = [
        ((np.ones(2), np.ones(3)), None),
        ([memory[:4], memory[4:]], [memory[2:6], np.ones(4)]),
    ]
    for arrays, out in pairs:
        call = comm.persistent_all_reduce_many(arrays, out=out)
        for step in range(4):
            memory[:] = comm.rank + step
            for result, length in zip(call(), (len(each) for each in arrays), strict=True):
                expected = 2.0 if out is None else 1.0 + 2 * step
                np.testing.assert_array_equal(result, np.full(length, expected))
    for refused, error in (
        ([np.ones(2 + comm.rank)], ShapeMismatchError),
        (None, TypeError),
        ({"a": np.ones(2)}, TypeError),
    ):
        call = comm.persistent_all_reduce_many(refused)
        with pytest.raises(error):
            call()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_arrays_of_a_persistent_call_that_are_made_read_only(comm):
    arrays, out = [np.ones(4), np.ones(2)], [np.zeros(4), np.zeros(2)]
    call = comm.persistent_all_reduce_many(arrays, out=out)
    for _ in range(3):
        call()
    if comm.rank == 0:
        for array in out:
            array.flags.writeable = False
    arrays[1][...] = comm.rank
    results = call()
    assert list(map(id, results)) == list(map(id, out))
    np.testing.assert_array_equal(out[1], [1, 1])
    assert comm.all_reduce(np.array(1.0)) == 2


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_persistent_call_keeps_its_list(comm, in_place):
    first, arrays = np.ones(3), [np.ones(4)]
    arrays.insert(0, first)
    call = comm.persistent_all_reduce_many(arrays, "max", out=arrays if in_place else None)
    for step in range(6):
        if step == 4:
            arrays[0] = np.ones(9 + comm.rank)
        first[...] = comm.rank + step
        np.testing.assert_array_equal(call()[0], np.full(3, 1 + step))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_the_texts_of_bound_lists_are_compared(comm):
    arrays = lists(comm.size)[comm.rank]
    for text in ("this", "that"):
        repeated(comm, arrays, 0, what=text)
    with pytest.raises(MismatchError, match="this"):
        comm.all_reduce_many(arrays, what="that" if comm.rank else "this")
    repeated(comm, arrays, 4, what="this")
    handle = comm.all_reduce_many_async(arrays, what="that" if comm.rank else "this")
    with pytest.raises(MismatchError, match="that"):
        handle.wait()
    arrays = lists(comm.size)[comm.rank]
    calls = [comm.persistent_all_reduce_many(arrays, what=text) for text in ("this", "that")]
    for _ in range(3):
        for call in calls:
            check(call(), lists(comm.size))
    with pytest.raises(MismatchError, match="this"):
        calls[comm.rank > 0]()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_results_own_their_memory(comm):
    arrays = lists(comm.size)[comm.rank]
    kept = [comm.all_reduce_many(arrays) for _ in range(4)]
    copies = [[result.copy() for result in results] for results in kept]
    comm.all_reduce_many([array * 0 for array in arrays])
    for results, each in zip(kept, copies, strict=True):
        assert all(result.flags.owndata and result.flags.writeable for result in results)
        for result, copy in zip(results, each, strict=True):
            np.testing.assert_array_equal(result, copy)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_another_array_in_the_same_list(comm):
    arrays = [value(comm.rank, 4) for _ in range(5)]
    outs = [np.empty(4) for _ in range(5)]
    for _ in range(3):
        comm.all_reduce_many(arrays, out=outs)
    arrays[3], outs[2] = value(comm.rank + 1, 4), np.empty(4)
    results = comm.all_reduce_many(arrays, out=outs)
    assert results[2] is outs[2]
    ranks = [[value(rank + (place == 3), 4) for place in range(5)] for rank in range(comm.size)]
    check(outs, ranks)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_an_array_of_another_size_or_dtype_in_its_place(comm):
    arrays = [np.array(value(comm.rank, 6, np.float32)) for _ in range(3)]
    for _ in range(3):
        comm.all_reduce_many(arrays)
    arrays[1].resize(9, refcheck=False)
    repeated(comm, arrays, 1)
    arrays[2] = np.zeros(6, np.int32)
    ranks = [
        [value(rank, 6, np.float32), value(rank, 9, np.float32), value(rank, 6, np.int32)]
        for rank in range(comm.size)
    ]
    for array, content in zip(arrays, ranks[comm.rank], strict=True):
        array[...] = content
    check(comm.all_reduce_many(arrays), ranks)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.filterwarnings("ignore:Setting the dtype:DeprecationWarning")
def test_a_dtype_that_was_changed_in_place(comm):
    arrays = [value(comm.rank, 6, np.float32) for _ in range(3)]
    for _ in range(3):
        comm.all_reduce_many(arrays)
    for array in arrays:
        array.dtype = np.int32
    repeated(comm, arrays, 1)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_arrays_that_were_freed_are_not_kept_nor_mistaken(comm):
    for step in range(20):
        arrays = [value(comm.rank + step, 300, np.float32) for _ in range(3)]
        for _ in range(3):
            results = comm.all_reduce_many(arrays)
        check(results, [[value(rank + step, 300, np.float32)] * 3 for rank in range(comm.size)])
        assert all(sys.getrefcount(array) <= 3 for array in arrays)
        del arrays
        gc.collect()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_an_output_that_has_become_read_only(comm):
    arrays, outs = [value(comm.rank, 5)] * 3, [np.empty(5) for _ in range(3)]
    for _ in range(3):
        comm.all_reduce_many(arrays, out=outs, bucket_bytes=40)
    if comm.rank == 0:
        outs[0].flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            comm.all_reduce_many(arrays, out=outs, bucket_bytes=40)
        outs[0].flags.writeable = True
    comm.all_reduce_many(arrays, out=outs, bucket_bytes=40)
    check(outs, [[value(rank, 5)] * 3 for rank in range(comm.size)])
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("bucket_bytes", [None, 24])
def test_outputs_that_are_other_inputs_again(comm, bucket_bytes):
    first, second = np.empty(3), np.empty(3)
    given, outs = [first, second], [second, first]
    for step in range(4):
        ranks = lists(comm.size, step, np.float64, [(3,), (3,)])
        first[...], second[...] = ranks[comm.rank]
        comm.all_reduce_many(given, out=outs, bucket_bytes=bucket_bytes)
        check(outs, ranks)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("bucket_bytes", [None, 1, 100])
@pytest.mark.parametrize("form", ["fresh", "out", "in place"])
def test_new_arrays_of_the_same_kinds(comm, form, bucket_bytes):
    for step in range(5):
        ranks = lists(comm.size, step)
        arrays = [each.copy() for each in ranks[comm.rank]]
        outs = [np.empty_like(array) for array in arrays]
        out = {"fresh": None, "out": outs, "in place": arrays}[form]
        results = comm.all_reduce_many(arrays, out=out, bucket_bytes=bucket_bytes)
        check(results, ranks)
        if out is not None:
            assert all(result is each for result, each in zip(results, out, strict=True))


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_new_arrays_that_overlap_after_others_that_do_not(comm):
    """Of several buckets, of which one must not be written before the next one is read."""
    for step in range(6):
        bases = [np.arange(12.0) + rank + step for rank in range(comm.size)]
        starts = [0, 2, 8] if step % 2 else [0, 4, 8]
        ranks = [[base[start : start + 4] for start in starts] for base in bases]
        expected = [[each.copy() for each in arrays] for arrays in ranks]
        arrays = ranks[comm.rank]
        comm.all_reduce_many(arrays, out=arrays, bucket_bytes=32)
        check(arrays, expected)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("odd", ["strided", "tuple", "new", "without out", "torch"])
def test_one_rank_that_passes_other_kinds_of_arrays(comm, odd):
    shapes, outs = [(30, 4), (7,), (1000,)] * 3, None
    torch = pytest.importorskip("torch") if odd == "torch" else None
    strided = [np.empty((*shape, 2), np.float32)[..., 0] for shape in shapes]
    arrays = [np.empty(shape, np.float32) for shape in shapes]
    if comm.rank != 0 or odd != "without out":
        outs = [np.empty(shape, np.float32) for shape in shapes]
    for step in range(4):
        ranks = lists(comm.size, step, shapes=shapes)
        given = strided if odd == "strided" and comm.rank == 0 else arrays
        for array, content in zip(given, ranks[comm.rank], strict=True):
            array[...] = content
        if comm.rank == 0 and odd in ("tuple", "new", "torch"):
            kind = {"tuple": tuple, "new": lambda each: [*map(np.copy, each)]}.get(odd)
            given = kind(arrays) if kind else [torch.from_numpy(array) for array in arrays]
        check(comm.all_reduce_many(given, out=outs, bucket_bytes=2000), ranks)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_known_call_that_differs_by_rank_is_refused(comm):
    arrays = [value(comm.rank, 5) for _ in range(3)]
    for _ in range(3):
        comm.all_reduce_many(arrays)
        comm.all_reduce_many(arrays, "max")
    with pytest.raises(OpMismatchError):
        comm.all_reduce_many(arrays, "sum" if comm.rank else "max")
    check(comm.all_reduce_many(arrays), [[value(rank, 5)] * 3 for rank in range(comm.size)])


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_buckets_of_every_size_between_other_calls(comm):
    shapes = [(1,), (100_000,), (300_000,), (7,)] * 2
    arrays = [np.empty(shape, np.float32) for shape in shapes]
    for step, bucket_bytes in enumerate([None, 1 << 20, 10 << 20, 4]):
        repeated(comm, arrays, step, bucket_bytes=bucket_bytes)
        check([comm.all_reduce(arrays[3])], [[a] for a in comm.all_gather_object(arrays[3])])


# --- arrays in buckets ---------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3, 4)
@settings(max_examples=10)
@given(
    kinds=st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), max_size=2).map(tuple),
            st.sampled_from(["float32", "int64", "float16"]),
        ),
        max_size=12,
    ),
    bucket_bytes=st.none() | st.integers(1, 5000),
)
def test_views_are_reduced_in_place(comm, kinds, bucket_bytes):
    fusion = Fusion(comm, kinds, bucket_bytes=bucket_bytes)
    views = fusion.views
    assert [(view.shape, view.dtype.name) for view in views] == kinds
    assert not any(view.any() for view in views)
    for step, op in enumerate(["sum", "max", "sum"]):
        ranks = [
            [value(rank + place + step, *kind) for place, kind in enumerate(kinds)]
            for rank in range(comm.size)
        ]
        for view, content in zip(views, ranks[comm.rank], strict=True):
            view[...] = content
        results = fusion.all_reduce(op)
        assert all(result is view for result, view in zip(results, views, strict=True))
        check(results, ranks, op)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
def test_views_like_arrays_with_an_op_of_their_own(comm):
    fusion = Fusion(comm, [np.ones((2, 3)), np.float32(1.0), np.ones(2, ">f8")], "mean")
    assert [view.dtype.str for view in fusion.views] == ["<f8", "<f4", "<f8"]
    for view in fusion.views:
        view[...] = comm.rank
    assert all((view == (comm.size - 1) / 2).all() for view in fusion.all_reduce())


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_an_op_of_which_a_later_bucket_has_another_dtype(comm):
    """It is refused before the first bucket is reduced."""
    fusion = Fusion(comm, [((3,), "f4"), ((3,), "i4")])
    fusion.views[0][...] = comm.rank
    with pytest.raises(TypeError, match="op='mean' of int32: the result has another dtype"):
        fusion.all_reduce("mean")
    assert (fusion.views[0] == comm.rank).all()
    assert (fusion.all_reduce()[0] == 1).all()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("kinds", "error"),
    [
        ([((3,), "f4"), ((4,), "f4")], ShapeMismatchError),
        ([((3,), "f4")], ShapeMismatchError),
        ([((3,), "f8"), ((5,), "f4")], DtypeMismatchError),
    ],
)
def test_fusions_that_differ_by_rank_are_refused_on_every_rank(comm, kinds, error):
    usual = [((3,), "f4"), ((5,), "f4")]
    with pytest.raises(error, match=r"rank 0: Fusion\(sum, "):
        Fusion(comm, usual if comm.rank == 0 else kinds)
    fusion = Fusion(comm, usual)
    fusion.views[1][...] = 1
    np.testing.assert_array_equal(fusion.all_reduce()[1], [comm.size] * 5)


def test_without_memory_of_a_node():
    def one_rank(transport):
        comm = Communicator(transport)
        fusion = Fusion(comm, [((2, 3), "f8"), ((4,), "f4")])
        for view in fusion.views:
            view[...] = value(comm.rank, view.shape, view.dtype)
        return fusion.all_reduce()

    for results in run(3, one_rank):
        for result in results:
            expected = reduced("sum", values(3, result.shape, result.dtype))
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("like", "named", "error"),
    [
        ([((3,), "S3")], {}, TypeError),
        ([((3,), "c8")], {"op": "max"}, TypeError),
        ([((3,), "f4")], {"op": "most"}, ValueError),
        ([((-1,), "f4")], {}, ValueError),
        ([((3,), "f4")], {"bucket_bytes": 0}, ValueError),
    ],
)
def test_what_one_rank_can_see_to_be_wrong(like, named, error):
    def one_rank(transport):
        with pytest.raises(error):
            Fusion(Communicator(transport), like, **named)

    run(1, one_rank)
