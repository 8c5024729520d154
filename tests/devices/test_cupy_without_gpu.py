"""CuPy on a machine without a GPU: really imported, and used only where it needs none."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy isn't installed: its real arrays can't be tested")

from collectives import BackendUnavailableError, Communicator  # noqa: E402
from collectives.arrays.kinds import flat, is_device, is_plain  # noqa: E402
from collectives.cuda import runtime as cuda_module  # noqa: E402
from collectives.cuda.cupy_cuda import CupyCuda  # noqa: E402
from collectives.cuda.cupy_streams import CupyStream, ForeignStream  # noqa: E402
from collectives.gpu.probe import nccl_problem  # noqa: E402
from collectives.transports.local import alone  # noqa: E402
from collectives.transports.nccl_driver import NcclDriver, NcclError  # noqa: E402

without_gpu = pytest.mark.skipif(
    CupyCuda().problem() is None, reason="there is a GPU: what happens without can't be tested"
)


def on_host(values):
    """A real CuPy array whose memory is the host's: operations that need no GPU work."""
    memory = cupy.cuda.UnownedMemory(values.ctypes.data, values.nbytes, values, device_id=0)
    return cupy.ndarray(values.shape, values.dtype, cupy.cuda.MemoryPointer(memory, 0))


@without_gpu
def test_the_problem_is_put_into_words():
    assert (
        "finds no GPU: no NVIDIA driver is loaded (cudaErrorInsufficientDriver"
        in CupyCuda().problem()
    )
    assert "finds no GPU" in nccl_problem()


@without_gpu
def test_to_ask_for_nccl_is_an_error_that_says_why():
    with pytest.raises(BackendUnavailableError, match="finds no GPU"):
        Communicator(alone(), backend="nccl")


def test_arrays_are_known_without_a_gpu(monkeypatch):
    gpus = CupyCuda()
    monkeypatch.setattr(cuda_module, "_made", gpus)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = on_host(values)
    assert cuda_module.on_gpu(array)
    assert not cuda_module.on_gpu(values)
    assert gpus.array(array) is array
    assert is_device(array)
    assert gpus.address(array) == values.ctypes.data
    assert gpus.device_of(array) == 0
    assert not gpus.read_only(array)
    assert gpus.export(array, array) is array


@pytest.mark.parametrize("dtype", ["float32", "int16", "complex64", "bool", ml_dtypes.bfloat16])
def test_what_is_used_of_arrays_costs_no_gpu(dtype, monkeypatch):
    """Views, flags and the axes' order: as NumPy's own."""
    monkeypatch.setattr(cuda_module, "_made", CupyCuda())
    values = np.zeros((3, 4), dtype)
    array = on_host(values)
    assert is_plain(array)
    assert not is_plain(array[:, 1:])
    assert flat(array).shape == (12,)
    assert array.view("u1").nbytes == values.nbytes
    moved = np.moveaxis(array, 1, 0)
    assert moved.shape == (4, 3)
    assert np.may_share_memory(array, array[1:])
    assert array[1:].data.ptr - array.data.ptr == values[1:].ctypes.data - values.ctypes.data


def test_nccl_says_whether_it_is_there():
    driver = NcclDriver()
    if driver.problem() is not None:
        assert "pip install nvidia-nccl-cu12" in driver.problem()
        pytest.skip(f"NCCL isn't installed: {driver.problem()}")
    assert driver.version() > 21800
    assert len(driver.unique_id()) == 128
    driver.group_start()
    driver.group_end()
    if CupyCuda().problem() is not None:
        with pytest.raises(NcclError) as caught:
            driver.init_rank(1, driver.unique_id(), 0)
        assert caught.value.status == 1


def test_a_status_that_cupy_has_no_name_for_is_an_error_of_nccl():
    driver = NcclDriver()
    if driver.problem() is not None:
        pytest.skip("NCCL isn't installed: CuPy has no NcclError without it")

    def call():
        raise driver._nccl.NcclError(7)

    with pytest.raises(NcclError, match="in progress") as caught:
        driver._call(call)
    assert caught.value.status == 7


def test_another_librarys_stream_is_taken_without_a_warning():
    stream = cupy.cuda.Stream.from_external(ForeignStream(0x1230))
    assert CupyStream(stream).handle == 0x1230


def test_programs_that_use_no_gpu_import_no_cupy():
    program = (
        "import sys, numpy, collectives, strategies\n"
        "collectives.world().all_reduce(numpy.ones(3))\n"
        "assert 'cupy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
