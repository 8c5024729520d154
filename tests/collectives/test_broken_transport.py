"""A transport that never communicates makes the suite fail: each collective's test detects it."""

import os
import re
import subprocess
import sys

import pytest

from tests.broken_transport import BROKEN_VARIABLE

pytestmark = pytest.mark.slow

# One test of each collective, on two ranks.
NOTICING = {
    "messages": [
        "test_all_reduce_on_every_path[ring-2ranks]",
        "test_reduce_to_every_root[binomial-2ranks]",
        "test_broadcast_from_every_root[binomial-2ranks]",
        "test_all_gather_along_axes_of_differing_length[ring-2ranks]",
        "test_gather_to_every_root[binomial-2ranks]",
        "test_scatter_from_every_root[binomial-2ranks]",
        "test_reduce_scatter[ring-2ranks]",
        "test_all_to_all_of_blocks_that_all_differ[pairwise-2ranks]",
        "test_send_and_recv_round_the_ring[2ranks]",
        "test_objects[2ranks]",
    ],
    "memory": [
        "test_all_reduce_on_every_path[None-2ranks]",
        "test_all_reduce_on_every_path[shared-2ranks]",
        "test_reduce_to_every_root[shared-2ranks]",
        "test_broadcast_from_every_root[shared-2ranks]",
        "test_all_gather_along_axes_of_differing_length[shared-2ranks]",
        "test_gather_to_every_root[shared-2ranks]",
        "test_scatter_from_every_root[shared-2ranks]",
        "test_reduce_scatter[shared-2ranks]",
        "test_all_to_all_of_blocks_that_all_differ[shared-2ranks]",
    ],
}
FILE = "tests/collectives/test_communicator.py"


def run_suite(names, environment):
    command = [sys.executable, "-m", "pytest", "-q", "--worlds", "2", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, *(f"{FILE}::{name}" for name in names)],
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


@pytest.mark.parametrize("broken", NOTICING)
def test_the_suite_rejects_what_never_communicates(broken):
    code, failed, ended = run_suite(NOTICING[broken], {BROKEN_VARIABLE: broken})
    assert failed == set(NOTICING[broken]), ended.stdout
    assert code == 1


def test_the_same_tests_pass_on_what_is_sound():
    code, failed, ended = run_suite([name for names in NOTICING.values() for name in names], {})
    assert not failed, ended.stdout
    assert code == 0
