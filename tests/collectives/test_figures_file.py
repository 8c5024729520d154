"""The file of cost parameters."""

import json
import logging
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.execution import parameters_file
from collectives.execution.cost_model import CostParameters, Layout
from collectives.execution.parameters_file import Key, from_text, to_text

KEY = Key("host", "MPI 1", Layout((2, 1), 1.5))
POSITIVE = st.floats(1.1e-12, 0.9e15)
FIGURES = st.builds(CostParameters, **{field.name: POSITIVE for field in fields(CostParameters)})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(parameters_file.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@given(FIGURES)
def test_figures_survive_the_file(figures):
    assert from_text(KEY, to_text(KEY, figures)) == figures


def test_what_is_saved_is_loaded(cache):
    figures = replace(CostParameters(), reduction=1.25)
    path = parameters_file.save(KEY, figures)
    assert parameters_file.load(KEY) == (figures, path)
    assert [each.name for each in cache.iterdir()] == [path.name]


def test_nothing_saved_is_no_warning(cache, caplog):
    assert parameters_file.load(KEY) is None
    assert not cache.exists()
    assert not caplog.records


@pytest.mark.parametrize(
    "other",
    [
        Key("elsewhere", "MPI 1", KEY.layout),
        Key("host", "MPI 2", KEY.layout),
        Key("host", "MPI 1", Layout((3,), 1.5)),
        Key("host", "MPI 1", Layout((2, 1), 1.0)),
    ],
)
def test_figures_are_for_one_host_library_and_layout(cache, caplog, other):
    path = parameters_file.save(KEY, CostParameters())
    assert parameters_file.load(other) is None
    # Nor are they used where the file names collide.
    path.rename(other.path)
    assert parameters_file.load(other) is None
    assert "measured elsewhere" in caplog.text


def changed(**changes):
    return json.dumps(json.loads(to_text(KEY, CostParameters())) | changes)


def with_figure(value):
    return changed(figures=asdict(CostParameters()) | {"reduction": value})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        (to_text(KEY, CostParameters())[:-9], "no JSON"),
        ("[]", "version"),
        (changed(version=0), "version"),
        (changed(figures=None), "not those that are needed"),
        (changed(figures={"reduction": 1.0}), "not those that are needed"),
        (with_figure(-1.0), "reduction is -1.0"),
        (with_figure(0.0), "reduction is 0.0"),
        (with_figure(1e300), "reduction is 1e+300"),
        (with_figure(float("nan")), "reduction is nan"),
        (with_figure(float("inf")), "reduction is inf"),
        (with_figure("fast"), "reduction is 'fast'"),
        (with_figure(True), "reduction is True"),
        (b"\xff\xfe\x00", "could not be read"),
    ],
)
def test_a_file_that_is_no_good_is_ignored(cache, caplog, content, reason):
    path = parameters_file.save(KEY, CostParameters())
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert parameters_file.load(KEY) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert reason in caplog.text


def test_a_folder_that_cant_be_used_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv(parameters_file.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    assert parameters_file.save(KEY, CostParameters()) is None
    assert "could not be saved" in caplog.text
    assert parameters_file.load(KEY) is None
    assert "could not be read" in caplog.text
    caplog.clear()
    # Programs that never call tune: there may be no home, as in containers.
    monkeypatch.delenv(parameters_file.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert parameters_file.load(KEY) is None
    assert not caplog.records


def test_other_users_may_read_the_file(cache):
    assert parameters_file.save(KEY, CostParameters()).stat().st_mode & 0o777 == 0o644


def test_a_write_that_fails_leaves_the_old_file(cache, monkeypatch):
    path = parameters_file.save(KEY, CostParameters())

    def fail(*_):
        raise OSError("full")

    monkeypatch.setattr(parameters_file.os, "replace", fail)
    assert parameters_file.save(KEY, replace(CostParameters(), reduction=1.0)) is None
    assert parameters_file.load(KEY) == (CostParameters(), path)
    assert list(cache.iterdir()) == [path]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv(parameters_file.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert parameters_file.cache_folder() == tmp_path / "mpi-collectives"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parameters_file.cache_folder() == tmp_path / ".cache" / "mpi-collectives"
    monkeypatch.setenv(parameters_file.CACHE_VARIABLE, "~/shared")
    assert parameters_file.cache_folder() == tmp_path / "shared"
