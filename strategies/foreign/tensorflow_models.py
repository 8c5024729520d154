"""TensorFlow without Keras: variables, modules, and the optimizers of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from strategies.foreign.framework import Framework, Note, Undo, preceded


class TensorFlow(Framework):
    """TensorFlow, whose creator scopes tell of variables."""

    name = "TensorFlow"
    module = "tensorflow"
    classes = ("Variable", "Module", "compat.v1.train.Optimizer")
    instead = (
        "outside of the strategy's scope and run, variable.assign(comm.broadcast("
        "variable.numpy())) each variable once, and comm.all_reduce_many([each.numpy() for each in"
        " gradients], 'mean') before they are applied, with comm = collectives.world()"
    )

    def trains(self, thing: Any) -> bool:
        """Trainable variables of floats, modules that have such, optimizers."""
        if isinstance(thing, self.find("Variable")):
            return bool(thing.trainable and (thing.dtype.is_floating or thing.dtype.is_complex))
        if isinstance(thing, self.find("Module")):
            return any(map(self.trains, thing.trainable_variables))
        return True

    def extent(self, thing: Any) -> int:
        """The number of variables."""
        return len(thing.variables) if isinstance(thing, self.find("Module")) else 0

    def told(self, thing: Any) -> str:
        """What it is, with a variable's name and shape."""
        if isinstance(thing, self.find("Variable")):
            return f"Variable {thing.name!r} of shape {thing.shape}"
        what = "module" if isinstance(thing, self.find("Module")) else "optimizer"
        return f"{what} {type(thing).__name__}"

    def watch_steps(self, refuse: Note) -> Undo:
        """By the one method in which TensorFlow 1's optimizers change variables."""
        return preceded(self.find("compat.v1.train.Optimizer"), "apply_gradients", refuse)

    def creation_noted(self, note: Note) -> AbstractContextManager[Any]:
        """TensorFlow's own scope for those who make variables their own way."""

        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            variable = next_creator(**kwargs)
            note(variable)
            return variable

        scope: AbstractContextManager[Any] = self.find("variable_creator_scope")(create)
        return scope
