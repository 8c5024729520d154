"""The comparison with gloo runs, and notices results that differ."""

import sys

import pytest

pytest.importorskip("torch", reason="torch isn't installed: it can't be tested with")

LOSSY = """
import sys, torch
from bench.torch import operations, run
broadcast = operations._broadcast
def lossy(elements, group):
    call, tensor = broadcast(elements, group)
    return lambda: (call(), group.name() == "gloo" and tensor.add_(1)), tensor
operations.OPERATIONS["broadcast"] = (lossy, operations.SIZES)
sys.exit(run.main(sys.argv[1:]))
"""


def test_calls_are_compared_with_gloo(launch):
    command = [sys.executable, "-c", LOSSY, "--only", "calls", "--sizes", "8,64K", "--repeats", "1"]
    ended = launch(2, command, timeout=120)
    rows = [line.split(" | ") for line in ended.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 6 * 2, ended.stderr
    wrong = {(name.strip("| "), nbytes) for name, nbytes, *_ in rows if "WRONG" in name}
    assert wrong == {("broadcast WRONG", "8"), ("broadcast WRONG", "64K")}
    assert ended.returncode == 1
    assert all(float(ratio.strip(" |")) > 0 for *_, ratio in rows[1:])
