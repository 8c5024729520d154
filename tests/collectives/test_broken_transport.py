"""A transport that never communicates makes the suite fail: each collective's test notices it."""

import os
import re
import subprocess
import sys

import pytest

from tests.broken_transport import BROKEN_VARIABLE

# One test of each collective, on two ranks.
NOTICING = {
    "all_reduce": "test_all_reduce_on_every_path[3-ring-2ranks]",
    "reduce": "test_reduce_to_every_root[binomial-2ranks]",
    "broadcast": "test_broadcast_from_every_root[float64-binomial-2ranks]",
    "all_gather": "test_all_gather_along_axes_of_differing_length[0-ring-2ranks]",
    "gather": "test_gather_to_every_root[binomial-2ranks]",
    "scatter": "test_scatter_from_every_root[0-binomial-2ranks]",
    "reduce_scatter": "test_reduce_scatter[sum-0-ring-2ranks]",
    "all_to_all": "test_all_to_all_of_blocks_that_all_differ[pairwise-2ranks]",
    "send": "test_send_and_recv_round_the_ring[2ranks]",
    "objects": "test_objects[2ranks]",
}
FILE = "tests/collectives/test_communicator.py"


def run_suite(environment):
    command = [sys.executable, "-m", "pytest", "-q", "--worlds", "2", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, *(f"{FILE}::{name}" for name in NOTICING.values())],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    return (
        ended.returncode,
        set(re.findall(r"^FAILED \S+::(\S+)", ended.stdout, re.MULTILINE)),
        ended,
    )


@pytest.mark.parametrize("broken", [False, True], ids=["sound", "broken"])
def test_the_suite_tells_a_broken_transport_from_a_sound_one(broken):
    code, failed, ended = run_suite({BROKEN_VARIABLE: "1"} if broken else {})
    assert failed == (set(NOTICING.values()) if broken else set()), ended.stdout
    assert code == (1 if broken else 0)
