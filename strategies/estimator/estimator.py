"""`Estimator`: training, evaluation and prediction of a Keras model, between checkpoints."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import keras
import tensorflow as tf

from strategies.core.same_error import PropagatedErrors
from strategies.estimator.restored import (
    NAME,
    Restoration,
    RestoredModel,
    Saving,
    SharedSaving,
    step_of,
)
from strategies.estimator.specs import InputFunction, ModeKeys, RunConfig, refuse, refuse_both
from strategies.tensorflow import (
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    Strategy,
)


class Estimator:
    """A model function, and the folder of its checkpoints.

    Training begins at the folder's latest checkpoint, and evaluation and prediction use it, so that
    a program that is started again continues where it stopped. The chief writes.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> None:
        """`model_fn` returns a Keras model that it has compiled. Collective.

        It is called in the scope of each strategy, without arguments or with any of `params` and
        `config`. `model_dir` precedes the one of `config`. Raises TypeError for a model function of
        other arguments.
        """
        refuse("Estimator", unsupported, "model_fn, model_dir, config, params")
        _check_arguments("model_fn", model_fn, ("params", "config"))
        self.config = RunConfig() if config is None else config
        self.params = dict(params or {})
        self._model_fn = model_fn
        self.train_strategy = self.config.train_distribute or MultiWorkerMirroredStrategy()
        self._asynchronous = isinstance(self.train_strategy, ParameterServerStrategy)
        evaluates = OneDeviceStrategy("/cpu:0") if self._asynchronous else self.train_strategy
        self.eval_strategy = self.config.eval_distribute or evaluates
        given = self.config.model_dir if model_dir is None else os.fspath(model_dir)
        self.model_dir = given or ""
        if not (self._asynchronous and self.train_strategy.is_server):
            self.model_dir = self.train_strategy.chief_first(lambda: given or tempfile.mkdtemp())
        self._models: dict[tuple[str, bool], RestoredModel] = {}

    def train(
        self,
        input_fn: InputFunction,
        hooks: Any = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Any = None,
    ) -> Estimator:
        """Train for `steps` more steps, until `max_steps` in all, or to the end of the data.

        Collective, as is every method but `predict`. Each rank's batch is one replica's; gradients
        count by rows. A checkpoint is saved at the end. Raises ValueError where both numbers are
        given, TypeError for hooks and for an input function that doesn't return a dataset.
        """
        given = {"hooks": hooks, "saving_listeners": saving_listeners}
        with PropagatedErrors(self.train_strategy.communicator, "Estimator.train"):
            refuse("train", given, "input_fn, steps, max_steps")
            refuse_both(steps, max_steps)
        return self.train_between(input_fn, steps, max_steps, lambda: None)

    def train_between(
        self,
        input_fn: InputFunction,
        steps: int | None,
        max_steps: int | None,
        saved: Callable[[], Any],
    ) -> Estimator:
        """As `train`; `saved()` is called after each checkpoint. Collective."""
        strategy, every = self.train_strategy, self.config.save_checkpoints_steps
        given = f"{steps=}, {max_steps=}, save_checkpoints_steps={every}"
        strategy.communicator.barrier(f"Estimator.train, {given}")
        path = self.latest_checkpoint()
        first = step_of(path)
        count = steps if max_steps is None else max(max_steps - first, 0)
        if count == 0:
            return self
        if path is None:
            # A training that has failed before its first checkpoint may have changed it.
            self._models.pop((ModeKeys.TRAIN, True), None)
        restored = self._model_of(ModeKeys.TRAIN, strategy)
        manager = tf.train.CheckpointManager(
            restored.checkpoint,
            self.model_dir,
            max_to_keep=self.config.keep_checkpoint_max,
            checkpoint_name=NAME,
        )
        kind = SharedSaving if self._asynchronous else Saving
        end = None if count is None else first + count
        saving = kind(manager, first, end, every, saved)
        data = self._distributed(strategy, input_fn, ModeKeys.TRAIN)
        restores = Restoration(restored, path, strategy, chief_alone=self._asynchronous)
        restored.model.fit(
            data,
            steps_per_epoch=count,
            verbose=0,
            shuffle=False,
            callbacks=[restores, saving],
        )
        saving.finish(strategy)
        return self

    def evaluate(
        self,
        input_fn: InputFunction,
        steps: int | None = None,
        hooks: Any = None,
        checkpoint_path: str | None = None,
    ) -> dict[str, Any]:
        """The loss and metrics over all replicas' batches, and `global_step`, on every rank.

        steps: the number of batches of each replica; None: all of the data. checkpoint_path: None
        is the latest one; the model's first values where there is none. Collective.
        """
        strategy = self.eval_strategy
        with PropagatedErrors(strategy.communicator, "Estimator.evaluate"):
            refuse("evaluate", {"hooks": hooks}, "input_fn, steps, checkpoint_path")
            refuse_both(steps, None)
            given = f"checkpoint {step_of(checkpoint_path)}" if checkpoint_path else "the latest"
        strategy.communicator.barrier(f"Estimator.evaluate, {steps=}, {given}")
        path = checkpoint_path or self._latest(strategy)
        step = step_of(path)
        restored = self._model_of(ModeKeys.EVAL, strategy, restores=path is not None)
        data = self._distributed(strategy, input_fn, ModeKeys.EVAL)
        found = restored.model.evaluate(
            data,
            steps=steps,
            verbose=0,
            callbacks=[Restoration(restored, path, strategy)],
            return_dict=True,
        )
        return {**found, "global_step": step}

    def predict(
        self, input_fn: InputFunction, hooks: Any = None, checkpoint_path: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """A dictionary for each row of this rank's own dataset, without communication.

        Keys are the names of the model's outputs, values are NumPy arrays. Of batches that are
        tuples, the first element is used.
        """
        refuse("predict", {"hooks": hooks}, "input_fn, checkpoint_path")
        return self._predict(input_fn, checkpoint_path)

    def _predict(self, input_fn: InputFunction, path: str | None) -> Iterator[dict[str, Any]]:
        # The latest checkpoint when the first row is requested: an older one may be deleted.
        path = path or tf.train.latest_checkpoint(self.model_dir)
        restored = self._model_of(ModeKeys.PREDICT, None, restores=path is not None)
        data = self._dataset(input_fn, tf.distribute.InputContext(), ModeKeys.PREDICT)
        yield from _rows(restored, path, data)

    def latest_checkpoint(self) -> str | None:
        """The path of the last one in `model_dir`, as the chief finds it. Collective."""
        return self._latest(self.train_strategy)

    def _latest(self, strategy: Strategy) -> str | None:
        newest: str | None = strategy.chief_first(
            lambda: tf.train.latest_checkpoint(self.model_dir)
        )
        return newest

    def _model_of(
        self, mode: str, strategy: Strategy | None, *, restores: bool = True
    ) -> RestoredModel:
        """The mode's own model, so that an evaluation may occur within `train`.

        One for what is restored, and one that keeps its first values.
        """
        kept = mode, restores
        if kept not in self._models:
            scope = nullcontext() if strategy is None else strategy.scope()
            known = {"params": self.params, "config": self.config}
            communicator = None if strategy is None else strategy.communicator
            with PropagatedErrors(communicator, "Estimator: model_fn"):
                self._models[kept] = RestoredModel(lambda: _call(self._model_fn, known), scope)
        return self._models[kept]

    def _distributed(self, strategy: Strategy, input_fn: InputFunction, mode: str) -> Any:
        return strategy.distribute_datasets_from_function(
            lambda context: self._dataset(input_fn, context, mode)
        )

    def _dataset(self, input_fn: InputFunction, context: Any, mode: str) -> tf.data.Dataset:
        """This rank's dataset."""
        known = {"input_context": context, "mode": mode, "params": self.params}
        known["config"] = self.config
        _check_arguments("input_fn", input_fn, tuple(known))
        dataset = _call(input_fn, known)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"input_fn returned {type(dataset).__name__}: must return a tf.data.Dataset whose"
                " batches are those of one replica"
            )
        return dataset


def _check_arguments(what: str, function: Any, known: tuple[str, ...]) -> None:
    """Raise TypeError for a function with other arguments that have no default."""
    if not callable(function):
        raise TypeError(f"{what} is a {type(function).__name__}: must be a function")
    others = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.name not in known
        and each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if others:
        returns = "a compiled Keras model" if what == "model_fn" else "a tf.data.Dataset"
        raise TypeError(
            f"{what} takes {', '.join(others)}: may take {', '.join(known)}, and returns {returns}"
        )


def _call(function: Callable[..., Any], known: Mapping[str, Any]) -> Any:
    taken = inspect.signature(function).parameters
    return function(**{name: value for name, value in known.items() if name in taken})


def _rows(
    restored: RestoredModel, path: str | None, data: tf.data.Dataset
) -> Iterator[dict[str, Any]]:
    model, this = restored.model, object()
    for batch in data:
        features = batch[0] if isinstance(batch, tuple) else batch
        if restored.user is not this:
            model(features, training=False)
            restored.restore(path)
            restored.user = this
        outputs = _named(model, model.predict_on_batch(features))
        for values in zip(*outputs.values(), strict=True):
            yield dict(zip(outputs, values, strict=True))


def _named(model: keras.Model, outputs: Any) -> dict[str, Any]:
    """The model's outputs by their names; by their numbers where a model of a program has none."""
    if isinstance(outputs, dict):
        return outputs
    many = outputs if isinstance(outputs, list | tuple) else [outputs]
    names = [f"output_{number}" for number, _ in enumerate(many, 1)]
    if isinstance(model, keras.Sequential):
        names = [model.layers[-1].name]
    elif hasattr(model, "output_names"):
        names = model.output_names
    return dict(zip(names, many, strict=True))
