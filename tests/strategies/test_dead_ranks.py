"""A rank that dies, fails or is absent in the middle of training, under each strategy."""

import sys
import textwrap
import time

import pytest

from tests.slow import slow_but

pytestmark = pytest.mark.both_mpis

DEADLINE_SECONDS = 3
SLOW = pytest.mark.slow
MADE = {
    "mirrored": "strategies.MirroredStrategy()",
    "multi_worker": "strategies.MultiWorkerMirroredStrategy()",
    "central_storage": "strategies.CentralStorageStrategy()",
    "local_sgd": "strategies.LocalSGDStrategy(sync_every=1)",
}
FAULTS = {
    "exits": "sys.exit(7)",
    "raises": "raise KeyError('own')",
    "raises in merge_call": "strategies.get_replica_context().merge_call(lambda _: 1 / 0)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
}

BY_DEFAULT = {("mirrored", "raises in merge_call")}
PAIRS = [
    pytest.param(strategy, fault, marks=[] if (strategy, fault) in BY_DEFAULT else SLOW)
    for strategy in MADE
    for fault in FAULTS
]

PROGRAM = """
import os, signal, sys, time
import numpy as np
import collectives, strategies
comm = collectives.world(deadline={deadline})
strategy = {strategy}
with strategy.scope():
    variable, optimizer = strategies.Variable(np.zeros(1000)), strategies.optimizers.Adam(0.1)


def step(number):
    if number == 4 and comm.rank == 0:
        print("four steps", flush=True)
    if number == 5 and comm.rank == 1:
        {fault}
    optimizer.apply_gradients([(np.full(1000, comm.rank + 1.0), variable)])


for number in range(10_000):
    strategy.run(step, (number,))
print("came to its end")
"""


def program(strategy, fault, deadline):
    text = PROGRAM.format(strategy=MADE[strategy], fault=fault, deadline=deadline)
    return [sys.executable, "-c", textwrap.dedent(text)]


@pytest.mark.parametrize(("strategy", "fault"), PAIRS)
def test_the_job_ends_long_before_the_deadline(strategy, fault, launch):
    start = time.monotonic()
    ended = launch(3, program(strategy, FAULTS[fault], deadline=60), timeout=80)
    assert ended.returncode != 0
    assert "four steps" in ended.stdout, ended.stderr
    assert "came to its end" not in ended.stdout
    assert time.monotonic() - start < 35


@pytest.mark.parametrize("strategy", slow_but(MADE, "mirrored"))
def test_a_rank_that_stays_away_is_named_at_the_deadline(strategy, launch):
    start = time.monotonic()
    ended = launch(3, program(strategy, "time.sleep(60)", DEADLINE_SECONDS), timeout=80)
    assert ended.returncode != 0
    assert f"waited the deadline of {DEADLINE_SECONDS} s for rank 1 " in ended.stderr
    assert time.monotonic() - start < 35
