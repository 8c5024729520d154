"""Keras 3 on any backend: layers and models, variables, optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strategies.foreign.distributed import strategy_of
from strategies.foreign.framework import Callback, Framework
from strategies.foreign.methods import Undo, call_with, replace_method

# Layers of these modules have no weights, though they define `build`.
_WEIGHTLESS = ("keras.src.layers.preprocessing.", "keras.src.layers.merging.")


class Keras(Framework):
    """Keras has no hooks of its own: two constructors and a method are wrapped instead."""

    name = "Keras"
    module = "keras"
    classes = ("layers.Layer", "Variable", "optimizers.Optimizer")
    by_hand = (
        "In a loop of your own, outside of the strategy's scope and run,"
        " collectives.world().all_reduce_many(gradients, 'mean')"
    )
    inference_mark = "model.trainable = False"

    @property
    def alternative(self) -> str:  # type: ignore[override]  # depends on what Keras was loaded with
        """What a program does instead; by Keras's backend."""
        if not self.compiles:
            return (
                "Keras runs on TensorFlow here: use strategies.tensorflow"
                ".MultiWorkerMirroredStrategy, or start the program with KERAS_BACKEND=torch or"
                f" jax. {self.by_hand}"
            )
        return (
            "make and compile the model in the scope of a strategy whose replicas take each step"
            " together (MultiWorkerMirroredStrategy, MirroredStrategy or CentralStorageStrategy):"
            f" model.compile(optimizer, loss), then model.fit. {self.by_hand}"
        )

    @property
    def compiles(self) -> bool:
        """Whether `compile` in a scope prepares models: not where TensorFlow trains them."""
        return bool(self.find("config.backend")() != "tensorflow")

    def trains(self, thing: Any) -> bool:
        """Trainable float variables, and layers that have such or will have when built.

        Those that a strategy trains in step don't count.
        """
        if strategy_of(thing) is not None:
            return False
        if isinstance(thing, self.find("Variable")):
            is_float = self.find("backend.is_float_dtype")
            return bool(thing.trainable and is_float(thing.dtype))
        if isinstance(thing, self.find("layers.Layer")):
            return any(self._has_weights(layer) for layer in _layers(thing))
        return True

    def _has_weights(self, layer: Any) -> bool:
        if strategy_of(layer) is not None:
            return False
        if layer.trainable_variables:
            return any(strategy_of(each) is None for each in layer.trainable_variables)
        return not layer.built and bool(layer.trainable) and self._builds_weights(type(layer))

    def _builds_weights(self, kind: type) -> bool:
        """Whether an unbuilt layer of this class gets weights of its own when it is built.

        The `build` of models only builds the contained layers.
        """
        defining = next(each for each in kind.__mro__ if "build" in vars(each))
        bases = (self.find("layers.Layer"), self.find("Model"), self.find("Sequential"))
        return defining not in bases and not defining.__module__.startswith(_WEIGHTLESS)

    def components(self, thing: Any) -> Sequence[Any]:
        """The backend's variable of a Keras variable, which isn't marked where Keras' is frozen."""
        return (thing.value,) if isinstance(thing, self.find("Variable")) else ()

    def size(self, thing: Any) -> int:
        """The number of layers."""
        return len(_layers(thing)) if isinstance(thing, self.find("layers.Layer")) else 0

    def describe(self, thing: Any) -> str:
        """Kind, class and name."""
        if isinstance(thing, self.find("Variable")):
            return f"Variable {thing.name!r} of shape {tuple(thing.shape)}"
        if isinstance(thing, self.find("layers.Layer")):
            what = "model" if isinstance(thing, self.find("Model")) else "layer"
            return f"{what} {type(thing).__name__} {thing.name!r}"
        return f"optimizer {type(thing).__name__}"

    def hook_steps(self, refuse: Callback) -> Undo:
        """Wraps `apply`, which every method that applies gradients calls."""
        return call_with(self.find("optimizers.Optimizer"), "apply", refuse)

    def hook_creation(self, record: Callback) -> Undo:
        """Wraps the constructors of layers and of variables."""

        def make_new(original: Any) -> Any:
            def new(kind: type, *args: Any, **kwargs: Any) -> Any:
                layer = original.__func__(kind, *args, **kwargs)
                record(layer)
                return layer

            return staticmethod(new)

        undo_layers = replace_method(self.find("layers.Layer"), "__new__", make_new)
        undo_variables = call_with(self.find("Variable"), "__init__", record, after=True)

        def undo() -> None:
            undo_layers()
            undo_variables()

        return undo


def _layers(layer: Any) -> list[Any]:
    """The layer and its sublayers; none for a layer whose constructor has failed."""
    if getattr(layer, "built", None) is None:
        return []
    return list(layer._flatten_layers())
