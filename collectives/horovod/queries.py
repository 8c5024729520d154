"""Horovod's questions about how it was built, of which scripts print or branch on the answers."""

from __future__ import annotations

from importlib.util import find_spec

from collectives.transports.nccl_driver import NcclDriver


def mpi_threads_supported() -> bool:
    """True: threads other than the program's make MPI calls."""
    return True


def mpi_built() -> bool:
    """True."""
    return True


def cuda_built() -> bool:
    """Whether CuPy is installed, without which tensors on GPUs are refused."""
    return find_spec("cupy") is not None


def nccl_built() -> int:
    """The version of the NCCL that CuPy loads, such as 22809; 0 without."""
    try:
        driver = NcclDriver()
    except ImportError:
        return 0
    return 0 if driver.problem() else driver.version()


def gloo_built() -> bool:
    """False."""
    return False


mpi_enabled = mpi_built
gloo_enabled = ddl_built = ccl_built = rocm_built = gloo_built
