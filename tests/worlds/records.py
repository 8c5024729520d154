"""A rank's records of its tests while they run, and how the parent reads them."""

import json
from collections import defaultdict
from dataclasses import dataclass, field


class Recorder:
    """A rank's own file of events, one JSON object a line, flushed before the rank may die."""

    def __init__(self, directory, rank):
        self.file = record_path(directory, rank).open("a", encoding="utf-8")

    def write(self, event, **details):
        """Append one event."""
        self.file.write(json.dumps({"event": event, **details}) + "\n")
        self.file.flush()


def is_plain(report):
    """Tell whether all there is to say about a phase of a test is that it passed, and how long."""
    extra = hasattr(report, "wasxfail") or report.sections or report.user_properties
    return report.passed and not extra


@dataclass
class PlainReport:
    """The report of a phase that passed and left nothing else to say."""

    duration: float
    outcome: str = "passed"
    longrepr: object = None
    sections: tuple = ()
    skipped: bool = False


@dataclass
class RankTest:
    """The events of one rank about one test."""

    reports: dict = field(default_factory=dict)
    """The latest report of each phase (setup, call, teardown)."""
    failure: object = None
    """The first failed report."""
    finished: bool = False

    def add(self, report):
        """Add one more report."""
        self.reports[report.when] = report
        if report.failed and self.failure is None:
            self.failure = report

    def verdict(self):
        """Return the outcome in a word, with the reason of a skip or an expected failure."""
        for report in self.reports.values():
            if hasattr(report, "wasxfail"):
                return f"xfailed: {report.wasxfail}" if report.skipped else "xpassed"
            if report.skipped:
                return f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
        return "passed"


@dataclass
class Records:
    """The events of all ranks of one launch."""

    tests: dict
    """By node id, then by rank, a RankTest."""
    problems: dict
    """By rank, why it could not collect the tests."""


def record_path(directory, rank):
    """Return the file of a rank's events."""
    return directory / f"rank-{rank}.jsonl"


def stacks_path(directory, rank):
    """Return the file for the stacks that a rank's watchdog dumps."""
    return directory / f"rank-{rank}.stacks"


def read_records(config, directory, size):
    """Read the records of a launch's ranks, however they ended."""
    records = Records(tests=defaultdict(dict), problems={})
    for rank in range(size):
        for event in read_events(record_path(directory, rank)):
            if event["event"] == "problem":
                records.problems[rank] = event["text"]
                continue
            test = records.tests[event["nodeid"]].setdefault(rank, RankTest())
            if event["event"] == "report":
                test.add(restore_report(config, event["report"]))
            elif event["event"] == "finish":
                test.finished = True
                plain = event["plain"].items()
                test.reports |= {when: PlainReport(duration) for when, duration in plain}
    return records


def read_events(path):
    """Return a rank's events, without a line that its death truncated."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def restore_report(config, data):
    """Return the pytest report in a rank's record."""
    report = config.hook.pytest_report_from_serializable(config=config, data=data)
    if isinstance(report.longrepr, list):
        # JSON has no tuples, and pytest requires one for a skip.
        report.longrepr = tuple(report.longrepr)
    return report
