"""What of a tree takes no part in the digests of its functions and static fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treering._format.index import ForeignKey, OpaqueLeaf
from treering._tree.flatten import flatten_like
from treering._tree.unflatten import containers_of
from treering._values.keys import join_key


def uncompared(tree: Any) -> dict[str, str]:
    """Return what in the functions and static fields of ``tree`` ``load`` cannot compare.

    ``load`` warns where those of ``like`` are not those that were saved. It compares digests of their whole values:
    arrays by dtype, shape and bytes, containers and dataclasses by what they hold, functions by their names. Two things
    are left out. What a function closes over and its code take no part. An object of another class has no digest, nor
    has anything that holds it; ``load`` compares the first 400 characters of its repr.

    Args:
        tree: any pytree: what you save, a ``like``, or what ``load`` gives.

    Returns:
        Key of the leaf, or key of the node, a point and name of the field -> what in it is left out.

    Example:
        >>> import dataclasses, jax
        >>> @jax.tree_util.register_dataclass
        ... @dataclasses.dataclass
        ... class Layer:
        ...     weight: object
        ...     table: object = dataclasses.field(metadata={"static": True})
        >>> uncompared({"a": Layer(1.0, {"rate": 0.5}), "b": Layer(2.0, {"hook": object()}), "f": [max, lambda x: x]})
        {'b.table': 'a builtins.object', 'f/1': 'the inside of treering._tree.value_report.<lambda>'}
    """
    flat = flatten_like(tree)
    found = [
        (f"{join_key(path)}.{name}", value) for path, node in containers_of(flat.tokens) for name, value in node.static
    ]
    found += [(flat.keys[number], value) for number, value in flat.opaque.items()]
    return {place: value.left_out or "it was saved without a digest" for place, value in _left_out(found)}


def _left_out(found: list[tuple[str, Any]]) -> Iterator[tuple[str, ForeignKey | OpaqueLeaf]]:
    for place, value in found:
        if isinstance(value, tuple):
            yield from _left_out([(f"{place}[{number}]", item) for number, item in enumerate(value)])
        elif isinstance(value, ForeignKey | OpaqueLeaf) and (value.left_out or value.digest is None):
            yield place, value
