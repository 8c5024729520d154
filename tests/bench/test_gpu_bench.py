"""The benchmark on GPUs, as far as it needs no GPU."""

import builtins
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from bench.cases import CASES
from bench.gpu import bars, run
from bench.gpu.bare import NAME, Bare, transport_of
from bench.gpu.measure import GpuBench
from bench.gpu.memory import MOST_SETS, buffer_sets, sets_of
from bench.gpu.options import COLLECTIVES, parse
from bench.measure import Settings
from bench.options import problems
from bench.problem import Problem
from bench.reports.columns import columns
from bench.reports.files import table_lines
from bench.rows import Measurement, PeerMeasurement, Row
from bench.timing import Timing, wall_seconds
from collectives.cuda import runtime as cuda_module
from tests.devices import simulated_kernels  # noqa: F401  fills the simulator's kernels
from tests.devices.gpu_worlds import run as run_ranks
from tests.devices.gpu_worlds import simulated

NCCL_NAMES = {
    "allReduce": "all_reduce",
    "reduce": "reduce",
    "reduceScatter": "reduce_scatter",
    "broadcast": "broadcast",
    "allGather": "all_gather",
}


def test_everything_is_measured_by_default():
    options = parse([])
    assert options.collectives == list(COLLECTIVES)
    assert options.bars
    assert options.settings == Settings(rotate=0)
    assert "barrier" not in COLLECTIVES


def test_the_bars_alone_or_one_collective_alone():
    assert (parse(["bars"]).collectives, parse(["bars"]).bars) == ([], True)
    chosen = parse(["all_gather", "--sizes", "8,1M", "--dtype", "float16", "--repeats", "3"])
    assert (chosen.collectives, chosen.bars) == (["all_gather"], False)
    assert chosen.given[:2] == ["--sizes", "8,1M"]
    chosen.collective = "all_gather"
    assert [problem.nbytes for problem in problems(chosen, 4)] == [8, 1 << 20]


@pytest.mark.parametrize("line", ["barrier", "all --repeats 0", "--backend gloo", "--rotate -1"])
def test_an_option_error_ends_with_status_2(line, monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(SystemExit) as ended:
        parse(line.split())
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_without_cupy_it_prints_one_line_and_ends(monkeypatch, capsys):
    load = builtins.__import__

    def refuse(name, *arguments):
        if name.split(".")[0] == "cupy" or name == "collectives.cuda.cupy_cuda":
            raise ImportError(name)
        return load(name, *arguments)

    monkeypatch.setattr(cuda_module, "_made", None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(run, "status_of", None)
    assert run.main([]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("bench.gpu: ")
    assert "CuPy" in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_without_a_gpu_it_prints_so(monkeypatch, capsys):
    gpus = SimpleNamespace(problem=lambda: "CuPy 14 finds no GPU")
    monkeypatch.setattr(cuda_module, "_made", gpus)
    assert run.main(["bars"]) == 2
    assert capsys.readouterr().err == "bench.gpu: CuPy 14 finds no GPU\n"


def test_the_buffer_sets_exceed_the_cache():
    assert sets_of(128 << 20, 50 << 20) == 1
    assert sets_of(2 << 20, 50 << 20) == 50
    assert sets_of(8, 50 << 20) == MOST_SETS


def row(nbytes, seconds):
    timing = Timing(seconds, seconds / 2, seconds * 2)
    peer = PeerMeasurement(Timing(seconds / 2, seconds / 2, seconds), 0.5, 0)
    algbw, factor = nbytes / seconds, CASES["all_reduce"].factor(4)
    graph = Timing(seconds / 4, seconds / 4, seconds / 4)
    measured = Measurement(timing, algbw, algbw * factor, 0, peer, graph=graph)
    return Row(nbytes, nbytes // 4, "float32", "sum", None, "auto", out_of_place=measured)


def test_the_table_of_made_up_numbers():
    shown = columns(CASES["all_reduce"], NAME, ["auto"], graph=True)
    titles, _, cells = table_lines(shown, [row(8_000_000, 20e-6)])
    assert [title.strip() for title in titles.strip("| ").split("|")][5:] == [
        *("out time (µs)", "out algbw (GB/s)", "out busbw (GB/s)", "out #wrong"),
        *("out bare NCCL (µs)", "out ratio", "out graph (µs)"),
    ]
    assert [cell.strip() for cell in cells.strip("| ").split("|")] == [
        *("8000000", "2000000", "float32", "sum", "auto"),
        *("20.00", "400.00", "600.00", "0", "10.00", "0.50", "5.00"),
    ]


def test_a_bar_shows_whether_it_is_reached():
    missed = bars.Bar("a call", "12.00 µs", "10.00 µs", False)
    assert str(missed) == "a call: 12.00 µs (bar: 10.00 µs: MISSED)"


class World:
    """The part of mpi4py's communicator that the bench uses, between threads."""

    def Barrier(self):  # noqa: N802
        pass

    def allgather(self, value):
        return [value]

    def allreduce(self, value):
        return value


class FakeDevice:
    """The simulated GPU's stream, timed by the host's clock."""

    name, libraries, l2_bytes = "simulated", "", 4096

    def __init__(self, cuda):
        self.cuda = cuda

    def seconds(self, work):
        def until_done():
            work()
            self.synchronize()

        return wall_seconds(until_done)

    def capture(self, work):
        stream = self.cuda.current_stream()
        stream.begin_capture()
        try:
            work()
        finally:
            graph = stream.end_capture()
        return lambda: graph.launch(stream)

    def synchronize(self):
        self.cuda.current_stream().synchronize()


def with_names_of_cupy(comm, nccl):
    """Give NCCL's handle CuPy's methods, which the bare calls use."""
    handle = transport_of(comm)._comm
    for name, own in NCCL_NAMES.items():
        setattr(handle, name, partial(getattr(nccl, own), handle))


def on_simulated(size, program, backend="nccl"):
    with simulated() as (cuda, nccl):

        def one_rank(comm, cuda):
            with cuda.on(cuda.new_stream()):
                if transport_of(comm) is not None:
                    with_names_of_cupy(comm, nccl)
                device = FakeDevice(cuda)
                settings = Settings(repeats=2, warmup=1, rotate=2, calls=3)
                return program(comm, cuda, device, GpuBench(comm, World(), cuda, device, settings))

        return run_ranks(size, one_rank, gpus=cuda, backend=backend)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "name", ["all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather"]
)
def test_measured_on_a_simulated_gpu(name, size):
    case = CASES[name]
    problem = Problem(size, 6 * size, np.dtype("f4"), root=size - 1)
    for row in on_simulated(size, lambda comm, cuda, device, bench: bench.row(case, problem)):
        assert row.wrong == 0
        for form in filter(None, (row.out_of_place, row.in_place)):
            assert form.busbw == pytest.approx(form.algbw * case.factor(size))
            assert (form.peer is None) == (name == "gather")
            assert (form.graph is None) == (name in ("gather", "reduce"))


def test_wrong_results_are_counted(monkeypatch):
    case = CASES["all_reduce"]
    monkeypatch.setattr(case, "expected", lambda problem, rank: np.full(problem.count, 9, "f4"))
    problem = Problem(1, 5, np.dtype("f4"))
    (row,) = on_simulated(1, lambda comm, cuda, device, bench: bench.row(case, problem))
    assert row.out_of_place.wrong == 10  # of the call, and of the graph
    assert row.in_place.wrong == 5
    assert row.out_of_place.peer.wrong == 5


def test_by_way_of_the_host_there_is_neither_bare_call_nor_graph():
    problem = Problem(2, 5, np.dtype("f4"))

    def program(comm, cuda, device, bench):
        assert transport_of(comm) is None
        return bench.row(CASES["all_reduce"], problem)

    for row in on_simulated(2, program, backend="mpi"):
        assert row.wrong == 0
        assert row.out_of_place.peer is row.out_of_place.graph is None


def test_the_overhead_of_a_call(monkeypatch):
    monkeypatch.setattr(bars, "_REPEATS", 2)
    monkeypatch.setattr(bars, "_BATCH", 5)

    def program(comm, cuda, device, bench):
        return bars.call_overhead(comm, World(), cuda, device)

    (bar,) = on_simulated(1, program)
    assert "−" in bar.found
    assert bar.bar == "10.00 µs"


def test_packing(monkeypatch):
    monkeypatch.setattr(bars, "_REPEATS", 2)
    monkeypatch.setattr(bars, "TENSORS", 20)

    def program(comm, cuda, device, bench):
        return bars.packing(World(), cuda, device)

    (bar,) = on_simulated(1, program)
    assert bar.found.startswith("2 launches, ")


def test_copy_bound_sizes(monkeypatch):
    monkeypatch.setattr(bars, "COPY_BOUND", (1 << 20,))

    def program(comm, cuda, device, bench):
        return bars.copy_bound(comm, bench)

    ((bar,),) = on_simulated(1, program)
    assert (bar.name, bar.wrong) == ("all_reduce of 1 MiB over the bare call", 0)
    case = CASES["all_reduce"]
    monkeypatch.setattr(case, "expected", lambda problem, rank: np.full(problem.count, 9, "f4"))
    monkeypatch.setattr(bars, "MOST_OF_BARE", float("inf"))
    ((bar,),) = on_simulated(1, program)
    assert bar.wrong
    assert not bar.met


def test_all_ranks_cycle_as_many_sets_of_buffers():
    with simulated() as (cuda, _):
        for name in ("reduce", "gather", "scatter", "exscan", "all_reduce"):
            problem = Problem(2, 1 << 18, np.dtype("f4"))
            case, cache = CASES[name], 50 << 20
            sets = [buffer_sets(case, problem, rank, cuda, None, cache) for rank in range(2)]
            assert len(sets[0]) == len(sets[1]) > 1, name


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_whole_run_on_a_simulated_gpu(op, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bars, "COPY_BOUND", (1 << 20,))
    for name, number in (("_REPEATS", 2), ("_BATCH", 5), ("TENSORS", 20)):
        monkeypatch.setattr(bars, name, number)
    file = tmp_path / "gpu.md"
    line = "--sizes 8,4K --tensors 5 --repeats 2 --warmup 1 --rotate 2 --calls 3"
    line += f" --op {op} --markdown"
    options = parse([*line.split(), str(file)])

    def program(comm, cuda, device, bench):
        module = SimpleNamespace(CupyDevice=lambda: device)
        monkeypatch.setitem(sys.modules, "bench.gpu.cupy_device", module)
        return run._measure_all(comm, options)

    assert on_simulated(1, program) == [0]
    text = file.read_text()
    printed = capsys.readouterr().out
    for name in COLLECTIVES:
        if op == "mean" and name in ("scan", "exscan"):
            assert f"can't measure {name}: op='mean'" in printed
        else:
            assert f"python -m bench.gpu {name} " in text
    for bar in (
        "all_reduce of 4 bytes",
        "pack and unpack of 20",
        "all_reduce of 1 MiB over",
    ):
        assert bar in text
        assert bar in printed


def test_nccl_has_no_bare_call_for_what_it_can_not_reduce():
    def program(comm, cuda, device, bench):
        task = SimpleNamespace(problem=Problem(1, 4, np.dtype("f4"), "max"))
        return Bare(transport_of(comm), cuda).call("all_reduce", task)

    assert on_simulated(1, program) == [None]
