"""Steps of Keras's trainers on a rank's piece of a batch, which may have no rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from strategies.keras.seeds import replica_seeds
from strategies.keras.shares import length_of
from strategies.keras.training import Training

Step = Callable[..., Any]


def steps_of(model: Any, training: Training) -> dict[str, Step]:
    """Replacements of the model's steps.

    With no rows the step runs on a row of zeros, so that it takes part in the ranks' reductions,
    and everything but the reduced gradients is discarded.
    """
    stateless = keras.config.backend() == "jax"
    train, test = (_train_in_jax, _test_in_jax) if stateless else (_step, _step)
    predict = _predict_in_jax if stateless else _predict
    kind = type(model)
    return {
        "train_step": _with_own_seeds(training, _counting(model, training, kind.train_step, train)),
        "test_step": _counting(model, training, kind.test_step, test),
        "predict_step": _counting(model, training, kind.predict_step, predict),
    }


def _with_own_seeds(training: Training, step: Step) -> Step:
    def seeded(*arguments: Any) -> Any:
        with replica_seeds(training.communicator.rank):
            return step(*arguments)

    return seeded


def _counting(model: Any, training: Training, step: Step, on_no_rows: Step) -> Step:
    def counted(*arguments: Any) -> Any:
        *state, data = arguments
        before, training.rows = training.rows, length_of(data)
        try:
            if training.rows:
                return step(model, *state, data)
            return on_no_rows(model, step, *state, row_of_zeros(data))
        finally:
            training.rows = before

    return counted


def row_of_zeros(data: Any) -> Any:
    """One row of zeros for every array of a nest, whose dtype it has."""

    def make(array: Any) -> Any:
        if array is None:
            return None
        return keras.ops.zeros((1, *array.shape[1:]), keras.backend.standardize_dtype(array.dtype))

    return keras.tree.map_structure(make, data)


def _step(model: Any, step: Step, data: Any) -> Any:
    """Metrics and statistics stay as they were."""
    every, of_weights = model.non_trainable_variables, _of_weights(model)
    statistics = [each for n, each in enumerate(every) if n not in of_weights]
    variables = [*model.metrics_variables, *statistics]
    values = [keras.ops.copy(each.value) for each in variables]
    logs = step(model, data)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return logs


def _of_weights(model: Any) -> set[int]:
    """The positions of non-trainable variables that follow from weights alone, not from rows.

    The weights of the next step depend on them.
    """
    found = {
        id(variable)
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.SpectralNormalization)
        for variable in layer._non_trainable_variables
    }
    return {n for n, each in enumerate(model.non_trainable_variables) if id(each) in found}


def _predict(model: Any, step: Step, data: Any) -> Any:
    return _no_rows(step(model, data))


def _train_in_jax(model: Any, step: Step, state: Any, data: Any) -> Any:
    logs, (trainable, statistics, optimizer, _) = step(model, state, data)
    of_weights = _of_weights(model)
    kept = [
        new if n in of_weights else old
        for n, (old, new) in enumerate(zip(state[1], statistics, strict=True))
    ]
    return logs, (trainable, kept, optimizer, state[3])


def _test_in_jax(model: Any, step: Step, state: Any, data: Any) -> Any:
    logs, _ = step(model, state, data)
    return logs, state


def _predict_in_jax(model: Any, step: Step, state: Any, data: Any) -> Any:
    outputs, _ = step(model, state, data)
    return _no_rows(outputs), state[1]


def _no_rows(outputs: Any) -> Any:
    return keras.tree.map_structure(lambda each: each[:0], outputs)


@contextmanager
def errors_as_raised() -> Iterator[None]:
    """A context in which errors of collective calls in JAX's programs are raised as themselves."""
    if keras.config.backend() != "jax":
        yield
        return
    from collectives.jax.host_calls import original_errors, raise_original

    with original_errors():
        try:
            yield
        except TypeError as error:
            # Keras's `fit` ends training then, too, and fails for lack of the variables' values.
            raise_original(error.__context__)
            raise
