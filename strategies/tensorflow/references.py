"""TensorFlow's objects as they travel between the coordinator's chief and its workers.

A `tf.function` is sent once, with the models and optimizers that it refers to: each worker traces
its own copy. Variables travel as the names of their values on the servers.
"""

from __future__ import annotations

import sys
from itertools import count
from types import MethodType
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.tf_method_target import TfMethodTarget
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable
from tensorflow.python.util import tf_decorator

from strategies.base.strategy import Strategy as ArrayStrategy
from strategies.coordinator.link import Keep
from strategies.coordinator.packing import StrategyName, pack
from strategies.parameter_server.references import ServedReferences
from strategies.parameter_server.requests import VariableInfo
from strategies.tensorflow.served import Place, ServedVariable


class VariableName(NamedTuple):
    """A variable, by its value on the servers."""

    info: VariableInfo
    name: str
    trainable: bool
    aggregation: tf.VariableAggregation
    unique_id: str
    is_assigned: bool


class FunctionName(NamedTuple):
    """A `tf.function` that the workers keep."""

    number: int


class TensorReferences(ServedReferences):
    """Functions, variables and the strategy of TensorFlow, of which each rank has its own."""

    def __init__(self, tensor_strategy: Any, strategy: ArrayStrategy, **side: Any) -> None:
        super().__init__(strategy, **side)
        self.tensor_strategy = tensor_strategy
        self._exchange = tensor_strategy.extended.exchange
        self._variables: dict[int, ServedVariable] = {}
        self._functions: dict[int, tuple[FunctionName, Any]] = {}
        self._numbers = count()
        self._kept: dict[FunctionName, Any] = {}
        self._errors: dict[FunctionName, BaseException] = {}
        self._packing: list[Any] = []

    def name(self, thing: Any) -> Any:
        """As of every strategy; the chief sends a new function to the workers.

        TypeError for a variable that was created outside of the strategy's scope.
        """
        if thing is self.tensor_strategy:
            return StrategyName()
        if isinstance(thing, ServedVariable):
            return self._name_of_variable(thing)
        if isinstance(thing, tf.types.experimental.PolymorphicFunction):
            return self._name_of_function(thing)
        if isinstance(thing, tf.Tensor) and thing.dtype in (tf.resource, tf.variant):
            raise TypeError(
                f"{thing.name if tf.is_symbolic_tensor(thing) else 'a tensor'} of dtype"
                f" {thing.dtype.name}, as of a lookup table, belongs to one process: make the"
                " table, or the layer that has it, within dataset_fn or the scheduled function"
            )
        if isinstance(thing, BaseResourceVariable):
            raise TypeError(
                f"variable {thing.name!r} was created outside of the scope of"
                f" {type(self.tensor_strategy).__name__}: create it in the scope"
            )
        return super().name(thing)

    def resolve(self, name: Any) -> Any:
        """This process's own object of that name."""
        if isinstance(name, StrategyName):
            return self.tensor_strategy
        if isinstance(name, FunctionName):
            if name in self._errors:
                raise self._errors[name].with_traceback(None)
            return self._kept.get(name) or _LaterFunction(self._kept, name)
        return self._variable(name) if isinstance(name, VariableName) else super().resolve(name)

    def keep(self, name: Any, thing: Any) -> None:
        """Keep a function of the chief's."""
        if isinstance(name, FunctionName):
            self._kept[name] = thing
        else:
            super().keep(name, thing)

    def keep_error(self, name: Any, error: BaseException) -> None:
        """Calls of a function that can't be unpacked fail by the error; others go on."""
        if isinstance(name, FunctionName):
            self._errors[name] = error
        else:
            super().keep_error(name, error)

    def call(self, context: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        """Call the function in the scope, in which it may call `strategy.run`."""
        with self.tensor_strategy.scope():
            return fn(*args, **kwargs)

    def reduce(self, thing: Any) -> Any:
        """Objects of Keras as they are, with their variables' names."""
        if "keras" not in sys.modules:
            return NotImplemented
        from strategies.tensorflow.keras_pickles import reduced

        return reduced(thing)

    def _name_of_variable(self, variable: ServedVariable) -> VariableName:
        place = variable.place
        if place.storage is None:
            self._exchange.serve(place, variable._primary.read_value(), repr(variable.name))
        assert place.storage is not None
        info = place.storage.info
        self._variables.setdefault(info.shards[0].number, variable)
        rules = variable.trainable, variable.aggregation
        return VariableName(info, variable.name, *rules, variable._unique_id, variable.is_assigned)

    def _variable(self, name: VariableName) -> ServedVariable:
        number = name.info.shards[0].number
        if number not in self._variables:
            with tf.init_scope(), tf.device("/cpu:0"):
                copy = ResourceVariable(
                    tf.zeros(name.info.shape, tf.as_dtype(name.info.dtype)),
                    trainable=name.trainable,
                    name=name.name.partition(":")[0],
                )
            made = ServedVariable(self.tensor_strategy, [copy], name.aggregation)
            made.chiefs_id, made.is_assigned = name.unique_id, name.is_assigned
            self._exchange.add(made, Place(self.storage(name.info)))
            self._variables[number] = made
        return self._variables[number]

    def _name_of_function(self, function: Any) -> FunctionName | None:
        if any(function is each for each in self._packing):
            return None
        if id(function) not in self._functions:
            # Named first: it may refer to itself, as a method does by its object.
            name = FunctionName(next(self._numbers))
            self._functions[id(function)] = name, function
            # Without the graphs of the chief, where it may be called as well.
            untraced = function._clone(_method_of(function))
            self._packing.append(untraced)
            try:
                packed = pack(untraced, self)
            except BaseException:
                del self._functions[id(function)]
                raise
            finally:
                self._packing.pop()
            assert self._notify_workers is not None
            self._notify_workers(Keep(name), packed)
        return self._functions[id(function)][0]


def _method_of(function: Any) -> Any:
    """The Python method of an object's `tf.function`, which has weak references to both.

    None of a function, which has its own.
    """
    method = tf_decorator.unwrap(function.python_function)[1]
    target = getattr(method, "__self__", None)
    if not isinstance(target, TfMethodTarget):
        return None
    return MethodType(target.weakrefself_func__(), target.target)


class _LaterFunction:
    """A function within itself, while this worker unpacks it."""

    def __init__(self, kept: dict[FunctionName, Any], name: FunctionName) -> None:
        self._kept, self._name = kept, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kept[self._name](*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._kept[self._name], attribute)
