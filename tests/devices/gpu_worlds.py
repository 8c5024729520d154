"""Communicators between ranks that are threads, each with a simulated GPU."""

from contextlib import contextmanager

import numpy as np
import pytest

from collectives import Communicator
from collectives.cuda import runtime as cuda_module
from collectives.gpu import probe
from collectives.transports import local
from tests.devices.simulated import SimulatedCuda
from tests.devices.simulated_nccl import SimulatedNccl

DEADLINE = 20


@contextmanager
def simulated(**settings):
    """The GPUs and the NCCL that are used in the block."""
    cuda = SimulatedCuda(**settings)
    nccl = SimulatedNccl(cuda)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_module, "_made", cuda)
        patch.setattr(probe, "nccl_driver", lambda: nccl)
        try:
            yield cuda, nccl
        finally:
            cuda.close()


def run(size, function, *, gpus=None, device=None, **options):
    """Call `function(comm, cuda)` on ranks with a GPU each; the results in rank order.

    `gpus` are those of `simulated`; `device` gives a rank's GPU; `options` are the communicator's.
    """

    def one_rank(cuda, transport):
        cuda.be_rank(transport.rank, None if device is None else device(transport.rank))
        options.setdefault("deadline", DEADLINE)
        with Communicator(transport, **options) as comm:
            return function(comm, cuda)

    if gpus is not None:
        return local.run(size, lambda transport: one_rank(gpus, transport))
    with simulated() as (cuda, _):
        return local.run(size, lambda transport: one_rank(cuda, transport))


def same(result, expected):
    """A device array holds these values, of this dtype and shape."""
    found = result.get()
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    kind = np.dtype(expected.dtype)
    exact = kind.kind in "biu"
    if kind.kind == "V":
        found, expected = found.astype(np.float32), expected.astype(np.float32)
    loose = {2: 2e-2}.get(kind.itemsize, 1e-5)
    if exact:
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=loose, atol=loose, equal_nan=True)
