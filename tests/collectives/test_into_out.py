"""gather and scatter into memory that the caller gives."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, algorithms
from tests.collectives.oracle import case, value

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

NODES = {
    "one node": None,
    "each alone": lambda rank, size: rank,
    "one apart": lambda rank, size: int(rank == size - 1),
}
FEW, MANY = 3, 12_000


@pytest.fixture(params=NODES)
def part(comm, request):
    node_of = NODES[request.param] and [
        NODES[request.param](r, comm.size) for r in range(comm.size)
    ]
    with Communicator(MPI.COMM_WORLD, node_of=node_of, deadline=20) as part:
        yield part


def ways(collective):
    """Twice the bound call, every algorithm, and the asynchronous call."""
    names = [None, None, *algorithms.names(collective), "native"]
    return [(collective, {"algorithm": name}) for name in names] + [(f"{collective}_async", {})]


def ended(result):
    return result.wait() if hasattr(result, "wait") else result


def outputs(shape, options):
    """Of every form, for the automatic choice; contiguous ones for others."""
    rows, columns = shape
    every = {
        "contiguous": np.zeros(shape),
        "strided": np.zeros((rows, 2 * columns))[:, ::2],
        "transposed": np.zeros(shape[::-1]).T,
    }
    return list(every.items())[: 1 if options.get("algorithm") else None]


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_gather(part, rows):
    rank, size = part.rank, part.size
    for axis, root in ((0, 0), (1, size - 1)):
        shapes = [(rows + each, 2) if axis == 0 else (2, rows + each) for each in range(size)]
        own = [value(each, shape, float, 100) for each, shape in enumerate(shapes)]
        joined = np.concatenate(own, axis)
        for name, options in ways("gather"):
            for form, out in outputs(joined.shape, options):
                with case(name, options, "axis", axis, form):
                    # What other ranks give as `out` doesn't count.
                    given = out if rank == root else "nothing"
                    result = getattr(part, name)(
                        own[rank], root=root, axis=axis, out=given, **options
                    )
                    assert ended(result) is (out if rank == root else None)
                    expected = joined if rank == root else np.zeros(joined.shape)
                    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_gather_of_a_part_of_the_output(part, rows):
    rank, size = part.rank, part.size
    every = [value(each, rows, float, 100) for each in range(size)]
    for _ in range(2):
        for root in range(size):
            # Of another rank's place, which is written before or after.
            out = np.zeros(rows * size)
            at = (root + 1) % size * rows
            own = out[at : at + rows]
            own[:] = every[rank]
            part.gather(own, root=root, out=out)
            if rank == root:
                np.testing.assert_array_equal(out, np.concatenate(every))


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_scatter(part, rows):
    rank, size = part.rank, part.size
    for axis, root in ((0, 0), (1, size - 1)):
        whole = value(root + 1, (rows, 5) if axis == 0 else (5, rows), float, 100)
        block = np.array_split(whole, size, axis)[rank]
        for name, options in ways("scatter"):
            for form, out in outputs(block.shape, options):
                with case(name, options, "axis", axis, form):
                    given = whole if rank == root else None
                    result = getattr(part, name)(given, root=root, axis=axis, out=out, **options)
                    assert ended(result) is out
                    np.testing.assert_array_equal(out, block)
    # The root's array and its block overlap.
    whole = value(7, rows * size, float, 100)
    given, out = whole.copy(), np.zeros(rows)
    if rank == 0:
        out = given[1 : 1 + rows]
    part.scatter(given if rank == 0 else None, out=out)
    np.testing.assert_array_equal(out, whole[rank * rows :][:rows])


def test_the_paths_that_are_tried(part):
    """Each one runs some of so many calls; the arrays change from call to call."""
    rank, size = part.rank, part.size
    out, block = np.zeros(MANY * size), np.zeros(MANY)
    for turn in range(60):
        root, given_out = turn % size, turn % 4 < 2
        with case("turn", turn, part.explain("gather", out.nbytes)):
            every = [value(turn + each, MANY, float, 1000) for each in range(size)]
            joined = np.concatenate(every)
            result = part.gather(every[rank], root=root, out=out if given_out else None)
            if rank == root:
                np.testing.assert_array_equal(result, joined)
            given, target = (joined, block) if rank == root else (None, block)
            if rank == root and turn % 3 == 0:
                # A place of another rank's block.
                target = joined[(root + 1) % size * MANY :][:MANY]
            result = part.scatter(given, root=root, out=target if given_out else None)
            np.testing.assert_array_equal(result, every[rank])


def test_outputs_of_another_dtype_than_the_array(part):
    """An array of integers can't take their mean, nor one of another byte order its sum."""
    swapped = np.ones(FEW, np.dtype(float).newbyteorder())
    for given, op in ((np.full(FEW, 3), "mean"), (np.full(MANY, 3), "mean"), (swapped, "sum")):
        for call in (part.all_reduce, part.reduce, part.scan):
            before = given.copy()
            if op == "mean" and call == part.scan:
                continue
            # Calls of a kind are bound when they recur.
            for _ in range(4):
                call(given, op)
                if call != part.reduce or part.rank == 0:
                    with pytest.raises(TypeError, match="out"):
                        call(given, op, out=given)
            np.testing.assert_array_equal(given, before)
    part.barrier()


def test_wrong_outputs_leave_the_ranks_in_step(part):
    rank, size, last = part.rank, part.size, part.size - 1
    own = value(rank, (2, 2))
    for call in (part.gather, part.gather, lambda *a, **b: part.gather_async(*a, **b).wait()):
        out = np.zeros((2 * size + 1, 2))
        with pytest.raises(ValueError, match=f"out has {2 * size + 1} rows on rank {last}"):
            call(own, root=last, out=out)
        assert not out.any()
        part.gather(own, root=last)
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    wrong = {
        r"out has shape \(3,\): must have the result's, \(2,\)": (ValueError, np.zeros(3)),
        "out has dtype float32: must have the result's, float64": (TypeError, np.zeros(2, "f4")),
        "out is read-only": (ValueError, read_only),
        "out is a list": (TypeError, [0.0, 0.0]),
    }
    whole = np.arange(2.0 * size)
    for call in (part.scatter, lambda *a, **b: part.scatter_async(*a, **b).wait()):
        for text, (kind, out) in wrong.items():
            given = whole if rank == 0 else None
            if rank == last:
                with pytest.raises(kind, match=text):
                    call(given, out=out)
            else:
                np.testing.assert_array_equal(call(given), whole[2 * rank :][:2])
            part.barrier()
