"""The fuzzer finds nothing in the package, and finds every planted fault."""

import re
import sys

import pytest

from tests.slow import slow, slow_but

SECONDS, SLOW_SECONDS = 2, 10

# Planted faults of one line each, and the kinds of faults that must detect them.
SABOTAGES = {
    "all_reduce never communicates": (
        "import collectives\n"
        "collectives.Communicator.all_reduce = lambda comm, array, *a, **k: array.copy()",
        ["none"],
    ),
    "ops are not compared": (
        "from collectives.consistency.signature import Signature\n"
        "Signature.agreed = property(lambda call: (call[0], *call[2:-2]))",
        ["other_arguments"],
    ),
    "a rank that skips a call is not waited for": (
        "from collectives.consistency.call_check import CallCheck\n"
        "CallCheck.check_word = lambda self, *a, **k: None",
        ["skipped"],
    ),
}


def command(steps, sabotage="", only=()):
    code = f"{sabotage}\nimport runpy\nrunpy.run_module('tests.fuzz', run_name='__main__')"
    names = ["--only", *only] if only else []
    return [sys.executable, "-c", code, "--seed", "12", "--steps", str(steps), *names]


@pytest.mark.parametrize("size", [3, *slow(2, 5)])
def test_nothing_deviates(launch, size, slow):
    seconds = SLOW_SECONDS if slow else SECONDS
    ended = launch(size, [*command(1_000_000), "--seconds", str(seconds)], timeout=120)
    counted = re.search(r"(\d+) faults injected in .* (\d+) deviations", ended.stdout)
    assert counted is not None, ended.stdout + ended.stderr
    injected, deviations = map(int, counted.groups())
    assert deviations == 0, ended.stdout
    assert injected > (10 if slow else 0)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", slow_but(SABOTAGES, next(iter(SABOTAGES))))
def test_what_is_broken_deviates(launch, name):
    sabotage, only = SABOTAGES[name]
    ended = launch(2, [*command(40, sabotage, only), "--most", "1"], timeout=120)
    assert ended.returncode != 0
    # A rank that waits for data without end ends the job, which counts as detection, too.
    found = re.search(r"1 deviations|, from which no error|Timeout \(", ended.stdout + ended.stderr)
    assert found, ended.stdout + ended.stderr
