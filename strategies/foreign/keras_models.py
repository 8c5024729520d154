"""Keras 3 on any backend: layers and models, variables, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from strategies.foreign.framework import Framework, Note, Undo, preceded, replaced

# Layers of these families have no weights, though they define `build`.
_WEIGHTLESS = ("keras.src.layers.preprocessing.", "keras.src.layers.merging.")


class Keras(Framework):
    """Keras, which has no hooks: two constructors and a method are wrapped while it is watched."""

    name = "Keras"
    module = "keras"
    classes = ("layers.Layer", "Variable", "optimizers.Optimizer")
    instead = (
        "outside of the strategy's scope and run, model.set_weights([comm.broadcast(each) for each"
        " in model.get_weights()]) once, and gradients = comm.all_reduce_many(gradients, 'mean')"
        " on NumPy arrays before optimizer.apply(gradients), in a loop of your own, with"
        " comm = collectives.world()"
    )
    reading = "model.trainable = False"

    def trains(self, thing: Any) -> bool:
        """Trainable variables of floats, and layers that have such or will once they are built."""
        if isinstance(thing, self.find("Variable")):
            is_float = self.find("backend.is_float_dtype")
            return bool(thing.trainable and is_float(thing.dtype))
        if isinstance(thing, self.find("layers.Layer")):
            return any(self._weighs(layer) for layer in _parts(thing))
        return True

    def _weighs(self, layer: Any) -> bool:
        if layer.trainable_variables:
            return True
        return not layer.built and bool(layer.trainable) and self._builds_weights(type(layer))

    def _builds_weights(self, kind: type) -> bool:
        """Whether a layer of this class, as yet without weights, gets some when it is built.

        A model's own `build` only builds the layers in it.
        """
        builds = next(each for each in kind.__mro__ if "build" in vars(each))
        plain = builds in (self.find("layers.Layer"), self.find("Model"), self.find("Sequential"))
        return not plain and not builds.__module__.startswith(_WEIGHTLESS)

    def held(self, thing: Any) -> Sequence[Any]:
        """A variable's value, a variable of the backend: it doesn't learn that it is frozen."""
        return (thing.value,) if isinstance(thing, self.find("Variable")) else ()

    def extent(self, thing: Any) -> int:
        """The number of layers."""
        return len(_parts(thing)) if isinstance(thing, self.find("layers.Layer")) else 0

    def told(self, thing: Any) -> str:
        """What it is, its class and its name."""
        if isinstance(thing, self.find("Variable")):
            return f"Variable {thing.name!r} of shape {tuple(thing.shape)}"
        if isinstance(thing, self.find("layers.Layer")):
            what = "model" if isinstance(thing, self.find("Model")) else "layer"
            return f"{what} {type(thing).__name__} {thing.name!r}"
        return f"optimizer {type(thing).__name__}"

    def watch_steps(self, refuse: Note) -> Undo:
        """By the method that every way of applying gradients calls."""
        return preceded(self.find("optimizers.Optimizer"), "apply", refuse)

    def watch_creation(self, note: Note) -> Undo:
        """By the constructors of layers, which are built later, and of variables."""

        def make_new(original: Any) -> Any:
            def new(kind: type, *args: Any, **kwargs: Any) -> Any:
                layer = original.__func__(kind, *args, **kwargs)
                note(layer)
                return layer

            return staticmethod(new)

        def make_init(original: Any) -> Callable[..., None]:
            @wraps(original)
            def init(variable: Any, *args: Any, **kwargs: Any) -> None:
                original(variable, *args, **kwargs)
                note(variable)

            return init

        undo_layers = replaced(self.find("layers.Layer"), "__new__", make_new)
        undo_variables = replaced(self.find("Variable"), "__init__", make_init)

        def undo() -> None:
            undo_layers()
            undo_variables()

        return undo


def _parts(layer: Any) -> list[Any]:
    """The layer and those in it; none of one whose own constructor has failed."""
    if getattr(layer, "built", None) is None:
        return []
    return list(layer._flatten_layers())
