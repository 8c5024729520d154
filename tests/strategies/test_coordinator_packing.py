"""Functions, values and exceptions as messages between processes."""

import inspect
import pickle
import subprocess
import sys

import numpy as np
import pytest

from collectives.messaging.remote_error import Failure, rebuild
from strategies.coordinator.packing import pack, pack_copy, unpack
from strategies.coordinator.values import RemoteValue
from strategies.coordinator.worker import describe_failure
from strategies.errors import OutOfRangeError, RemoteError
from tests.strategies.posts import PlainReferences

PLAIN = PlainReferences()


class Places:
    """The number 7.5 belongs to the rank."""

    def __init__(self, own):
        self.own = own

    def name(self, thing):
        return "own" if thing == 7.5 else None

    def reduce(self, thing):
        return NotImplemented

    def resolve(self, name):
        assert name == "own"
        return self.own


def test_a_function_takes_along_what_it_refers_to_as_it_is_now():
    held = [1, 2]
    array = np.arange(3.0)
    packed = pack_copy(lambda: (held, array * 2), PLAIN)
    held.append(3)
    array[:] = 0
    values, doubled = unpack(packed, PLAIN)()
    assert values == [1, 2]
    assert doubled.tolist() == [0, 2, 4]


def test_a_copied_function_has_its_source():
    def outer():
        return lambda: "inner"

    copy = unpack(pack(outer, PLAIN), PLAIN)
    assert (copy()(), inspect.getsource(copy)) == ("inner", inspect.getsource(outer))
    assert inspect.getsource(copy()) == inspect.getsource(outer())


def test_a_function_of_a_program_runs_in_another_process():
    program = """
import sys
from strategies.coordinator.packing import pack
from tests.strategies.posts import PlainReferences
scale = 3
def triple(number): return scale * number
sys.stdout.buffer.write(pack(triple, PlainReferences())[0])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert unpack([np.frombuffer(ended.stdout, np.uint8)], PLAIN)(14) == 42


def test_arrays_are_unpacked_without_copies_and_writable():
    large, strided = np.arange(1000.0), np.arange(20)[::2]
    parts = pack({"large": large, "rest": (strided, "text")}, PLAIN)
    assert any(np.shares_memory(part, large) for part in parts)
    received = [part.copy() for part in parts]
    back = unpack(received, PLAIN)
    np.testing.assert_array_equal(back["large"], large)
    np.testing.assert_array_equal(back["rest"][0], strided)
    assert back["rest"][1] == "text"
    assert any(np.shares_memory(part, back["large"]) for part in received)
    back["large"][0] = 5


def test_objects_of_a_rank_are_sent_by_name():
    packed = pack([7.5, {"deep": (7.5, 8.5)}], Places("chief's"))
    assert unpack(packed, Places("mine")) == ["mine", {"deep": ("mine", 8.5)}]


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: lambda: value])
def test_a_remote_value_does_not_travel(wrap):
    with pytest.raises(ValueError, match="fetch it first"):
        pack(wrap(RemoteValue()), PLAIN)


class OddError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class DetailedError(Exception):
    """An exception with more state than its arguments."""

    def __init__(self, text):
        super().__init__(text)
        self.detail = [1, 2]


def failure_of(error):
    try:
        raise error
    except BaseException as caught:
        return describe_failure(caught, "worker 1")


@pytest.mark.parametrize(
    "error", [KeyError("x"), DetailedError("y"), SystemExit(3), OSError(2, "no")]
)
def test_an_exception_is_rebuilt_as_what_it_is(error):
    back = rebuild(failure_of(error))
    assert (type(back), back.args, vars(back)) == (type(error), error.args, vars(error))
    text = str(back.__cause__)
    assert text.startswith("on worker 1:\nTraceback")
    assert "failure_of" in text


def test_an_exception_that_cannot_be_unpickled_is_described():
    class LockedError(Exception):
        def __reduce__(self):
            raise TypeError("no")

    class ChangingError(Exception):
        def __reduce__(self):
            return ValueError, ("another",)

    for error in (OddError(1, 2), LockedError("well"), ChangingError("well")):
        back = rebuild(failure_of(error))
        assert type(back) is RemoteError
        assert str(back) == f"{type(error).__name__}: {error}"


def test_an_exception_of_the_main_program_is_described():
    """Its class exists only there, but cloudpickle sends it by value."""
    program = """
import sys, pickle
from strategies.coordinator.worker import describe_failure
class Own(Exception): pass
sys.stdout.buffer.write(pickle.dumps(tuple(describe_failure(Own("text"), "worker 1"))))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    back = rebuild(Failure(*pickle.loads(ended.stdout)))
    assert (type(back).__name__, str(back)) == ("Own", "text")


def test_the_end_of_an_iterator_becomes_an_ordinary_error():
    def take():
        return next(iter([]))

    try:
        take()
    except StopIteration as error:
        back = rebuild(describe_failure(error, "worker 1"))
    assert type(back) is OutOfRangeError
    assert "in take" in str(back.__cause__)
