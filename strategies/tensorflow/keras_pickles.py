"""Objects of Keras as pickles of their attributes; layers that look up, of their vocabularies.

Keras's own pickles of models are files of weights, whose variables would be new ones.
"""

from __future__ import annotations

from typing import Any

from keras.src.layers.preprocessing.index_lookup import IndexLookup
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils.backend_utils import DynamicBackend
from keras.src.utils.tracking import TrackedDict, TrackedList, TrackedSet

_CONTAINERS = {TrackedDict: dict, TrackedList: list, TrackedSet: set}
"""Containers that report what is added to a tracker, which they have only once they are made."""


def reduced(thing: Any) -> Any:
    """As `__reduce__` of an object of Keras; NotImplemented for others."""
    if isinstance(thing, IndexLookup) and thing.output_mode != "tf_idf":
        # Its table belongs to one process.
        return _lookup, (type(thing), thing.get_config(), thing.get_vocabulary(False))
    if isinstance(thing, KerasSaveable):
        return _blank, (object, type(thing)), thing.__dict__
    if isinstance(thing, DynamicBackend):
        # Its attributes are those of the backend's module, also while it is unpickled.
        return DynamicBackend, (thing.name,)
    plain = _CONTAINERS.get(type(thing))
    if plain is not None:
        state = thing.__dict__, plain(thing)
        return _blank, (plain, type(thing)), state, None, None, _fill
    return NotImplemented


def _blank(base: Any, kind: type) -> Any:
    return base.__new__(kind)


def _lookup(kind: Any, config: dict[str, Any], vocabulary: list[Any]) -> Any:
    layer = kind.from_config(config | {"vocabulary": None})
    if vocabulary:
        layer.set_vocabulary(vocabulary)
    return layer


def _fill(container: Any, state: tuple[dict[str, Any], Any]) -> None:
    attributes, content = state
    container.__dict__.update(attributes)
    fill = list.extend if isinstance(content, list) else type(content).update
    fill(container, content)
