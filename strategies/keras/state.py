"""Variables of a model that all ranks share: made equal, averaged or summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from strategies.core.same_error import refuse_differences
from strategies.keras.optimizers import optimizers_of
from strategies.keras.training import Training


def broadcast_state(training: Training, model: Any) -> None:
    """Overwrite the variables of model and optimizers with the chief's. Collective.

    Seed generators stay each rank's own. Raises ValueError on every rank where models differ.
    """
    inner = [each for optimizer in optimizers_of(model) for each in optimizer.variables]
    seeds = {id(generator.state) for generator in _seed_generators(model)}
    found = {id(each): each for each in [*model.variables, *inner] if id(each) not in seeds}
    variables = list(found.values())
    kinds = ", ".join(f"{each.dtype}{list(each.shape)}" for each in variables)
    what = "fit: the ranks' models differ"
    refuse_differences(training.communicator, what, kinds)
    for variable in variables:
        array = copy_of(variable)
        training.communicator.broadcast(array)
        if not training.is_chief:
            variable.assign(array)


def _seed_generators(model: Any) -> Iterable[Any]:
    for layer in model._flatten_layers():
        yield from getattr(layer, "_seed_generators", ())


def average_statistics(training: Training, model: Any) -> None:
    """Make the moving statistics of layers such as BatchNormalization the ranks' mean. Collective.

    Frozen weights are not statistics: they are equal already.
    """
    found = {
        id(variable): variable
        for layer in model._flatten_layers()
        for variable in layer._non_trainable_variables
        if keras.backend.is_float_dtype(variable.dtype)
    }
    if found:
        # In float64, so that the mean of equal values is that value.
        arrays = [copy_of(each).astype(np.float64) for each in found.values()]
        means = training.communicator.all_reduce_many(arrays, "mean")
        for variable, mean in zip(found.values(), means, strict=True):
            variable.assign(mean.astype(copy_of(variable).dtype))


def sum_metrics(training: Training, model: Any) -> None:
    """Replace the metrics' variables by what one process would have counted. Collective."""
    variables = [each for each in model.metrics_variables if each.aggregation in _ADDED]
    sums = training.communicator.all_reduce_many([copy_of(each) for each in variables], "sum")
    for variable, total in zip(variables, sums, strict=True):
        mean = variable.aggregation == "mean"
        variable.assign(total / training.communicator.size if mean else total)


_ADDED = ("sum", "mean", "none")


def average_logs(training: Training, logs: Mapping[str, Any]) -> dict[str, Any]:
    """The mean of the last step's numbers, weighted by rows. Collective."""
    names = sorted(logs)
    weight = training.rows_read
    values = [np.asarray(keras.ops.convert_to_numpy(logs[name]), np.float64) for name in names]
    # A product with 0 would keep NaN.
    weighted = [each * weight if weight else np.zeros_like(each) for each in values]
    total, *sums = training.communicator.all_reduce_many(
        [np.array([float(weight)]), *weighted], "sum"
    )
    means = [each / total[0] for each in sums]
    return dict(zip(names, means, strict=True))


def copy_of(variable: Any) -> Any:
    """A NumPy array with the variable's value."""
    value = variable.value
    if hasattr(value, "read_value"):
        value = value.read_value()  # of TensorFlow's variables, NumPy reads only some kinds
    return np.array(keras.ops.convert_to_numpy(value))


def learning_rates(model: Any) -> Sequence[Any]:
    """The variables of learning rates; schedules have none."""
    rates = [getattr(each, "_learning_rate", None) for each in optimizers_of(model)]
    return [each for each in rates if isinstance(each, keras.Variable)]
