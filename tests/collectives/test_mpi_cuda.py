"""Whether MPI reads the memory of GPUs: the sources of the answer."""

import os
import shutil
import subprocess
import sys
import types

import pytest

from collectives.transports import mpi_cuda
from collectives.transports.mpi_cuda import VARIABLE, cuda_aware, libraries_among
from tests.worlds.programs import ROOT


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(mpi_cuda, "_found", None)


class Info:
    """The info of a communicator with one key."""

    def __init__(self, kinds):
        self.kinds, self.freed = kinds, False

    def Get(self, key):  # noqa: N802  mpi4py's name
        return self.kinds if key == "mpi_memory_alloc_kinds" else None

    def Free(self):  # noqa: N802
        self.freed = True


def comm_with(kinds):
    info = Info(kinds)
    return types.SimpleNamespace(Get_info=lambda: info, info=info)


class Library:
    """A ctypes library with some functions, which records the calls."""

    def __init__(self, **functions):
        self.asked = []
        for name, function in functions.items():
            setattr(self, name, function)


def query(failed, answer):
    def fill(kind, pointer):
        assert kind == 0
        pointer._obj.value = answer
        return failed

    return fill


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_neither_wheel_reads_gpus(comm):
    from mpi4py import MPI

    assert cuda_aware(MPI.COMM_WORLD) is False
    assert list(mpi_cuda._loaded())


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (None, False),
        ("", False),
        ("mpi,system", False),
        ("mpi,system,cuda", True),
        ("system, cuda:device,cuda:managed", True),
        ("mpi,rocm,cudalike", False),
    ],
)
def test_the_kinds_of_memory(kinds, expected, monkeypatch):
    monkeypatch.setattr(mpi_cuda, "_loaded", lambda: iter(()))
    comm = comm_with(kinds)
    assert cuda_aware(comm) is expected
    assert comm.info.freed
    # It was found once.
    assert cuda_aware(None) is expected


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ({}, False),
        ({"MPIX_Query_cuda_support": lambda: 0}, False),
        ({"MPIX_Query_cuda_support": lambda: 1}, True),
        ({"MPIX_GPU_query_support": query(0, 1)}, True),
        ({"MPIX_GPU_query_support": query(0, 0)}, False),
        ({"MPIX_GPU_query_support": query(1, 1)}, False),
        (
            {"MPIX_Query_cuda_support": lambda: 0, "MPIX_GPU_query_support": query(0, 1)},
            False,
        ),
    ],
)
def test_the_library_is_asked(functions, expected, monkeypatch):
    libraries = [Library(), Library(**functions)]
    monkeypatch.setattr(mpi_cuda, "_loaded", lambda: iter(libraries))
    assert cuda_aware(comm_with("mpi,system")) is expected


@pytest.mark.parametrize(("given", "expected"), [("0", False), ("1", True)])
def test_the_environment_decides(given, expected, monkeypatch):
    monkeypatch.setenv(VARIABLE, given)
    assert cuda_aware(None) is expected
    # And only while it is set.
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(mpi_cuda, "_loaded", lambda: iter(()))
    assert cuda_aware(comm_with("cuda")) is True


@pytest.mark.parametrize("given", ["yes", "2", " 1"])
def test_what_the_environment_may_say(given, monkeypatch):
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ValueError, match=f"{VARIABLE}='{given}': must be 0 or 1"):
        cuda_aware(None)


def test_libraries_are_found_in_the_map_of_memory():
    maps = [
        "7f00-7f10 r--p 00000000 08:01 99   /opt/my mpi/lib/libmpi.so.40.40.7\n",
        "7f10-7f20 r-xp 00001000 08:01 99   /opt/my mpi/lib/libmpi.so.40.40.7\n",
        "7f20-7f30 r--p 00000000 08:01 98   /usr/lib/libmpich.so.12\n",
        "7f30-7f40 r--p 00000000 08:01 97   /usr/lib/python/mpi4py/MPI.cpython-311.so\n",
        "7f40-7f50 r--p 00000000 08:01 96   /opt/libmpi/lib/libc.so.6\n",
        "7f50-7f60 rw-p 00000000 00:00 0 \n",
        "7f60-7f70 r--p 00000000 08:01 95   /usr/lib/liblibmpi.so\n",
    ]
    assert libraries_among(maps) == ["/opt/my mpi/lib/libmpi.so.40.40.7", "/usr/lib/libmpich.so.12"]


ASKING = """
import ctypes, sys
from collectives.transports import mpi_cuda
ctypes.CDLL(sys.argv[1])
info = type("Info", (), {"Get": lambda self, key: None, "Free": lambda self: None})
print(mpi_cuda.cuda_aware(type("Comm", (), {"Get_info": lambda self: info()})()))
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler")
def test_a_real_library_is_asked(tmp_path):
    """In a separate process, the only one that has it loaded then."""
    source, library = tmp_path / "mpi.c", tmp_path / "libmpi.so.1"
    source.write_text("int MPIX_GPU_query_support(int t, int *v) { *v = t == 0; return 0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    command = [sys.executable, "-c", ASKING, library]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    asked = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert asked.stdout == "True\n"
