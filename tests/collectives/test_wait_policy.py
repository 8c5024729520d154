"""How long a wait spins, yields and sleeps, and when it logs, by a clock of its own."""

import logging
from types import SimpleNamespace

import pytest

from collectives.waiting import wait_policy as module
from collectives.waiting.wait_policy import WaitPolicy

SECONDS = 0.1


@pytest.fixture
def pauses(monkeypatch):
    """The sleeps so far, as (time, length); a yield takes 10 microseconds."""
    clock, found = [0.0], []

    def pass_time(seconds=10e-6):
        clock[0] += seconds

    def sleep(seconds):
        found.append((clock[0], seconds))
        pass_time(seconds)

    times = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr(module, "time", times)
    monkeypatch.setattr(module.os, "sched_yield", pass_time)
    return found


@pytest.mark.parametrize(
    ("early", "in_transit", "first", "longest"),
    [
        (False, False, 2e-3, 1e-3),
        # MPI moves data only while it is called: the link would be idle.
        (False, True, 20e-3, 0.1e-3),
        (True, False, 20e-6, 1e-3),
        (True, True, 20e-6, 0.1e-3),
    ],
)
def test_a_wait_yields_and_then_sleeps(pauses, early, in_transit, first, longest):
    policy = WaitPolicy()
    if early:
        policy.sleep_early()
    policy.until(lambda: module.time.monotonic() >= SECONDS, dict, in_transit=in_transit)
    begins, lengths = zip(*pauses, strict=True)
    assert first <= begins[0] < 1.2 * first + 20e-6
    assert max(lengths) == pytest.approx(longest)


def test_waits_of_one_start_log_one_warning(pauses, caplog):
    """The second wait begins when the warning is due: the first one may have ended before it."""
    policy = WaitPolicy(deadline=1.0)
    start = module.time.monotonic()
    with caplog.at_level(logging.WARNING):
        for until, warnings in [(0.09, 0), (0.2, 1), (0.3, 1)]:
            policy.until(lambda until=until: module.time.monotonic() >= until, dict, start=start)
            assert len(caplog.records) == warnings
            module.time.sleep(0.05)
        policy.until(lambda: module.time.monotonic() >= 0.5, dict)
    assert ["has waited" in record.message for record in caplog.records] == [True, True]
