"""Fixtures that the benchmark's tests share."""

import pytest


@pytest.fixture
def world(comm):
    from mpi4py import MPI

    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()
