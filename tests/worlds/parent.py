"""The plugin of the user's pytest: launches worlds and reports their tests.

When the worlds are done, a second process runs ordinary tests from the other end of the list.
"""

import json
import os
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.worlds.launcher import (
    NO_MPIRUN,
    ORDINARY_VARIABLE,
    Background,
    find_mpirun,
    mpirun_command,
    ordinary_command,
    rank_command,
    run_world,
    world_environment,
)
from tests.worlds.merging import failed_reports, merge_reports
from tests.worlds.recording import SELECTION_NAME
from tests.worlds.records import read_records
from tests.worlds.selection import world_size_of
from tests.worlds.watchdog import time_limit

START_AND_STOP_SECONDS = 60
ORDINARY_SECONDS = 300
"""An ordinary test's limit, unless it has one of its own."""
FEWEST_FILES = 8
"""Of which a second process takes a half: to start one takes seconds."""


class Parent:
    """Runs ordinary tests as usual, and the worlds, one after the other, at the same time."""

    def __init__(self, config):
        self.config = config
        self.worlds = {}
        self.background = None
        self.thread = threading.Thread(target=self.run_beside, name="worlds")
        self.lock = threading.Lock()
        self.waiting = []
        self.taken = {}

    def pytest_sessionstart(self):
        """Compile each module once, and not in each of a thousand processes."""
        if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
            self.bytecode = tempfile.TemporaryDirectory(prefix="bytecode-")
            os.environ["PYTHONPYCACHEPREFIX"] = self.bytecode.name

    def pytest_collection_finish(self, session):
        self.background = Background()
        for item in session.items:
            if size := world_size_of(item):
                world = self.worlds.setdefault(size, World(self.config, size, self.background))
                world.items.append(item)
            else:
                self.waiting.append(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session):
        if session.config.option.collectonly or session.testsfailed:
            return (yield)
        self.thread.start()
        try:
            return (yield)
        finally:
            self.background.unwanted.set()
            self.thread.join()

    def run_beside(self):
        for world in self.worlds.values():
            world.run()
        option = self.config.option
        # What the second process would not know of.
        own = (option.usepdb, option.trace, option.runxfail, option.doctestmodules)
        if option.capture != "no" and not any(own) and not os.environ.get("PYTEST_ADDOPTS"):
            while not self.background.unwanted.is_set() and (tests := self.take()):
                tests.run()

    def take(self):
        """Return half of the files of ordinary tests that wait, for a second process, or None."""
        with self.lock:
            # The first one may have begun.
            files = list(dict.fromkeys(item.path for item in self.waiting))[1:]
            if len(files) < FEWEST_FILES:
                return None
            taken = set(files[len(files) // 2 :])
            tests = OrdinaryTests(self.config, 1, self.background)
            tests.items = [item for item in self.waiting if item.path in taken]
            self.waiting = [item for item in self.waiting if item.path not in taken]
            self.taken |= dict.fromkeys(tests.items, tests)
            tests.take_over_time_limits()
            return tests

    def runner_of(self, item):
        """Return what runs a test beside this process, or None for a test that runs here now."""
        if size := world_size_of(item):
            return self.worlds[size]
        with self.lock:
            if item in self.waiting:
                self.waiting.remove(item)
            return self.taken.get(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        runner = self.runner_of(item)
        if runner is None:
            if nextitem is None or not world_size_of(nextitem):
                return None
            # World tests set up nothing here, so all fixtures must be torn down by now.
            return item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in runner.reports_of(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


class World:
    """The tests of one world size, and their state."""

    needs_mpirun = True

    def __init__(self, config, size, background):
        self.config = config
        self.size = size
        self.background = background
        self.items = []
        self.reports = Future()

    def run(self):
        """Run all tests, in as many launches as it takes, unless they become unwanted."""
        reports, undecided = {}, self.items
        try:
            while undecided and not self.background.unwanted.is_set():
                reports |= self.launch(undecided)
                undecided = [item for item in undecided if item.nodeid not in reports]
        except BaseException as error:
            self.reports.set_exception(error)
        else:
            self.reports.set_result(reports)

    def reports_of(self, item):
        """Return a test's reports, once the world has ended."""
        return self.reports.result()[item.nodeid]

    def launch(self, items):
        """Run tests in one launch; return the reports of those it completed, at least one."""
        if self.needs_mpirun and find_mpirun() is None:
            return {item.nodeid: failed_reports(item, NO_MPIRUN) for item in items}
        with tempfile.TemporaryDirectory(prefix="world-") as name:
            directory = Path(name)
            selection = json.dumps([item.nodeid for item in items])
            (directory / SELECTION_NAME).write_text(selection, encoding="utf-8")
            ending = run_world(
                self.command(dict.fromkeys(item.path for item in items)),
                directory,
                self.config.invocation_params.dir,
                self.quiet_limit(items),
                self.background,
                self.environment(directory),
            )
            records = read_records(self.config, directory, self.size)
            return merge_reports(items, self.size, records, ending, directory)

    def command(self, paths):
        """Return the command that runs pytest on all ranks."""
        return mpirun_command(find_mpirun(), self.size) + rank_command(self.config, paths)

    def environment(self, directory):
        """Return the environment of the launch."""
        return world_environment(directory, self.background.environment)

    def quiet_limit(self, items):
        """Return the time for which the ranks may record nothing.

        The ranks' watchdogs end hanging tests. This limit is for what they cannot detect (a
        frozen rank, a start or an end that hangs) and must be longer than any of theirs. It counts
        from the last progress: a total would fail an innocent test on a slow machine.
        """
        given = self.config.getoption("world_timeout")
        return given or START_AND_STOP_SECONDS + max(time_limit(item) for item in items)


class OrdinaryTests(World):
    """Ordinary tests in a process beside this one."""

    needs_mpirun = False

    def take_over_time_limits(self):
        """Let only the second process limit its tests: here each may wait for all of them."""
        limits = [item.get_closest_marker("timeout") for item in self.items]
        self.longest = max([ORDINARY_SECONDS, *(each.args[0] for each in limits if each)])
        for item in self.items:
            item.add_marker(pytest.mark.timeout(0), append=False)

    def command(self, paths):
        return ordinary_command(self.config, paths)

    def environment(self, directory):
        return self.background.environment | {ORDINARY_VARIABLE: str(directory)}

    def quiet_limit(self, items):
        given = self.config.getoption("world_timeout")
        return given or START_AND_STOP_SECONDS + self.longest
