"""How long a wait spins, yields and sleeps, by a clock of its own."""

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
