"""The calls of other libraries, and their dtypes."""

import sys
from contextlib import closing
from unittest.mock import MagicMock

import numpy as np
import pytest

from bench.cases import CASES
from bench.measure import Bench, Settings
from bench.peers import PEERS, open_peer
from bench.peers.base import Peer, PeerUnavailableError
from bench.problem import Problem
from bench.run import main

SETTINGS = Settings(repeats=2, warmup=1, rotate=2, calls=3)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.reduces])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mpi_reduces_float32_in_place_of_16_bit_floats(dtype, name, comm, world):
    problem = Problem(comm.size, 6 * comm.size, np.dtype(dtype), tensors=2)
    peer = open_peer("mpi4py", world)
    (row,) = Bench(comm, world, CASES[name], SETTINGS, peer).rows(problem, ["auto"])
    assert row.wrong == 0
    assert row.dtype == dtype
    assert row.nbytes == problem.count * 2
    for measured in filter(None, (row.out_of_place, row.in_place)):
        assert measured.peer.ratio > 0


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_mpi_moves_16_bit_floats_as_they_are(comm, world):
    assert open_peer("mpi4py", world).dtype_for(np.dtype("float64")) == np.float64
    problem = Problem(comm.size, 6, np.dtype("bfloat16"))
    bench = Bench(comm, world, CASES["broadcast"], SETTINGS, open_peer("mpi4py", world))
    (row,) = bench.rows(problem, ["auto"])
    assert row.in_place.peer.wrong == 0


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_the_header_names_the_peers_reduction(comm, capsys):
    line = "{} --sizes 16 --repeats 1 --calls 5 --peer mpi4py --dtype {}"
    told = "peer's type: float32 of the same element count"
    for collective, dtype in (("all_reduce", "bfloat16"), ("broadcast", "bfloat16")):
        assert main(line.format(collective, dtype).split()) == 0
        shown = capsys.readouterr().out
        assert (told in shown) == (comm.rank == 0 and collective == "all_reduce")


class LossyPeer(Peer):
    """Omits half of what it reduces, in a dtype of its own."""

    name = "lossy"

    def __init__(self, world):
        self._world = world

    def dtype_for(self, dtype):
        return np.dtype(np.float64)

    def all_reduce(self, task):
        def call():
            task.out[...] = sum(self._world.allgather(task.send))
            task.out[::2] = -1

        return call


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_peer_is_checked_in_its_own_memory(comm, world):
    problem = Problem(comm.size, 10, np.dtype(np.float16))
    bench = Bench(comm, world, CASES["all_reduce"], SETTINGS, LossyPeer(world))
    (row,) = bench.rows(problem, ["auto"])
    for measured in (row.out_of_place, row.in_place):
        assert measured.wrong == 0
        assert measured.peer.wrong == 5 * comm.size


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gloo_gives_the_same(dtype, comm, world):
    pytest.importorskip("torch")
    problem = Problem(comm.size, 6 * comm.size, np.dtype(dtype), root=1, tensors=2)
    with closing(open_peer("gloo", world)) as gloo:
        for case in CASES.values():
            (row,) = Bench(comm, world, case, SETTINGS, gloo).rows(problem, ["auto"])
            assert row.wrong == 0
            # gloo has no scan.
            compared = "scan" not in case.name
            for form in (row.out_of_place, row.in_place):
                assert form is None or (form.peer is not None) == compared, case.name


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_a_library_that_one_rank_lacks_is_named_on_all(world, monkeypatch):
    assert "gloo" in PEERS
    last = world.size - 1
    modules = {} if world.rank == last else {"torch": MagicMock(), "torch.distributed": MagicMock()}
    for name in ("torch", "torch.distributed"):
        monkeypatch.setitem(sys.modules, name, modules.get(name))
    with pytest.raises(PeerUnavailableError, match=f"needs torch, which rank {last} can't import"):
        open_peer("gloo", world)
