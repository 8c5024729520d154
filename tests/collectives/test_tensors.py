"""Tensors of torch: they keep their storage, and no gradient is lost silently."""

import gc
import sys

import numpy as np
import pytest

from collectives import Communicator
from collectives.arrays.kinds import to_numpy
from collectives.arrays.tensors import to_torch
from collectives.transports.local import alone, run
from tests.collectives.interrupting import Interruption, InterruptionError, share_memory

torch = pytest.importorskip("torch", reason="torch isn't installed: tensors can't be tested")

NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


def collectives_of(comm):
    """Every call that takes a tensor, each as a function of it."""
    ranks = range(comm.size)
    peer = (comm.rank + 1) % comm.size
    return {
        "all_reduce": comm.all_reduce,
        "all_reduce, ring": lambda given: comm.all_reduce(given, algorithm="ring"),
        "all_reduce in place": lambda given: comm.all_reduce(given, out=given),
        "reduce": comm.reduce,
        "broadcast": comm.broadcast,
        "all_gather": comm.all_gather,
        "gather": comm.gather,
        "scatter": lambda given: comm.scatter(given if comm.rank == 0 else None),
        "reduce_scatter": comm.reduce_scatter,
        "all_to_all": lambda given: comm.all_to_all([given for _ in ranks]),
        "all_reduce_many": lambda given: comm.all_reduce_many([given, given.detach().clone()]),
        "all_reduce_async": lambda given: comm.all_reduce_async(given).wait(),
        "broadcast_async": lambda given: comm.broadcast_async(given).wait(),
        "all_gather_async": lambda given: comm.all_gather_async(given).wait(),
        "send": lambda given: comm.send(given, peer) if comm.rank else comm.recv(given, 1),
    }


def resize_after_every_call(comm, length):
    # Else each collection passes through TensorFlow and JAX, where other tests have imported them.
    gc.collect()
    gc.freeze()
    for name, call in collectives_of(comm).items():
        tensor = torch.full((length,), comm.rank + 1.0)
        for _ in range(2):
            result = call(tensor)
        del result
        gc.collect()
        storage = tensor.untyped_storage()
        storage.resize_(0)
        assert storage.nbytes() == 0, name
        storage.resize_(4 * length)
        tensor.fill_(comm.rank)
        assert comm.all_reduce(tensor)[0] == sum(range(comm.size)), name


def test_a_storage_can_be_freed_after_every_call():
    run(2, lambda transport: resize_after_every_call(Communicator(transport), 6))


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_storage_can_be_freed_after_every_call_over_mpi(comm):
    resize_after_every_call(comm, 50_000)
    box = comm.mailbox()
    tensor = torch.ones(3)
    if comm.rank:
        box.send(0, None, [tensor])
    else:
        assert box.receive(timeout=20).arrays[0].tolist() == [1, 1, 1]
    comm.barrier()
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("name", NAMES)
def test_numpy_sees_the_tensors_own_memory(name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    whole = torch.arange(24).reshape(4, 6) % 2
    whole = whole.to(dtype) if name != "float8_e8m0fnu" else whole.to(torch.uint8).view(dtype)
    for tensor in (whole, whole.t(), whole[1:, ::2], whole[2, 3], whole[:0], whole[0].expand(3, 6)):
        array = to_numpy(tensor)
        assert (array.dtype.name, array.shape) == (name, tuple(tensor.shape))
        assert array.flags.writeable
        assert array.tobytes() == bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        if tensor.numel():
            assert array.ctypes.data == tensor.data_ptr()
    array = to_numpy(whole.clone())
    gc.collect()
    assert array.tobytes() == to_numpy(whole).tobytes()

    def broadcast(transport):
        tensor = whole.clone() if transport.rank == 0 else torch.zeros_like(whole)
        Communicator(transport).broadcast(tensor)
        gathered = Communicator(transport).all_gather(tensor)
        assert gathered.dtype == dtype
        return [bytes(each.view(-1).view(torch.uint8).tolist()) for each in (tensor, gathered)]

    expected = bytes(whole.view(-1).view(torch.uint8).tolist())
    assert run(2, broadcast) == [[expected, 2 * expected]] * 2


def test_lazy_views_are_resolved():
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    np.testing.assert_array_equal(to_numpy(tensor.conj()), [1 - 2j, 3 + 1j])
    np.testing.assert_array_equal(to_numpy(tensor.conj().imag), [-2, 1])
    with pytest.raises(TypeError, match="out is a Tensor that is conjugated or negated when "):
        Communicator(alone()).all_reduce(tensor, out=tensor.conj())


def calls_entered(call):
    """How many Python functions a warm call enters; garbage collections enter more."""
    counts = []

    def note(frame, event, argument):
        counts[-1] += event == "call"

    call(), call()
    for _ in range(5):
        counts.append(0)
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return min(counts)


def test_a_warm_call_on_a_tensor_is_the_one_on_its_memory():
    comm = Communicator(alone())
    tensor, other = torch.ones(4, 6), torch.ones(4, 6)
    array, second = to_numpy(tensor), to_numpy(other)
    calls = {
        "all_reduce": lambda given, out: comm.all_reduce(given, out=given),
        "all_reduce, apart": lambda given, out: comm.all_reduce(given, out=out),
        "all_reduce, new": lambda given, out: comm.all_reduce(given),
        "broadcast": lambda given, out: comm.broadcast(given),
        "all_gather": lambda given, out: comm.all_gather(given, out=out),
        "reduce_scatter": lambda given, out: comm.reduce_scatter(given, out=out),
    }
    for name, call in calls.items():
        on_array = calls_entered(lambda call=call: call(array, second))
        on_tensor = calls_entered(lambda call=call: call(tensor, other))
        assert on_tensor <= on_array + 7, name


def test_memory_that_tensors_share_one_after_the_other():
    def program(transport):
        comm = Communicator(transport)
        storage = torch.zeros(8)
        for dtype, shape in (("float32", (8,)), ("int32", (8,)), ("float32", (2, 4))):
            # The same address, and another tensor each time.
            tensor = storage.view(getattr(torch, dtype)).view(shape)
            tensor.fill_(comm.rank + 1)
            out = torch.empty_like(tensor)
            assert comm.all_reduce(tensor, out=out) is out
            assert out.dtype == tensor.dtype
            assert (out == 3).all()
            gathered = comm.all_gather(tensor).view(2, 8)
            assert (gathered == torch.tensor([[1], [2]])).all()
            assert comm.broadcast(tensor, root=1) is tensor
            assert (tensor == 2).all()
            assert (comm.reduce_scatter(tensor) == 4).all()
        lazy = torch.full((8,), comm.rank + 1j).conj()
        assert (comm.all_reduce(lazy) == 1 - 2j).all()
        transposed = torch.full((2, 4), float(comm.rank)).t()
        assert (comm.all_reduce(transposed, out=transposed) == 1).all()
        assert transposed.shape == (4, 2)

    run(2, program)


def test_arrays_in_foreign_byte_order_arrive_as_tensors():
    def program(transport):
        comm = Communicator(transport)
        sent = [np.arange(3, dtype=">f4"), torch.arange(3.0)][comm.rank]
        return comm.all_to_all([sent, sent])

    _, received = run(2, program)
    assert [each.tolist() for each in received] == [[0, 1, 2]] * 2


class Wrapper(torch.Tensor):
    """As DTensor: its elements are in another tensor."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return args[0]


def wrapper(offset=0):
    return torch.Tensor._make_wrapper_subclass(Wrapper, (3,), (1,), offset, dtype=torch.float32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(3).to_sparse(), r"array is a tensor of torch.float32 and torch.sparse"),
        (lambda: torch.ones(3, device="meta"), r"array is a tensor on meta, another device"),
        (lambda: torch.ones(3).to(torch.complex32), r"array is a tensor of torch.complex32 and"),
        (lambda: torch.nested.nested_tensor([torch.ones(3)]), r"array is a tensor of .*, nested"),
        (wrapper, r"array is a Wrapper, which has no memory of its own: .*`to_local\(\)`"),
        (lambda: wrapper(2), r"array is a Wrapper, which has no memory of its own"),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:The PyTorch API of nested")
def test_tensors_without_memory_that_numpy_knows(make, message):
    with pytest.raises(TypeError, match=message):
        Communicator(alone()).all_reduce(make())


WRITING = ("all_reduce in place", "broadcast", "broadcast_async", "send")


def test_a_gradient_that_a_result_would_lose_is_refused_before_any_message():
    """A leaf may be overwritten; without gradients everything is allowed."""

    def body(transport):
        comm = Communicator(transport, deadline=30)
        leaf = torch.ones(4, requires_grad=True)
        for name, call in collectives_of(comm).items():
            if name == "scatter":
                # Errors of the root's array are raised on every rank.
                with pytest.raises(ValueError, match="array is a tensor that requires grad"):
                    call(leaf)
            elif name not in WRITING:
                with pytest.raises(ValueError, match=r"requires grad.*\.detach\(\).*no_grad"):
                    call(leaf)
            else:
                call(leaf)
                if name != "send" or not comm.rank:
                    computed = leaf * 2
                    with pytest.raises(ValueError, match="falsify their gradients"):
                        call(computed)
            with torch.no_grad():
                call(leaf)
            call(leaf.detach())
        buffer = torch.zeros(4)
        assert comm.all_reduce(leaf, out=buffer) is buffer
        with pytest.raises(ValueError, match=r"out\[1\] is a tensor that was computed"):
            comm.all_reduce_many([buffer, buffer], out=[buffer, leaf * 2])
        assert comm.all_reduce(buffer).shape == (4,)

    run(2, body)


def test_an_absent_gradient_is_named():
    comm = Communicator(alone())
    gradients = [torch.ones(3), None]
    with pytest.raises(TypeError, match=r"arrays\[1\] is None.*zeros_like\(p\) if p.grad is None"):
        comm.all_reduce_many(gradients, out=gradients)
    with pytest.raises(TypeError, match="array is None: must be an array"):
        comm.all_reduce(None)
    with pytest.raises(ValueError, match=r"out\[1\] has shape"):
        comm.all_reduce_many([torch.ones(3)] * 2, out=[torch.ones(3), torch.ones(2)])


def test_an_exception_in_a_new_tensor_s_making_ends_the_communicator(monkeypatch):
    """The other ranks have made the call: a repeated one would pair with their next call."""
    share_memory(monkeypatch)
    names = ("all_reduce", "reduce", "scan", "reduce_scatter", "all_gather", "gather", "all_to_all")

    def outcome(transport, name):
        comm = Communicator(transport, deadline=10)
        call, tensor = getattr(comm, name), torch.arange(4.0) + comm.rank
        call(tensor)
        if comm.rank:
            return call(tensor)
        begin = Interruption((to_torch.__code__, 0, 1))
        with pytest.raises(InterruptionError), begin:
            call(tensor)
        with pytest.raises(RuntimeError, match="can't go on"):
            call(tensor)
        return begin.where

    for name in names:
        assert run(2, lambda transport, name=name: outcome(transport, name))[0], name
