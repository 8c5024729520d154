"""Methods of other libraries are replaced by several threads and scopes, which end in any order."""

import pytest

from strategies.foreign.methods import replace_method


class Model:
    def compile(self):
        return ["original"]


def adding(name):
    def make(original):
        return lambda model: [name, *original(model)]

    return make


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_replacements_end_in_any_order(order):
    original = Model.compile
    names = ["first", "second", "third"]
    undos = [replace_method(Model, "compile", adding(name)) for name in names]
    left = names.copy()
    for place in order:
        assert Model().compile() == [*reversed(left), "original"]
        undos[place]()
        left.remove(names[place])
    assert Model.compile is original
