"""torch's own tests of a backend: a dozen always, all of them where slow tests run."""

import importlib.util

import pytest

from tests.frameworks.torch_backend import own_suite


@pytest.fixture(autouse=True)
def _needs_its_packages(torch):
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("expecttest isn't installed, which torch's own tests import")


def failed(found):
    return {name: each["why"] for name, each in found.items() if each["outcome"] == "fail"}


def test_a_dozen_of_torchs_own_tests():
    found = own_suite.run("collectives", 2, own_suite.FEW, limit=300)
    assert failed(found) == {}
    assert own_suite.counts(found) == {"pass": len(own_suite.FEW)}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_of_torchs_own_tests(ranks):
    found = own_suite.run("collectives", ranks)
    assert failed(found) == {}
    assert own_suite.counts(found)["pass"] >= 94
