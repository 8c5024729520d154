"""Which tests need a world of ranks, the world's sizes, and which are available here."""

import argparse

import pytest

DEFAULT_SIZES = (1, 2, 3)
SLOW_SIZES = (1, 2, 3, 4, 5, 7, 8)


def parse_sizes(text):
    """Return the world sizes in a text such as `2,3`."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected world sizes like 2,3, not {text!r}")
    return sizes


def is_world_test(node):
    """Return whether a test needs a world of ranks."""
    return node.get_closest_marker("mpi") is not None


def world_size_of(item):
    """Return the size of the world that a test needs, or 0 for an ordinary test."""
    if not is_world_test(item):
        return 0
    if not hasattr(item, "callspec"):
        raise pytest.UsageError(
            f"{item.nodeid} is marked mpi but cannot be parametrised: make it a plain function"
        )
    return item.callspec.params["world_size"]


def sizes_to_generate(node, offered, slow):
    """Return the world sizes to parametrise a test with.

    `offered` may be None: those of the test's mark then, without the larger ones unless slow tests
    are wanted; the first of the mark where all are larger.
    """
    mark = node.get_closest_marker("ranks")
    if mark is None:
        return offered or (SLOW_SIZES if slow else DEFAULT_SIZES)
    if not mark.args or not all(isinstance(size, int) for size in mark.args):
        raise pytest.UsageError(
            f"{node.nodeid}: the ranks mark takes world sizes, as in ranks(2, 3)"
        )
    if offered is None:
        usual = [size for size in mark.args if slow or size in DEFAULT_SIZES]
        return usual or mark.args[:1]
    # A test that no offered world suits is generated all the same, to be counted and left out.
    return [size for size in mark.args if size in offered] or mark.args[:1]


class Selection:
    """The plugin that generates a test per world size, orders them, and reports deselected ones."""

    def __init__(self, offered, only_world_tests, slow):
        self.offered = offered
        self.only_world_tests = only_world_tests
        self.slow = slow
        self.left_out = 0
        self.slow_left_out = 0

    # Last, so that `3ranks` ends the node id, after the test's own parameters.
    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc):
        if not is_world_test(metafunc.definition):
            return
        sizes = sizes_to_generate(metafunc.definition, self.offered, self.slow)
        if "world_size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world_size")
        names = ["1rank" if size == 1 else f"{size}ranks" for size in sizes]
        metafunc.parametrize("world_size", sizes, ids=names, indirect=True, scope="session")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        slow = [item for item in items if not self.slow and item.get_closest_marker("slow")]
        self.slow_left_out = len(slow)
        deselect(config, items, set(slow))
        sizes = {item: world_size_of(item) for item in items}
        unsuited = [i for i in items if self.offered and sizes[i] and sizes[i] not in self.offered]
        self.left_out = len(unsuited)
        ordinary = [item for item in items if self.only_world_tests and not sizes[item]]
        deselect(config, items, {*unsuited, *ordinary})
        for item in items:
            if sizes[item]:
                # The watchdogs of the ranks limit it; in the parent, it may wait for a whole world.
                item.add_marker(pytest.mark.timeout(0))
        items.sort(key=sizes.get)

    def pytest_terminal_summary(self, terminalreporter):
        if self.left_out:
            offered = ", ".join(map(str, self.offered))
            terminalreporter.write_line(
                f"{self.left_out} mpi tests left out: "
                f"their ranks marks exclude the world sizes offered here ({offered})",
                yellow=True,
            )
        if self.slow_left_out:
            terminalreporter.write_line(
                f"slow tests left out: {self.slow_left_out} (--slow runs them)"
            )


def deselect(config, items, unwanted):
    """Deselect tests of a collection, as pytest's own -k does."""
    if unwanted:
        config.hook.pytest_deselected(items=[item for item in items if item in unwanted])
        items[:] = [item for item in items if item not in unwanted]
