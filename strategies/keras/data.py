"""Global batches cut into one piece for each rank, for Keras's `fit`, `evaluate` and `predict`.

Every rank reads the same global batches, and takes contiguous rows of each: ⌈n/W⌉ of n, fewer or
none on the last ranks, as TensorFlow does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters import ArrayDataAdapter, TFDatasetAdapter, get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from collectives import Communicator
from collectives.consistency.uncaught import raised_on_all
from strategies.core.same_error import compare
from strategies.input import DistributedDataset
from strategies.input.batches import digest_of
from strategies.input.sources import shared_order
from strategies.keras.orders import OrderedPyDataset, has_workers
from strategies.keras.shares import length_of, share_of
from strategies.keras.training import Training

log = logging.getLogger("strategies")

# Not an error: each rank may augment the same examples differently.
_DIFFERENT_BATCHES = (
    "each rank takes its part of every global batch, but the ranks' first global batches differ."
    " If their order differs, examples are lost or repeated: shuffle with the same seed on every"
    " rank, for example after keras.utils.set_random_seed. If the data are cut for each rank, as by"
    " a DistributedSampler or shard, examples are left out: give all ranks all of them"
)


_COMPARED = 16
"""The number of rows that the ranks compare of arrays."""


class Pieces(DataAdapter):
    """This rank's piece of every batch of another adapter."""

    def __init__(self, whole: DataAdapter, training: Training, most: int | None) -> None:
        """`most`: batches that one iteration takes; None where it takes all."""
        self._whole, self._training, self._most = whole, training, most
        self._share = share_of(training)
        self._compared = False
        self.lengths: list[int] | None = None
        """The lengths of the global batches in the order of reading, if it is a list."""
        self.batch_counts: tuple[int | None, ...] | None = None
        """Every rank's number of batches, where they differ and the ranks agree on the end."""
        self.own_batch_count: int | None = None if training.reduces else whole.num_batches
        self._begun: Iterator[Any] | None = None

    def peek(self) -> Any:
        """The first piece, which the next iterator of Keras's backend gives again."""
        in_torch = keras.config.backend() == "torch"
        pieces = self.get_torch_dataloader() if in_torch else self.get_jax_iterator()
        first = next(pieces)
        # Not read a second time: some data, such as that of worker threads, can't begin again.
        self._begun = chain([first], pieces)
        return first

    def _cut(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            if not self._compared:
                self._compared = True
                warn_of_different_batches(self._training, batch)
            if self.lengths is not None:
                self.lengths.append(length_of(batch))
            piece = self._share.cut(batch)
            self._training.rows_read = length_of(piece)
            yield piece

    def get_jax_iterator(self) -> Iterator[Any]:
        """Pieces of arrays for JAX."""
        begun, self._begun = self._begun, None
        return begun or self._cut(self._whole.get_jax_iterator())

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Pieces of torch tensors; Keras only iterates over it."""
        begun, self._begun = self._begun, None
        return begun or self._cut(self._whole.get_torch_dataloader())

    def get_tf_dataset(self) -> Any:
        """The global batches, which a strategy of `tf.distribute` splits."""
        if isinstance(self._whole, TFDatasetAdapter):
            return self._whole.get_tf_dataset()
        from strategies.keras.tensorflow_data import batches_of

        return batches_of(self._whole, self._most)

    @property
    def num_batches(self) -> int | None:
        """The number of batches, the largest of all ranks' where they differ; None if unknown."""
        numbers = self.batch_counts or (self._whole.num_batches,)
        return None if None in numbers else max(numbers)

    @property
    def batch_size(self) -> int | None:
        """Unknown, since pieces differ."""
        return None

    def on_epoch_begin(self) -> None:
        """Notify the data."""
        self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Notify the data."""
        self._whole.on_epoch_end()


class ArrayPieces(ArrayDataAdapter):
    """This rank's piece of every batch of arrays, in an order that the seed determines."""

    def __init__(self, training: Training, seed: int, *data: Any, **options: Any) -> None:
        super().__init__(*data, **options)
        self._training = training
        self._share = share_of(training)
        self._generator = np.random.default_rng(seed)
        self.lengths: list[int] | None = None
        """As of `Pieces`."""

    def _get_iterator(self, slice_and_convert_fn: Any, inputs: Any) -> Iterator[Any]:
        for rows in self._rows():
            yield keras.tree.map_structure(
                lambda each, rows=rows: slice_and_convert_fn(each, indices=rows),
                inputs,
                none_is_leaf=False,
            )

    def peek(self) -> Any:
        """The first piece, in NumPy."""
        lengths, self.lengths = self.lengths, None
        first = next(self.get_numpy_iterator())
        self.lengths = lengths
        return first

    def sample(self) -> Any:
        """Some rows of all arrays, from the first to the last, to compare."""
        rows = np.unique(np.linspace(0, self._num_samples - 1, _COMPARED).astype(int))
        inputs = convert_to_sliceable(self._inputs, target_backend="numpy")
        return [
            each.convert_to_numpy(each[rows])
            for each in keras.tree.flatten(inputs)
            if each is not None
        ]

    def _rows(self) -> Iterator[Any]:
        """The rows of each piece: slices, or arrays of indices."""
        order = self._order() if self._shuffle else None
        for start, length in self._batches():
            if self.lengths is not None:
                self.lengths.append(length)
            part = self._share.of(length)
            self._training.rows_read = part.stop - part.start
            rows = slice(start + part.start, start + part.stop)
            yield rows if order is None else order[rows]

    def _batches(self) -> Iterator[tuple[int, int]]:
        """The first row and the length of each global batch."""
        for start in range(0, self._num_samples, self._batch_size):
            yield start, min(self._batch_size, self._num_samples - start)

    def _order(self) -> Any:
        """A new order of all rows, as `shuffle` says."""
        if self._shuffle == "batch":
            batches = [start + np.arange(length) for start, length in self._batches()]
            return np.concatenate([self._generator.permutation(each) for each in batches])
        return self._generator.permutation(self._num_samples)

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Pieces of torch tensors; Keras only iterates over it."""

        def convert(sliceable: Any, indices: Any) -> Any:
            part = sliceable.convert_to_torch_compatible(sliceable[indices])
            return keras.ops.convert_to_tensor(part)

        inputs = convert_to_sliceable(self._inputs, target_backend="torch")
        return self._get_iterator(convert, inputs)

    def get_tf_dataset(self) -> Any:
        """This rank's pieces."""
        from strategies.keras.tensorflow_data import pieces_of

        parts = [(start, self._share.of(length)) for start, length in self._batches()]
        starts, stops = np.array(
            [(start + part.start, start + part.stop) for start, part in parts], np.int64
        ).T
        order = self._order if self._shuffle else None
        return pieces_of(self._inputs, starts, stops, order)


def warn_of_different_batches(training: Training, batch: Any) -> None:
    """Log a warning on the chief where the ranks' global batches differ. Collective."""
    arrays = [each for each in keras.tree.flatten(batch) if hasattr(each, "shape")]
    digest = digest_of(list(map(keras.ops.convert_to_numpy, arrays)))
    differ = compare(training.communicator, "first batch: ", digest, digest)
    if differ is not None and training.is_chief:
        log.warning("%s", _DIFFERENT_BATCHES)


def share_data(
    training: Training,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    shuffle: Any = False,
    seed: int = 0,
    most: int | None = None,
    **options: Any,
) -> Any:
    """An adapter that gives Keras this rank's pieces of the data that every rank was given.

    seed: `common_seed`, which determines the order with `shuffle`.
    most: as of `Pieces`.
    options: `batch_size`, `class_weight` and `steps_per_epoch`, as of `fit`.

    Not collective. Raises as Keras does for data that it doesn't support; TypeError for
    a dataset that a strategy has distributed already, and for sparse and ragged arrays; ValueError
    for arrays without rows.
    """
    if isinstance(x, DistributedDataset):
        raise TypeError(
            "x is a DistributedDataset: must be the dataset of global batches itself, since fit,"
            " evaluate and predict take each rank's piece of every batch"
        )
    _refuse_unsliceable(x, y, sample_weight)
    if not isinstance(x, DataAdapter) and can_convert_arrays((x, y, sample_weight)):
        if any(np.shape(each)[:1] == (0,) for each in keras.tree.flatten(x)):
            raise ValueError("the arrays have no rows: must have at least one")
        options["steps"] = options.pop("steps_per_epoch", None)
        return ArrayPieces(training, seed, x, y, sample_weight, shuffle=shuffle, **options)
    if isinstance(x, keras.utils.PyDataset):
        shuffled = bool(shuffle) and x.num_batches is not None
        if shuffled or has_workers(x):
            x = OrderedPyDataset(x, seed if shuffled else None)
    elif (set_seed := shared_order(x)) is not None:
        # A DataLoader shuffles whatever Keras is told, in evaluations, too.
        set_seed(seed)
    whole = get_data_adapter(x, y, sample_weight, **options)
    return Pieces(whole, training, most)


def _refuse_unsliceable(*arrays: Any) -> None:
    """TypeError for arrays whose rows can't be sliced: TensorFlow's of two kinds, and SciPy's."""
    for each in keras.tree.flatten(arrays):
        kind = type(each).__name__
        if kind in ("SparseTensor", "RaggedTensor") or hasattr(each, "tocoo"):
            raise TypeError(
                f"the data are a {kind}, which isn't divided into the ranks' rows: give a"
                " tf.data.Dataset of batches, such as from_tensor_slices(…).batch(…)"
            )


def end_together(training: Training, *adapters: Any) -> None:
    """Have as many steps on every rank where TensorFlow's datasets differ. Collective.

    Its iterators give a rank without more data batches without rows.
    """
    pieces = [each for each in adapters if isinstance(each, Pieces)]
    if training.reduces or not pieces:
        return
    numbers = training.communicator.all_gather_object([each.own_batch_count for each in pieces])
    for each, found in zip(pieces, zip(*numbers, strict=True), strict=True):
        if len(set(found)) > 1:
            each.batch_counts = found


def refuse_different_arrays(communicator: Communicator, name: str, *adapters: Any) -> None:
    """Raise ValueError on every rank where they were given different arrays. Collective."""
    samples = [each.sample() for each in adapters if isinstance(each, ArrayPieces)]
    digest = digest_of(samples)
    if samples and compare(communicator, f"{name}'s arrays: ", digest, digest) is not None:
        error = ValueError(
            f"{name}: the ranks' arrays have different contents: every rank must be given the same"
            " whole arrays, from which it takes its part of each batch. For parts such as"
            " x[rank::size], or for data that each rank augments, use a PyDataset or generator of"
            " global batches"
        )
        raise raised_on_all(error, communicator.rank)
