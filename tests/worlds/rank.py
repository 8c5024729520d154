"""The plugin of a rank in a world: runs its tests in step with the others, and records them."""

import functools
import itertools
import os
import tempfile
import time
from pathlib import Path

import pytest

from tests.worlds.recording import Recording
from tests.worlds.records import stacks_path
from tests.worlds.watchdog import Watchdog, time_limit

FINALIZE_SECONDS = 30
FIRST_POLL_SECONDS = 20e-6
LONGEST_POLL_SECONDS = 2e-3


class Rank(Recording):
    """One rank; `directory` is None without a parent to report to, under the user's own mpirun."""

    def __init__(self, config, directory):
        # The parent, which imports this module too, must not initialise MPI.
        from mpi4py import MPI

        wait_for_all(MPI.COMM_WORLD)
        # A separate communicator, which leftover messages of a test cannot reach.
        self.communicator = MPI.COMM_WORLD.Dup()
        rank = self.communicator.rank
        separate_temporary_files(rank)
        super().__init__(config, directory, rank)
        self.watchdog = Watchdog(stacks_path(directory, rank) if directory else None)

    def abort(self):
        """End the world, so that no rank waits for this one."""
        self.communicator.Abort(1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        """Check that all ranks are about to run the same tests, before anything can hang."""
        if session.testsfailed:
            # Not collected: pytest will report it, and the other ranks must not wait for this one.
            return
        wait_for_all(self.communicator)
        nodeids = [item.nodeid for item in session.items]
        if any(others != nodeids for others in self.communicator.allgather(nodeids)):
            text = "the ranks collected different tests"
            self.record("problem", text=text)
            raise pytest.UsageError(text)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        # In step: a rank that fails now cannot end another that still records the last test.
        wait_for_all(self.communicator)
        with self.watchdog.limit(time_limit(item)):
            return (yield from super().pytest_runtest_protocol(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        test = getattr(getattr(item, "obj", None), "hypothesis", None)
        if not test or not self.directory or self.communicator.size == 1:
            return (yield)
        body = test.inner_test
        test.inner_test = self.abort_at_first_failure(item, body)
        try:
            return (yield)
        finally:
            test.inner_test = body

    def abort_at_first_failure(self, item, function):
        """Wrap the body of a Hypothesis test, which would be repeated while others wait."""
        from hypothesis.errors import HypothesisException

        @functools.wraps(function)
        def body(*arguments, **named_arguments):
            try:
                return function(*arguments, **named_arguments)
            except HypothesisException:
                raise
            except (Exception, pytest.fail.Exception):
                self.record_report(failure_report(item, named_arguments))
                self.abort()

        return body

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        super().pytest_runtest_logreport(report)
        if report.failed and self.directory:
            self.abort()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self):
        self.watchdog.start(FINALIZE_SECONDS)


def separate_temporary_files(rank):
    """Give the rank its own root of tmp_path: pytests that share one delete others' files."""
    root = Path(tempfile.gettempdir(), f"pytest-of-{os.getuid()}-rank-{rank}")
    root.mkdir(exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(root)


def wait_for_all(communicator):
    """Wait for the other ranks without using the few cores of those that still work."""
    request = communicator.Ibarrier()
    for number in itertools.count():
        if request.Test():
            return
        # A barrier has several rounds, each of which waits for a poll: short sleeps at first.
        time.sleep(min(FIRST_POLL_SECONDS * 1.2 ** min(number, 50), LONGEST_POLL_SECONDS))


def failure_report(item, example):
    """Return the report of the current exception, with the example that led to it."""
    lines = [f"{name}={value!r}" for name, value in example.items()]
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=item.repr_failure(pytest.ExceptionInfo.from_current()),
        when="call",
        sections=[("Falsifying example", "\n".join(lines))],
    )
