"""Functions of pytrees: their sizes, and a map with paths."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from treering._tree.registry import has_shape_and_dtype, is_typed_key
from treering._tree.state_dict import leaves_of, map_with_path
from treering.checkpoint import moved_names

__all__ = ["tree_bytes", "tree_map_with_path", "tree_size"]


def tree_map_with_path(
    f: Callable[[tuple[str, ...], Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Return ``tree`` with every leaf replaced by ``f(path, leaf)``.

    Args:
        f: gets the path as a tuple of str, outermost first, and the leaf; None is a leaf.
        tree: any pytree; dicts keep their order, every node its type.
        is_leaf: returns True for a node that counts as a leaf.

    Source: eformer.pytree.tree_map_with_path.

    Example:
        >>> tree_map_with_path(lambda path, x: "/".join(path), {"b": [1, 2], "a": None})
        {'b': ['b/0', 'b/1'], 'a': 'a'}
    """
    return map_with_path(f, tree, is_leaf)


def tree_size(tree: Any) -> int:
    """Return the number of elements in all leaves; a leaf that is not an array counts as one.

    Source: eformer.pytree.tree_size.

    Example:
        >>> import numpy as np
        >>> tree_size({"w": np.zeros((2, 3)), "step": 7})
        7
    """
    return sum(math.prod(leaf.shape) if has_shape_and_dtype(leaf) else 1 for leaf in leaves_of(tree))


def tree_bytes(tree: Any) -> int:
    """Return the bytes in all leaves: of an array its own, of a Python number those in numpy, of others none.

    Source: eformer.pytree.tree_bytes.

    Example:
        >>> import numpy as np
        >>> tree_bytes({"w": np.zeros((2, 3), np.float32), "step": 7, "name": "run"})
        32
    """
    return sum(_leaf_bytes(leaf) for leaf in leaves_of(tree))


def _leaf_bytes(leaf: Any) -> int:
    if is_typed_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    if has_shape_and_dtype(leaf):
        return int(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize)
    return int(np.asarray(leaf).nbytes) if isinstance(leaf, bool | int | float | complex) else 0


if not TYPE_CHECKING:  # a type checker is to refuse the old name
    __getattr__ = moved_names(__name__, "uncompared")
