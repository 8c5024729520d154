"""Options of `Strategy.run`, as `tf.distribute.RunOptions`: accepted, and of no effect."""

from __future__ import annotations

from typing import Any, NamedTuple

from strategies.core.declared import declared, refuse_change


class RunOptions(NamedTuple):
    """Options of TensorFlow's compiler for TPUs. Nothing is compiled here.

    Raises AttributeError where an attribute is assigned.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        allowed = declared(type(self))
        if name in self._fields or name not in allowed or name in vars(self):
            refuse_change(self, name, allowed)
        object.__setattr__(self, name, value)
