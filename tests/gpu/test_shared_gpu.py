"""NCCL between two ranks that share a GPU, which it allows from 2.30 on."""

import sys

import pytest

from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.programs import run_launcher

pytestmark = pytest.mark.gpu

SHARING_VERSION = 23000
# In a separate process: NCCL reads it once. It hangs with too few resources.
SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}


def test_two_ranks_over_nccl(gpu):
    from collectives.gpu.probe import nccl_driver

    driver = nccl_driver()
    if driver.problem() is not None:
        pytest.skip(driver.problem())
    if driver.version() < SHARING_VERSION:
        pytest.skip(
            f"NCCL {driver.version()} has one rank for a GPU, from {SHARING_VERSION} on two"
        )
    mpirun = find_mpirun()
    options = ["--oversubscribe"] if is_open_mpi(mpirun) else []
    command = [sys.executable, "-m", "mpi4py", "-m", "tests.gpu.shared_gpu"]
    ended = run_launcher([mpirun, *options, "-n", "2", *command], SHARING, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all as expected" in ended.stdout
