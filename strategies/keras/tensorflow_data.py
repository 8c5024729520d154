"""This rank's pieces of arrays, for Keras's TensorFlow backend.

A `tf.data` dataset of global batches would be split by rewriting its graph, with the arrays in it,
and every rank would gather the rows of all. Arrays can be indexed, so that here each rank gathers
its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters.array_slicing import (
    TensorflowSparseWrapper,
    convert_to_sliceable,
    slice_tensorflow_sparse_wrapper,
)
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

_PREFETCHED = 4


class OwnPieces(tf.distribute.DistributedDataset):
    """A dataset that Keras takes as distributed, since it holds this rank's pieces alone.

    All ranks have as many. TensorFlow's own iterator over the datasets of one device would add
    0.6 ms of one core to each step.
    """

    def __init__(self, pieces: Any) -> None:
        self._pieces = pieces

    def __iter__(self) -> Any:
        """The pieces, as tensors."""
        return iter(self._pieces)

    @property
    def element_spec(self) -> Any:
        """As of the pieces."""
        return self._pieces.element_spec


def pieces_of(arrays: Any, starts: Any, stops: Any, order: Callable[[], Any] | None) -> OwnPieces:
    """A dataset of the rows from `starts[i]` to `stops[i]`, in every epoch.

    arrays: a nest of what Keras's `fit` takes, of which None stays None.
    starts, stops: int64 arrays with an element for each global batch. A piece may have no rows.
    order: returns the rows' order, called once for each iteration; None for their own order.
    """
    inputs = keras.tree.lists_to_tuples(convert_to_sliceable(arrays, target_backend="tensorflow"))
    inputs = keras.tree.map_structure(_tensor, inputs, none_is_leaf=False)
    bounds = tf.data.Dataset.from_tensor_slices((starts, stops))
    if order is None:
        rows = bounds.map(tf.range)
    else:
        orders = tf.data.Dataset.range(1).map(
            lambda _: tf.ensure_shape(tf.numpy_function(order, [], tf.int64), [None])
        )
        rows = orders.flat_map(lambda order: bounds.map(lambda start, stop: order[start:stop]))
    pieces = rows.map(
        lambda rows: keras.tree.map_structure(
            lambda each: _rows_of(each, rows), inputs, none_is_leaf=False
        )
    )
    options = tf.data.Options()
    # Optimizations would rewrite the graph, with the arrays in it.
    options.experimental_optimization.apply_default_optimizations = False
    # The end of an epoch may wait for autotuning's thread for as long as the epoch has taken: it
    # sleeps twice as long each time (TensorFlow 2.21, core/framework/model.cc).
    options.autotune.enabled = False
    return OwnPieces(pieces.with_options(options).prefetch(_PREFETCHED))


def batches_of(whole: Any, most: int | None) -> Any:
    """The dataset of an adapter's batches, in memory of TensorFlow's.

    No iteration reads more than `most` batches of a Python generator: those that are read ahead are
    lost when it ends, as many as each rank has had time for. A generator's tensors lie in the
    program's own arrays; operations whose input nothing else needs store their result in it
    (TensorFlow 2.21).
    """
    if most is not None and isinstance(whole, GeneratorDataAdapter):
        iterate = whole.generator
        whole.generator = lambda: islice(iterate(), most)
    batches = whole.get_tf_dataset()

    def copy(*parts: Any) -> Any:
        batch = parts if isinstance(batches.element_spec, tuple) else parts[0]
        return tf.nest.map_structure(_copy, batch, expand_composites=True)

    return batches.map(copy)


def _copy(tensor: Any) -> Any:
    return tensor if tensor.dtype == tf.string else tf.raw_ops.DeepCopy(x=tensor)


def _tensor(array: Any) -> Any:
    """Now, since an array that a traced function uses becomes a constant of its graph."""
    return array if isinstance(array, TensorflowSparseWrapper) else tf.convert_to_tensor(array)


def _rows_of(array: Any, rows: Any) -> Any:
    if isinstance(array, TensorflowSparseWrapper):
        return slice_tensorflow_sparse_wrapper(array, rows)
    return tf.gather(array, rows)
