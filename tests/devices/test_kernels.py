"""The tables of pack and unpack, and their CUDA source, compiled for the host by g++."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.cuda import kernels
from collectives.cuda.kernels import ALIGNMENT, PIECE, THREADS
from tests.collectives.oracle import DTYPES
from tests.devices.simulated_kernels import CASTS, WIDTHS

SHIM = Path(__file__).with_name("host_cuda.h")
LENGTHS = st.lists(st.integers(0, 3) | st.integers(0, 3 * PIECE + 5), min_size=1, max_size=12)


@given(lengths=LENGTHS, dtype=st.sampled_from(DTYPES), data=st.data())
def test_every_element_is_moved_once_to_a_place_of_its_own(lengths, dtype, data):
    itemsize = dtype.itemsize // kernels.reals(dtype)
    starts, total = kernels.lay_out(lengths, itemsize)
    assert total * itemsize % ALIGNMENT == 0
    assert not (starts * itemsize % ALIGNMENT).any()
    gaps = data.draw(st.lists(st.integers(0, 99), min_size=len(lengths), max_size=len(lengths)))
    stops = np.cumsum([gap + length for gap, length in zip(gaps, lengths, strict=True)])
    origins = (stops - lengths).tolist()
    addresses = [10**15 + origin * itemsize for origin in origins]
    table = kernels.make_table(addresses, starts, lengths, itemsize)
    assert table.dtype == np.int64
    assert table.shape == (sum(-(-length // PIECE) for length in lengths), 3)
    comes_from = np.full(total, -1)
    for address, start, length in table.tolist():
        assert 0 < length <= PIECE
        assert start * itemsize % ALIGNMENT == 0
        origin, rest = divmod(address - 10**15, itemsize)
        assert rest == 0
        assert (comes_from[start : start + length] == -1).all()
        comes_from[start : start + length] = np.arange(origin, origin + length)
    for start, length, origin in zip(starts.tolist(), lengths, origins, strict=True):
        np.testing.assert_array_equal(
            comes_from[start : start + length], np.arange(origin, origin + length)
        )
    assert (comes_from >= 0).sum() == sum(lengths)


def test_the_names_of_kernels():
    def name(array, bucket):
        return kernels.kernel_name("pack", np.dtype(array), np.dtype(bucket))

    single = "pack<unsigned int, unsigned int>"
    assert name("f4", "f4") == name("c8", "c8") == name("i4", "i4") == single
    assert name("c16", "c16") == name("f8", "f8") == "pack<unsigned long long, unsigned long long>"
    half = "pack<unsigned short, unsigned short>"
    assert name("f2", "f2") == name(ml_dtypes.bfloat16, ml_dtypes.bfloat16) == half
    assert name("?", "?") == name("i1", "i1") == "pack<unsigned char, unsigned char>"
    assert name("i4", "f8") == "pack<int, double>"


# --- the source ----------------------------------------------------------------------------------

PAIRS = [*((width, width) for width in WIDTHS), *CASTS]
KERNELS = ("pack", "unpack")
NAMES = list(dict.fromkeys(kernels.kernel_name(each, *pair) for each in KERNELS for pair in PAIRS))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The kernels on the host, by name: function(blocks, table, bucket)."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("kernels")
    lines = [SHIM.read_text(), kernels.SOURCE]
    for number, name in enumerate(NAMES):
        bucket = name[name.index(",") + 2 : -1]
        lines.append(
            f'extern "C" void run_{number}(int blocks, const long long* table, void* bucket)'
            f" {{ run_blocks({name}, blocks, {THREADS}, table, static_cast<{bucket}*>(bucket)); }}"
        )
    (folder / "kernels.cpp").write_text("\n".join(lines))
    # A GPU's compiler doesn't assume that values of different types don't alias.
    options = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-Wall", "-Werror"]
    command = ["g++", *options, "-shared", "-fPIC", "kernels.cpp", "-o", "kernels.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    library = ctypes.CDLL(str(folder / "kernels.so"))

    def runner(number):
        def run(blocks, table, bucket):
            places = [ctypes.c_void_p(array.ctypes.data) for array in (table, bucket)]
            getattr(library, f"run_{number}")(blocks, *places)
            assert library.misaligned_vectors() == 0

        return run

    return {name: runner(number) for number, name in enumerate(NAMES)}


def aligned(nbytes, shift=0):
    memory = np.full(nbytes + 64, 0x55, np.uint8)
    begin = -memory.ctypes.data % 16 + shift
    return memory[begin : begin + nbytes]


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize(
    ("dtype", "folded"), [*((dtype, dtype) for dtype in DTYPES), *CASTS], ids=str
)
def test_the_source_moves_arrays_to_a_bucket_and_back(source, dtype, folded, shift):
    """Also of arrays that begin one or two elements off the vectors' alignment."""
    generator = np.random.default_rng(shift)
    factor = kernels.reals(dtype)
    item, packed_item = dtype.itemsize // factor, folded.itemsize // factor
    lengths = [5, 0, 1, PIECE, 2 * PIECE + 13, 16, 3]
    arrays = [aligned(each * dtype.itemsize, shift * item).view(dtype) for each in lengths]
    for array in arrays:
        array.view(np.uint8)[...] = generator.integers(0, 256, array.nbytes)
        if dtype.kind == "b":
            array.view(np.uint8)[...] &= 1
    outs = [aligned(each * folded.itemsize, shift * packed_item).view(folded) for each in lengths]

    counts = [length * factor for length in lengths]
    starts, total = kernels.lay_out(counts, packed_item)
    bucket = aligned(total * packed_item)
    for kernel, kinds, places, size in (
        ("pack", (dtype, folded), arrays, item),
        ("unpack", (folded, folded), outs, packed_item),
    ):
        table = kernels.make_table([each.ctypes.data for each in places], starts, counts, size)
        table = np.ascontiguousarray(table)
        source[kernels.kernel_name(kernel, *kinds)](len(table), table, bucket)
    for array, out in zip(arrays, outs, strict=True):
        assert out.tobytes() == array.astype(folded).tobytes()
        # Nothing is written beyond.
        assert (out.base[-16:] == 0x55).all()
    moved = np.zeros(total * packed_item, bool)
    for start, count in zip((starts * packed_item).tolist(), counts, strict=True):
        moved[start : start + count * packed_item] = True
    assert (bucket[~moved] == 0x55).all()


def test_the_source_is_cuda(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    lines = [kernels.SOURCE]
    for name in NAMES:
        bucket = name[name.index(",") + 2 : -1]
        constant = "const " * name.startswith("unpack")
        lines.append(f"template __global__ void {name}(const long long*, {constant}{bucket}*);")
    (tmp_path / "kernels.cu").write_text("\n".join(lines))
    command = ["nvcc", "-std=c++17", "-Werror", "all-warnings", "-ptx", "kernels.cu"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
