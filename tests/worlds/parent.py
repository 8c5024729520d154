"""The plugin of the user's pytest: launches worlds and reports their tests."""

import json
import os
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.worlds.launcher import (
    NO_MPIRUN,
    Background,
    find_mpirun,
    mpirun_command,
    pytest_command,
    run_world,
)
from tests.worlds.merging import failed_reports, merge_reports
from tests.worlds.rank import SELECTION_NAME
from tests.worlds.records import read_records
from tests.worlds.selection import world_size_of
from tests.worlds.watchdog import time_limit

START_AND_STOP_SECONDS = 60


class Parent:
    """Runs ordinary tests as usual, and the worlds, one after the other, at the same time."""

    def __init__(self, config):
        self.config = config
        self.worlds = {}
        self.background = None
        self.thread = threading.Thread(target=self.run_worlds, name="worlds")

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

    def run_worlds(self):
        for world in self.worlds.values():
            world.run()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if not world_size_of(item):
            if nextitem is None or not world_size_of(nextitem):
                return None
            # World tests set up nothing here, so all fixtures must be torn down by now.
            return item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.worlds[world_size_of(item)].reports_of(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


class World:
    """The tests of one world size, and their state."""

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
        mpirun = find_mpirun()
        if mpirun is None:
            return {item.nodeid: failed_reports(item, NO_MPIRUN) for item in items}
        paths = dict.fromkeys(item.path for item in items)
        command = mpirun_command(mpirun, self.size) + pytest_command(self.config, paths)
        with tempfile.TemporaryDirectory(prefix="world-") as name:
            directory = Path(name)
            selection = json.dumps([item.nodeid for item in items])
            (directory / SELECTION_NAME).write_text(selection, encoding="utf-8")
            working_directory = self.config.invocation_params.dir
            limit = self.quiet_limit(items)
            ending = run_world(command, directory, working_directory, limit, self.background)
            records = read_records(self.config, directory, self.size)
            return merge_reports(items, self.size, records, ending, directory)

    def quiet_limit(self, items):
        """Return the time for which the ranks may record nothing.

        The ranks' watchdogs end hanging tests. This limit is for what they cannot detect (a
        frozen rank, a start or an end that hangs) and must be longer than any of theirs. It counts
        from the last progress: a total would fail an innocent test on a slow machine.
        """
        given = self.config.getoption("world_timeout")
        return given or START_AND_STOP_SECONDS + max(time_limit(item) for item in items)
