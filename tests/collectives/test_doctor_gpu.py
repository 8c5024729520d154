"""The doctor's report on GPUs, with and without CuPy."""

import sys
import types
from dataclasses import asdict

import pytest

from collectives.doctor import gpu
from collectives.doctor.gpu import (
    GpuFindings,
    find_gpus,
    find_in_subprocess,
    report_device_arrays,
    report_gpu,
)
from collectives.doctor.report import Report
from collectives.gpu.probe import Health
from collectives.transports.mpi_cuda import VARIABLE
from tests.collectives.test_doctor import rows
from tests.devices.gpu_worlds import simulated

BROKEN = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"


def reported(capsys, monkeypatch, found, driver=None, version="14.2"):
    """The report, where CuPy is of this version and a findings finds this."""
    monkeypatch.setattr(gpu, "found_version", lambda *_: version)
    monkeypatch.setattr(gpu, "_driver_version", lambda: driver)
    monkeypatch.setattr(gpu, "find_in_subprocess", lambda: found)
    findings = report_gpu(Report(prints=True))
    return findings, rows(capsys.readouterr().out)


def test_without_cupy_nothing_is_started(capsys, monkeypatch):
    findings, found = reported(capsys, monkeypatch, None, version=None)
    assert findings.health(0).problem == "CuPy is not installed"
    assert "pip install 'mpi-collectives[cuda12]'" in found["cupy"][0]
    assert "NVRTC" not in found


@pytest.mark.parametrize(
    ("driver", "text"),
    [(None, "must be started with its GPUs"), ("470.1", "driver 470.1 is too old")],
)
def test_the_driver_in_words(capsys, monkeypatch, driver, text):
    _, found = reported(capsys, monkeypatch, GpuFindings(BROKEN, nccl="2.28.9"), driver)
    assert text in found["cupy"][1]
    assert BROKEN in found["cupy"][1]
    assert found["NCCL"] == ["2.28.9"]
    assert found["NVRTC"][0] == "not found"
    assert "pip install 'cupy-cuda12x[ctk]'" in found["NVRTC"][1]


def test_gpus_are_named(capsys, monkeypatch):
    findings = GpuFindings(None, ["H200", "H200"], "2.28.9", "12.9", [])
    found = reported(capsys, monkeypatch, findings, "570.1")[1]
    assert (found["GPU 0"], found["GPU 1"]) == (["H200"], ["H200"])
    assert (found["NVRTC"], found["NVIDIA driver"]) == (["12.9"], ["570.1"])


def mpi_of(*healths):
    """An MPI whose other ranks have these."""
    world = types.SimpleNamespace(allgather=lambda own: [own, *healths])
    return types.SimpleNamespace(COMM_WORLD=world)


def healthy(uuid, **changes):
    return Health(**asdict(Health(None, None, "here", uuid, 22809)) | changes)


@pytest.mark.parametrize(
    ("others", "way", "why"),
    [
        ([], "NCCL", None),
        ([healthy("second")], "NCCL", None),
        ([healthy("first")], "CUDA IPC", "share the GPU"),
        ([healthy("second"), healthy("first")], "the host's memory", "share the GPU"),
        ([healthy("second", nccl_problem="none")], "the host's memory", "rank 1: none"),
        ([Health("no CuPy")], "nothing: no GPU", "rank 1: no CuPy"),
    ],
)
def test_which_way_arrays_would_go(capsys, monkeypatch, others, way, why):
    monkeypatch.setattr(gpu, "cuda_aware", lambda comm: False)
    findings = GpuFindings(None, ["H200"], "2.28.9", "12.9", [asdict(healthy("first"))])
    report_device_arrays(Report(prints=True), mpi_of(*others), findings, local_rank=0)
    found = rows(capsys.readouterr().out)
    assert found["would go over"][0] == way
    assert len(found["would go over"]) == (1 if why is None else 2)
    assert why is None or why in found["would go over"][1]
    assert found["MPI"] == ["this MPI reads GPU memory: no (it is not given any)"]


@pytest.mark.parametrize(("given", "text"), [("1", "memory: yes"), ("maybe", "not known")])
def test_a_word_of_the_user(capsys, monkeypatch, given, text):
    monkeypatch.setenv(VARIABLE, given)
    report = Report(prints=True)
    report_device_arrays(report, mpi_of(), GpuFindings("no GPU"), local_rank=0)
    assert text in rows(capsys.readouterr().out)["MPI"][0]
    assert report.warnings == (given == "maybe")


def test_ranks_take_gpus_by_their_number():
    findings = GpuFindings(None, healths=[asdict(healthy(uuid)) for uuid in ("first", "second")])
    assert [findings.health(rank).gpu for rank in range(3)] == ["first", "second", "first"]
    assert GpuFindings("none").health(5) == Health("none")


def test_a_look(monkeypatch):
    monkeypatch.setattr(gpu, "_name", "GPU {}".format)
    monkeypatch.setattr(gpu, "_nvrtc", lambda: "12.9")
    with simulated(devices=2) as (cuda, nccl):
        cuda.be_rank(0)
        found = find_gpus()
        assert (found.gpus, found.nccl, found.nvrtc) == (["GPU 0", "GPU 1"], "2.30.7", "12.9")
        assert found.health(1).gpu == "GPU-1"
        nccl.missing[0] = "no NCCL"
        cuda.missing[0] = "no GPU"
        assert find_gpus() == GpuFindings("no GPU", [], "no NCCL", "12.9")


def test_what_goes_wrong_in_the_other_process(monkeypatch, tmp_path):
    # A CuPy that can't be imported, found before any other.
    broken = tmp_path / "cupy"
    broken.mkdir()
    (broken / "__init__.py").write_text("import os, sys; os.write(2, b'dead\\n'); os._exit(3)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert find_in_subprocess().problem == "CuPy can't be used: dead"
    (broken / "__init__.py").write_text("import time; time.sleep(60)")
    assert find_in_subprocess(0.5).problem == "CuPy did not import within 0.5 s"
