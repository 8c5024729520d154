"""Arguments that must be equal on all ranks: of `fit` and the other loops, and of `compile`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters import array_slicing

from collectives.consistency.uncaught import raised_on_all
from strategies.core.same_error import refuse_differences
from strategies.keras.state import LOST, copy_of, has_lost_values, learning_rates
from strategies.keras.training import Training

_RANKS_OWN = ("callbacks", "verbose", "return_dict")
_NO_SETTINGS = ("name", "registered_name", "shared_object_id", "build_config")


def agreed_arguments(
    training: Training, model: Any, name: str, args: Any, kwargs: Any, compiled: int
) -> dict[str, Any]:
    """The arguments of a method by name. ValueError on every rank where they differ. Collective.

    `compiled` is how often the model was compiled, which must be equal, too.
    """
    given = _bound(getattr(keras.Model, name), model, args, kwargs)
    lost = has_lost_values(training, model)
    compared = {key: value for key, value in given.items() if key not in _RANKS_OWN}
    if name == "train_on_batch" and not lost:
        # The other loops take the chief's.
        compared["learning_rate"] = [float(copy_of(each)) for each in learning_rates(model)]
        compared["trained weights"] = len(model.trainable_variables)
    times = "" if compiled == 1 else f"the model is compiled {compiled} times"
    text = ", ".join(f"{key}={_description(value)}" for key, value in compared.items())
    refuse_differences(
        training.communicator,
        f"{name}: the ranks' arguments differ",
        ", ".join(filter(None, [text, times, LOST if lost else ""])),
        call=f"{name}, a call for every rank",
    )
    if lost:
        raise raised_on_all(ValueError(LOST), training.communicator.rank)
    return given


def _bound(method: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(method).bind(model, *args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    given.pop("self")
    given |= given.pop("kwargs", {})
    return given


def taken(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove arguments that are passed in another way."""
    return {name: given.pop(name, None) for name in names}


def split_validation(given: dict[str, Any]) -> None:
    """Take the last samples for validation, as `fit` does."""
    fraction, given["validation_split"] = given["validation_split"], 0.0
    if fraction and given["validation_data"] is None:
        arrays = given["x"], given["y"], given["sample_weight"]
        split = array_slicing.train_validation_split(arrays, validation_split=fraction)
        (given["x"], given["y"], given["sample_weight"]), given["validation_data"] = split


def _description(value: Any) -> str:
    """What must be equal on all ranks: shapes and dtypes of arrays, and plain values."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        # Keras takes them by name.
        return str(sorted((_description(key), _description(each)) for key, each in value.items()))
    if isinstance(value, list | tuple):
        return str([_description(each) for each in value])
    if hasattr(value, "shape"):
        return f"{getattr(value, 'dtype', '')}{list(value.shape)}"
    plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if plain else type(value).__name__


def refuse_different_settings(training: Training, model: Any, name: str) -> None:
    """Raise ValueError on every rank where they have compiled the model differently. Collective.

    `name` is the method that is called. Learning rates are the chief's, but for schedules. Names
    don't count, nor what a class of the program's own doesn't show.
    """
    compiled = getattr(model, "_compile_config", None)
    settings = {} if compiled is None else dict(compiled.config)
    settings |= {"optimizer": getattr(model, "optimizer", None)}
    settings |= {"auto_scale_loss": getattr(model, "auto_scale_loss", None)}
    text = ", ".join(f"{key}={settings_of(each)}" for key, each in settings.items())
    what = f"{name}: the ranks have compiled the model differently"
    refuse_differences(training.communicator, what, text)


def settings_of(value: Any) -> str:
    """What an optimizer, loss or other argument shows of itself, but for its learning rate."""
    if isinstance(value, dict):
        if value.get("class_name") == "__lambda__":
            return "lambda"  # its code has a path
        parts = [f"{key}: {settings_of(each)}" for key, each in value.items() if _counts(key, each)]
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(settings_of, value))}]"
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__name__
    if hasattr(value, "get_config"):
        try:
            with warnings.catch_warnings():
                # Of functions, which this program doesn't load.
                warnings.simplefilter("ignore")
                config = value.get_config()
        except Exception:  # of the program's own, or of what can't be saved
            config = {}
        # Keras's losses leave their arguments out, such as `delta`.
        given = getattr(value, "_fn_kwargs", {})
        return f"{type(value).__name__}{settings_of({**config, **given, **_exclusions(value)})}"
    return _description(value)


def _exclusions(value: Any) -> dict[str, Any]:
    """What an optimizer's weight decay leaves out, which its `get_config` doesn't show."""
    variables = getattr(value, "_exclude_from_weight_decay", ())
    pattern = getattr(value, "_exclude_from_weight_decay_pattern", None)
    # Keras joins the names in the order of a set.
    names = sorted(pattern.pattern.split("|")) if pattern is not None else []
    return {"without weight decay": [len(variables), names]} if variables or names else {}


def _counts(key: Any, value: Any) -> bool:
    return key not in _NO_SETTINGS and (key != "learning_rate" or isinstance(value, dict))
