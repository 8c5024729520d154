"""Calls within functions, loops and derivatives come in the order of the program, on every rank."""

import re
from functools import partial

import numpy as np
import pytest

from collectives import DtypeMismatchError

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


@pytest.mark.parametrize("way", ["ffi", "callbacks"])
def test_calls_of_compiled_functions_and_loops(jax, calls, comm, monkeypatch, way):
    """Independent calls of one signature, in programs that XLA compiles differently by rank."""
    from jax._src.state.discharge import run_state  # what pallas.run_state is

    from collectives.jax import host_calls

    if way == "callbacks":
        monkeypatch.setattr(host_calls, "uses_ffi", lambda: False)
    jnp, lax, rank, size = jax.numpy, jax.lax, comm.rank, comm.size

    @jax.jit
    def total(x):
        return calls.all_reduce(x)

    @jax.custom_vjp
    def twice(x):
        return total(2 * x)

    twice.defvjp(lambda x: (twice(x), None), lambda _, g: (total(g),))
    ways = {
        "function": total,
        "nested": jax.jit(lambda x: total(jax.nn.relu(x))),
        "fori_loop": lambda x: lax.fori_loop(0, 2, lambda i, y: total(x) + i, x),
        "scan": lambda x: lax.scan(lambda c, y: (c, total(x) + y), 0, jnp.arange(2.0))[1][1],
        "while_loop": lambda x: lax.while_loop(lambda y: total(x) > y, lambda y: total(x), -1.0),
        "cond": lambda x: lax.cond(x > -1, lambda y: total(jax.nn.relu(y)), lambda y: y, x),
        "checkpoint": jax.checkpoint(total),
        "custom_vjp": lambda x: twice(x) / 2,
        "custom_vjp, derivative": lambda x: jax.grad(lambda y: twice(y) * x)(x),
        "vmap": lambda x: jax.vmap(total)(x[None])[0],
        "composite": lax.composite(total, name="collectives.total"),
        "run_state": lambda x: run_state(lambda ref: ref.__setitem__((), total(ref[()])))(x),
        "a rule that JAX got later": lambda x: own_rule(jax, calls.all_reduce, x),
    }
    expected = {"fori_loop": 1, "scan": 1}

    @jax.jit
    def program(x, rows):
        slow = jnp.tanh(rows @ rows.T).sum() * 0
        if rank == 0:
            jax.debug.callback(lambda _: None, x.max())
        # What a call needs is ready later for other calls on other ranks.
        late = [slow if number % size == rank else 0 for number in range(2 * len(ways))]
        given = [x.sum() + 10 * number + each for number, each in enumerate(late)]
        every = zip([*ways.values(), *reversed(ways.values())], given, strict=True)
        return [way(own) for way, own in every]

    names = [*ways, *reversed(ways)]
    rows = jnp.ones((1 if rank == 0 else 500, 300), "float32")
    for _ in range(3):
        found = program(jnp.arange(4.0, dtype="float32") + rank, rows)
        for number, (name, each) in enumerate(zip(names, found, strict=True)):
            sums = sum(6 + 4 * other + 10 * number for other in range(size))
            assert float(each) == sums + expected.get(name, 0), (number, name)


def own_rule(jax, function, x):
    """The function of x, by a primitive of its own, as modules of JAX that are imported later."""
    from jax.interpreters import mlir

    primitive = jax.extend.core.Primitive("function_of_a_test")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x, call_jaxpr: call_jaxpr.out_avals)
    rule = partial(mlir.core_call_lowering, name="function_of_a_test")
    mlir.register_lowering(primitive, rule, cacheable=False)
    return primitive.bind(x, call_jaxpr=jax.make_jaxpr(lambda x: function(x))(x))[0]


@pytest.mark.parametrize("way", ["ffi", "callbacks"])
def test_calls_after_conditions_and_loops_of_unused_results(jax, calls, comm, monkeypatch, way):
    """Each depends on the condition or loop before it, as the lowered program shows."""
    from collectives.jax import host_calls

    if way == "callbacks":
        monkeypatch.setattr(host_calls, "uses_ffi", lambda: False)
    jnp, lax = jax.numpy, jax.lax

    def program(x):
        found = []
        for number in range(2):
            lax.cond(x[0] > -1, lambda: calls.reduce(100 * x), lambda: x)
            found.append(calls.all_reduce(x + number))
            lax.switch(number, [lambda: None, lambda: calls.barrier() and None])
            found.append(calls.all_reduce(x + number))
            lax.fori_loop(0, 2, lambda _, y: (calls.barrier(), y)[1], 0)
            found.append(calls.all_reduce(x + number))
            lax.while_loop(lambda y: calls.reduce(x)[0] < 0, lambda y: y, 0)
            found.append(calls.all_reduce(x + number))
        return found

    lowered = jax.jit(program).lower(jnp.arange(2.0)).as_text()
    # Callbacks of older versions return a tuple.
    lowered = lowered.replace("get_tuple_element", "custom_call")
    gives = dict(re.findall(r'(%\w+)(?::\d+)? = "?stablehlo\.(\w+)', lowered))
    operands = re.findall(r"custom_call @\w+\((.*)\) {.*} : .*tensor<1x1x1xui8>", lowered)
    last = [each.split(", ")[-1].split("#")[0] for each in operands]
    found = [gives.get(each, each.split("_")[0]) for each in last[1:]]
    # Of each call, in the order of the program: those within depend on the call before.
    once = ["case", "custom_call", "case", "%iterArg", "while", "%iterArg", "while"]
    assert found == [*once, "custom_call", *once]
    # XLA replaces what a loop never changes by what it was before the loop.
    assert len(re.findall(r"stablehlo.add .* : tensor<1x1x1xui8>", lowered)) == 2
    for number, each in enumerate(jax.jit(program)(jnp.arange(2.0) + comm.rank)):
        total = sum(np.arange(2.0) + rank + number // 4 for rank in range(comm.size))
        np.testing.assert_array_equal(each, total)


def test_batches_of_loops_and_ordered_effects_of_conditions(jax, calls, comm):
    from jax.experimental import io_callback

    jnp, lax, seen = jax.numpy, jax.lax, []

    def until(total):
        return lambda x: lax.while_loop(lambda y: y < total, lambda y: y + calls.all_reduce(x), x)

    def told(x):
        io_callback(lambda each: seen.append(int(each)), None, x, ordered=True)
        return calls.all_reduce(x)

    @jax.jit
    def program(x):
        total = calls.all_reduce(x)
        every = jax.vmap(until(5.0))(jnp.arange(1.0, 3))
        conditions = [lax.cond(total > 0, told, lambda y: y, x + number) for number in range(3)]
        return every, calls.all_reduce(x), conditions

    size, all_ranks = comm.size, comm.size * (comm.size + 1) / 2
    every, total, conditions = program(comm.rank + 1.0)
    wanted = [
        next(one + n * size * one for n in range(5) if one + n * size * one >= 5)
        for one in (1.0, 2.0)
    ]
    assert (list(every), total) == (wanted, all_ranks)
    assert conditions == [all_ranks + size * number for number in range(3)]
    assert seen == [comm.rank + 1 + number for number in range(3)]


def test_derivatives_of_checkpoints(jax, calls, comm):
    jnp, rank, size = jax.numpy, comm.rank, comm.size

    def layer(x):
        following, before = (rank + 1) % size, (rank - 1) % size
        moved = calls.sendrecv(jnp.sin(x), source=before, dest=following)
        return jnp.cos(moved) + calls.reduce(x * x) + calls.barrier(x)

    def loss(layer):
        return lambda x: (layer(layer(x)) * (rank + 1)).sum()

    own = jnp.arange(3.0) + rank
    wanted = jax.jit(jax.grad(loss(layer)))(own)
    np.testing.assert_allclose(jax.jit(jax.grad(loss(jax.checkpoint(layer))))(own), wanted, 1e-6)


def test_calls_in_loops_run_in_each_iteration_under_reverse_mode(jax, calls, comm):
    """Also where a rank gives arrays that depend on no iteration, or uses no result."""
    jnp, lax, rank, last = jax.numpy, jax.lax, comm.rank, comm.size - 1

    def body(weight, carry, x):
        if rank == 0:
            calls.send(x, last, tag=1)
        got = calls.recv(jnp.zeros(()), 0, tag=1) if rank == last else x
        shared = calls.broadcast(x if rank == 0 else jnp.zeros(()))
        calls.barrier()
        return carry + weight * (got + shared)

    def scanned(body, checkpointed=lambda function: function):
        def loss(weight, xs):
            return lax.scan(lambda c, x: (body(weight, c, x), (c, x)), 0.0, xs)[0]

        return jax.jit(jax.value_and_grad(checkpointed(loss)))

    losses = scanned(body), scanned(jax.checkpoint(body))
    for number, loss in enumerate(2 * losses, 1):
        value, slope = loss(2.0, number * jnp.arange(1.0, 5.0))
        assert (float(value), float(slope)) == (40 * number, 20 * number)
    fori = jax.jit(
        jax.grad(lambda w: lax.fori_loop(0, 4, lambda i, c: body(w, c, 1.0 * i + 1.0), 0.0))
    )
    assert float(fori(2.0)) == 20

    def noted(weight, xs):
        sums = jax.new_ref(jnp.zeros(()))

        def step(carry, x):
            sums[...] += x
            return carry + calls.all_reduce(weight * x), None

        return lax.scan(step, 0.0, xs)[0] + sums[...]

    assert jax.jit(jax.grad(noted))(2.0, jnp.arange(3.0)) == 3
    # Of these nothing is moved: a tangent of a constant, and what is no call at all.
    for own, factor in (
        (lambda w, x: calls.all_reduce(w + x), 1),
        (lambda w, x: calls.pvary(w) + x, comm.size),
    ):

        @jax.checkpoint
        def total(weight, xs, own=own):
            return lax.scan(lambda c, x: (c + own(weight, x), None), 0.0, xs)[0]

        assert jax.jit(jax.grad(total))(2.0, jnp.arange(3.0)) == 3 * factor
    moved = scanned(body, jax.checkpoint)
    with pytest.raises(NotImplementedError, match="depends on nothing of the iteration"):
        moved(2.0, jnp.arange(1.0, 5.0))


def test_programs_that_are_not_compiled(jax, calls, comm):
    with jax.disable_jit():
        found = jax.jit(lambda x: calls.all_reduce(x))(jax.numpy.ones(2) + comm.rank)
    np.testing.assert_array_equal(found, np.full(2, comm.size * (comm.size + 1) / 2))


def test_programs_of_another_process_are_refused(jax, calls, monkeypatch):
    """Which JAX loads from a file."""
    from collectives.jax import host_calls

    if not host_calls.uses_ffi():
        pytest.skip("JAX has another interface, whose programs can't be stored")
    program = jax.jit(calls.all_reduce)
    program(jax.numpy.ones(3))
    monkeypatch.setattr(host_calls, "_places", host_calls._Places())
    with pytest.raises(Exception, match="another process has compiled"):
        jax.block_until_ready(program(jax.numpy.ones(3)))


def test_keys_are_moved(jax, calls, comm):
    keys = jax.random.split(jax.random.key(comm.rank), 2)
    moved = jax.jit(lambda tree: calls.broadcast(tree, root=1))({"key": keys, "rank": comm.rank})
    every = calls.all_gather(keys)
    for rank in range(comm.size):
        same = jax.random.key_data(jax.random.split(jax.random.key(rank), 2))
        np.testing.assert_array_equal(jax.random.key_data(every[2 * rank :][:2]), same)
    np.testing.assert_array_equal(
        jax.random.key_data(moved["key"]), jax.random.key_data(every[2:4])
    )
    assert moved["rank"] == 1


def test_reductions_are_checked_where_they_are_traced(jax, calls, comm):
    wrong = {
        "sums of keys": (lambda x: calls.all_reduce(jax.random.key(0)), TypeError, "only moved"),
        "an unknown op": (lambda x: calls.all_reduce(x, "avg"), ValueError, "op='avg'"),
        "bits of floats": (lambda x: calls.scan(x, "bitwise_or"), TypeError, "must be bool"),
        "an order": (lambda x: calls.reduce(x * 1j, "max"), TypeError, "no order"),
    }
    for call, error, text in wrong.values():
        with pytest.raises(error, match=text):
            jax.eval_shape(call, jax.numpy.ones(2))
    half = jax.grad(lambda x: calls.all_reduce(x, "MEAN").sum())(jax.numpy.ones(2))
    np.testing.assert_allclose(half, np.full(2, 1 / comm.size))


def test_layers_that_are_divided_between_the_ranks(jax, calls, comm):
    """Two layers one behind the other have the gradients of one process."""
    jnp, rank, size = jax.numpy, comm.rank, comm.size
    draw = np.random.default_rng(0).normal
    width = 4 * size
    weights = [(draw(size=(6, width)), draw(size=(width, 6))) for _ in range(2)]
    x = jnp.asarray(draw(size=(5, 6)))

    def network(weights, x, enter, leave):
        for first, second in weights:
            x = x + leave(jnp.tanh(enter(x) @ first) @ second)
        return (x**2).sum()

    own = slice(4 * rank, 4 * rank + 4)
    parts = [(jnp.asarray(first[:, own]), jnp.asarray(second[own])) for first, second in weights]
    wanted, of_input = jax.grad(network, (0, 1))(weights, x, lambda y: y, lambda y: y)

    @jax.jit
    def gradients(parts, x):
        return jax.grad(network, (0, 1))(parts, x, calls.pvary, calls.all_reduce)

    found, found_of_input = gradients(parts, x)
    for (first, second), (whole_first, whole_second) in zip(found, wanted, strict=True):
        np.testing.assert_allclose(first, whole_first[:, own], 1e-3, 1e-3)
        np.testing.assert_allclose(second, whole_second[own], 1e-3, 1e-3)
    np.testing.assert_allclose(found_of_input, of_input, 1e-3, 1e-3)


def test_blocks_that_jax_would_make_narrower_are_refused_in_step(jax, comm):
    wide, before = np.array([2**40 + 5, 1]), jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    try:
        given = [jax.numpy.zeros(2) if comm.rank == 0 else wide] * comm.size
        if comm.rank == 0:
            with pytest.raises(DtypeMismatchError, match=r"rank 1 sent int64.* become int32"):
                comm.all_to_all(given)
        else:
            np.testing.assert_array_equal(comm.all_to_all(given)[1], wide)
    finally:
        jax.config.update("jax_enable_x64", before)
    np.testing.assert_array_equal(comm.all_reduce(np.ones(2)), [comm.size] * 2)
