"""Horovod's interface, initialized, in the worlds of the tests."""

import pytest


@pytest.fixture(scope="session")
def hvd(torch, comm):
    import collectives.torch.horovod as hvd

    torch.set_num_threads(1)
    hvd.shutdown()  # that of TensorFlow's interface
    with pytest.raises(ValueError, match=r"use hvd\.init"):
        hvd.rank()
    hvd.init()
    return hvd


@pytest.fixture(autouse=True)
def _equal_seeds(torch):
    torch.manual_seed(0)
