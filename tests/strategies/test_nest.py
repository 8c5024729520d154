"""Nests: their leaves, and nests with replaced leaves."""

from collections import OrderedDict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.core import nest

Point = namedtuple("Point", "x y")
Rect = namedtuple("Rect", "x y")


def test_dicts_go_by_key_and_the_rest_by_place():
    value = {"b": [1, (2, 3)], "a": Point(4, {10: 5, 9: 6})}
    assert nest.leaves(value) == [4, 5, 6, 1, 2, 3]
    assert nest.leaves({"a": value["a"], "b": value["b"]}) == nest.leaves(value)


def test_packing_keeps_types_and_the_order_of_keys():
    value = {"b": [1, (2, 3)], "a": Point(4, {10: 5, 9: 6}), "c": [], "d": ()}
    result = nest.map_leaves(lambda leaf: -leaf, value)
    assert result == {"b": [-1, (-2, -3)], "a": Point(-4, {10: -5, 9: -6}), "c": [], "d": ()}
    assert list(result) == ["b", "a", "c", "d"]
    assert type(result["a"]) is Point
    assert type(result["b"][1]) is tuple


@pytest.mark.parametrize("leaf", [5, None, "text", np.arange(3), {1, 2}, b"bytes", range(3)])
def test_everything_else_is_a_leaf(leaf):
    assert nest.leaves(leaf)[0] is leaf
    assert nest.structure(leaf) == "*"
    assert nest.map_leaves(id, leaf) == id(leaf)


@pytest.mark.parametrize("mapping", [OrderedDict(b=1, a=2), MappingProxyType({"b": 1, "a": 2})])
def test_other_mappings_become_dicts(mapping):
    assert nest.leaves(mapping) == [2, 1]
    assert nest.map_leaves(str, mapping) == {"b": "1", "a": "2"}


def test_keys_of_different_types_have_an_order():
    assert nest.leaves({1: "one", "1": "text", None: "none"}) == ["none", "one", "text"]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "a": 4}, True),
        ([1, [2]], [[1], 2], False),
        ([1], (1,), False),
        ([1], [[1]], False),
        ([], {}, False),
        ([], (), False),
        ({"1": 1}, {1: 1}, False),
        ({"a": 1}, {"b": 1}, False),
        (Point(1, 2), (1, 2), False),
        (Point(1, 2), Rect(1, 2), False),
        (Point(1, 2), Point(3, 4), True),
        ((1,), 1, False),
    ],
)
def test_structures(one, other, equal):
    assert (nest.structure(one) == nest.structure(other)) is equal


nests = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Point, inner, inner)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
    ),
)


@given(nests)
def test_packing_the_leaves_gives_the_nest(value):
    assert nest.pack_like(value, nest.leaves(value)) == value
    flat = [object() for _ in nest.leaves(value)]
    packed = nest.pack_like(value, flat)
    assert nest.leaves(packed) == flat
    assert nest.structure(packed) == nest.structure(value)
