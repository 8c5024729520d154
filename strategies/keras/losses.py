"""Losses that are sums, whose gradients' mean over the ranks isn't that of the whole batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np

from collectives.consistency.uncaught import raised_on_all
from strategies.keras.training import Training

log = logging.getLogger("strategies")


def check_losses(model: Any, training: Training) -> None:
    """Raise ValueError for a loss of Keras whose mean over the ranks isn't the whole batch's."""
    for loss in keras.tree.flatten(model.loss) if model.loss is not None else ():
        reduction = getattr(loss, "reduction", None)
        if reduction == "mean_with_sample_weight" and training.communicator.size > 1:
            raise ValueError(
                f"loss {loss.name!r} has reduction='mean_with_sample_weight': must be"
                " 'sum_over_batch_size', since each rank would divide by its own samples' weights"
            )
        if training.reduces and reduction == "sum":
            raise ValueError(
                f"loss {loss.name!r} has reduction='sum': must be 'sum_over_batch_size', since"
                " gradients are averaged over the ranks"
            )
    if not training.reduces:
        from strategies.keras.tensorflow_steps import has_sums

        has_sums(model)  # raises where some are sums and others means


def checked_loss(model: Any, training: Training) -> dict[str, Callable[..., Any]]:
    """A replacement of `compute_loss`, which checks the model's only loss, if the user wrote it.

    Raises ValueError on every rank in the first step if the loss is a sum over the rows.
    """
    loss, kind = model.loss, type(model)
    function = loss.call if isinstance(loss, keras.losses.Loss) else loss
    if not callable(function) or type(loss).__module__.startswith("keras."):
        # The check of an earlier loss ends with that.
        checks = getattr(vars(model).get("compute_loss"), "checks_loss", False)
        return {"compute_loss": partial(kind.compute_loss, model)} if checks else {}
    name = getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__)
    checked = False

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        _, y, predicted = (*args, None, None, None)[:3]
        y, predicted = kwargs.get("y", y), kwargs.get("y_pred", predicted)
        arrays = hasattr(y, "shape") and hasattr(predicted, "shape")
        if not checked and arrays and _is_sum(function, y, predicted):
            error = ValueError(
                f"loss {name!r} is a sum over the rows of a batch: must be their mean, or one"
                " number for each row, since gradients are averaged over the ranks"
            )
            raise raised_on_all(error, training.communicator.rank)
        checked = True
        return kind.compute_loss(model, *args, **kwargs)

    vars(compute_loss)["checks_loss"] = True
    return {"compute_loss": compute_loss}


def _is_sum(function: Callable[..., Any], targets: Any, predicted: Any) -> bool:
    """Whether the loss of two equal rows is twice that of one."""
    losses = []
    for rows in (1, 2):
        # Numbers, not arrays of a program that JAX compiles.
        arrays = [_rows_like(targets, rows, 0.75), _rows_like(predicted, rows, 0.25)]
        try:
            # Keras calls losses also to build the model, on a device without memory.
            with _eagerly(), keras.device("cpu:0"):
                loss = function(*map(keras.ops.convert_to_tensor, arrays))
                losses.append(np.asarray(keras.ops.convert_to_numpy(loss), float))
        except Exception as error:
            log.debug("the loss can't be called with %d rows: %r", rows, error)
            return False
    one, two = losses
    return bool(one.ndim == two.ndim == 0 and one != 0 and np.isclose(two, 2 * one, rtol=1e-3))


def _rows_like(array: Any, rows: int, value: float) -> Any:
    dtype = keras.backend.standardize_dtype(array.dtype)
    return np.full((rows, *array.shape[1:]), value).astype(dtype)


def _eagerly() -> AbstractContextManager[Any]:
    if keras.config.backend() != "jax":
        return nullcontext()
    from strategies.keras.jax_gradients import outside_of_programs

    return outside_of_programs()
