"""The tuples and namedtuples of a tree, as Orbax records them with ``support_rich_types``; no class is imported."""

from __future__ import annotations

from typing import Any, Final

from treering._codec.documents import member, parse_json
from treering._foreign.leaf_paths import Containers, most_steps
from treering._format.index import MAX_LEVELS, Container
from treering.errors import Corrupt, Unsupported

_WHAT: Final = "value_metadata_tree"


def read_containers(text: str) -> Containers:
    """Return the tuples and namedtuples of a tree by their paths.

    Args:
        text: the tree, as JSON inside of JSON.

    Raises:
        Corrupt: it is no such tree.
        Unsupported: containers are nested too deep.

    Example:
        >>> leaf = '{"category": "custom", "clazz": "ValueMetadataEntry", "data": {}}'
        >>> pair = f'{{"category": "custom", "clazz": "tuple", "entries": [{leaf}, {leaf}]}}'
        >>> read_containers(f'{{"a": {pair}}}')[("a",)].node
        'tuple'
    """
    found: Containers = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), parse_json(text, _WHAT))]
    left = most_steps(len(text))
    while waiting:
        path, node = waiting.pop()
        left -= len(path)
        if len(path) > MAX_LEVELS or left < 0:
            raise Unsupported(f"{_WHAT}: containers are nested too deep")
        if type(node) is list:
            children = [(str(number), child) for number, child in enumerate(node)]
        elif type(node) is not dict:
            raise Corrupt(f"{_WHAT} holds what is neither a container nor a leaf")
        elif node.get("category") == "namedtuple":
            entries = member(node, "entries", list, _WHAT)
            children = [(member(entry, "key", str, _WHAT), entry.get("value")) for entry in entries]
            name = f"{member(node, 'module', str, _WHAT)}.{member(node, 'clazz', str, _WHAT)}"
            keys = tuple(key for key, _ in children)
            found[path] = Container(node="namedtuple", keys=keys, class_name=name)
        elif node.get("category") != "custom":
            children = list(node.items())
        elif node.get("clazz") == "tuple":
            children = [(str(n), child) for n, child in enumerate(member(node, "entries", list, _WHAT))]
            found[path] = Container(node="tuple", keys=tuple(range(len(children))))
        else:
            children = []
        waiting.extend(((*path, key), child) for key, child in children)
    return found
