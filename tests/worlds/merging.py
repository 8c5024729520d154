"""Merge the records of a world's ranks to one pytest report per test."""

from dataclasses import dataclass

import pytest

from tests.worlds.records import stacks_path
from tests.worlds.watchdog import read_stacks

PHASES = ("setup", "call", "teardown")


@dataclass
class CrashLine:
    """The one line of a failure that pytest's short summary shows."""

    message: str

    def __str__(self):
        return self.message


class WorldFailure:
    """A failure in a world, shown in pytest's form: a headline, then titled parts."""

    def __init__(self, headline, parts=()):
        self.reprcrash = CrashLine(headline)
        self.parts = [(title, part) for title, part in parts if part]

    def __str__(self):
        return "\n".join([str(self.reprcrash), *(f"{title}\n{part}" for title, part in self.parts)])

    def toterminal(self, writer):
        """Write the failure in the way that pytest requires of its representations."""
        writer.line(str(self.reprcrash), red=True)
        for title, part in self.parts:
            writer.sep("- ", title)
            if hasattr(part, "toterminal"):
                part.toterminal(writer)
            else:
                writer.line(str(part))


def merge_reports(items, size, records, ending, directory):
    """Return the reports of the tests that a launch completed, by node id."""
    merge = Merge(size, ending, directory)
    reports = {
        item.nodeid: merge.reports_of(item, records.tests[item.nodeid])
        for item in items
        if item.nodeid in records.tests
    }
    if not reports:
        return {item.nodeid: merge.nothing_ran(item, records.problems) for item in items}
    if not ending.succeeded and not any(has_failure(reports[nodeid]) for nodeid in reports):
        last = [item for item in items if item.nodeid in reports][-1]
        reports[last.nodeid] = merge.bad_ending(last)
    return reports


@dataclass
class Merge:
    """The merging of one launch's tests."""

    size: int
    ending: object
    directory: object

    def reports_of(self, item, tests):
        """Return the reports of a test that at least one rank has started."""
        failures = {rank: test.failure for rank, test in tests.items() if test.failure}
        if failures:
            return self.rank_failures(item, failures)
        if any(rank not in tests or not tests[rank].finished for rank in range(self.size)):
            return self.unfinished(item, tests)
        if len({test.verdict().partition(":")[0] for test in tests.values()}) > 1:
            return failed_reports(item, f"the ranks disagree: {verdicts(tests)}")
        return agreed_reports(item, tests)

    def rank_failures(self, item, failures):
        """Return the reports of a test that failed on some ranks."""
        first = min(failures)
        ranks = name_ranks(failures)
        message = first_line(failures[first])
        parts = [(self.title(rank), failure.longrepr) for rank, failure in failures.items()]
        return failed_reports(
            item,
            WorldFailure(f"failed on {ranks} of {self.size}: {message}", parts),
            when=failures[first].when,
            sections=rank_sections(failures),
            duration=max(failure.duration for failure in failures.values()),
        )

    def unfinished(self, item, tests):
        """Return the reports of a test during which the world ended."""
        finished = {rank: test for rank, test in tests.items() if test.finished}
        others = [rank for rank in range(self.size) if rank not in finished]
        headline = f"not finished on {name_ranks(others)} of {self.size}: {self.ending.description}"
        if finished:
            headline += f"; {verdicts(finished)}"
        return failed_reports(item, WorldFailure(headline, [*self.stacks(), self.output()]))

    def nothing_ran(self, item, problems):
        """Return the reports of a test that was never started, nor any other of its launch."""
        headline = f"no test began on {self.size} ranks: {self.ending.description}"
        parts = [(self.title(rank), problem) for rank, problem in problems.items()]
        return failed_reports(item, WorldFailure(headline, parts or [self.output()]))

    def bad_ending(self, item):
        """Return the reports of the last test before a world ended badly, without a failure."""
        headline = f"every rank finished its tests, but {self.ending.description}"
        return failed_reports(item, WorldFailure(headline, [*self.stacks(), self.output()]))

    def title(self, rank):
        """Return the title of a rank's part of a failure."""
        return f"rank {rank} of {self.size}"

    def stacks(self):
        """Return the parts with the ranks' stacks at the watchdogs' alarms."""
        return [
            (f"{self.title(rank)} was here", read_stacks(stacks_path(self.directory, rank)))
            for rank in range(self.size)
        ]

    def output(self):
        """Return the part with the last output."""
        return "the end of the output", self.ending.tail()


def agreed_reports(item, tests):
    """Return the reports of a test with the same outcome on all ranks."""
    reports = []
    for when in PHASES:
        phase = {rank: tests[rank].reports[when] for rank in tests if when in tests[rank].reports}
        if phase:
            example = phase[min(phase)]
            extra = {"wasxfail": example.wasxfail} if hasattr(example, "wasxfail") else {}
            duration = max(report.duration for report in phase.values())
            sections = rank_sections(phase)
            reports.append(
                make_report(
                    item, when, example.outcome, example.longrepr, sections, duration, **extra
                )
            )
    return reports


def failed_reports(item, failure, when="call", sections=(), duration=0.0):
    """Return the reports of a test that failed in one phase: pytest expects the others too."""
    before = [make_report(item, earlier, "passed") for earlier in PHASES[: PHASES.index(when)]]
    after = [make_report(item, "teardown", "passed")] if when != "teardown" else []
    if isinstance(failure, str):
        failure = WorldFailure(failure)
    failed = make_report(item, when, "failed", failure, sections, duration)
    return [*before, failed, *after]


def make_report(item, when, outcome, failure=None, sections=(), duration=0.0, **extra):
    """Return one report of a test, as if it had run here."""
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=outcome,
        longrepr=failure,
        when=when,
        sections=list(sections),
        duration=duration,
        **extra,
    )


def rank_sections(reports):
    """Return the captured output of some ranks, with titles that name them."""
    return [
        (f"{title} (rank {rank})", text)
        for rank, report in reports.items()
        for title, text in report.sections
    ]


def has_failure(reports):
    """Tell whether any of a test's reports failed."""
    return any(report.failed for report in reports)


def first_line(report):
    """Return the cause of a failure, in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines()
    return lines[0] if lines else "no message"


def name_ranks(ranks):
    """Return `rank 1` or `ranks 0, 2`."""
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, sorted(ranks)))}"


def verdicts(tests):
    """Return the outcomes by rank."""
    ranks = {}
    for rank, test in sorted(tests.items()):
        ranks.setdefault(test.verdict(), []).append(rank)
    return "; ".join(f"{name_ranks(ranks[verdict])} {verdict}" for verdict in ranks)
