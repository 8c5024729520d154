"""The last calls of a rank."""

import json
import os
import tempfile

import numpy as np
import pytest

from collectives import Communicator
from collectives.consistency.flight_recorder import CALLS_KEPT, DIRECTORY_VARIABLE, FlightRecorder
from collectives.consistency.signature import Signature
from collectives.transports import local


def record(count):
    recorder = FlightRecorder(3)
    for number in range(count):
        call = Signature("all_reduce", "sum", "float32", (number,), nbytes=4 * number)
        recorder.add((number, call, "ring", number * 10**9, number * 10**9 + 500_000_000))
    return recorder


@pytest.mark.parametrize("count", [0, 1, CALLS_KEPT - 1, CALLS_KEPT, CALLS_KEPT + 1, 700])
def test_the_last_256_calls_are_kept_in_order(count):
    assert CALLS_KEPT == 256
    recorder = record(count)
    expected = list(range(max(0, count - 256), count))
    assert [entry[0] for entry in recorder.entries()] == expected
    assert [each["sequence"] for each in recorder.calls()] == expected


def test_a_dump_tells_who_why_and_what(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    recorder = record(2)
    path = recorder.dump("nobody came")
    # Other communicators, and the thread of asynchronous calls, have files of their own.
    assert record(1).dump("another") != path == recorder.dump("nobody came")
    assert path.parent == tmp_path
    assert path.name.startswith(f"collectives-rank3-{os.getpid()}-")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (content["rank"], content["reason"]) == (3, "nobody came")
    assert content["calls"][1] == {
        "sequence": 1,
        "collective": "all_reduce",
        "call": "all_reduce(sum, float32[1])",
        "nbytes": 4,
        "algorithm": "ring",
        "start": 1.0,
        "end": 1.5,
    }


def test_one_rank_has_no_path():
    comm = Communicator(local.alone())
    for _ in range(3):
        comm.barrier()
        comm.all_reduce(np.ones(3))
        comm.broadcast(np.ones(3))
    assert {path for _, _, path, _, _ in comm._engine.recorder.entries()} == {""}


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_it_is_where_temporary_files_are(tmp_path, monkeypatch, value):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if value is None:
        monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(DIRECTORY_VARIABLE, value)
    assert record(1).dump("why").parent == tmp_path
