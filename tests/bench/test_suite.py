"""The suite: its runs are valid, and one world writes all of them to two files."""

import json

import pytest

from bench import suite
from bench.cases import CASES
from bench.options import parse, problems
from tests.bench.test_measure import CorruptedAllReduce


@pytest.mark.parametrize("line", [*suite.RUNS.values(), *suite.RUNS_OF_MANY.values()])
def test_every_run_is_a_line_for_the_benchmark(line):
    options = parse(line.split())
    asked = options.sizes or [options.tensors * options.tensor_bytes]
    assert [problem.nbytes for problem in problems(options, 2)] == [*asked]


@pytest.fixture
def small_runs(monkeypatch):
    runs = {"first": "all_reduce", "second, registered": "broadcast --registered"}
    monkeypatch.setattr(suite, "RUNS", {name: f"{line} --sizes 40" for name, line in runs.items()})
    monkeypatch.setattr(suite, "RUNS_OF_MANY", {"alone": "all_reduce --sizes 64"})


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_two_ranks_measure_all_runs(comm, small_runs, tmp_path):
    assert suite.main(["--output", str(tmp_path / "new"), "--repeats", "1"]) == 0
    if comm.rank:
        assert not [*tmp_path.iterdir()]
        return
    json_path, markdown_path = sorted((tmp_path / "new").iterdir())
    assert json_path.stem == markdown_path.stem
    assert json_path.name.startswith("suite-2-ranks-")
    sections = json.loads(json_path.read_text(encoding="utf-8"))["sections"]
    assert [section["title"] for section in sections] == [*suite.RUNS]
    assert [section["header"]["buffers"] for section in sections] == ["ordinary", "registered"]
    assert all(section["rows"][0]["in_place"]["peer"] for section in sections)
    repeated = sections[1]["command"].split(" -m bench ")[1]
    assert parse(repeated.split()).collective == "broadcast"
    text = markdown_path.read_text(encoding="utf-8")
    assert text.startswith("# 2 ranks, ")
    assert text.count("\n## ") == text.count(" --peer mpi4py --repeats 1`") == 2
    assert text.count("thread level") == 1
    assert text.count("| 40 |") == 2


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_more_ranks_measure_less(comm, small_runs, tmp_path):
    assert suite.main(["--output", str(tmp_path), "--repeats", "1"]) == 0
    (text,) = [path.read_text() for path in tmp_path.glob("suite-3-ranks-*.md")] or [None]
    assert (text is None) == (comm.rank > 0)
    assert text is None or ("## alone" in text and "## first" not in text)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_what_is_wrong_ends_with_status_1_and_is_written(comm, small_runs, tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, "all_reduce", CorruptedAllReduce())
    assert suite.main(["--output", str(tmp_path), "--repeats", "1"]) == 1
    assert bool([*tmp_path.iterdir()]) == (comm.rank == 0)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_folder_that_can_not_be_made_is_refused_before_anything_is_measured(comm, capsys):
    assert suite.main(["--output", "/dev/null/x"]) == 2
    assert ("--output: can't write /dev/null/x: " in capsys.readouterr().err) == (comm.rank == 0)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_what_was_measured_is_kept_when_a_later_run_can_not_be(
    comm, small_runs, tmp_path, monkeypatch
):
    monkeypatch.setitem(suite.RUNS, "impossible", "reduce --root 7")
    assert suite.main(["--output", str(tmp_path), "--repeats", "1"]) == 2
    if comm.rank == 0:
        (path,) = tmp_path.glob("*.json")
        assert len(json.loads(path.read_text())["sections"]) == 2
