"""Pytrees that a strategy trains, and that checkpoints save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from collectives.jax.paths import names_of
from strategies.core.same_error import PropagatedErrors
from strategies.core.storage import ReplacedArrays
from strategies.core.values import Array
from strategies.jax.gradients import refuse_servers
from strategies.replication.replication import Replication


class PytreeState:
    """A pytree that begins with the chief's arrays, and that `strategies.Checkpoint` saves.

        state = PytreeState(strategy, (parameters, optimizer_state), lambda value: value[0])
        checkpoint = strategies.Checkpoint(training=state)
        state.value = step(state.value, batch)

    Arrays of JAX don't change, so the program stores each step's pytree in `value`. Arrays are
    saved under the paths of their keys, numbers as arrays, keys of `jax.random.key` as the integers
    that they consist of. Making one is collective.

    parameters: a function of the pytree that returns those of its arrays which are trained, as
        they are, in any pytree. LocalSGDStrategy needs it: each assignment of `value` counts as one
        step, after which the parameters are averaged where a round ends. The rest, as an
        optimizer's state, is each rank's own, and a checkpoint has the chief's. Other strategies
        don't use it.

    Raises a MismatchError on every rank where the ranks' pytrees differ in keys, shapes or dtypes;
    ValueError for two leaves of one path and integers that JAX would change; under LocalSGDStrategy
    also without `parameters`, for parameters that aren't floats or aren't the pytree's, and where
    a pytree is assigned whose structure, shapes or dtypes are others; RuntimeError where one is
    assigned after an averaging and `value` was not read in between; TypeError for leaves that
    are neither arrays nor numbers, and under ParameterServerStrategy, whose variables are
    `strategies.Variable` alone.
    """

    def __init__(
        self,
        strategy: Replication,
        value: Any,
        parameters: Callable[[Any], Any] | None = None,
    ) -> None:
        refuse_servers(strategy, "PytreeState")
        self.strategy = strategy
        self._value = value
        self._averaged: ReplacedArrays | None = None
        self._trained: list[int] = []
        self._unread = False
        """Whether the ranks have averaged since the program has read `value`."""
        with PropagatedErrors(strategy.communicator, "PytreeState"):
            self._mirror(parameters)

    def _mirror(self, parameters: Callable[[Any], Any] | None) -> None:
        strategy, names = self.strategy, names_of(self._value)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"PytreeState: two leaves have the path {twice!r}: must differ")
        leaves = jax.tree.leaves(self._value)
        impls = sorted({str(jax.random.key_impl(each)) for each in leaves if _is_key(each)})
        tensors = {name: np.array(each) for name, each in self.saved_tensors().items()}
        # A rank with one more would wait for the others.
        strategy.barrier(f"PytreeState of {len(tensors)} arrays {impls or ''}")
        for name, each in tensors.items():
            strategy.mirror(each, f"PytreeState: {name}")
        self.restore_tensors(tensors)
        # JAX may have narrowed NumPy's arrays.
        self._kinds = _kinds_of(self._value)
        self._averaged = strategy.averaged(lambda: self._begin(parameters))

    @property
    def value(self) -> Any:
        """The pytree; after an averaging with the means."""
        self._take_averages()
        self._unread = False
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        if self._averaged is None:
            self._value = value
            return
        self._take_averages()
        if self._unread:
            raise RuntimeError(
                "PytreeState: the ranks have averaged the parameters since `value` was last read: "
                "read it before the next assignment; what is trained together is one PytreeState"
            )
        kinds = _kinds_of(value)
        if kinds != self._kinds:
            raise ValueError(
                "PytreeState: value has another structure, or other shapes or dtypes: must be as"
                f" before, {jax.tree.unflatten(self._kinds[0], self._kinds[1])}"
            )
        self._value = value
        self._averaged.step(self._trained_leaves())

    def _take_averages(self) -> None:
        averages = None if self._averaged is None else self._averaged.averages()
        if averages is not None:
            self._unread = True
            leaves, structure = jax.tree.flatten(self._value)
            for number, array in zip(self._trained, averages, strict=True):
                # `asarray` may share the memory, which the next round changes.
                leaves[number] = jax.numpy.array(array)
            self._value = jax.tree.unflatten(structure, leaves)

    def saved_tensors(self) -> Mapping[str, Array]:
        """The arrays by their paths, such as "layers/0/kernel".

        "/" and "~" in a key become "~1" and "~0", as in `Checkpoint`.
        """
        self._take_averages()
        leaves, names = jax.tree.leaves(self._value), names_of(self._value)
        return {name: _array_of(name, leaf) for name, leaf in zip(names, leaves, strict=True)}

    def check_tensors(self, tensors: Mapping[str, Array]) -> None:
        """ValueError for other names, shapes or dtypes than those of `value`.

        A step that failed may have deleted its arrays, which were donated.
        """
        found = {name: _kind_of(each) for name, each in tensors.items()}
        leaves, names = jax.tree.leaves(self._value), names_of(self._value)
        kept = [jax.eval_shape(_data_of, leaf) for leaf in leaves]
        wanted = {name: _kind_of(each) for name, each in zip(names, kept, strict=True)}
        lines = [
            f"{name} is {found.get(name, 'missing')}, wanted {wanted.get(name, 'nothing')}"
            for name in sorted(found.keys() | wanted.keys())
            if found.get(name) != wanted.get(name)
        ]
        if lines:
            raise ValueError("; ".join(lines))

    def restore_tensors(self, tensors: Mapping[str, Array]) -> None:
        """Replace `value` by a pytree of the same structure."""
        leaves, structure = jax.tree.flatten(self._value)
        arrays = [jax.numpy.array(tensors[name]) for name in names_of(self._value)]
        restored = [
            jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
            if _is_key(leaf)
            else array
            for leaf, array in zip(leaves, arrays, strict=True)
        ]
        self._value, self._unread = jax.tree.unflatten(structure, restored), False
        if self._averaged is not None:
            self._averaged.restore([np.asarray(each) for each in self._trained_leaves()])

    def _trained_leaves(self) -> list[Any]:
        leaves = jax.tree.leaves(self._value)
        return [leaves[number] for number in self._trained]

    def _begin(self, parameters: Callable[[Any], Any] | None) -> list[Array]:
        """Find the parameters among the leaves; copies of them."""
        if parameters is None:
            raise ValueError(
                "PytreeState: under this strategy the parameters are averaged: name them by"
                " parameters=, such as parameters=lambda value: value[0]"
            )
        leaves = jax.tree.leaves(self._value)
        # All of them are arrays of their own, made when the chief's were taken.
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        chosen = jax.tree.leaves(parameters(self._value))
        if not chosen or not all(id(each) in numbers for each in chosen):
            raise ValueError(
                "PytreeState: parameters= must return one or more of the pytree's own arrays"
            )
        self._trained = [numbers[id(each)] for each in chosen]
        for number in self._trained:
            if not jax.numpy.issubdtype(leaves[number].dtype, jax.numpy.inexact):
                kind, name = leaves[number].dtype, names_of(self._value)[number]
                raise ValueError(f"PytreeState: {name} is {kind}: parameters must be floats")
        self.strategy.barrier(f"PytreeState: parameters are the arrays {self._trained}")
        return [np.array(each) for each in self._trained_leaves()]


def _kinds_of(value: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    leaves, structure = jax.tree.flatten(value)
    arrays = [each if hasattr(each, "dtype") else jax.numpy.asarray(each) for each in leaves]
    return structure, [(each.shape, each.dtype) for each in arrays]


def _kind_of(array: Any) -> str:
    return f"{array.dtype} of shape {array.shape}"


def _data_of(leaf: Any) -> Any:
    """What is saved of a leaf."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    """Whether it is an array of random keys, which NumPy does not know."""
    return hasattr(leaf, "dtype") and bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _array_of(name: str, leaf: Any) -> Array:
    """In the dtype that JAX gives the leaf, which may be one of Python's numbers."""
    array = np.asarray(_data_of(leaf))
    if array.dtype.kind in "OSU":
        raise TypeError(
            f"PytreeState: {name} is a {type(leaf).__name__}: must be an array or a number; leave"
            " others out of the pytree, as equinox.partition does"
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    narrow = array.astype(dtype)
    if array.dtype.kind in "iu" and not np.array_equal(narrow, array):
        raise ValueError(
            f"PytreeState: {name} has numbers of {array.dtype} that {dtype} lacks:"
            " use jax_enable_x64"
        )
    return narrow
