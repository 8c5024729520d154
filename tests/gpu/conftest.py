"""Fixtures of the tests that need a GPU."""

import warnings

import pytest


@pytest.fixture(scope="session")
def gpu():
    """The GPU; requested only by tests marked `gpu`."""
    from tests.gpu.real import RealGpu

    return RealGpu()


@pytest.fixture(scope="session")
def torch():
    """torch with CUDA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("torch", reason="torch isn't installed")
        if not module.cuda.is_available():
            pytest.skip("torch finds no GPU")
    return module


@pytest.fixture
def alone(gpu):
    """A communicator of one rank whose collectives are NCCL's."""
    from collectives import Communicator
    from collectives.transports import local

    with Communicator(local.alone(), backend="nccl") as comm:
        yield comm
