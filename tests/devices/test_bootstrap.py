"""The start of NCCL: no rank waits for one that can't take part."""

import logging

import numpy as np
import pytest

from collectives import BackendUnavailableError, CollectiveError, Communicator
from collectives.gpu import probe
from collectives.gpu.probe import Health
from collectives.transports import local
from tests.devices.gpu_worlds import run, simulated


def outcome(function):
    try:
        return function()
    except Exception as error:
        return type(error), str(error)


def started(size, prepare=lambda gpus, nccl: None, **options):
    """Each rank's result of a sum, and its path; or its error."""

    def program(comm, cuda):
        def add():
            result = comm.all_reduce(cuda.from_host(np.full(2, comm.rank + 1.0)))
            return result.get().tolist(), comm._engine.path

        return outcome(add)

    with simulated() as (gpus, nccl):
        prepare(gpus, nccl)
        made = outcome(lambda: run(size, program, gpus=gpus, **options))
        calls = {rank: [name for name, *_ in calls] for rank, calls in nccl.calls.items()}
    return made, calls


@pytest.mark.parametrize("lacking", [0, 1, 2])
@pytest.mark.parametrize("what", ["gpu", "nccl", "cupy"])
def test_one_rank_without_is_an_error_of_all(lacking, what, monkeypatch):
    def prepare(gpus, nccl):
        if what == "gpu":
            gpus.missing[lacking] = "there is no driver"
        elif what == "nccl":
            nccl.missing[lacking] = "there is no libnccl"
        else:
            look = probe.find_gpu

            def without(choose):
                if gpus.rank == lacking:
                    return None, Health("there is no CuPy")
                return look(choose)

            monkeypatch.setattr(probe, "find_gpu", without)

    made, calls = started(3, prepare, backend="nccl")
    kind, text = made
    assert kind is BackendUnavailableError
    assert f"rank {lacking}: there is no" in text
    assert not calls, "NCCL was called"


def test_a_rank_without_nccl_sends_all_by_way_of_the_host(caplog):
    def prepare(gpus, nccl):
        nccl.missing[1] = "there is no libnccl"

    with caplog.at_level(logging.WARNING, "collectives"):
        made, calls = started(3, prepare, backend="auto")
    assert made == [([6.0, 6.0], "staged")] * 3
    assert not calls
    said = [each.getMessage() for each in caplog.records if "arrays on GPUs" in each.getMessage()]
    assert said == ["arrays on GPUs go by way of the host's memory: rank 1: there is no libnccl"]


def test_ranks_that_share_a_gpu_are_told():
    made, calls = started(3, backend="nccl", device=lambda rank: rank)
    assert made == [([6.0, 6.0], "nccl")] * 3

    def prepare(gpus, nccl):
        gpus.uuids |= {(0, 0): "same", (2, 2): "same"}

    made, calls = started(3, prepare, backend="nccl")
    kind, text = made
    assert kind is BackendUnavailableError
    assert not calls
    assert "ranks 0 and 2 share the GPU GPU-same" in text
    assert started(3, prepare, backend="auto")[0] == [([6.0, 6.0], "staged")] * 3


def test_from_nccl_2_30_on_ranks_may_share_a_gpu_where_they_say_so(monkeypatch):
    def prepare(version):
        def share(gpus, nccl):
            nccl.version_number = version
            gpus.uuids |= {(0, 0): "same", (1, 1): "same"}

        return share

    assert started(2, prepare(23000), backend="nccl")[0][0] is BackendUnavailableError
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert started(2, prepare(23000), backend="nccl")[0] == [([3.0, 3.0], "nccl")] * 2
    assert started(2, prepare(22907), backend="nccl")[0][0] is BackendUnavailableError


def test_versions_must_agree():
    def prepare(gpus, nccl):
        nccl.version = lambda: 22809 + gpus.rank

    made, calls = started(2, prepare, backend="nccl")
    assert made[0] is BackendUnavailableError
    assert not calls
    assert "rank 0 has NCCL 2.28.9, rank 1 2.28.10" in made[1]


def test_where_rank_0_gets_no_id_all_hear_it():
    def prepare(gpus, nccl):
        nccl.fail_next(0, "unique_id", 2)

    made, calls = started(3, prepare, backend="nccl")
    assert made[0] is CollectiveError
    assert "NCCL did not start" in made[1]
    assert "init_rank" not in {name for names in calls.values() for name in names}


def test_the_order_of_the_calls_is_the_same_on_all():
    _, calls = started(3, backend="nccl")
    assert calls[0] == ["unique_id", "init_rank", "all_reduce", "destroy"]
    assert calls[1] == calls[2] == ["init_rank", "all_reduce", "destroy"]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_whose_start_fails_ends_the_start_of_all(failing):
    """What others may have created by then is aborted, since destroying it would wait."""

    def prepare(gpus, nccl):
        nccl.wait_policy = 0.5
        nccl.fail_next(failing, "init_rank", 5)

    made, calls = started(3, prepare, backend="nccl")
    assert made[0] is CollectiveError
    assert "NCCL did not start" in made[1]
    assert not any("all_reduce" in names for names in calls.values())


def test_nothing_is_started_for_arrays_of_the_host():
    def program(comm, cuda):
        return comm.all_reduce(np.full(2, comm.rank + 1.0)).tolist()

    with simulated() as (gpus, nccl):
        assert run(2, program, gpus=gpus, backend="auto") == [[3.0, 3.0]] * 2
        assert not nccl.calls
        assert not gpus.allocations


def test_all_is_done_on_the_gpu_that_is_current():
    """Refused before the ranks synchronize: the ranks' later calls still match."""

    def program(comm, cuda):
        array = cuda.from_host(np.full(2, comm.rank + 1.0))
        first = comm.all_reduce(array).get().tolist()
        if comm.rank == 1:
            cuda.use_device(5)
            other = cuda.from_host(np.ones(2))
            with pytest.raises(TypeError, match="array lies on GPU 1, and the current one is 5"):
                comm.all_reduce(array)
            with pytest.raises(TypeError, match=r"the current GPU is 5: .* uses GPU 1"):
                comm.all_reduce(other)
            refused = pytest.raises(TypeError, match=r"the current GPU is 5: .* uses GPU 1")
            with comm._devices.beside(None), refused:  # as calls of torch
                comm.all_reduce(other)
            with pytest.raises(TypeError, match=r"the current GPU is 5: .* uses GPU 1"):
                comm.all_reduce_many([other, other])
            with pytest.raises(TypeError, match=r"the current GPU is 5: .* uses GPU 1"):
                comm.all_gather_async(other)
            cuda.use_device(1)
        return first, comm.all_reduce(array).get().tolist()

    with simulated() as (gpus, _):
        assert run(2, program, gpus=gpus, backend="auto") == [([3.0, 3.0], [3.0, 3.0])] * 2


def test_whatever_goes_wrong_while_a_rank_looks_is_told_to_all(monkeypatch):
    def prepare(gpus, nccl):
        def version():
            if gpus.rank == 1:
                raise OSError("libnccl is broken")
            return 23007

        monkeypatch.setattr(nccl, "version", version)

    made, calls = started(3, prepare, backend="nccl")
    assert made == (BackendUnavailableError, "backend='nccl': rank 1: OSError: libnccl is broken")
    assert not calls


def test_different_backends_are_an_error_of_all():
    names = ["auto", "mpi"]

    def one_rank(transport):
        return outcome(lambda: Communicator(transport, backend=names[transport.rank]))

    made = local.run(2, one_rank)
    assert made == [(ValueError, "backend: rank 0 gave auto, rank 1 mpi")] * 2
