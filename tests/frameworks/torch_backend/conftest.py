"""Process groups of the backend "collectives", in the worlds of the tests."""

from datetime import timedelta

import pytest

DEADLINE = 30.0


@pytest.fixture(scope="session")
def dist(torch, comm):
    """torch.distributed with a default group of all ranks, without any variable of torch."""
    import collectives.torch  # noqa: F401

    torch.set_num_threads(1)
    timeout = timedelta(seconds=DEADLINE)
    torch.distributed.init_process_group("collectives", timeout=timeout)
    yield torch.distributed
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _equal_seeds(torch):
    torch.manual_seed(0)
