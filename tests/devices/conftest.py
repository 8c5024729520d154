"""A simulated GPU that all ranks of a test share."""

import contextlib
import random
from types import SimpleNamespace

import pytest

from collectives.transports import local
from tests.devices.ipc_worlds import World
from tests.devices.simulated import SimulatedCuda
from tests.devices.simulated_arrays import OnDevice


@pytest.fixture
def lags(monkeypatch):
    """Copies are work on streams, as CuPy's are; `lags.longest` seconds may pass before each."""
    lags = SimpleNamespace(longest=0.0)
    chance = random.Random(0)

    def put(cuda):
        if lags.longest:
            cuda.slow(cuda.current_stream(), chance.uniform(lags.longest / 2, lags.longest))

    def copy(array, function):
        put(array.cuda)
        array.cuda.put(array.cuda.current_stream(), function)

    def fold(cuda, *arguments):
        put(cuda)
        done_by(cuda, *arguments)

    done_by = SimulatedCuda.fold
    monkeypatch.setattr(OnDevice, "_do", copy)
    monkeypatch.setattr(SimulatedCuda, "fold", fold)
    return lags


@pytest.fixture
def cuda(lags):
    with contextlib.closing(SimulatedCuda()) as cuda:
        yield cuda


@pytest.fixture
def on_ranks(cuda):
    """`on_ranks(size, function)` calls function(path, rank, meetings), on a stream of each rank."""

    def run(size, function):
        world = World(size)

        def one_rank(transport):
            rank = transport.rank
            cuda.be_rank(rank, 0)
            try:
                with cuda.on(cuda.new_stream()):
                    path = world.path(cuda, rank)
                    result = function(path, rank, lambda: world.meetings[rank])
                    path.close()
                    return result
            except BaseException:
                world.barrier.abort()
                raise

        results = local.run(size, one_rank)
        assert not cuda.open_arenas
        return results

    return run
