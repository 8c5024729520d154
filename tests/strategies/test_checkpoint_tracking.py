"""Which states a checkpoint finds in nests, attributes and cycles, and their names."""

import dataclasses
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as draw

from strategies import Variable, metrics, optimizers
from strategies.checkpoint import Checkpoint
from strategies.checkpoint.tracking import find_states
from strategies.core import nest
from tests.strategies.support import lone_strategy, refusal

Pair = namedtuple("Pair", "left right")


class Layer:
    def __init__(self, value):
        self.weights, self.size, self._bias = Variable(value), 3, Variable(value + 0.5)


class Model:
    def __init__(self):
        self.layers = [Layer(1.0), Layer(2.0)]
        self.activation, self.sizes, self.data = np.tanh, [1, 2], np.zeros(3)
        self.strategy, self.library, self.kind = lone_strategy(), np, Layer

    def __call__(self, inputs):
        return inputs


def names(**things):
    return list(find_states(things))


def test_attributes_are_followed_by_name():
    assert names(model=Model()) == [
        "model/layers/0/_bias",
        "model/layers/0/weights",
        "model/layers/1/_bias",
        "model/layers/1/weights",
    ]


def test_nests_are_followed_by_key_index_and_field():
    things = {
        "nest": {"b": [Variable(1), (Variable(2),)], "a": Pair(Variable(3), None), 7: Variable(4)},
        "lone": Variable(5),
    }
    expected = ["lone", "nest/7", "nest/a/left", "nest/b/0", "nest/b/1/0"]
    assert names(**things) == expected


def test_more_than_ten_of_a_kind():
    assert names(rows=[Variable(each) for each in range(11)])[:3] == ["rows/0", "rows/1", "rows/10"]


def test_names_with_slashes_do_not_collide():
    things = {"a": {"b": {"c": Variable(1)}, "b/c": Variable(2), "b~1c": Variable(3)}}
    assert names(**things) == ["a/b/c", "a/b~01c", "a/b~1c"]


def test_a_shared_object_is_found_once_by_its_shortest_path():
    shared = Variable(1.0)
    layers = [shared, shared]
    assert names(model={"layers": layers}, all=layers, z=shared) == ["z"]
    assert names(b=layers, a=[shared]) == ["a/0"]


def test_circles_end():
    parent, child = Layer(1.0), Layer(2.0)
    parent.child, child.parent, parent.me = child, parent, parent
    ring = [parent]
    ring.append(ring)
    assert names(ring=ring) == [
        "ring/0/_bias",
        "ring/0/child/_bias",
        "ring/0/child/weights",
        "ring/0/weights",
    ]


def test_metrics_and_optimizers():
    assert names(loss=metrics.Mean(), optimizer=optimizers.SGD()) == [
        "loss/count",
        "loss/total",
        "optimizer",
    ]


class Own:
    def __init__(self):
        self.hidden = Variable(1.0)

    def saved_tensors(self):
        return {}

    def restore_tensors(self, tensors):
        pass


def test_a_saveable_object_is_not_searched():
    assert names(own=Own()) == ["own"]


@dataclasses.dataclass(slots=True)
class Slotted:
    weights: Variable
    lacking: Variable = dataclasses.field(init=False)


class SlottedChild(Slotted):
    __slots__ = "bias"

    def __init__(self):
        super().__init__(Variable(1.0))
        self.bias = Variable(2.0)


def test_slots_are_attributes_too():
    assert names(a=Slotted(Variable(1.0)), b=SlottedChild()) == ["a/weights", "b/bias", "b/weights"]


def test_the_order_of_keys_and_attributes_does_not_matter():
    one, two = Layer(1.0), Layer(2.0)
    forth = OrderedDict([("x", one), ("y", two), ("z", one)])
    back = OrderedDict(reversed(forth.items()))
    assert names(a=forth) == names(a=back)
    assert find_states({"a": forth})["a/x/weights"].owner is one.weights
    assert find_states({"a": back})["a/x/weights"].owner is one.weights


leaf = draw.sampled_from([None, 1, "text", "variable"])
nests = draw.recursive(
    leaf,
    lambda inner: (
        draw.lists(inner, max_size=3)
        | draw.dictionaries(draw.text("ab/~0", max_size=2) | draw.integers(1, 3), inner, max_size=3)
        | draw.builds(Pair, inner, inner)
    ),
)


@given(nests)
def test_every_variable_of_a_nest_is_found_once(nested):
    made = nest.map_leaves(lambda each: Variable(0) if each == "variable" else each, nested)
    variables = [each for each in nest.leaves(made) if isinstance(each, Variable)]
    found = [state.owner for state in find_states({"nest": [made]}).values()]
    assert len(found) == len(variables)
    assert {id(each) for each in found} == {id(each) for each in variables}


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [5, 2.5, "text", None, np.zeros(3), np.float32(1), len, Layer])
def test_what_can_hold_no_state_is_refused(thing):
    refusal(TypeError, "step is a .*: must be a Variable, or contain one", Checkpoint, step=thing)


def test_empty_nests_and_objects_are_allowed():
    assert names(layers=[], more={}, model=Slotted.__new__(Slotted)) == []


@pytest.mark.parametrize(
    ("thing", "error", "match"),
    [
        ({1.5: Variable(1)}, TypeError, "a/ has the key 1.5: must be a string or an integer"),
        ({True: Variable(1)}, TypeError, "has the key True"),
        ({1: Variable(1), "1": Variable(2)}, ValueError, "a/ has two keys that are '1' as strings"),
        ({Variable}, None, None),
    ],
)
def test_keys_that_have_no_name(thing, error, match):
    if error is None:
        assert names(a=thing) == []
    else:
        refusal(error, match, find_states, {"a": thing})


def test_keys_of_ignored_objects_are_free():
    assert names(a={1.5: 3, ("x",): "text", "w": Variable(1)}) == ["a/w"]


def test_a_set_has_no_order():
    hashable = Own()
    refusal(TypeError, "a is a set, which has no order", find_states, {"a": {hashable}})


def test_the_reserved_name_is_refused():
    refusal(ValueError, "__metadata__ is reserved", Checkpoint, __metadata__=Variable(1))
    assert names(a={"__metadata__": Variable(1)}) == ["a/__metadata__"]


def test_what_is_named_is_an_attribute_too():
    step = Variable(3)
    checkpoint = Checkpoint(step=step, self=[step])
    assert checkpoint.step is step
    assert checkpoint.self == [step]
    refusal(AttributeError, "Checkpoint has no 'other'", getattr, checkpoint, "other")
