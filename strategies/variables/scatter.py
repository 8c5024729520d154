"""Changes of some rows of an array, as the scatter methods of `tf.Variable`.

Each is a function of a module, `change(array, indices, values)`, so that it can be sent to the
process that holds the array. Duplicate rows are applied one after the other.
"""

from __future__ import annotations

import numpy as np

from strategies.core.values import Array


def scatter_add(array: Array, indices: Array, values: Array) -> None:
    """Add to rows."""
    np.add.at(array, indices, values)


def scatter_sub(array: Array, indices: Array, values: Array) -> None:
    """Subtract from rows."""
    np.subtract.at(array, indices, values)


def scatter_mul(array: Array, indices: Array, values: Array) -> None:
    """Multiply rows."""
    np.multiply.at(array, indices, values)


def scatter_div(array: Array, indices: Array, values: Array) -> None:
    """Divide rows."""
    np.divide.at(array, indices, values)


def scatter_min(array: Array, indices: Array, values: Array) -> None:
    """The elementwise minimum of rows and values."""
    np.minimum.at(array, indices, values)


def scatter_max(array: Array, indices: Array, values: Array) -> None:
    """The elementwise maximum of rows and values."""
    np.maximum.at(array, indices, values)


def scatter_update(array: Array, indices: Array, values: Array) -> None:
    """Replace rows."""
    array[indices] = values
