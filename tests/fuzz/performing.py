"""Runs a planned call on a communicator, and computes the required result."""

import itertools
from functools import partial

import numpy as np

from collectives.calls.scans import identity
from collectives.reductions.reduction import ReduceOp
from tests.collectives.oracle import reduced, value
from tests.fuzz.plans import SCANS

EXACT_BYTES = 4
# Every rank must get the same bits.
SAME_ON_ALL = ("all_reduce", "broadcast", "all_gather", "all_reduce_many")


class Lists:
    """Recurring lists of arrays of one communicator, as the gradients of a program."""

    def __init__(self):
        self._kept = {}

    def find(self, plan, which):
        """The same arrays for the same plan, with any values."""
        key = (which, *shapes_of_many(plan), plan.dtype, plan.op)
        if key not in self._kept:
            if len(self._kept) > 40:
                self._kept.clear()
            dtype = result_dtype(plan) if which == "outs" else plan.dtype
            self._kept[key] = [np.zeros(shape, dtype) for shape in shapes_of_many(plan)]
        return self._kept[key]


class Asynchronous:
    """An asynchronous call, and the wait for it, which may be repeated."""

    def __init__(self, begin):
        self._begin, self._handle = begin, None

    def __call__(self):
        """Begin it, unless it has begun, and wait for it."""
        if self._handle is None:
            self._handle = self._begin()
        return self._handle.wait()


def shapes_of_many(plan):
    """A few shapes, among them an empty one and a scalar."""
    count = 1 + plan.salt % 5
    return [plan.shape, (), (0,), (3, 2), (plan.salt % 4 + 1,), (129,)][:count]


def result_dtype(plan):
    """The shape of a reduction's result."""
    integers = plan.dtype.kind in "biu"
    return np.dtype("f8") if plan.reduces and plan.op == "mean" and integers else plan.dtype


def content(plan, rank, shape, extra=0):
    """A rank's elements: they differ by rank, index and call, and are exact in every dtype."""
    largest = 5
    if plan.op == "product":
        largest = 3
    elif plan.dtype.kind in "iuf" and plan.dtype.itemsize >= EXACT_BYTES:
        largest = 1000
    array = value(rank + 17 * plan.salt + extra, shape, plan.dtype, largest)
    if plan.nans and array.size:
        floats = array.reshape(-1).view(array.real.dtype)
        bits = floats.view(f"u{floats.itemsize}")
        quiet = np.array([np.nan], floats.dtype).view(bits.dtype)[0]
        sign = (rank & 1) << (8 * floats.itemsize - 1)
        bits[:: 3 + rank] = quiet | bits.dtype.type(rank + 1) | bits.dtype.type(sign)
    return array


def lay_out(array, layout):
    """The same elements in another kind of memory. Registered arrays come from the world."""
    if layout == "strided" and array.ndim:
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        view = wide[..., ::2]
        view[...] = array
        return view
    return np.asfortranarray(array) if layout == "fortran" and array.ndim > 1 else array


def prepare(plan, comm, lists, registered=None):
    """A function that makes the call and returns its result. The arrays are created now."""
    rank = comm.rank
    if plan.collective == "all_reduce_many":
        # The arrays of an asynchronous call may be in use after an error.
        return _prepare_many(plan, comm, Lists() if plan.asynchronous else lists)
    if plan.collective == "barrier":
        return _ready(plan, comm, f"salt {plan.salt}")
    if plan.collective in PLAIN:
        return partial(PLAIN[plan.collective], plan, comm)
    given = _given(plan, rank, comm.size)
    kind = None if given is None else (given.shape, given.dtype)
    if registered is not None and kind == (registered.shape, registered.dtype):
        registered[...] = given
        given = registered
    elif given is not None:
        given = lay_out(given, plan.layout)
    named = {} if plan.algorithm is None else {"algorithm": plan.algorithm}
    if plan.collective == "all_to_all":
        blocks = [content(plan, rank, _block(plan, peer), peer) for peer in range(comm.size)]
        return _ready(plan, comm, blocks, **named)
    if plan.collective in ("reduce", "broadcast", "gather", "scatter"):
        named["root"] = plan.root
    if plan.collective in ("all_gather", "gather", "scatter", "reduce_scatter"):
        named["axis"] = plan.axis
    positional = [plan.op] if plan.reduces else []
    given, out = _with_out(plan, given, comm)
    if out is not None:
        named["out"] = out
    return _ready(plan, comm, given, *positional, **named)


def _ready(plan, comm, *arguments, **named):
    if plan.asynchronous:
        begin = getattr(comm, f"{plan.collective}_async")
        return Asynchronous(partial(begin, *arguments, **named))
    return partial(getattr(comm, plan.collective), *arguments, **named)


def _given(plan, rank, size):
    if plan.collective == "scatter":
        return content(plan, rank, plan.shape) if rank == plan.root else None
    if plan.collective in ("all_gather", "gather"):
        return content(plan, rank, _part_shape(plan, rank))
    return content(plan, rank, plan.shape)


def _part_shape(plan, rank):
    """Lengths along the axis differ by rank."""
    shape = list(plan.shape)
    shape[plan.axis] += (rank + plan.salt) % 3
    return tuple(shape)


def _block(plan, peer):
    return (1 + (peer + plan.salt) % 4, 2)


def _with_out(plan, given, comm):
    """The input and `out`: separate, the same array, or slices of one another."""
    if plan.collective not in ("all_reduce", "reduce_scatter", "all_gather", *SCANS):
        return given, None
    if plan.place == "new":
        return given, None
    if plan.place == "in place":
        in_place = plan.collective in ("all_reduce", *SCANS) and result_dtype(plan) == plan.dtype
        return given, given if in_place else None
    wanted = expected(plan, comm.rank, comm.size)
    if plan.place == "out":
        return given, np.zeros(wanted.shape, wanted.dtype)
    if plan.collective == "reduce_scatter" and wanted.dtype == given.dtype and plan.axis == 0:
        return given, given[-len(wanted) :] if len(wanted) else given[:0]
    if plan.collective == "all_gather" and plan.axis == 0:
        out = np.zeros(wanted.shape, wanted.dtype)
        view = out[len(out) - len(given) :]
        view[...] = given
        return view, out
    return given, None


def _prepare_many(plan, comm, lists):
    arrays = lists.find(plan, "arrays")
    for index, array in enumerate(arrays):
        array[...] = content(plan, comm.rank, array.shape, index)
    if plan.place == "in place" and result_dtype(plan) == plan.dtype:
        return _ready(plan, comm, arrays, plan.op, out=arrays)
    if plan.place == "out":
        return _ready(plan, comm, arrays, plan.op, out=lists.find(plan, "outs"))
    return _ready(plan, comm, arrays, plan.op)


def _broadcast_object(plan, comm):
    return comm.broadcast_object((plan.salt, comm.rank), plan.root)


def _all_gather_object(plan, comm):
    return comm.all_gather_object((plan.salt, comm.rank, "x" * (comm.rank * plan.salt)))


PLAIN = {
    "broadcast_object": _broadcast_object,
    "all_gather_object": _all_gather_object,
}


def expected(plan, rank, size):
    """The required result of the call on this rank."""
    return EXPECTED[plan.collective](plan, rank, size)


def _folded(plan, shape, size, extra=0):
    with np.errstate(all="ignore"):
        parts = [content(plan, each, shape, extra) for each in range(size)]
        return np.asarray(reduced(plan.op, [np.atleast_1d(part) for part in parts])).reshape(shape)


def _exscanned(plan, rank, size):
    if rank:
        return _folded(plan, plan.shape, rank)
    return np.full(plan.shape, identity(ReduceOp(plan.op), plan.dtype), plan.dtype)


def _reduce_scattered(plan, rank, size):
    return np.array_split(_folded(plan, plan.shape, size), size, plan.axis)[rank]


def _joined(plan, size):
    parts = [content(plan, each, _part_shape(plan, each)) for each in range(size)]
    return np.concatenate(parts, plan.axis)


def _scattered(plan, rank, size):
    return np.array_split(content(plan, plan.root, plan.shape), size, plan.axis)[rank]


def _many(plan, rank, size):
    shapes = enumerate(shapes_of_many(plan))
    return [_folded(plan, shape, size, index) for index, shape in shapes]


EXPECTED = {
    "all_reduce": lambda plan, rank, size: _folded(plan, plan.shape, size),
    "reduce": lambda plan, rank, size: (
        _folded(plan, plan.shape, size) if rank == plan.root else None
    ),
    "reduce_scatter": _reduce_scattered,
    "all_reduce_many": _many,
    "scan": lambda plan, rank, size: _folded(plan, plan.shape, rank + 1),
    "exscan": _exscanned,
    "broadcast": lambda plan, rank, size: content(plan, plan.root, plan.shape),
    "all_gather": lambda plan, rank, size: _joined(plan, size),
    "gather": lambda plan, rank, size: _joined(plan, size) if rank == plan.root else None,
    "scatter": _scattered,
    "all_to_all": lambda plan, rank, size: [
        content(plan, peer, _block(plan, rank), rank) for peer in range(size)
    ],
    "barrier": lambda plan, rank, size: None,
    "broadcast_object": lambda plan, rank, size: (plan.salt, plan.root),
    "all_gather_object": lambda plan, rank, size: [
        (plan.salt, each, "x" * (each * plan.salt)) for each in range(size)
    ],
}


def difference(plan, result, rank, size):
    """The difference between a result and the required one, as text; None where it is right."""
    wanted = expected(plan, rank, size)
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], np.ndarray):
        pairs = list(itertools.zip_longest(result, wanted))
        found = (_array_difference(plan, *pair) for pair in pairs)
        return next((each for each in found if each is not None), None)
    if isinstance(wanted, np.ndarray):
        return _array_difference(plan, result, wanted)
    return None if result == wanted else f"{result!r:.80}, must be {wanted!r:.80}"


def _array_difference(plan, result, wanted):
    if type(result) is not np.ndarray or result.dtype != wanted.dtype:
        return f"{type(result).__name__} of {getattr(result, 'dtype', None)}: {wanted.dtype}"
    if result.shape != wanted.shape:
        return f"shape {result.shape}, must be {wanted.shape}"
    if plan.dtype.kind == "c" and plan.op == "product":
        # NaN and infinity propagate differently in the parts of a product.
        same = np.isclose(result, wanted, rtol=1e-4) | np.isnan(wanted)
    elif plan.op == "mean":
        tolerance = 2e-2 if wanted.dtype.itemsize == 2 else 1e-6
        same = _wide_close(result, wanted, tolerance)
    else:
        same = (result == wanted) | ((result != result) & (wanted != wanted))
    if np.all(same):
        return None
    place = int(np.argmin(np.asarray(same).reshape(-1)))
    pair = result.reshape(-1)[place], wanted.reshape(-1)[place]
    return f"element {place} of {result.size} is {pair[0]}, must be {pair[1]}"


def _wide_close(result, wanted, tolerance):
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
    pair = result.astype(wide), wanted.astype(wide)
    return np.isclose(*pair, rtol=tolerance, atol=1e-6, equal_nan=True)


def bits(result, *, any_nan=False):
    """The content that is compared between ranks; `any_nan` makes all NaNs equal."""
    arrays = [np.ascontiguousarray(array) for array in as_list(result)]
    if any_nan:
        arrays = [np.where(array != array, array.dtype.type(np.nan), array) for array in arrays]
    return b"".join(array.tobytes() for array in arrays)


def as_list(result):
    """The arrays of a result."""
    return result if isinstance(result, list) else [result]
