"""Every collective of JAX, in every kind of program, has NumPy's results and right derivatives."""

import numpy as np
import pytest

import collectives
from tests.slow import slow_but

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

# Each: the call, and the result of rank r, given the rows of all ranks.
CASES = {
    "all_reduce": (lambda f, x, c: f.all_reduce(x), lambda rows, r: rows.sum(0)),
    "mean": (lambda f, x, c: f.all_reduce(x, "mean"), lambda rows, r: rows.mean(0)),
    "max": (lambda f, x, c: f.all_reduce(x, "max"), lambda rows, r: rows.max(0)),
    "min": (lambda f, x, c: f.all_reduce(x, "min", comm=c), lambda rows, r: rows.min(0)),
    "product": (lambda f, x, c: f.all_reduce(x, "product"), lambda rows, r: rows.prod(0)),
    "reduce": (
        lambda f, x, c: f.reduce(x, root=1),
        lambda rows, r: rows.sum(0) if r == 1 else rows[r] * 0,
    ),
    "reduce, mean": (
        lambda f, x, c: f.reduce(x, "mean"),
        lambda rows, r: rows.mean(0) if r == 0 else rows[r] * 0,
    ),
    "scan": (lambda f, x, c: f.scan(x), lambda rows, r: rows[: r + 1].sum(0)),
    "all_gather": (lambda f, x, c: f.all_gather(x), lambda rows, r: np.concatenate(rows)),
    "all_gather, axis": (
        lambda f, x, c: f.all_gather(x, axis=-1),
        lambda rows, r: np.concatenate(rows, -1),
    ),
    "reduce_scatter": (
        lambda f, x, c: f.reduce_scatter(x),
        lambda rows, r: np.split(rows.sum(0), len(rows))[r],
    ),
    "reduce_scatter, mean": (
        lambda f, x, c: f.reduce_scatter(x, "mean", axis=1),
        lambda rows, r: np.split(rows.mean(0), len(rows), 1)[r],
    ),
    "reduce_scatter, max": (
        lambda f, x, c: f.reduce_scatter(x, "max"),
        lambda rows, r: np.split(rows.max(0), len(rows))[r],
    ),
    "all_to_all": (
        lambda f, x, c: f.all_to_all(x),
        lambda rows, r: np.concatenate([np.split(each, len(rows))[r] for each in rows]),
    ),
    "broadcast": (lambda f, x, c: f.broadcast(x, root=1), lambda rows, r: rows[1]),
    "sendrecv": (
        lambda f, x, c: f.sendrecv(x, source=c.rank - 1 if c.rank else c.size - 1, dest=after(c)),
        lambda rows, r: rows[r - 1],
    ),
    "shift": (
        lambda f, x, c: f.sendrecv(
            x,
            source=c.rank - 1 if c.rank else None,
            dest=after(c) or None,
        ),
        lambda rows, r: rows[r - 1] if r else rows[0] * 0,
    ),
    "barrier": (lambda f, x, c: f.barrier(x), lambda rows, r: rows[r]),
}
QUICK = ("all_reduce", "max", "reduce", "scan", "reduce_scatter, mean", "all_to_all")
QUICK += ("all_gather, axis", "broadcast", "shift")
MOVEMENTS = ("all_gather", "all_to_all", "broadcast", "sendrecv", "barrier")
# The cotangents of these are the same on every rank.
ONE_TOTAL = ("all_reduce", "mean", "max", "min", "product")


def after(comm):
    return (comm.rank + 1) % comm.size


def drawn(comm, dtype="float64", seed=0):
    """The rows of all ranks, each of 2 · size numbers squared."""
    generator = np.random.default_rng(seed)
    rows = generator.uniform(-2, 2, (comm.size, 2 * comm.size, 2 * comm.size))
    return rows.astype(dtype)


@pytest.fixture(autouse=True)
def _wide(jax):
    enable = getattr(jax, "enable_x64", None)
    if enable is None:  # JAX before 0.8
        from jax.experimental import enable_x64 as enable
    with enable(True):
        yield


@pytest.mark.parametrize("case", slow_but(CASES, *QUICK))
def test_values_and_derivatives(jax, calls, comm, case):
    call, expected = CASES[case]
    rows = drawn(comm)
    wanted = expected(rows, comm.rank)

    def function(array):
        return call(calls, array, comm)

    found = jax.jit(function)(rows[comm.rank])
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert found.dtype == "float64"
    np.testing.assert_array_equal(function(jax.numpy.asarray(rows[comm.rank])), found)
    two = np.stack([rows[comm.rank], rows[comm.rank] * 2], -1)
    batched = jax.jit(jax.vmap(function, in_axes=-1))(two)
    np.testing.assert_array_equal(batched[0], found)
    # Forward mode: the difference of the values.
    directions, step = drawn(comm, seed=1), 1e-6
    own, direction = rows[comm.rank], directions[comm.rank]
    slope = jax.jit(lambda x, t: jax.jvp(function, (x,), (t,))[1])(own, direction)
    higher = expected(rows + step * directions, comm.rank)
    lower = expected(rows - step * directions, comm.rank)
    np.testing.assert_allclose(slope, (higher - lower) / (2 * step), rtol=1e-4, atol=1e-6)
    # Reverse mode: the transpose of all ranks' derivatives.
    one_total = case in ONE_TOTAL
    generator = np.random.default_rng(2 if one_total else comm.rank)
    cotangent = generator.normal(size=wanted.shape)
    back = jax.jit(lambda x, t: jax.vjp(function, x)[1](t)[0])(own, cotangent)
    forward = np.vdot(cotangent, slope)
    totals = comm.all_reduce(np.array([forward, np.vdot(back, direction)]))
    np.testing.assert_allclose(totals[0] / (comm.size if one_total else 1), totals[1], rtol=1e-9)
    # The transpose's own transpose, as second derivatives in reverse mode take it.
    twice = jax.jit(
        lambda x, t, d: jax.linear_transpose(lambda c: jax.vjp(function, x)[1](c)[0], t)(d)[0]
    )
    np.testing.assert_allclose(twice(own, cotangent, direction), slope, rtol=1e-9, atol=1e-12)


def test_loops_and_conditions(jax, calls, comm):
    lax, jnp, size = jax.lax, jax.numpy, comm.size
    own = jnp.arange(3.0) + comm.rank
    ranks = sum(range(size))

    def mean(x):
        return calls.all_reduce(x, "mean")

    @jax.jit
    def program(x):
        scanned = lax.scan(lambda c, y: (calls.all_reduce(c) / size + y, c), x, jnp.ones((4, 3)))[0]
        fori = lax.fori_loop(0, 3, lambda i, y: mean(y) + i, x)
        while_ = lax.while_loop(lambda y: calls.all_reduce(y[0]) < 40, lambda y: mean(y) + 9, x)
        branch = lax.cond(mean(x)[0] > 0, calls.all_reduce, lambda y: y, x)
        return scanned, fori, while_, branch, jax.checkpoint(calls.scan)(x)

    middle = np.arange(3.0) + ranks / size
    for found in (program(own), jax.vmap(program)(own[None])):
        found = [np.asarray(each).reshape(3) for each in found]
        np.testing.assert_allclose(found[0], middle + 4)
        np.testing.assert_allclose(found[1], middle + 3)
        steps = max(1, -(-(40 - ranks) // (9 * size)))
        np.testing.assert_allclose(found[2], middle + 9 * steps)
        np.testing.assert_allclose(found[3], middle * size)
        np.testing.assert_allclose(found[4], sum(np.arange(3.0) + r for r in range(comm.rank + 1)))

    def loss(x):
        return lax.scan(lambda c, _: (jnp.sin(mean(c)), None), x, None, length=3)[0].sum()

    value = middle
    factor = np.ones(3) / size
    for _ in range(3):
        factor, value = factor * np.cos(value), np.sin(value)
    # Only the first mean is of arrays that differ; every mean divides the cotangent.
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(own), factor / size**2, rtol=1e-6)
    for outer in (jax.jacfwd, jax.jacrev):
        hessian = jax.jit(outer(jax.grad(lambda x: (mean(x) ** 3).sum())))(own)
        np.testing.assert_allclose(np.diag(hessian), 6 * middle / size, rtol=1e-6)
    cube = jax.grad(lambda x: (mean(x) ** 3).sum())
    np.testing.assert_allclose(jax.grad(lambda x: cube(x).sum())(own), 6 * middle / size, rtol=1e-6)


def test_dtypes_and_pytrees(jax, calls, comm):
    jnp, size = jax.numpy, comm.size
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="JAX needs it")
    names = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32")
    names += ("int8", "uint16", "int64", "complex64", "complex128")
    rows = {name: abs(drawn(comm).round()).astype(jnp.dtype(name)) for name in names}
    own = {name: each[comm.rank] for name, each in rows.items()}
    total = jax.jit(calls.all_reduce)(own)
    for name, each in total.items():
        assert each.dtype == name
        np.testing.assert_array_equal(
            np.asarray(each).astype(complex), rows[name].astype(complex).sum(0), name
        )
    own["bool"] = own["int8"] > 0
    for case in MOVEMENTS:
        call, expected = CASES[case]
        moved = jax.jit(lambda tree, call=call: call(calls, tree, comm))(own)
        for name, each in own.items():
            given = rows["int8"] > 0 if name == "bool" else rows[name]
            assert moved[name].dtype == each.dtype
            assert np.asarray(moved[name]).tobytes() == expected(given, comm.rank).tobytes(), name
    assert jax.jit(calls.all_reduce, static_argnums=1)(own["int8"], "mean").dtype == "float64"
    assert calls.all_gather(jnp.float32(comm.rank)).tolist() == list(range(size))
    assert calls.all_reduce({"empty": jnp.ones(0), "none": None})["empty"].shape == (0,)
    assert calls.all_reduce({}) == {}
    mixed = {"a": jnp.ones(2), "n": jnp.arange(2)}
    gradient = jax.grad(lambda t: calls.broadcast(t)["a"].sum(), allow_int=True)(mixed)
    np.testing.assert_array_equal(gradient["a"], np.full(2, size if comm.rank == 0 else 0))
    assert ml_dtypes.bfloat16 is not None
    small = own["float8_e4m3fn"]
    for call in (calls.all_gather, calls.broadcast, calls.pvary):
        slope = jax.jit(jax.grad(lambda x, f=call: f(x).astype(float).sum()))(small)
        assert slope.dtype == small.dtype
        due = 0 if call is calls.broadcast and comm.rank else size
        np.testing.assert_array_equal(slope.astype(float), due)


def test_messages_and_barriers_run_although_nothing_uses_them(jax, calls, comm):
    jnp, last = jax.numpy, comm.size - 1

    def program(x):
        calls.barrier()
        if comm.rank == 0:
            calls.send(x + 5, last, tag=3)
        elif comm.rank == last:
            x = calls.recv(x, 0, tag=3)
        calls.barrier()
        return x

    for found in (jax.jit(program)(jnp.arange(3.0)), program(jnp.arange(3.0))):
        np.testing.assert_array_equal(found, np.arange(3.0) + 5 * (comm.rank == last))
    if comm.rank == 0:
        with pytest.raises(NotImplementedError, match="send has no derivative: use sendrecv"):
            jax.grad(lambda x: calls.send(x, 1).sum())(jnp.ones(2))
    with pytest.raises(NotImplementedError, match="scan of 'max'"):
        jax.grad(lambda x: calls.scan(x, "max").sum())(jnp.ones(2))
    for function in (calls.scan, calls.all_reduce):
        with pytest.raises(NotImplementedError, match=r"'max'.* has no transpose"):
            jax.linear_transpose(lambda x, f=function: f(x, "max"), jnp.ones(2))(jnp.ones(2))


def test_arguments_are_checked(jax, calls, comm):
    odd = jax.numpy.ones(comm.size + 1)
    with pytest.raises(ValueError, match=r"reduce_scatter: axis 0 .* multiple"):
        calls.reduce_scatter(odd)
    with pytest.raises(ValueError, match=r"root=9: must be an integer from 0 to"):
        calls.broadcast(odd, root=9)


def test_calls_of_a_communicator_in_compiled_functions_are_refused(jax, comm):
    for call in (comm.all_reduce, comm.broadcast, lambda x: comm.all_reduce_many([x])):
        with pytest.raises(TypeError, match=r"is traced by JAX, .*`collectives\.jax\.all_reduce`"):
            jax.jit(call)(np.ones(2))


def test_shard_map_on_one_device(jax, calls, comm):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    spec = jax.sharding.PartitionSpec("x")
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map
    function = shard_map(calls.all_reduce, mesh=mesh, in_specs=spec, out_specs=spec)
    found = jax.jit(function)(jax.numpy.ones(4) * comm.rank)
    np.testing.assert_array_equal(found, np.full(4, sum(range(comm.size))))


def test_independent_calls_run_in_one_order(jax, calls, comm):
    independent_calls(jax, calls, comm, 100)


@pytest.mark.slow
@pytest.mark.ranks(2, 3, 4)
def test_hundreds_of_independent_calls_run_in_one_order(jax, calls, comm):
    independent_calls(jax, calls, comm, 200)


def independent_calls(jax, calls, comm, count):
    jnp = jax.numpy
    big = jnp.ones((64, 64), "float32")

    @jax.jit
    def program(x, cost):
        slow = jax.lax.fori_loop(0, cost, lambda _, y: jnp.tanh(y @ big), big).sum() * 0
        # What a call needs is ready later for other calls on other ranks.
        given = [x + number + slow * (number % comm.size == comm.rank) for number in range(count)]
        ops = ("sum", "max")
        totals = [calls.all_reduce(each, ops[n % 2]) for n, each in enumerate(given)]

        def loss(y):
            return calls.all_reduce(jnp.sin(y)).sum() + calls.reduce(y * 2).sum()

        return totals, jax.grad(loss)(x), jax.jit(calls.broadcast)(x), calls.all_gather(x[:1])

    own = jnp.arange(3, dtype="float32")
    for _ in range(3):
        totals, gradient, *_ = program(own, 30)
        for number, found in enumerate(totals):
            factor = 1 if number % 2 else comm.size
            np.testing.assert_array_equal(found, (np.arange(3) + number) * factor)
        np.testing.assert_allclose(gradient, np.cos(np.arange(3)) + 2, rtol=1e-6)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("way", ["ffi", "callbacks"])
def test_calls_after_loops_and_after_the_programs_own_callbacks(jax, calls, comm, monkeypatch, way):
    from collectives.jax import host_calls, kinds

    jnp = jax.numpy
    if way == "callbacks":
        monkeypatch.setattr(host_calls, "uses_ffi", lambda: False)
    made, plain = [], kinds.function_of

    def noted(call, count):
        run = plain(call, count)
        return lambda *arrays: (made.append(call.op), run(*arrays))

    monkeypatch.setattr(kinds, "function_of", noted)
    big, own = jnp.ones((64, 64), "float32"), jnp.arange(300, dtype="float32")
    byte = jax.ShapeDtypeStruct((), np.uint8)
    loops = {
        "fori_loop": lambda x: jax.lax.fori_loop(0, 2, lambda _, y: calls.all_reduce(y), x),
        "scan": lambda x: jax.lax.scan(lambda y, z: (y, calls.all_reduce(z)), 0, x[:2])[1],
        "while_loop": lambda x: jax.lax.while_loop(
            lambda y: y[0] < 2, lambda y: (y[0] + 1, calls.all_reduce(y[1]), y[2]), (0, x, x[:0])
        ),
        "complex": lambda x: jax.lax.fori_loop(
            0, 2, lambda _, y: calls.all_reduce(y), x.astype("complex64")
        ),
        "print": lambda x: [calls.all_reduce(x), jax.debug.callback(lambda _: None, own)][:1],
        "callback": lambda x: [
            calls.all_reduce(x),
            jax.experimental.io_callback(lambda _: np.uint8(0), byte, own),
        ],
    }
    for name, loop in loops.items():

        @jax.jit
        def program(x, cost, loop=loop):
            # What the first calls need is ready last.
            turns = jax.lax.fori_loop(0, cost, lambda _, y: jnp.tanh(y @ big), big)
            found = loop(x + turns.sum() * 0)
            # XLA runs a program of few and small operations in its order.
            return found, [calls.all_reduce(x + each, "max") for each in range(12)]

        made.clear()
        jax.block_until_ready(program(own, 1000))
        first = len(made) - 12
        assert first >= 1
        assert made == ["sum"] * first + ["max"] * 12, name


class Box:
    """A pytree with a key of its own."""

    def __init__(self, held):
        self.held = held


_registered = set()


def test_errors_are_raised_on_every_rank_and_the_next_call_works(jax, calls, comm):
    jnp = jax.numpy
    gather = jax.jit(lambda x: calls.all_gather(x))

    def differing(dtype):
        return jax.block_until_ready(gather(jnp.ones(3, dtype)))

    dtype = "float32" if comm.rank == 0 else "int32"
    with pytest.raises(collectives.DtypeMismatchError), calls.original_errors():
        differing(dtype)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"DtypeMismatchError: .*differ"):
        differing(dtype)
    np.testing.assert_array_equal(differing("float32"), np.ones(3 * comm.size))
    # What no array shows: axes that are moved, dtypes in which others are reduced.
    odd, square = comm.rank == 1, jnp.ones((comm.size, comm.size))
    for call in (
        lambda: calls.all_gather(square, axis=int(odd)),
        lambda: calls.reduce_scatter(square, axis=int(odd)),
        lambda: calls.all_to_all(square, axis=int(odd)),
        lambda: (jax.vmap(calls.all_gather) if odd else calls.all_gather)(square),
        lambda: calls.all_reduce(square.astype("float8_e4m3fn" if odd else "float32")),
        lambda: calls.scan(square.astype("float8_e4m3fn" if odd else "float8_e5m2")),
        # Keys, and numbers of arrays, of which each is a call.
        lambda: calls.all_reduce({"a": square, "c" if odd else "b": square}),
        lambda: calls.all_reduce({"c" if odd else "b": square}),
        lambda: calls.all_reduce({"b": square} if odd else square),
        lambda: calls.all_reduce({"a": dict.fromkeys(range(200), square), "bc"[odd]: square}),
        lambda: jax.grad(lambda x: calls.pvary(x)["bc"[odd]].sum())({"bc"[odd]: square}),
        lambda: calls.broadcast([square, {"c" if odd else "b": square}]),
        lambda: calls.all_gather([square] * (2 + odd)),
        lambda: calls.reduce([square] * (1 + odd)),
        # A rank without arrays makes the call, too.
        lambda: calls.all_reduce({} if odd else {"a": square}),
        lambda: calls.broadcast([None] if odd else [square]),
        lambda: calls.all_reduce({("a", "bc"[odd]): square}),
        lambda: calls.all_reduce(
            {"a, b": square, "c": square} if odd else {"a": square, "b, c": square}
        ),
        lambda: calls.all_reduce({"1" if odd else 1: square}),
        lambda: calls.all_reduce(square.astype("int32" if odd else "float32"), "mean"),
        lambda: calls.broadcast(jax.random.key(0, impl="rbg" if odd else "unsafe_rbg")),
    ):
        with pytest.raises(collectives.MismatchError), calls.original_errors():
            jax.block_until_ready(call())
    # Keys whose text differs between processes count by position.
    boxes = {"a": Box(square), "b": Box(square)}
    register = jax.tree_util.register_pytree_with_keys
    if Box not in _registered:
        _registered.add(Box)
        register(Box, lambda box: ([(object(), box.held)], None), lambda _, held: Box(*held))
    assert calls.all_reduce(boxes)["b"].held[0, 0] == comm.size
    same = {True: square} if odd else {1: square}
    assert next(iter(calls.all_reduce(same).values()))[0, 0] == comm.size
    assert calls.all_reduce({"a": []}) == {"a": []}
    total = calls.all_reduce({object(): square})
    np.testing.assert_array_equal(next(iter(total.values())), np.full(square.shape, comm.size))
    # A program that has run raises another error of JAX's, on the ranks where it has.
    again = jax.jit(calls.all_reduce)
    for _ in range(3):
        jax.block_until_ready(again(jnp.ones(4)))
    with pytest.raises(collectives.ShapeMismatchError), calls.original_errors():
        jax.block_until_ready(again(jnp.ones(4 + comm.rank)))
    known = ValueError, jax.errors.JaxRuntimeError

    def fail(kind):
        with pytest.raises(known):
            jax.block_until_ready(again(jnp.ones(4 + comm.rank)))
        raise kind("of the program")

    for kind in known:
        with pytest.raises(kind, match="of the program"), calls.original_errors():
            fail(kind)

    from collectives.jax import host_calls

    def interrupt():
        host_calls._Failure.error = KeyboardInterrupt()  # without a text
        raise jax.errors.JaxRuntimeError("INTERNAL: KeyboardInterrupt")

    with pytest.raises(KeyboardInterrupt), calls.original_errors():
        interrupt()
    own = comm.split(0)
    own.deadline = 0.3
    late = jax.jit(lambda x: calls.all_reduce(x, comm=own))
    if comm.rank:
        with pytest.raises(collectives.DeadlineExceededError), calls.original_errors():
            jax.block_until_ready(late(jnp.ones(2)))
    comm.barrier()
    own.deadline = 30
    np.testing.assert_array_equal(late(jnp.ones(2)), np.full(2, comm.size))
    own.close()


def test_programs_run_in_the_order_of_their_calls(jax, calls, comm):
    jnp = jax.numpy
    big = jnp.ones((200, 200), "float32")

    @jax.jit
    def later(x, cost):
        turns = jax.lax.fori_loop(0, cost, lambda _, y: jnp.tanh(y @ big), big)
        return x + turns.sum() * 0

    total, highest = jax.jit(calls.all_reduce), jax.jit(lambda x: calls.all_reduce(x, "max"))
    own = jnp.arange(3.0) + comm.rank
    for _ in range(3):
        # The argument of the one is ready first on rank 0, that of the other on other ranks.
        costs = (60, 1) if comm.rank == 0 else (1, 60)
        arguments = [later(own, cost) for cost in costs]
        found = total(arguments[0]), highest(arguments[1])
        np.testing.assert_array_equal(found[0], np.arange(3) * comm.size + sum(range(comm.size)))
        np.testing.assert_array_equal(found[1], np.arange(3) + comm.size - 1)


def test_calls_by_python_come_after_programs_that_run(jax, calls, comm):
    """JAX has only enqueued them. A call that a program is traced with comes in its place, too."""
    jnp = jax.numpy

    @jax.jit
    def slow(matrix, steps):
        matrix = jax.lax.fori_loop(0, steps, lambda _, each: jnp.tanh(each @ each) / 10, matrix)
        return calls.all_reduce(matrix)

    @jax.jit
    def traced(x):
        return x + int(comm.all_reduce(np.ones(2))[0])

    chance = np.random.default_rng(comm.rank)
    expected = comm.size * (comm.size + 1) // 2
    for step in range(150):
        slow(jnp.ones((100, 100)), int(chance.integers(1, 20)))
        if step % 50 == 1:
            assert traced(jnp.zeros(step)).sum() == step * comm.size
        # Bound and small, in messages of other lengths, and not bound.
        for length in (7, 30_000):
            array = np.full(length, comm.rank + 1.0)
            assert comm.all_reduce(array)[-1] == expected
        assert comm.all_gather_object(step) == [step] * comm.size
    with jax.disable_jit():
        comm.barrier()


def test_messages_by_python_come_after_those_of_programs(jax, calls, comm):
    @jax.jit
    def slow(steps):
        matrix = jax.numpy.ones((100, 100), "float32")
        matrix = jax.lax.fori_loop(0, steps, lambda _, each: jax.numpy.tanh(each @ each), matrix)
        return calls.send(matrix[:3, 0] * 0 + 1, 1)

    for _ in range(3):
        if comm.rank == 0:
            slow(200)
            comm.send(np.full(3, 2, np.float32), 1)
        elif comm.rank == 1:
            found = [comm.recv(np.empty(3, np.float32), 0)[0] for _ in range(2)]
            assert found == [1, 2]


def test_arrays_at_more_addresses_than_are_kept(jax, calls, comm):
    program = jax.jit(lambda x: calls.all_reduce((x, x + 1)))
    own = [jax.numpy.arange(1000.0) * (number + comm.rank) for number in range(40)]
    kept = []
    for number in [*range(40), *reversed(range(40)), 0, 0]:
        kept.append((number, program(own[number])))
    for number, (first, second) in kept:
        total = np.arange(1000.0) * sum(number + rank for rank in range(comm.size))
        np.testing.assert_array_equal(first, total)
        np.testing.assert_array_equal(second, total + comm.size)


def test_callbacks_where_jax_has_another_interface(jax, calls, comm, monkeypatch):
    from collectives.jax import host_calls

    jnp = jax.numpy
    numbers = list(host_calls._places)
    monkeypatch.setattr(host_calls, "uses_ffi", lambda: False)

    @jax.jit
    def program(x):
        if comm.rank == 0:
            calls.send(x, 1)
        elif comm.rank == 1:
            calls.recv(x, 0)
        totals = [calls.all_reduce(x + number, ("sum", "max")[number % 2]) for number in range(20)]
        return totals, jax.grad(lambda y: calls.broadcast(y).sum())(x)

    for _ in range(3):
        totals, gradient = program(jnp.arange(3.0))
        for number, found in enumerate(totals):
            factor = 1 if number % 2 else comm.size
            np.testing.assert_array_equal(found, (np.arange(3) + number) * factor)
        np.testing.assert_array_equal(gradient, np.full(3, 0 if comm.rank else comm.size))
    assert list(host_calls._places) == numbers, "no call went through the other interface"

    # As of a thread without the context that enables 64 bits.
    def narrow(function, shapes, *arrays):
        return function(*(each.astype("float32") for each in arrays))

    given = np.ones(2)
    with pytest.raises(TypeError, match="jax_enable_x64"):
        host_calls.call_back(narrow, lambda *_: None, [given], [given])
