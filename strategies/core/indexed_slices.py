"""Sparse gradients and sparse changes: some rows of an array, as `tf.IndexedSlices`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from collectives import Communicator
from strategies.core import nest
from strategies.core.options import ReduceOp
from strategies.core.values import Array, as_array


def copied(gradients: Iterable[Gradient]) -> list[Gradient]:
    """With copies of NumPy's arrays, which a step may overwrite."""
    return [each.copy() if isinstance(each, np.ndarray) else each for each in gradients]


class IndexedSlices:
    """Rows of a larger array: `values[i]` belongs to row `indices[i]`, and duplicates add up.

    As `tf.IndexedSlices`. values: an array (n, …) whose rows are those of the larger array;
    indices: n integers. dense_shape: the larger array's shape, or None. Raises
    TypeError for indices that aren't integers, ValueError for shapes that don't fit together.
    """

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None) -> None:
        self.values = as_array(values, "values")
        self.indices = as_indices(indices)
        self.dense_shape = None if dense_shape is None else tuple(dense_shape)
        if self.indices.ndim != 1 or self.values.shape[:1] != self.indices.shape:
            raise ValueError(
                f"values of shape {self.values.shape}, indices of shape {self.indices.shape}:"
                " there must be one index for each row of values"
            )
        if self.dense_shape is not None and self.dense_shape[1:] != self.values.shape[1:]:
            raise ValueError(
                f"dense_shape={self.dense_shape}: its rows aren't those of values of shape"
                f" {self.values.shape}"
            )

    def fitted(self, shape: tuple[int, ...], dtype: np.dtype[Any], what: object) -> IndexedSlices:
        """The same for an array of this shape, with values of this dtype.

        Raises ValueError where the rows are of another shape or don't exist.
        """
        rows = self.values.shape[1:]
        if not shape or rows != shape[1:] or self.dense_shape not in (None, shape):
            given = f"dense_shape {self.dense_shape}" if self.dense_shape else f"rows of {rows}"
            raise ValueError(f"slices have {given}: {what} has shape {shape}")
        check_rows(self.indices, shape[0], what)
        return IndexedSlices(np.asarray(self.values, dtype), self.indices, shape)

    def summed(self) -> IndexedSlices:
        """Each row once, in rising order; duplicates are added up in theirs."""
        rows, places = np.unique(self.indices, return_inverse=True)
        values = np.zeros((len(rows), *self.values.shape[1:]), self.values.dtype)
        np.add.at(values, places, self.values)
        return IndexedSlices(values, rows, self.dense_shape)

    def to_dense(self) -> Array:
        """The whole array, zeros elsewhere; ValueError without dense_shape."""
        if self.dense_shape is None:
            raise ValueError("the slices have no dense_shape: give one")
        dense = np.zeros(self.dense_shape, self.values.dtype)
        np.add.at(dense, self.indices, self.values)
        return dense

    def __repr__(self) -> str:
        known = "" if self.dense_shape is None else f" of {list(self.dense_shape)}"
        return f"<IndexedSlices {self.values.dtype}{list(self.values.shape)}{known}>"


Gradient: TypeAlias = Array | IndexedSlices


def check_rows(indices: Array, count: int, what: object) -> None:
    """ValueError where there aren't that many rows."""
    if indices.size and not 0 <= indices.min() <= indices.max() < count:
        wrong = indices[(indices < 0) | (indices >= count)].flat[0]
        raise ValueError(f"row {wrong}: {what} has rows 0 to {count - 1}")


def as_indices(indices: Any) -> Array:
    """The numbers of rows as int64; TypeError for anything but integers."""
    array = as_array(indices, "indices")
    if not array.size:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"indices has dtype {array.dtype}: must be integers")
    return array.astype(np.int64, copy=False)


def structure(value: Any, leaves: Sequence[Any]) -> str:
    """The nest of these leaves, and which of its arrays are rows of larger ones."""
    rows = [
        f"{place}: rows of {leaf.dense_shape}"
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, IndexedSlices)
    ]
    return nest.structure(value) + (f" with {', '.join(rows)}" if rows else "")


def reduce_slices(
    communicator: Communicator, slices: IndexedSlices, op: ReduceOp | None
) -> IndexedSlices:
    """The ranks' slices concatenated, duplicates kept; MEAN divides them by the number of ranks.

    With op None they are those of rank 0. Collective. As `tf.distribute` does it
    (`cross_device_utils.aggregate_tensors_or_indexed_slices` and the division after it).
    """
    kept = 0 if op is None and communicator.rank else len(slices.indices)
    values = communicator.all_gather(slices.values[:kept])
    indices = communicator.all_gather(slices.indices[:kept])
    if op is ReduceOp.MEAN:
        # Of integers float64, as of arrays.
        dtype = np.float64 if values.dtype.kind in "biu" else values.dtype
        values = np.asarray(values / np.dtype(dtype).type(communicator.size), dtype)
    return IndexedSlices(values, indices, slices.dense_shape)


def map_apart(
    leaves: Sequence[Any],
    of_arrays: Callable[[list[Any]], Iterable[Any]],
    of_slices: Callable[[IndexedSlices], Any],
) -> list[Any]:
    """Map all arrays together and each slices by itself; results in the order of the leaves."""
    return nest.map_by_kind(
        leaves,
        lambda leaf: isinstance(leaf, IndexedSlices),
        of_arrays,
        lambda slices: list(map(of_slices, slices)),
    )


def refuse_slices(leaves: Sequence[Any], what: str) -> None:
    """NotImplementedError where a leaf is an `IndexedSlices`."""
    for leaf in leaves:
        if isinstance(leaf, IndexedSlices):
            raise NotImplementedError(f"{what} takes arrays, not {leaf}: use its to_dense()")


def embedding_lookup(params: Any, ids: Any) -> Array:
    """Rows of a variable, as `tf.nn.embedding_lookup`: an array of shape (*ids.shape, *row shape).

    `params` is a variable, or anything with its `sparse_read`: of a sharded one only these rows
    are moved. `ids` are integers of any shape. Raises ValueError for rows that don't exist,
    TypeError for ids that aren't integers.
    """
    rows: Array = params.sparse_read(ids)
    return rows
