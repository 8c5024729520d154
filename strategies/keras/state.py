"""Variables of a model that all ranks share: made equal, averaged or summed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from collectives import Communicator
from collectives.consistency.uncaught import raised_on_all
from strategies.core.same_error import compare, refuse_differences
from strategies.input.batches import digest_of
from strategies.keras.optimizers import optimizers_of
from strategies.keras.training import Training


def broadcast_state(training: Training, model: Any, *, optimizers: bool = True) -> None:
    """Overwrite the variables of the model, and of its optimizers, with the chief's. Collective.

    Seed generators stay each rank's own. Raises ValueError on every rank where models differ.
    """
    own = optimizers_of(model) if optimizers else []
    inner = [each for optimizer in own for each in optimizer.variables]
    seeds = {id(generator.state) for generator in _seed_generators(model)}
    found = {id(each): each for each in [*model.variables, *inner] if id(each) not in seeds}
    variables = list(found.values())
    trained = {id(each) for each in model.trainable_variables}
    kinds = ", ".join(
        f"{each.dtype}{list(each.shape)}{' trained' * (id(each) in trained)}" for each in variables
    )
    what = "the ranks' models differ"
    refuse_differences(training.communicator, what, kinds)
    for variable in variables:
        array = copy_of(variable)
        training.communicator.broadcast(array)
        # On the chief as well: with JAX, two may share a buffer, which a step can't donate twice.
        variable.assign(array)


LOST = (
    "the model's variables have no values, since a step or a callback of a loop has failed: make"
    " and compile the model again, then load its weights"
)


def refuse_lost_values(training: Training, model: Any) -> None:
    """ValueError on every rank where any has lost values of the model. Collective, with JAX."""
    if keras.config.backend() == "jax":
        lost = np.array(has_lost_values(training, model))
        if training.communicator.all_reduce(lost, "max"):
            raise raised_on_all(ValueError(LOST), training.communicator.rank)


def has_lost_values(training: Training, model: Any) -> bool:
    """Whether variables of the model have no values on this rank, as after a failed step of JAX.

    Keras takes the values from the variables before a loop's first step, and returns them at its
    end. A step deletes them, as it does the arrays that are donated to it.
    """
    if keras.config.backend() != "jax":
        return False
    if training.in_epoch:
        model.jax_state_sync()
    else:
        # Of a call that has failed: Keras might give it to the variables later.
        model._jax_state = None
    inner = [each for optimizer in optimizers_of(model) for each in optimizer.variables]
    return any(
        _is_lost(variable._value)
        for variable in [*model.variables, *model.metrics_variables, *inner]
    )


def _is_lost(array: Any) -> bool:
    """Whether JAX has deleted the array, or what computes it has failed."""
    if array is None or array.is_deleted():
        return True
    try:
        array.block_until_ready()
    except (RuntimeError, ValueError):
        return True
    return False


def _seed_generators(model: Any) -> Iterable[Any]:
    for layer in model._flatten_layers():
        yield from getattr(layer, "_seed_generators", ())


def refuse_different_weights(
    training: Training, model: Any, when: str, values: Sequence[Any] | None = None
) -> None:
    """Raise ValueError on every rank where their trainable weights differ. Collective.

    values: those of the weights, where the variables don't hold them.
    """
    variables = model.trainable_variables
    values = [each.value for each in variables] if values is None else values
    digests = [digest_of(keras.ops.convert_to_numpy(each)) for each in values]
    text = hashlib.blake2b(" ".join(digests).encode(), digest_size=16).hexdigest()
    reports = compare(training.communicator, "weights: ", text, digests)
    if reports is None:
        return
    numbers = list(map(len, reports))
    if len(set(numbers)) > 1:
        error = ValueError(f"fit: the ranks train different numbers of weights {when}: {numbers}")
        raise raised_on_all(error, training.communicator.rank)
    differ = [len(set(each)) > 1 for each in zip(*reports, strict=True)]
    error = ValueError(
        f"fit: the ranks' weights differ {when}: {variables[differ.index(True)].path!r} is the"
        f" first of {sum(differ)}. Gradients are averaged by the optimizers of Keras that are"
        " attributes of the model or of its layers, also in lists and dictionaries. For other"
        " updates, average with strategy.communicator.all_reduce_many(gradients, 'mean')"
    )
    raise raised_on_all(error, training.communicator.rank)


def statistics_of(model: Any) -> list[Any]:
    """The variables of layers that no gradient changes, such as those of BatchNormalization."""
    found = {
        id(variable): variable
        for layer in model._flatten_layers()
        for variable in layer._non_trainable_variables
    }
    return list(found.values())


Starts = Mapping[int, Any]
"""The values that were equal on all ranks, by the variable's id."""


def starts_of(model: Any) -> Starts:
    """The values from which each rank adds to those variables that are sums."""
    return {id(each): copy_of(each) for each in statistics_of(model) if each.aggregation == "sum"}


def average_statistics(training: Training, model: Any, starts: Starts) -> None:
    """Make the layers' statistics equal on all ranks, by their `aggregation`. Collective.

    "sum": what all ranks have added. "mean", and "none" for floats: the mean, rounded for integers.
    "only_first_replica", and "none" for other dtypes: the chief's. Frozen weights are equal.
    """
    sums, means, chiefs = [], [], []
    for each in statistics_of(model):
        number = keras.backend.is_float_dtype(each.dtype)
        kind = each.aggregation
        if kind == "sum" and id(each) in starts:
            sums.append(each)
        elif kind == "mean" or (number and kind != "only_first_replica"):
            means.append(each)
        else:
            chiefs.append(each)
    communicator = training.communicator
    # In float64, so that the mean of equal values is that value.
    own = [copy_of(each).astype(np.float64) for each in means]
    for variable, mean in _reduced(communicator, means, own, "mean"):
        number = keras.backend.is_float_dtype(variable.dtype)
        variable.assign((mean if number else np.rint(mean)).astype(copy_of(variable).dtype))
    added = [copy_of(each) - starts[id(each)] for each in sums]
    for variable, total in _reduced(communicator, sums, added, "sum"):
        variable.assign(starts[id(variable)] + total)
    for variable in chiefs:
        variable.assign(communicator.broadcast(copy_of(variable)))


def _reduced(
    communicator: Communicator, variables: Sequence[Any], arrays: Sequence[Any], op: str
) -> Iterable[tuple[Any, Any]]:
    results = communicator.all_reduce_many(arrays, op) if arrays else []
    return zip(variables, results, strict=True)


def sum_metrics(training: Training, model: Any) -> None:
    """Replace the metrics' variables by what one process would have counted. Collective."""
    variables = [each for each in model.metrics_variables if each.aggregation in _ADDED]
    sums = training.communicator.all_reduce_many([copy_of(each) for each in variables], "sum")
    for variable, total in zip(variables, sums, strict=True):
        mean = variable.aggregation == "mean"
        variable.assign(total / training.communicator.size if mean else total)
        if not mean:
            object.__setattr__(variable, _SUM, total)


def metric_results(model: Any) -> dict[str, Any]:
    """The metrics' results, without that for the loss if the model's steps don't update it.

    Those of `compile` are there by their own names, and by the name of what holds them.
    """
    results: dict[str, Any] = model.get_metrics_result()
    for metric in model.metrics:
        if isinstance(result := metric.result(), dict):
            results[metric.name] = result
    tracker = model._loss_tracker
    if tracker is not None and not copy_of(tracker.count).any():
        names = [each.name for each in model.metrics if each is not tracker]
        if tracker.name not in names:
            results.pop(tracker.name, None)
    return results


def divide_sums(training: Training, model: Any) -> None:
    """Where metrics go on from sums of all ranks, leave each rank a part, so that they count once.

    Not where they were reset.
    """
    size, rank = training.communicator.size, training.communicator.rank
    for variable in model.metrics_variables:
        total = vars(variable).pop(_SUM, None)
        if total is not None:
            value = copy_of(variable)
            kept = value == total
            if kept.any():
                whole = total.dtype.kind in "iu"
                part = total // size + (rank < total % size) if whole else total / size
                variable.assign(np.where(kept, part, value))


_ADDED = ("sum", "mean", "none")
_SUM = "_sum_of_ranks"
"""The attribute of a metric's variable that has the last sum."""


def average_logs(training: Training, logs: Mapping[str, Any]) -> dict[str, Any]:
    """The mean of the last step's numbers, weighted by rows. Collective."""
    numbers = keras.tree.flatten(logs)
    weight = training.rows_read
    values = [np.asarray(keras.ops.convert_to_numpy(each), np.float64) for each in numbers]
    # A product with 0 would keep NaN.
    weighted = [each * weight if weight else np.zeros_like(each) for each in values]
    total, *sums = training.communicator.all_reduce_many(
        [np.array([float(weight)]), *weighted], "sum"
    )
    means: dict[str, Any] = keras.tree.pack_sequence_as(logs, [each / total[0] for each in sums])
    return means


def finish_step(logs: Any) -> None:
    """Raise the error of JAX's program that computes them, before a call that others don't make."""
    if keras.config.backend() == "jax":
        from strategies.keras.jax_gradients import finish

        finish(logs)


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
