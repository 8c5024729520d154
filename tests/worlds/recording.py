"""The plugin of a process that runs tests for the user's pytest, and records each."""

import json

import pytest

from tests.worlds.records import Recorder, is_plain
from tests.worlds.selection import deselect

SELECTION_NAME = "selection.json"


class Recording:
    """Runs the tests of the selection in a directory, in its order, and records them there.

    `directory` is None without a parent to report to: all tests run, and nothing is recorded.
    """

    def __init__(self, config, directory, rank=0):
        self.config = config
        self.directory = directory
        self.recorder = Recorder(directory, rank) if directory else None
        self.plain = {}

    def record(self, event, **details):
        """Send an event to the parent, if there is one."""
        if self.recorder:
            self.recorder.write(event, **details)

    def record_report(self, report):
        """Record a phase of a test for the parent."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.record("report", nodeid=report.nodeid, report=data)

    def pytest_collectreport(self, report):
        if report.failed:
            self.record("problem", text=report.longreprtext)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config, items):
        result = yield
        if self.directory:
            selection = json.loads((self.directory / SELECTION_NAME).read_text(encoding="utf-8"))
            order = {nodeid: index for index, nodeid in enumerate(selection)}
            deselect(config, items, {item for item in items if item.nodeid not in order})
            items.sort(key=lambda item: order[item.nodeid])
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.plain = {}
        self.record("start", nodeid=item.nodeid)
        result = yield
        self.record("finish", nodeid=item.nodeid, plain=self.plain)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        if is_plain(report):
            self.plain[report.when] = report.duration
        else:
            self.record_report(report)
