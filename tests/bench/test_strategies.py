"""The benchmark of strategies: every program runs, and its rows are written to two files."""

import json
import sys

import pytest

from bench import strategies
from bench.strategies import SECTIONS, Program
from bench.strategy_programs.digits import PROGRAMS
from bench.strategy_programs.rows import print_rows, read_rows
from tests.worlds.programs import run_program


def test_every_strategy_is_measured():
    names = {name.replace(" ", "_") for name in PROGRAMS}
    measured = {program.arguments.split()[1] for program in SECTIONS["Steps per second"]}
    assert measured == names


@pytest.mark.parametrize(
    ("name", "ranks", "training"),
    [
        pytest.param("default", 1, 1, marks=pytest.mark.slow),
        pytest.param("one_device", 1, 1, marks=pytest.mark.slow),
        pytest.param("mirrored", 2, 2, marks=pytest.mark.slow),
        pytest.param("central_storage", 2, 2, marks=pytest.mark.slow),
        pytest.param("local_SGD,_every_8_steps", 2, 2, marks=pytest.mark.slow),
        pytest.param("multi-worker_mirrored,_dataset_rank", 3, 2, marks=pytest.mark.slow),
        pytest.param("parameter_server", 3, 2, marks=pytest.mark.slow),
        pytest.param("parameter_server,_coordinator", 3, 1, marks=pytest.mark.slow),
    ],
)
def test_steps_are_counted(name, ranks, training):
    command = [sys.executable, "-m", "bench.strategy_programs.digits", "--strategy", name]
    ended = run_program(ranks, [*command, "--steps", "5"], timeout=60)
    assert ended.returncode == 0, ended.stderr
    (row,) = read_rows(ended.stdout)["rows"]
    assert (row["strategy"], row["ranks"]) == (name.replace("_", " "), ranks)
    assert row["ranks that train"] == training
    assert 0 < row["steps/s"] < 1e6


@pytest.mark.slow
def test_what_was_measured_is_written_though_a_later_program_fails(tmp_path, monkeypatch, capsys):
    works = Program("digits", 1, "--strategy default --steps 3")
    fails = Program("digits", 1, "--strategy none")
    monkeypatch.setattr(strategies, "SECTIONS", {"First": [works], "Second": [fails]})
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    assert strategies.main(["--output", str(tmp_path)]) != 0
    assert "--strategy" in capsys.readouterr().err
    json_path, markdown_path = sorted(tmp_path.iterdir())
    (section,) = json.loads(json_path.read_text())
    assert section["commands"] == [works.line]
    assert section["rows"][0]["strategy"] == "default"
    text = markdown_path.read_text()
    assert "## First\n" in text
    assert f"    {works.line}\n" in text
    assert "| default | 1 | 1 |" in text


def test_rows_are_found_between_other_output(capsys):
    print("before")
    print_rows("about", [{"a": 1}])
    assert read_rows(capsys.readouterr().out) == {"about": "about", "rows": [{"a": 1}]}
    with pytest.raises(ValueError, match="printed no rows, but: 'nothing'"):
        read_rows("nothing")


def test_a_section_that_does_not_exist_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        strategies.main(["--output", str(tmp_path), "--only", "nothing"])
    assert "--only 'nothing': must be a part of The sync" in capsys.readouterr().err
