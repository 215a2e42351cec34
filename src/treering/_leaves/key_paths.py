"""Names for the leaves of a tree, as eformer writes them: the keys on the way, joined by dots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.tree_util import FlattenedIndexKey

from treering._tree.registry import has_shape_and_dtype
from treering._tree.state_dict import map_with_path

_QUOTES = ("''", '""')


def join_key(prefix: str | None, k: str | None) -> str:
    """Return ``prefix`` and ``k`` with a dot between them; what is empty or None is left out.

    Source: eformer.serialization.serialization.join_key.

    Example:
        >>> join_key("model", "layers.0"), join_key(None, "w"), join_key("model", ""), join_key("", None)
        ('model.layers.0', 'w', 'model', '')
    """
    return ".".join(str(part) for part in (prefix, k) if part)


def is_array_like(x: Any) -> bool:
    """Tell whether ``x`` has a shape and a dtype: arrays, numpy scalars, ``jax.ShapeDtypeStruct``; no class has.

    Source: eformer.serialization.is_array_like.

    Example:
        >>> import numpy as np
        >>> is_array_like(np.zeros(2)), is_array_like(np.float32(1)), is_array_like(1.0), is_array_like(None)
        (True, True, False, False)
    """
    return has_shape_and_dtype(x)


def leaf_key_paths(pytree: Any, prefix: str | None = "", *, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return ``pytree`` with the dotted path of each leaf in its place.

    The parts of a path are the keys of mappings as text, the numbers of items, and the names of fields; a node that
    gives jax no keys has ``<flat index 0>`` and so on. A bare leaf is called as the prefix is. Keys that hold dots
    are not escaped: ``{"a.b": x, "a": {"b": y}}`` has two leaves called ``a.b``.

    Args:
        pytree: any pytree; None is no leaf and stays, unless ``is_leaf`` says that it is one.
        prefix: stands before every path.
        is_leaf: says where to stop early.

    Source: eformer.serialization.leaf_key_paths.

    Example:
        >>> leaf_key_paths({"layers": [1, 2], "step": 3, "none": None}, "model")
        {'layers': ['model.layers.0', 'model.layers.1'], 'none': None, 'step': 'model.step'}
    """
    try:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(pytree, is_leaf=is_leaf)
    except (TypeError, ValueError, RecursionError, SystemError):
        # Keys that jax cannot sort, or more levels than it can walk; what the tree itself raises is raised again.
        return _walk(pytree, prefix, is_leaf)
    return jax.tree_util.tree_unflatten(treedef, [_join_parts(prefix, map(_part, path)) for path, _ in pairs])


def _walk(pytree: Any, prefix: str | None, is_leaf: Callable[[Any], bool] | None) -> Any:
    def name_leaf(path: tuple[str, ...], leaf: Any) -> str | None:
        return None if leaf is None and (is_leaf is None or not is_leaf(None)) else _join_parts(prefix, path)

    return map_with_path(name_leaf, pytree, is_leaf)


def _join_parts(prefix: str | None, parts: Iterable[str]) -> str:
    return join_key(prefix, ".".join(parts))


def _part(entry: Any) -> str:
    """Return the text of one step of a path; of a class of keys that jax does not know, its text without marks."""
    if isinstance(entry, FlattenedIndexKey):
        return f"<flat index {entry.key}>"
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    text = str(entry).removeprefix(".")
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
        return text[1:-1] if len(text) > 1 and text[0] + text[-1] in _QUOTES else text
    return text
