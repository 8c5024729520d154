"""`fit`, `evaluate`, `predict` and the steps on single batches, on the ranks of a training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from collectives.consistency.signature import shortened
from strategies.core.same_error import call_on_all, refuse_differences
from strategies.keras.arguments import (
    agreed_arguments,
    refuse_different_settings,
    split_validation,
    taken,
)
from strategies.keras.callbacks import (
    RunningStatistics,
    callbacks_of_fit,
    callbacks_of_rank,
    errors_kept,
)
from strategies.keras.data import (
    end_together,
    refuse_different_arrays,
    share_data,
    warn_of_different_batches,
)
from strategies.keras.orders import common_seed
from strategies.keras.shares import Share, length_of, refuse_other_rows, share_of
from strategies.keras.state import divide_sums, refuse_different_weights
from strategies.keras.steps import errors_as_raised, row_of_zeros
from strategies.keras.training import Training

Method = Callable[..., Any]

_DATA = "x", "y", "sample_weight"


class LoopMethods:
    """The methods that replace a model's own."""

    def __init__(self, model: Any, training: Training) -> None:
        self._model, self._training, self._kind = model, training, type(model)
        self._statistics = RunningStatistics(training, model)
        self._shared = self._fits = self._batches = False
        self._compiled = 1

    @classmethod
    def of(cls, model: Any, training: Training) -> LoopMethods:
        """Those of the model, which may be compiled again within `fit`."""
        known = getattr(vars(model).get("fit"), "__self__", None)
        if not (isinstance(known, cls) and known._training is training):
            return cls(model, training)
        known._shared = known._batches = False
        known._compiled += 1
        return known

    def methods(self) -> dict[str, Method]:
        """The replacements by name."""
        names = ["fit", "evaluate"]
        if self._training.reduces:
            names += ["predict", "train_on_batch", "test_on_batch", "_symbolic_build"]
        return {name: getattr(self, name) for name in names}

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Keras's `fit` on this rank's pieces of global batches. Collective."""
        training, self._batches = self._training, False
        # What earlier calls of train_on_batch, or steps of the program's own loop, have changed.
        if training.reduces:
            self._statistics.average()
        else:
            training.owner.synchronize()
        given = self._agreed("fit", args, kwargs)
        # Before Keras refuses some of them, on one rank.
        refuse_different_settings(training, self._model, "fit")
        seed = common_seed(training.communicator)

        def shared() -> tuple[Any, Any]:
            split_validation(given)
            validation = self._validation(given)
            options = taken(given, *_DATA, "batch_size", "class_weight", "shuffle")
            options["steps_per_epoch"] = given["steps_per_epoch"]
            return share_data(training, **options, seed=seed), validation

        x, validation = call_on_all(training.communicator, "fit's data", shared)
        refuse_different_arrays(training.communicator, "fit", x, validation)
        end_together(training, x, validation)
        callbacks = callbacks_of_fit(training, self._statistics, given["callbacks"])
        given |= {"x": x, "validation_data": validation, "callbacks": callbacks}
        given["verbose"] = self._verbose(given)
        before = self._fits
        with self._within_epoch(), errors_as_raised(), errors_kept(training, callbacks):
            self._fits = True
            try:
                history = self._kind.fit(self._model, **given)
            finally:
                self._fits = before
        if not training.reduces:
            # Keras and callbacks may have set the weights to each rank's own after the last epoch.
            training.owner.synchronize()
        # By callbacks at the end of training, or an optimizer that keeps averages of its own.
        refuse_different_weights(training, self._model, "at the end of training")
        return history

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Keras's `evaluate`: the metrics over all ranks' pieces. Collective."""
        self._statistics.average()
        if kwargs.get("_use_cached_eval_dataset"):
            pieces = self._model._eval_epoch_iterator.data_adapter
            with self._of_equal_lengths("fit's validation", pieces):
                return self._kind.evaluate(self._model, *args, **kwargs)
        with self._within_epoch():
            given = self._divided("evaluate", args, kwargs, *_DATA)
            with self._of_equal_lengths("evaluate", given["x"]):
                return self._kind.evaluate(self._model, **given)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Keras's `predict`: all rows, in their order, on every rank. Collective."""
        given = self.of_prediction(args, kwargs)
        with self._training.outside_of_epoch(), self._of_equal_lengths("predict", given["x"]):
            if not self._shared:
                self._build(given["x"])
            outputs = self._kind.predict(self._model, **given)
        lengths = given["x"].lengths
        refuse_other_rows(self._training, outputs, lengths, given["steps"])
        return keras.tree.map_structure(lambda each: self._joined(each, lengths), outputs)

    def of_prediction(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The arguments of `predict`, with this rank's pieces. Collective."""
        self._statistics.average()
        with self._training.outside_of_epoch():
            return self._divided("predict", args, kwargs, "x")

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Keras's `train_on_batch` on this rank's piece of a global batch. Collective."""
        self._statistics.train()
        return self._on_batch("train_on_batch", args, kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Keras's `test_on_batch` on this rank's piece of a global batch. Collective."""
        self._statistics.average()
        return self._on_batch("test_on_batch", args, kwargs)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Build the model, and make its first state the chief's. Collective, the first time."""
        batches = None if iterator is None else map(_step_with_a_row, iterator)
        batch = None if data_batch is None else _with_a_row(data_batch)
        self._kind._symbolic_build(self._model, batches, batch)
        if not self._shared:
            self._statistics.broadcast()
            self._shared = True

    @contextmanager
    def _within_epoch(self) -> Iterator[None]:
        """A context for loops and steps that a callback may run within an epoch of `fit`."""
        goes_on = self._fits and self._training.in_epoch
        with self._training.outside_of_epoch():
            yield
        if goes_on and self._training.reduces:
            # Keras adds to these metrics until the epoch ends.
            divide_sums(self._training, self._model)

    @contextmanager
    def _of_equal_lengths(self, name: str, pieces: Any) -> Iterator[None]:
        """A context for a loop over them. ValueError on every rank where their batches differ."""
        lengths = pieces.lengths = []
        yield
        if self._training.reduces:
            text = shortened(list(map(str, lengths)))
            what = f"{name}: the ranks' batches have different numbers of rows"
            refuse_differences(self._training.communicator, what, text)

    def _on_batch(self, name: str, args: Any, kwargs: Any) -> Any:
        given = self._agreed(name, args, kwargs)
        data = taken(given, *_DATA)
        if not self._batches:
            refuse_different_settings(self._training, self._model, name)
            warn_of_different_batches(self._training, list(data.values()))
            self._use_chiefs_state(trains=True)
            self._batches = True
        pieces = share_of(self._training).cut(tuple(data.values()))
        as_dictionary = given.pop("return_dict")
        given |= {**dict(zip(data, pieces, strict=True)), "return_dict": True}
        divide_sums(self._training, self._model)
        with self._within_epoch():
            self._training.rows_read = length_of(pieces)
            with errors_as_raised():
                logs = getattr(self._kind, name)(self._model, **given)
                # JAX reports an error of the step where its results are read.
                logs = _as_numbers(self._model._get_metrics_result_or_logs(logs))
        return logs if as_dictionary else self._model._flatten_metrics_in_order(logs)

    def _divided(self, name: str, args: Any, kwargs: Any, *data: str) -> dict[str, Any]:
        """The arguments of a loop without training, with this rank's pieces."""
        self._batches = False
        given = self._agreed(name, args, kwargs)
        if name == "evaluate":
            refuse_different_settings(self._training, self._model, name)
        self._use_chiefs_state(trains=False)
        options = taken(given, *data, "batch_size")
        options |= {"steps_per_epoch": given["steps"], "most": self._read_by(given["steps"])}
        communicator = self._training.communicator
        x = call_on_all(
            communicator, f"{name}'s data", lambda: share_data(self._training, **options)
        )
        refuse_different_arrays(communicator, name, x)
        end_together(self._training, x)
        callbacks = callbacks_of_rank(self._training, given["callbacks"])
        return given | {"x": x, "callbacks": callbacks, "verbose": self._verbose(given)}

    def _agreed(self, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
        """The arguments of a method by name, equal on all ranks. Collective."""
        return agreed_arguments(self._training, self._model, name, args, kwargs, self._compiled)

    def _use_chiefs_state(self, *, trains: bool) -> None:
        """As `fit` does; of a model that isn't built, when it is. Collective."""
        if self._shared and self._training.reduces and not self._fits:
            self._statistics.broadcast(optimizers=trains)

    def _validation(self, given: Mapping[str, Any]) -> Any:
        data = given["validation_data"]
        if data is None:
            return None
        parts = keras.utils.unpack_x_y_sample_weight(data)
        return share_data(
            self._training,
            *parts,
            batch_size=given["validation_batch_size"] or given["batch_size"],
            steps_per_epoch=given["validation_steps"],
            most=self._read_by(given["validation_steps"]),
        )

    def _read_by(self, steps: int | None) -> int | None:
        """The number of batches that so many steps read: whole executions of them."""
        together = self._model.steps_per_execution
        return None if steps is None else math.ceil(steps / together) * together

    def _verbose(self, given: Mapping[str, Any]) -> Any:
        return given["verbose"] if self._training.is_chief else 0

    def _build(self, pieces: Any) -> None:
        """Make the state the chief's before the first prediction, of a model that isn't built."""
        if not all(layer.built for layer in self._model._flatten_layers()):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(pieces.peek())
            self._kind.predict_on_batch(self._model, row_of_zeros(x))
        self._statistics.broadcast()
        self._shared = True

    def _joined(self, rows: Any, lengths: list[int]) -> Any:
        """All ranks' rows in the order of the global batches."""
        communicator = self._training.communicator
        gathered = communicator.all_gather(np.ascontiguousarray(rows))
        shares = [Share(rank, communicator.size) for rank in range(communicator.size)]
        ranks = [each.rank for n in lengths for each in shares for _ in range(n)[each.of(n)]]
        joined = np.empty_like(gathered)
        # Keras may have read a batch more than it used.
        joined[np.argsort(ranks[: len(gathered)], kind="stable")] = gathered
        return joined


def _step_with_a_row(step: tuple[Any, Any, Any]) -> tuple[Any, Any, list[Any]]:
    """A step of Keras's iterators: its numbers, and its first batch."""
    begin, end, batches = step
    first = batches[0] if isinstance(batches, list | tuple) else next(batches)
    return begin, end, [_with_a_row(first)]


def _with_a_row(batch: Any) -> Any:
    """A rank's piece, or what stands for none: losses and metrics may need rows."""
    return batch if length_of(batch) else row_of_zeros(batch)


def _as_numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Python's numbers, and arrays of metrics that have several."""
    arrays = {name: keras.ops.convert_to_numpy(each) for name, each in logs.items()}
    return {name: each if each.ndim else float(each) for name, each in arrays.items()}
