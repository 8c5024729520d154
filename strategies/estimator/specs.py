"""What an estimator is configured with."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from strategies.tensorflow import LocalSGDStrategy, ParameterServerStrategy, Strategy

InputFunction = Callable[..., Any]
"""A function of no arguments, or of any of `input_context`, `mode`, `params` and `config`, that
returns a `tf.data.Dataset` of (features, labels). It is called once on each rank, and each of its
batches is the batch of one replica."""


class ModeKeys:
    """What a dataset is for: the argument `mode` of an input function."""

    TRAIN: Final = "train"
    EVAL: Final = "eval"
    PREDICT: Final = "infer"


class RunConfig:
    """Where an estimator's checkpoints are written, and on which ranks it runs."""

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        *,
        train_distribute: Strategy | None = None,
        eval_distribute: Strategy | None = None,
        save_checkpoints_steps: int | None = None,
        keep_checkpoint_max: int | None = 5,
        **unsupported: Any,
    ) -> None:
        """`train_distribute` and `eval_distribute` are strategies of `strategies.tensorflow`.

        model_dir: the folder of the checkpoints; None: a temporary one.
        train_distribute: None is MultiWorkerMirroredStrategy: all ranks train.
        eval_distribute: None is the strategy of training.
        save_checkpoints_steps: the steps between two checkpoints. None: only the end of `train` is
            saved, as it always is.
        keep_checkpoint_max: the number of checkpoints that are kept; None: all.

        Raises TypeError for another strategy or argument, ValueError for a number below 1.
        """
        allowed = "model_dir, train_distribute, eval_distribute, save_checkpoints_steps,"
        refuse("RunConfig", unsupported, f"{allowed} keep_checkpoint_max")
        _check_strategy("train_distribute", train_distribute)
        _check_strategy("eval_distribute", eval_distribute)
        _check_count("save_checkpoints_steps", save_checkpoints_steps)
        _check_count("keep_checkpoint_max", keep_checkpoint_max)
        self.model_dir = None if model_dir is None else os.fspath(model_dir)
        self.train_distribute, self.eval_distribute = train_distribute, eval_distribute
        self.save_checkpoints_steps = save_checkpoints_steps
        self.keep_checkpoint_max = keep_checkpoint_max


@dataclass(frozen=True)
class TrainSpec:
    """What `train_and_evaluate` trains on, until `max_steps` in all or the end of the data."""

    input_fn: InputFunction
    max_steps: int | None = None
    hooks: Any = None

    def __post_init__(self) -> None:
        """TypeError for hooks, ValueError for `max_steps` below 1."""
        refuse("TrainSpec", {"hooks": self.hooks}, "input_fn, max_steps")
        _check_count("max_steps", self.max_steps)


@dataclass(frozen=True)
class EvalSpec:
    """What `train_and_evaluate` evaluates each checkpoint on: `steps` batches; None: all."""

    input_fn: InputFunction
    steps: int | None = 100
    name: Any = None
    hooks: Any = None
    exporters: Any = None
    start_delay_secs: Any = None
    throttle_secs: Any = None

    def __post_init__(self) -> None:
        """TypeError for arguments beside `input_fn` and `steps`, ValueError for `steps` below 1."""
        taken = ("input_fn", "steps")
        given = {name: value for name, value in vars(self).items() if name not in taken}
        refuse("EvalSpec", given, "input_fn, steps; every checkpoint is evaluated")
        _check_count("steps", self.steps)


def refuse(what: str, unsupported: Mapping[str, Any], allowed: str) -> None:
    """Raise TypeError for arguments that are not supported, unless they are None or empty."""
    given = [name for name, value in unsupported.items() if value not in (None, (), [])]
    if not given:
        return
    hint = "; Keras callbacks are given to the fit of the Keras model" if "hooks" in given else ""
    raise TypeError(f"{what}: {', '.join(given)} not supported: arguments are {allowed}{hint}")


def refuse_both(steps: int | None, max_steps: int | None) -> None:
    """Raise ValueError unless at most one number is given, and it is 1 or more."""
    if steps is not None and max_steps is not None:
        raise ValueError(f"steps={steps} and max_steps={max_steps}: only one may be given")
    _check_count("steps", steps)
    _check_count("max_steps", max_steps)


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name}={value}: must be 1 or more, or None")


def _check_strategy(name: str, strategy: Any) -> None:
    refused: tuple[type, ...] = (LocalSGDStrategy,)
    if name == "eval_distribute":
        refused = LocalSGDStrategy, ParameterServerStrategy
    if strategy is None or (isinstance(strategy, Strategy) and not isinstance(strategy, refused)):
        return
    raise TypeError(
        f"{name} is a {type(strategy).__name__}: must be a MultiWorkerMirroredStrategy,"
        " MirroredStrategy, CentralStorageStrategy, OneDeviceStrategy or, for training,"
        " ParameterServerStrategy of strategies.tensorflow"
    )
