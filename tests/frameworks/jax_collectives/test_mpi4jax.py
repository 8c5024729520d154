"""A script for mpi4jax, moved by its import."""

import numpy as np
import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


@pytest.fixture
def mpi(calls):
    return pytest.importorskip("mpi4py.MPI", reason="mpi4py isn't installed")


def test_functions_and_communicators(jax, mpi, comm):
    import collectives.jax.mpi4jax as mpi4jax
    from collectives import MismatchError

    world, jnp = mpi.COMM_WORLD, jax.numpy
    rank, size = world.Get_rank(), world.Get_size()
    rows = np.arange(size * 2.0).reshape(size, 2)

    @jax.jit
    def program(x):
        mpi4jax.barrier(comm=world)
        total = mpi4jax.allreduce(x, op=mpi.SUM, comm=world)
        highest = mpi4jax.reduce(x, mpi.MAX, root=1)
        everything = mpi4jax.allgather(x)
        collected = mpi4jax.gather(x, 0)
        part = mpi4jax.scatter(everything * 2 if rank == 1 else x, 1)
        turned = mpi4jax.alltoall(everything + rank)
        first = mpi4jax.bcast(x, 0)
        summed = mpi4jax.scan(x, mpi.SUM)
        left = mpi4jax.sendrecv(x, x, (rank - 1) % size, (rank + 1) % size)
        if rank == 0:
            mpi4jax.send(x, 1, tag=4)
        elif rank == 1:
            left = left + mpi4jax.recv(x, 0, tag=4)
        return total, highest, everything, collected, part, turned, first, summed, left

    own = rows[rank].astype("float32")
    wanted = [
        rows.sum(0),
        rows[-1] if rank == 1 else own,
        rows,
        rows if rank == 0 else own,
        2 * own,
        np.stack([rows[rank] + other for other in range(size)]),
        rows[0],
        rows[: rank + 1].sum(0),
        rows[rank - 1] + (rows[0] if rank == 1 else 0),
    ]
    for found in (program(own), program(own)):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)

    # Results that a rank ignores: mpi4jax's calls run nevertheless.
    @jax.jit
    def ignored(x):
        found = mpi4jax.gather(x, 0), mpi4jax.bcast(x, size - 1), mpi4jax.reduce(x, mpi.SUM, 0)
        return found if rank == 0 else x

    jax.block_until_ready(ignored(own))
    gradient = jax.grad(lambda x: mpi4jax.allreduce(x, mpi.SUM, comm=world).sum())(own)
    np.testing.assert_array_equal(gradient, np.ones(2))
    both = mpi4jax.allreduce(jnp.array([rank == 0, True]), mpi.LAND)
    assert both.tolist() == [False, True]

    part = world.Split(rank // 2)
    assert mpi4jax.allreduce(jnp.ones(()), mpi.SUM, comm=part) == part.Get_size()
    assert mpi4jax.allreduce(jnp.ones(()), mpi.SUM, comm=part) == part.Get_size()
    # Another object may hold the handle of a communicator that is freed, which MPI gives again.
    for color in (0, rank) * 3:
        group = world.Split(color)
        holder = mpi.Intracomm(group)
        found = mpi4jax.allreduce(jnp.ones(()), mpi.SUM, comm=holder)
        assert found == group.Get_size()
        group.Free()
    with pytest.raises(ValueError, match="of float32: must be MPI's SUM, PROD"):
        mpi4jax.allreduce(own, mpi.LAND)
    with pytest.raises(ValueError, match="must be of one kind"):
        mpi4jax.sendrecv(own, own[:1], 0, 0)
    with pytest.raises(ValueError, match=rf"input must have shape .*, .* {size}; .*\(1,\)"):
        mpi4jax.alltoall(own[:1])
    kinds = MismatchError, jax.errors.JaxRuntimeError
    with pytest.raises(kinds, match="gather to rank 1"):
        jax.block_until_ready(mpi4jax.gather(own, int(rank == 1)))
    call, whole = (mpi4jax.bcast if rank == 1 else mpi4jax.scatter), np.ones((size, 2), "float32")
    with pytest.raises(kinds, match="broadcast, of a scatter"):
        jax.block_until_ready(call(whole if rank < 2 else own, 0))
    # The root's shape is wrong: an error on every rank, and the next call works.
    odd = np.ones((size + 1, 2), "float32")
    for _ in range(2):
        with pytest.raises(kinds, match=r"rank 1: barrier\(Scatter input must have shape"):
            jax.block_until_ready(mpi4jax.scatter(odd if rank == 1 else own, 1))

    around = {"source": (rank - 1) % size, "dest": (rank + 1) % size}
    status = mpi.Status()
    shift = jax.jit(lambda x: mpi4jax.sendrecv(x, x, **around, sendtag=7, status=status))
    np.testing.assert_array_equal(shift(own), rows[rank - 1])
    assert (status.Get_source(), status.Get_tag()) == (around["source"], 7)
    assert status.Get_count(mpi.FLOAT) == 2
    status = mpi.Status()
    if rank == 0:
        mpi4jax.send(own, size - 1, tag=5)
    elif rank == size - 1:
        np.testing.assert_array_equal(mpi4jax.recv(own, 0, tag=5, status=status), rows[0])
        assert (status.Get_source(), status.Get_tag()) == (0, 5)
    assert [mpi4jax.has_cuda_support(), mpi4jax.has_sycl_support()] == [False, False]
