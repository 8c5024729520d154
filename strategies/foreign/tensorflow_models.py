"""TensorFlow without Keras: variables, modules and TensorFlow 1's optimizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from strategies.foreign.framework import Callback, Framework
from strategies.foreign.methods import Undo, call_with


class TensorFlow(Framework):
    """TensorFlow: variables are recorded by its variable creator scopes."""

    name = "TensorFlow"
    module = "tensorflow"
    classes = ("Variable", "Module", "compat.v1.train.Optimizer")
    alternative = (
        "import strategies.tensorflow, and create it in the scope of"
        " strategies.tensorflow.MultiWorkerMirroredStrategy (MirroredStrategy,"
        " CentralStorageStrategy), a tf.distribute.Strategy. In a loop of your own, outside of the"
        " strategy's scope and run, collectives.world().all_reduce_many([each.numpy() for each in"
        " gradients], 'mean')"
    )

    def trains(self, thing: Any) -> bool:
        """Trainable float and complex variables, modules that have such, optimizers."""
        if isinstance(thing, self.find("Variable")):
            return bool(thing.trainable and (thing.dtype.is_floating or thing.dtype.is_complex))
        if isinstance(thing, self.find("Module")):
            return any(map(self.trains, thing.trainable_variables))
        return True

    def size(self, thing: Any) -> int:
        """The number of variables."""
        return len(thing.variables) if isinstance(thing, self.find("Module")) else 0

    def describe(self, thing: Any) -> str:
        """Kind and class; of a variable its name and shape."""
        if isinstance(thing, self.find("Variable")):
            return f"Variable {thing.name!r} of shape {thing.shape}"
        what = "module" if isinstance(thing, self.find("Module")) else "optimizer"
        return f"{what} {type(thing).__name__}"

    def hook_steps(self, refuse: Callback) -> Undo:
        """Wraps the only method in which TensorFlow 1's optimizers change variables."""
        return call_with(self.find("compat.v1.train.Optimizer"), "apply_gradients", refuse)

    def creation_context(self, record: Callback) -> AbstractContextManager[Any]:
        """A `tf.variable_creator_scope`."""

        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            variable = next_creator(**kwargs)
            record(variable)
            return variable

        scope: AbstractContextManager[Any] = self.find("variable_creator_scope")(create)
        return scope
