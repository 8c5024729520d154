import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.options import parse, problems
from bench.output_paths import problem_of
from bench.reports.training import check_output
from bench.run import CanNotMeasureError, measure

ROOT = Path(__file__).resolve().parents[2]
ERRORS = {
    "all_reduce --algorithm bruck": "all_reduce has ring, ",
    "all_reduce --algorithm ring,": "not ''",
    "all_reduce --dtype float33": "'float33' is not a dtype",
    "all_reduce --dtype U0": "'U0' is not a dtype",
    "all_reduce --dtype datetime64[s]": "'datetime64[s]' is not a dtype",
    "all_reduce --dtype O": "'O' is not a dtype",
    "all_reduce_many --tensor-bytes 0": "--tensor-bytes is 0: must be at least 1",
    "all_reduce --tensor-bytes 8": "--tensor-bytes 8 is of all_reduce_many, and not of all_reduce",
    "all_reduce_many --tensor-bytes 6": "float32 has 4 bytes, of which it is no multiple",
    "all_reduce --max-bytes 4": "--max-bytes is less than --min-bytes",
    "all_reduce --min-bytes 0": "--min-bytes is 0: must be at least 1",
    "all_reduce --repeats 0": "--repeats is 0: must be at least 1",
    "all_reduce --calls 0": "--calls is 0: must be at least 1",
    "all_reduce --root -1": "--root is -1: must be at least 0",
    "all_reduce --sizes 8,64Q": "'64Q' is not a size",
    "all_reduce --step-factor 1": "--step-factor is 1: must be at least 2",
    "all_reduce --op xor": "invalid choice: 'xor'",
    "all_reduce --peer horovod": "invalid choice: 'horovod'",
    "all_reduce_many --algorithm ring": "all_reduce_many chooses by itself",
    "persistent_all_reduce_many --asynchronous": "persistent_all_reduce_many has no such form",
    "barrier --plot a.png": "barrier moves no bytes",
    "all_reduce --plot a.foo": "--plot a.foo: must end in .png, .svg, .pdf",
    "reduce_all": "invalid choice: 'reduce_all'",
}


@pytest.mark.parametrize("line", ERRORS)
def test_an_option_error_is_named_and_ends_with_status_2(line, capsys, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(SystemExit) as ended:
        parse(line.split())
    assert ended.value.code == 2
    assert ERRORS[line] in capsys.readouterr().err


def test_only_the_first_rank_complains(capsys, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(SystemExit) as ended:
        parse(["all_reduce", "--repeats", "0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == ""


def test_all_means_every_algorithm_and_the_native_one():
    chosen = parse(["all_reduce", "--algorithm", "all"]).algorithms
    assert {"ring", "doubling", "native"} <= set(chosen)
    assert parse(["all_reduce", "--algorithm", "ring,auto"]).algorithms == ["ring", "auto"]
    assert parse(["barrier", "--algorithm", "all"]).algorithms == ["auto"]


def problem(options, rank=0, **how):
    world = SimpleNamespace(rank=rank, bcast=lambda text: text)
    return problem_of(world, SimpleNamespace(**options), *options, **how)


def test_only_the_first_rank_needs_the_folder_of_an_output(tmp_path):
    absent = tmp_path / "absent" / "file"
    assert (
        problem({"json": absent}) == f"--json: can't write {absent}: {absent.parent} is no folder"
    )
    assert problem({"json": absent}, rank=1) is None
    # Folders are made.
    assert problem({"output": absent}, folder=True) is None
    assert problem({"json": None, "markdown": tmp_path / "file"}) is None
    both = problem({"json": tmp_path / "file", "markdown": tmp_path / "." / "file"})
    assert both == f"--markdown: {tmp_path / 'file'} is the file of --json, too"


def test_an_output_without_permission_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert problem({"json": tmp_path / "file"}) is None
    # As root it would be granted.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for path, denied in (("file", "file"), ("other", "")):
        found = problem({"json": tmp_path / path})
        assert found.endswith(f"no permission to write to {tmp_path / denied}")


def test_a_framework_benchmark_ends_with_status_2_too(capsys):
    world = SimpleNamespace(rank=0, bcast=lambda text: text)
    with pytest.raises(SystemExit) as ended:
        check_output(world, SimpleNamespace(output=Path("/absent/x")))
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err == "bench: --output: can't write /absent/x: /absent is no folder\n"
    )


def counts(line, ranks):
    return [problem.count for problem in problems(parse(line.split()), ranks)]


def test_sizes_become_counts_of_whole_blocks_each_once():
    assert counts("all_reduce --max-bytes 32", 3) == [2, 4, 8]
    assert counts("all_reduce --sizes 1,4,9 --dtype float64", 3) == [1, 2]
    assert counts("all_gather --max-bytes 32", 3) == [3, 6, 9]
    assert counts("all_reduce_many --sizes 8,8K --tensors 1000", 2) == [1000, 3000]
    assert counts("all_reduce_many --tensors 1000 --tensor-bytes 4000", 2) == [1000000]
    assert len(counts("barrier --max-bytes 1M", 4)) == 1


def test_help_needs_no_mpi():
    program = """
import runpy, sys
sys.modules["mpi4py"] = None
sys.argv = ["bench", "--help"]
runpy.run_module("bench", run_name="__main__")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "busbw" in ended.stdout


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_a_plot_needs_matplotlib_on_rank_0_alone(comm, monkeypatch, tmp_path):
    line = ["all_reduce", "--sizes", "8", "--repeats", "1", "--plot"]
    options = parse([*line, str(tmp_path / "plot.png")])
    for missing in range(comm.size):
        installed = None if comm.rank == missing else True
        monkeypatch.setattr("bench.run.find_spec", lambda name, found=installed: found)
        monkeypatch.setattr("bench.run.Report.finish", lambda report, notes: None)
        if missing == 0:
            with pytest.raises(CanNotMeasureError, match=r"pip install 'mpi-collectives\[bench\]'"):
                measure(comm, options)
        else:
            assert len(measure(comm, options).rows) == 1


@pytest.mark.parametrize("name", ["torch", "jax", "keras"])
def test_numbers_below_one_are_refused_before_anything_is_measured(name, capsys):
    program = importlib.import_module(f"bench.{name}.run")
    with pytest.raises(SystemExit, match="2"):
        program.main(["--repeats", "0"])
    assert "'0' is not a number from 1 up" in capsys.readouterr().err
