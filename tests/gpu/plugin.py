"""Tests marked `gpu`: skipped where there is no GPU, and listed at the end as not run."""

from collections import Counter

import pytest

from tests.gpu.problem import gpu_problem
from tests.worlds.merging import make_report

NOT_RUN = pytest.StashKey()


# After the worlds' parent, so that the hooks registered here run before it.
@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.stash[NOT_RUN] = Counter()
    config.pluginmanager.register(SkippedWorlds(), "gpu-skipped-worlds")


# After -k and -m; before the deselection of world tests, which are listed all the same.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    wanted = [item for item in items if is_gpu_test(item)]
    if wanted and gpu_problem() is not None:
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason=gpu_problem()))
        config.stash[NOT_RUN].update(item.nodeid.partition("[")[0] for item in wanted)


def pytest_terminal_summary(terminalreporter, config):
    names = config.stash[NOT_RUN]
    if names:
        terminalreporter.section("not run on a GPU")
        terminalreporter.write_line(f"not run, for want of a GPU: {names.total()}")
        for name, count in names.items():
            terminalreporter.write_line(f"  {name}" + (f" ({count})" if count > 1 else ""))


def is_gpu_test(item):
    """Return whether a test needs a GPU."""
    return item.get_closest_marker("gpu") is not None


class SkippedWorlds:
    """Skips world tests where there is no GPU, without starting a world."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        worlds = item.config.pluginmanager.has_plugin("worlds-parent")
        is_world_test = item.get_closest_marker("mpi") is not None
        if not (worlds and is_world_test and is_gpu_test(item)) or gpu_problem() is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        path, line, _ = item.location
        skipped = (path, (line or 0) + 1, f"Skipped: {gpu_problem()}")
        for report in (
            make_report(item, "setup", "skipped", skipped),
            make_report(item, "teardown", "passed"),
        ):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
