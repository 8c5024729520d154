"""Every collective, once through the measuring code."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from bench.cases import CASES
from bench.cases.reductions import AllReduce
from bench.measure import Bench, Settings
from bench.peers import open_peer
from bench.peers.base import Peer
from bench.problem import Problem
from bench.run import main as run_bench
from bench.stream import measure_stream
from bench.task import Task

SETTINGS = Settings(repeats=2, warmup=1, rotate=2, calls=3)


def main(line, *more):
    return run_bench([*line.split(), *more])


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_wrong(name, comm, world):
    case = CASES[name]
    problem = Problem(comm.size, 6 * comm.size, np.dtype(np.int64), "sum", comm.size - 1, tensors=2)
    bench = Bench(comm, world, case, SETTINGS, open_peer("mpi4py", world))
    (row,) = bench.rows(problem, ["auto"])
    assert (row.out_of_place is not None) == case.out_of_place
    assert (row.in_place is not None) == case.in_place
    for measured in filter(None, (row.out_of_place, row.in_place)):
        assert measured.wrong == measured.peer.wrong == 0
        assert 0 < measured.seconds.minimum <= measured.seconds.median <= measured.seconds.p90
        assert measured.busbw == measured.algbw * case.factor(comm.size)
        assert measured.peer.ratio > 0


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.counterpart == name])
def test_the_asynchronous_form_of_each(name, comm, world, monkeypatch):
    started, start = [], getattr(comm, f"{name}_async")

    def recorded(*arguments, **named):
        started.append(name)
        return start(*arguments, **named)

    monkeypatch.setattr(comm, f"{name}_async", recorded)
    problem = Problem(comm.size, 6 * comm.size, np.dtype(np.int64), "sum", comm.size - 1, tensors=2)
    settings = replace(SETTINGS, asynchronous=True)
    bench = Bench(comm, world, CASES[name], settings, open_peer("mpi4py", world))
    (row,) = bench.rows(problem, ["auto"])
    assert started
    for measured in filter(None, (row.out_of_place, row.in_place)):
        assert measured.wrong == 0
        # MPI has no nonblocking call of a list.
        assert (measured.peer is None) == (name == "all_reduce_many")
        assert measured.peer is None or measured.peer.wrong == 0


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_request_registered_buffers_equally(name, comm, world, monkeypatch):
    asked, empty = [], comm.empty

    def recorded(shape, dtype):
        asked.append((shape, str(dtype)))
        return empty(shape, dtype)

    monkeypatch.setattr(comm, "empty", recorded)
    problem = Problem(comm.size, 6 * comm.size, np.dtype(np.int64), "sum", comm.size - 1, tensors=2)
    settings = replace(SETTINGS, registered=True)
    bench = Bench(comm, world, CASES[name], settings, open_peer("mpi4py", world))
    assert bench.rows(problem, ["auto"])[0].wrong == 0
    assert world.allgather(asked) == [asked] * comm.size
    halves = CASES[name].has_bytes * (1 + CASES[name].out_of_place)
    assert len(asked) == halves * settings.rotate


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_results_are_written_to_the_peers_target(name, comm):
    problem = Problem(comm.size, 6 * comm.size, np.dtype(np.int64))
    task = Task(problem, comm.rank, CASES[name].buffers(problem, comm.rank), in_place=False)
    assert CASES[name].call(comm, task, None)() is task.out


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["mean", "min", "product"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_nothing_is_wrong_with_other_ops_and_dtypes(dtype, op, comm, world):
    problem = Problem(comm.size, 6, np.dtype(dtype), op)
    (row,) = Bench(comm, world, CASES["all_reduce"], SETTINGS).rows(problem, ["ring"])
    assert row.wrong == 0
    assert row.out_of_place.peer is None


class CorruptedAllReduce(AllReduce):
    def call(self, comm, task, algorithm):
        right = super().call(comm, task, algorithm)

        def call():
            result = right()
            if comm.rank == 1:
                result[2:5] += 1
            return result

        return call


class IdlePeer(Peer):
    """Returns the previous content of its memory."""

    name = "idle"

    def all_reduce(self, task):
        return lambda: None


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_corrupted_elements_are_counted_on_every_rank(comm, world):
    problem = Problem(comm.size, 10, np.dtype(np.float32))
    bench = Bench(comm, world, CorruptedAllReduce(), SETTINGS, IdlePeer())
    (row,) = bench.rows(problem, ["ring"])
    assert row.out_of_place.wrong == row.in_place.wrong == 3
    assert row.out_of_place.peer.wrong == 10 * comm.size
    assert row.wrong > 3


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_wrong_results_end_with_status_1(comm, monkeypatch, capsys):
    monkeypatch.setitem(CASES, "all_reduce", CorruptedAllReduce())
    assert main("all_reduce --sizes 40 --repeats 1") == 1
    assert ("6 WRONG elements" in capsys.readouterr().out) == (comm.rank == 0)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_rank_0_prints_a_table_and_writes_the_files(comm, tmp_path, capsys):
    json_path, markdown_path = tmp_path / "rows.json", tmp_path / "rows.md"
    line = "all_reduce --sizes 8,1K --algorithm ring,native --repeats 3 --calls 5 --peer mpi4py"
    assert main(line, "--json", str(json_path), "--markdown", str(markdown_path)) == 0
    out = capsys.readouterr().out
    assert json_path.exists() == markdown_path.exists() == bool(out) == (comm.rank == 0)
    if comm.rank:
        return
    lines = [line.split() for line in out.splitlines() if line and line[0] != "#"]
    assert [line[:5] for line in lines] == [
        [size, count, "float32", "sum", algorithm]
        for size, count in (("8", "2"), ("1024", "256"))
        for algorithm in ("ring", "native")
    ]
    assert len({len(line) for line in out.splitlines() if line[0] == " "}) == 1
    assert len(markdown_path.read_text().split("| 8 |")) == 3
    check_json(json.loads(json_path.read_text()))


def check_json(written):
    assert written["header"]["ranks"] == 2
    assert written["header"]["repeats"] == 3
    assert {"mpi", "mpi4py", "numpy", "thread level", "nodes", "cpu", "cores"} <= {
        *written["header"]
    }
    row = written["rows"][-1]
    assert (row["nbytes"], row["count"], row["algorithm"]) == (1024, 256, "native")
    for form in ("out_of_place", "in_place"):
        measured = row[form]
        assert {*measured["seconds"]} == {"median", "minimum", "p90"}
        assert measured["algbw"] == pytest.approx(1024 / measured["seconds"]["median"])
        assert measured["busbw"] == measured["algbw"]
        assert measured["wrong"] == measured["peer"]["wrong"] == 0


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_model_and_stream_figures_are_written(comm, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bench.yardstick.SMALLEST_STREAMED", 64 << 10)
    monkeypatch.setattr("bench.run.measure_stream", partial(measure_stream, nbytes=4096))
    path = tmp_path / "rows.json"
    line = "all_reduce --sizes 8,64K --registered --stream --dtype float16 --repeats 2"
    assert main(line, "--peer", "mpi4py", "--json", str(path)) == 0
    out = capsys.readouterr().out
    if comm.rank:
        return
    small, large = json.loads(path.read_text())["rows"]
    assert small["in_place"]["peer"]["model"] is small["in_place"]["of_stream"] is None
    # MPI's float32 has twice the bytes.
    assert large["in_place"]["peer"]["model"] == [3.5, 5.5]
    assert large["out_of_place"]["peer"]["model"] == [5.5, 7.5]
    assert large["in_place"]["of_stream"] > 0
    assert "stream copy / add (GB/s): " in out
    assert "buffers: registered" in out
    assert "3.50–5.50" in out


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("reduce --root 2", "--root is 2: there are 2 ranks"),
        ("all_reduce --op min --dtype complex64", "complex numbers have no order"),
        ("all_reduce --op min --algorithm native", "can't measure native"),
        *(
            (
                f"all_reduce --plot a.png --{name} /absent/x.png",
                f"--{name}: can't write /absent/x.png: ",
            )
            for name in ("json", "markdown", "plot")
        ),
    ],
)
def test_what_can_not_be_measured_ends_with_status_2(arguments, complaint, comm, capsys):
    assert main(arguments) == 2
    assert (complaint in capsys.readouterr().err) == (comm.rank == 0)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_all_omits_unavailable_cases_with_a_message(comm, capsys):
    assert main("all_reduce --op min --algorithm all --sizes 8 --repeats 1") == 0
    assert ("can't measure native" in capsys.readouterr().out) == (comm.rank == 0)
