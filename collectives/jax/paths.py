"""Names of the arrays in a pytree, by the keys that lead to them."""

from __future__ import annotations

from typing import Any

from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    tree_leaves_with_path,
)

from collectives.consistency.signature import shortened

_STEPS = (DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey)
"""The keys of paths whose text is known to be equal in all processes."""


def names_of(tree: Any) -> list[str]:
    """A name for each array, such as "layers/0/kernel": "/" and "~" in a key are "~1" and "~0"."""
    return ["/".join(map(_text, path)) for path, _ in tree_leaves_with_path(tree)]


def text_of_keys(tree: Any) -> str:
    """A text in which trees of other keys and attributes differ; "" for positions alone.

    Ranks can compare it: it has no keys but strings and integers, as others' texts may differ
    between processes.
    """
    steps = [step for path, _ in tree_leaves_with_path(tree) for step in path]
    names = [step.key for step in steps if isinstance(step, DictKey)]
    names += [step.name for step in steps if isinstance(step, GetAttrKey)]
    known = all(isinstance(step, _STEPS) for step in steps)
    if not names or not known or not all(isinstance(name, str | int) for name in names):
        return ""
    return f"keys {shortened(names_of(tree))}"


def _text(step: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(step, attribute):
            step = getattr(step, attribute)
            break
    return str(step).replace("~", "~0").replace("/", "~1")
