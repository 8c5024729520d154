"""Arrays of other libraries than NumPy."""

import array as standard_array
import types

import numpy as np
import pytest

import collectives
from collectives.arrays.kinds import flat, like, to_numpy
from collectives.communicator import Communicator
from collectives.transports.local import alone, run


class Foreign:
    """An array on a device, with DLPack and the array API's function to create new ones."""

    def __init__(self, content, device=1):
        self.content, self.device = np.asarray(content), device

    def __dlpack_device__(self):
        return (self.device, 0)

    def __dlpack__(self, **keywords):
        return self.content.__dlpack__(**keywords)

    def __array_namespace__(self):
        return types.SimpleNamespace(asarray=Foreign)


def test_dlpack_arrays_are_read_without_a_copy_and_come_back_as_their_kind():
    foreign = Foreign([1.0, 2.0])
    assert np.shares_memory(to_numpy(foreign), foreign.content)
    results = run(2, lambda transport: Communicator(transport).all_reduce(foreign))
    assert all(isinstance(result, Foreign) for result in results)
    np.testing.assert_array_equal(results[0].content, [2.0, 4.0])


def test_an_array_on_another_device_is_refused():
    with pytest.raises(TypeError, match=r"another device than the CPU or an NVIDIA GPU .*type 10"):
        Communicator(alone()).all_reduce(Foreign([1.0], device=10))


def test_pinned_memory_is_the_hosts():
    foreign = Foreign([1.0, 2.0], device=3)
    assert np.shares_memory(to_numpy(foreign), foreign.content)


def test_the_buffer_protocol():
    given = standard_array.array("d", [1, 2, 3])
    comm = Communicator(alone())
    np.testing.assert_array_equal(comm.all_reduce(given), [1, 2, 3])
    comm.all_reduce(np.full(3, 7.0), out=given)
    assert given.tolist() == [7, 7, 7]
    assert comm.all_reduce(b"\x01\x02").tolist() == [1, 2]


def test_subclasses_of_numpy_arrays():
    memory = np.arange(4).reshape(2, 2)
    comm = Communicator(alone())
    assert type(comm.all_reduce(memory.view(np.recarray))) is np.ndarray
    np.testing.assert_array_equal(comm.all_reduce(memory.view(np.recarray)), memory)
    with pytest.raises(TypeError, match="array is a masked array"):
        comm.all_reduce(np.ma.masked_equal([1, 2], 2))


def test_numbers_and_lists():
    comm = Communicator(alone())
    assert comm.all_reduce(3) == 3
    np.testing.assert_array_equal(comm.all_reduce([[1, 2], [3, 4]]), [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    "made",
    [
        lambda: np.arange(12.0).reshape(3, 4),
        lambda: np.arange(12.0).reshape(3, 4).T,
        lambda: np.arange(24.0)[::2],
        lambda: np.frombuffer(b"x" + np.arange(4.0).tobytes(), np.float64, offset=1),
        lambda: np.array(3.0),
        lambda: np.empty((0, 3)),
    ],
    ids=["C order", "transposed", "strided", "unaligned", "0-d", "empty"],
)
def test_flat_gives_the_elements_in_c_order(made):
    array = made()
    assert flat(array).flags.aligned
    np.testing.assert_array_equal(flat(array), array.ravel())


def test_results_of_one_rank_alias_nothing():
    comm = Communicator(alone())
    array = np.arange(4.0)
    results = [
        comm.all_reduce(array),
        comm.reduce(array),
        comm.all_gather(array),
        comm.gather(array),
        comm.scatter(array),
        comm.reduce_scatter(array),
        comm.all_to_all([array])[0],
        comm.all_reduce_many([array, array])[0],
        comm.all_reduce_async(array).wait(),
        comm.broadcast_object(array),
        comm.all_gather_object(array)[0],
    ]
    for result in results:
        np.testing.assert_array_equal(result, array)
        assert not np.shares_memory(result, array)
        assert result.flags.writeable


def test_torch_tensors_of_every_dtype():
    torch = pytest.importorskip("torch", reason="torch isn't installed")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.tensor([[1, 0], [1, 1]], dtype=dtype)
        tensors = run(2, lambda transport, t=tensor: Communicator(transport).all_reduce(t, "max"))
        assert tensors[0].dtype == dtype
        assert torch.equal(tensors[0], tensor)
    parameter = torch.nn.Parameter(torch.ones(3))
    out = torch.zeros(3)
    assert Communicator(alone()).all_reduce(parameter, out=out) is out
    assert out.tolist() == [1, 1, 1]


def test_jax_arrays():
    jax_numpy = pytest.importorskip("jax.numpy", reason="jax isn't installed")
    given = jax_numpy.arange(4.0)
    result = run(2, lambda transport: Communicator(transport).all_reduce(given))[0]
    assert type(result) is type(given)
    assert result.tolist() == [0, 2, 4, 6]
    with pytest.raises(ValueError, match="read-only"):
        Communicator(alone()).all_reduce(given, out=given)


def test_numpy_results_stay_as_they_are():
    result = np.ones(1)
    assert like(np.ones(1))(result) is result


def test_exported_names_are_exact():
    public = {name for name in vars(collectives) if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(collectives, name), types.ModuleType)}
    assert public - modules <= set(collectives.__all__)
    assert all(hasattr(collectives, name) for name in collectives.__all__)
