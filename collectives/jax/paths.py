"""Names of the arrays in a pytree, by the keys that lead to them."""

from __future__ import annotations

from typing import Any

from jax.tree_util import DictKey, GetAttrKey, tree_leaves_with_path

from collectives.consistency.signature import text_of_names


def names_of(tree: Any) -> list[str]:
    """A name for each array, such as "layers/0/kernel": "/" and "~" in a key are "~1" and "~0"."""
    return ["/".join(map(_text, path)) for path, _ in tree_leaves_with_path(tree)]


def text_of_keys(tree: Any) -> str:
    """A text in which trees of other keys and attributes differ; "" for positions alone.

    Ranks can compare it: it has no keys but strings and integers, as others' texts may differ
    between processes.
    """
    steps = [step for path, _ in tree_leaves_with_path(tree) for step in path]
    keys = [step.key for step in steps if isinstance(step, DictKey)]
    named = keys or any(isinstance(step, GetAttrKey) for step in steps)
    if not named or not all(isinstance(key, str | int) for key in keys):
        return ""
    return f"keys {text_of_names(names_of(tree))}"


def _text(step: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(step, attribute):
            step = getattr(step, attribute)
            break
    return str(step).replace("~", "~0").replace("/", "~1")
