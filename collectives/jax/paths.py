"""Names of the arrays in a pytree, by the keys that lead to them."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    tree_leaves_with_path,
)

from collectives.consistency.signature import shortened

_STEPS = (FlattenedIndexKey, GetAttrKey, SequenceKey)
"""The steps of paths whose text is known to be equal in all processes."""


def names_of(tree: Any) -> list[str]:
    """A name for each array, such as "layers/0/kernel": "/" and "~" in a key are "~1" and "~0"."""
    return ["/".join(map(_text, path)) for path, _ in tree_leaves_with_path(tree)]


def text_of_keys(tree: Any) -> str:
    """A text in which trees of other keys and attributes differ; "" for positions alone.

    Ranks can compare it: keys whose text may differ between processes count as *.
    """
    paths = [path for path, _ in tree_leaves_with_path(tree)]
    if not any(isinstance(step, DictKey | GetAttrKey) for path in paths for step in path):
        return ""
    return f"keys {shortened(['/'.join(map(_common_text, path)) for path in paths])}"


def _common_text(step: Any) -> str:
    if isinstance(step, DictKey):
        return _text_of_key(step.key)
    return str(step) if isinstance(step, _STEPS) else "*"


def _text_of_key(key: Any) -> str:
    """Equal for keys that are equal to a dictionary, as 1, 1.0 and True are."""
    if isinstance(key, str):
        return repr(str.__str__(key))
    if isinstance(key, int | np.integer | np.bool_):
        return str(int(key))
    if isinstance(key, float | np.number):
        number = float(key)
        return str(int(key)) if number.is_integer() else repr(number)
    if isinstance(key, tuple):
        return f"({', '.join(map(_text_of_key, key))})"
    return repr(key) if isinstance(key, bytes | None) else "*"


def _text(step: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(step, attribute):
            step = getattr(step, attribute)
            break
    return str(step).replace("~", "~0").replace("/", "~1")
