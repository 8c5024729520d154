"""The programs of the GPU tests on the simulated GPU, which tests the programs themselves."""

import numpy as np
import pytest

from collectives.reductions.reduction import ReduceOp
from tests.collectives import oracle
from tests.devices import simulated_kernels  # noqa: F401  fills the simulator's kernels
from tests.devices.gpu_worlds import run, simulated
from tests.gpu import programs
from tests.slow import slow

SIZES = [1, 2, *slow(3)]


def on_simulated(size, program, *arguments, backend="nccl", device=None):
    def one_rank(comm, cuda):
        cuda.capture = capture
        program(comm, cuda, *arguments)

    run(size, one_rank, backend=backend, device=device)


def capture(stream, function):
    stream.begin_capture()
    try:
        function()
    finally:
        graph = stream.end_capture()
    return lambda: graph.launch(stream)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("op", "dtype"), [("sum", "float32"), ("mean", "int16"), ("max", "float64"), ("min", "bool")]
)
def test_reductions(size, op, dtype):
    on_simulated(size, programs.all_reduce, op, dtype)
    on_simulated(size, programs.other_reductions, op, dtype)


def test_bitwise_reductions():
    """NCCL has those of bool but XOR."""
    for op in oracle.BITWISE:
        for dtype in ("bool", "int16", "uint32"):
            on_simulated(3, programs.all_reduce, op, dtype)
            on_simulated(3, programs.other_reductions, op, dtype)


@pytest.mark.parametrize("op", oracle.OPS)
@pytest.mark.parametrize("dtype", programs.FLOAT8S, ids=str)
def test_8_bit_floats(op, dtype):
    on_simulated(2, programs.all_reduce_8_bit_floats, op, dtype)
    on_simulated(2, programs.gathers, dtype)
    on_simulated(2, programs.other_movements, dtype)


@pytest.mark.parametrize("backend", ["nccl", "mpi"])
@pytest.mark.parametrize("size", SIZES)
def test_movements(size, backend):
    on_simulated(size, programs.gathers, "int16", backend=backend)
    on_simulated(size, programs.other_movements, "complex64", backend=backend)
    on_simulated(size, programs.strided, "complex64", backend=backend)


@pytest.mark.parametrize("size", SIZES)
def test_streams(size):
    on_simulated(size, programs.asynchronous)
    on_simulated(size, programs.runs_beside)
    on_simulated(size, programs.follows_the_stream)
    on_simulated(size, programs.holds_what_it_uses)
    on_simulated(size, programs.captured)


def test_many():
    on_simulated(2, programs.many)
    on_simulated(2, programs.captured, True)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *((ReduceOp.SUM, dtype) for dtype in ("bool", "float16", "complex64", "complex128")),
        *((ReduceOp.MEAN, dtype) for dtype in ("int8", "uint64")),
    ],
)
def test_kernels(op, dtype, aligned):
    with simulated() as (cuda, _):
        programs.packed(cuda, op, np.dtype(dtype), aligned)


def test_streams_by_way_of_the_host():
    on_simulated(2, programs.follows_the_stream, True, backend="mpi")


def test_ranks_that_share_a_gpu():
    for program, *arguments in (
        (programs.all_reduce, "mean", "float16"),
        (programs.other_reductions, "max", "int32"),
        (programs.gathers, "bool"),
        (programs.other_movements, "float64"),
        (programs.follows_the_stream, True),
        (programs.holds_what_it_uses,),
    ):
        on_simulated(2, program, *arguments, backend="auto", device=lambda rank: 0)
