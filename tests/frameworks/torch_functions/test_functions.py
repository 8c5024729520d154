"""Gradients of collectives are those that finite differences of all ranks' inputs give."""

import sys

import numpy as np
import pytest

from collectives import DtypeMismatchError

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]
STEP = 1e-5


@pytest.fixture(scope="session")
def functions(torch):
    import collectives.torch

    return collectives.torch


def rows(rank):
    return rank + 1


def complex_product(functions, tensor):
    product = functions.all_reduce(tensor.to(dtype=_complex(tensor)) * (1 + 2j), "product")
    return product.real * 2 - product.imag


def _complex(tensor):
    return sys.modules["torch"].complex128


def pieces(functions, tensor, comm):
    """Rank r sends r + i rows to rank i, of which rank 0 sends none to itself."""
    lengths = [comm.rank + peer for peer in range(comm.size)]
    received = functions.all_to_all(tensor.split(lengths))
    assert [len(each) for each in received] == lengths
    return sys.modules["torch"].cat(received)


# Each: the shape of a rank's tensor, and the call.
CASES = {
    "all_reduce": (lambda r, n: (3,), lambda f, x, c: f.all_reduce(x)),
    "mean": (lambda r, n: (3,), lambda f, x, c: f.all_reduce(x, "mean")),
    "min": (lambda r, n: (4,), lambda f, x, c: f.all_reduce(x, "min")),
    "max": (lambda r, n: (4,), lambda f, x, c: f.all_reduce(x, "max", comm=c)),
    "product": (lambda r, n: (2, 2), lambda f, x, c: f.all_reduce(x, "product")),
    "complex": (lambda r, n: (2,), lambda f, x, c: complex_product(f, x)),
    "not contiguous": (lambda r, n: (2, 3), lambda f, x, c: f.all_reduce(x.t())),
    "all_gather": (lambda r, n: (2, 2), lambda f, x, c: f.all_gather(x)),
    "all_gather of rows": (lambda r, n: (r, 2), lambda f, x, c: f.all_gather(x)),
    "all_gather, axis": (lambda r, n: (2, r + 1), lambda f, x, c: f.all_gather(x, axis=-1)),
    "all_gather of numbers": (lambda r, n: (), lambda f, x, c: f.all_gather(x)),
    "reduce_scatter": (lambda r, n: (n + 1, 2), lambda f, x, c: f.reduce_scatter(x)),
    "reduce_scatter, mean": (
        lambda r, n: (2, n + 1),
        lambda f, x, c: f.reduce_scatter(x, "mean", axis=1),
    ),
    "reduce_scatter, max": (lambda r, n: (n + 1,), lambda f, x, c: f.reduce_scatter(x, "max")),
    "all_to_all": (lambda r, n: (n * r + n * (n - 1) // 2, 2), pieces),
    "broadcast": (lambda r, n: (3,), lambda f, x, c: f.broadcast(x, root=c.size - 1)),
    "twice": (
        lambda r, n: (3,),
        lambda f, x, c: f.all_reduce(x * f.broadcast(x)) + f.all_reduce(x.sin(), "mean"),
    ),
}


def test_first_and_second_derivatives(torch, functions, comm):
    for case in CASES:
        compare(torch, functions, comm, case)


def compare(torch, functions, comm, case):
    shape, call = CASES[case]
    generator = torch.Generator(torch.get_default_device()).manual_seed(comm.rank)

    def draw(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = draw(shape(comm.rank, comm.size))
    with torch.no_grad():
        weights = draw(call(functions, inputs, comm).shape)
    probe, direction = draw(inputs.shape), draw(inputs.shape)

    def loss(tensor):
        """This rank's part of the loss: the ranks weigh the result differently."""
        return (weights * call(functions, tensor, comm).sin()).sum()

    def slope(tensor):
        """This rank's part of a derivative of the loss."""
        tensor = tensor.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(tensor), tensor, create_graph=True)
        return tensor, gradient, (gradient * probe).sum()

    def total(part):
        return comm.all_reduce(part.detach()).item()

    def differences(part):
        """How the parts' total changes with each rank's tensor in turn."""
        for moving in range(comm.size):
            step = STEP * direction * (comm.rank == moving)
            yield (total(part(inputs + step)) - total(part(inputs - step))) / (2 * STEP)

    def check(gradient, part):
        own = (gradient.detach() * direction).sum().reshape(1)
        wanted = torch.tensor(list(differences(part)), dtype=torch.float64)
        torch.testing.assert_close(
            comm.all_gather(own), wanted, rtol=1e-6, atol=1e-7, msg=lambda text: f"{case}: {text}"
        )

    tensor, gradient, derivative = slope(inputs)
    check(gradient, loss)
    (second,) = torch.autograd.grad(derivative, tensor)
    check(second, lambda tensor: slope(tensor)[2])


def test_values_and_dtypes(torch, functions, comm):
    """They are those of the communicator's calls; integers have no gradient."""
    tensor = torch.tensor([comm.rank + 1.5, -comm.rank])
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        given = getattr(functions, name)(tensor)
        assert given.requires_grad
        assert torch.equal(given, getattr(comm, name)(tensor))
    counts = torch.tensor([comm.rank + 1])
    assert functions.all_reduce(counts, "bitwise_or").item() == 3
    assert not functions.all_reduce(counts).requires_grad
    with torch.no_grad():
        assert not functions.all_reduce(tensor).requires_grad
    kept = tensor.clone()
    assert functions.broadcast(tensor).tolist() == [1.5, 0]
    assert torch.equal(tensor, kept)
    half = functions.all_reduce(tensor.to(torch.bfloat16), "mean")
    assert half.dtype == torch.bfloat16


def test_ties_share_the_gradient(torch, functions, comm):
    tensor = torch.tensor([1.0, float(comm.rank)], requires_grad=True)
    functions.all_reduce(tensor, "max").sum().backward()
    assert tensor.grad.tolist() == [1.0, comm.size * float(comm.rank == comm.size - 1)]


def test_a_rank_without_a_gradient_takes_part_in_the_backward_pass(torch, functions, comm):
    """Its own tensor may require none, where the others' results are differentiated by theirs."""
    tensor = torch.full((2,), comm.rank + 1.0, requires_grad=comm.rank > 0)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        result = getattr(functions, name)(tensor)
        (result * (comm.rank + 1)).sum().backward()
    total = comm.size * (comm.size + 1) / 2
    received = functions.all_to_all([tensor] * comm.size)
    sum(each.sum() * (comm.rank + 1) for each in received).backward()
    if comm.rank:
        # Reduced, gathered, one rank's block, nothing of broadcast, exchanged.
        blocks = torch.arange(1.0, comm.size + 1)[:2]
        wanted = 3 * total + blocks
        assert tensor.grad.tolist() == wanted.tolist()
    else:
        assert tensor.grad is None


def test_mismatches_are_the_communicators(torch, functions, comm):
    import collectives

    tensor = torch.zeros(2 + comm.rank, requires_grad=True)
    with pytest.raises(collectives.ShapeMismatchError):
        functions.all_reduce(tensor)
    with pytest.raises(ValueError, match="op='avg'"):
        functions.all_reduce(tensor, "avg")
    with pytest.raises(ValueError, match=r"call `collectives\.torch\.all_reduce`"):
        comm.all_reduce(tensor)


@pytest.mark.ranks(2)
# torch reads the gradients of whatever a compiled function uses, and warns itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_with_a_call_in_between(torch, functions, comm):
    tensor = torch.full((3,), comm.rank + 1.0, requires_grad=True)

    @torch.compile(backend="eager")
    def step(tensor):
        return functions.all_reduce(tensor * 2).square().sum()

    step(tensor).backward()
    total = comm.size * (comm.size + 1)
    assert tensor.grad.tolist() == [4.0 * total * comm.size] * 3


def test_what_torch_has_no_dtype_for_is_refused_in_step(torch, comm):
    """The communicator goes on."""
    records = [np.full(2, 1, [("a", "i4")])] * comm.size
    given = [torch.zeros(2)] * comm.size if comm.rank == 0 else records
    scattered = torch.zeros(2) if comm.rank == 0 else records[0]
    for text, call in {
        r"all_to_all: rank 1 sent .*\[2\]: not in the library": lambda: comm.all_to_all(given),
        "scatter: the root sent": lambda: comm.scatter(
            np.concatenate(records) if comm.rank == 1 else scattered, root=1
        ),
    }.items():
        if comm.rank == 0:
            with pytest.raises(DtypeMismatchError, match=text):
                call()
        else:
            call()
    np.testing.assert_array_equal(comm.all_reduce(np.ones(2)), [comm.size] * 2)
