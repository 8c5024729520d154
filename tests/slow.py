"""Parameters of tests that only `pytest --slow` runs."""

import pytest


def slow(*values):
    """The values of a parameter, each marked slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_but(values, *kept):
    """The values, all marked slow but those to be kept."""
    return [value if value in kept else slow(value)[0] for value in values]
