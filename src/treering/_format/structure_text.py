"""The containers around the leaves, as JSON and back, and the key texts that follow from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from treering._codec.documents import check_hashes, member, raising_corrupt, show
from treering._format.index import Container, ForeignKey, Token
from treering._format.leaf_values import decode_key, encode_key
from treering._format.structure import KEYS, iter_runs, key_text
from treering._values.human import pluralize
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_SHOWN: Final = 200
_WRITTEN_SURROGATE: Final = re.compile("~u([0-9a-f]{4})")


def escape_surrogates(key: str) -> str:
    r"""Return a key text as documents hold it: half a surrogate pair, which JSON cannot keep, is ``~u`` and its number.

    Example:
        >>> escape_surrogates("a/\ud800")
        'a/~ud800'
    """
    return _SURROGATE.sub(lambda found: f"~u{ord(found[0]):04x}", key)


def unescape_surrogates(text: str) -> str:
    r"""Return the key text that `escape_surrogates` wrote.

    Example:
        >>> unescape_surrogates("a/~ud800") == "a/\ud800"
        True
    """
    return _WRITTEN_SURROGATE.sub(lambda found: chr(int(found[1], 16)), text) if "~u" in text else text


# ------------------------------------------------------------------------------------------------------------- as JSON


def encode_structure(structure: Sequence[Token]) -> list[Any]:
    """Return the tokens as JSON: numbers of leaves, and an object for each container.

    Raises:
        UnsupportedError: a key or static field has no form in the document.

    Example:
        >>> encode_structure([Container(node="dict", keys=("a", "b")), 2])
        [{'node': 'dict', 'keys': ['a', 'b']}, 2]
    """
    return [token if type(token) is int else _encode(token) for token in structure]  # type: ignore[arg-type]


def _encode(container: Container) -> dict[str, Any]:
    node: dict[str, Any] = {"node": container.node}
    match container.node:
        case "dict":
            node["keys"] = _encode_keys(container.keys)
        case "list" | "tuple":
            node["length"] = len(container.keys)
        case _:
            node |= {"class": container.class_name, "fields": _encode_keys(container.keys)}
            if container.node == "other":
                node["static"] = {name: encode_key(value) for name, value in container.static}
                _check_static(container.static, UnsupportedError, f"a {container.class_name}")
    return node


def _encode_keys(keys: Sequence[Any]) -> list[Any]:
    # Nearly always all of them are plain names.
    if all(type(key) is str and key.isascii() for key in keys):
        return list(keys)
    encoded = [encode_key(key) for key in keys]
    check_hashes(keys, "the keys of a container", UnsupportedError)
    return encoded


def _check_static(static: Sequence[tuple[str, Any]], error: type[TreeringError], what: str) -> None:
    for name, value in static:
        if name == KEYS and type(value) is tuple:
            check_hashes(value, f"the keys of {what}", error)


def decode_structure(nodes: list[Any], leaves: int) -> list[Token]:
    """Return the tokens that `encode_structure` wrote.

    Args:
        nodes: the list.
        leaves: how many leaves there are; no more children than leaves and containers are believed in.

    Raises:
        CorruptError: a token makes no sense, or the numbers of leaves do not add up.
        FormatError: a container of a kind that this version does not know.

    Example:
        >>> decode_structure([{"node": "list", "length": 2}, 2], 2)
        [Container(node='list', keys=(0, 1), class_name=None, static=()), 2]
    """
    found = in_runs = children = 0
    most = leaves + len(nodes) - 1
    tokens: list[Token] = []
    # Layers have the same names in them; those were checked once, and one container stands for all.
    known: dict[tuple[Any, ...], Container] = {}
    for number, node in enumerate(nodes):
        if type(node) is int:
            if not 0 < node <= leaves:
                raise CorruptError(f"token {number} of the structure counts {show(node)} leaves, of {leaves} in all")
            in_runs += node
            tokens.append(node)
            continue
        container = _find_repeated(node, known) or _decode(node, f"token {number} of the structure", most - children)
        if container.node == "dict":
            known[container.keys] = container
        found += 1
        children += len(container.keys)
        tokens.append(container)
    if in_runs != leaves:
        raise CorruptError(f"the structure has {pluralize(in_runs, 'leaves')}, there are {pluralize(leaves, 'keys')}")
    if children != found + leaves - 1:
        raise CorruptError(
            f"the containers have {pluralize(children, 'children')}, there are {found + leaves - 1} of them"
        )
    return tokens


def _find_repeated(node: Any, known: dict[tuple[Any, ...], Container]) -> Container | None:
    if type(node) is dict and node.get("node") == "dict":
        keys = node.get("keys")
        if type(keys) is list and set(map(type, keys)) == {str}:
            return known.get(tuple(keys))
    return None


def _decode(node: Any, what: str, most: int) -> Container:
    kind = member(node, "node", str, what)
    match kind:
        case "dict":
            return Container(node=kind, keys=_decode_keys(node, "keys", what))
        case "list" | "tuple":
            length = member(node, "length", int, what)
            if not 0 <= length <= most:
                raise CorruptError(f"{what} is a {kind} of {show(length)} items; the tree has {most} for it")
            return Container(node=kind, keys=tuple(range(length)))
        case "namedtuple" | "other":
            fields, name = _decode_keys(node, "fields", what), member(node, "class", str, what)
            nodes = member(node, "static", dict, what) if kind == "other" else {}
            static = tuple((name, decode_key(value, f"{what}, {name!r},")) for name, value in nodes.items())
            _check_static(static, CorruptError, what)
            return Container(node=kind, keys=fields, class_name=name, static=static)
        case _:
            raise FormatError(f"{what} is a container of the unknown kind {kind[:60]!r}", hint="use a newer treering")


def _decode_keys(node: dict[str, Any], name: str, what: str) -> tuple[Any, ...]:
    keys = member(node, name, list, what)
    if set(map(type, keys)) <= {str}:
        found = tuple(keys)
    else:
        found = tuple(decode_key(key, f"a key of {what}") for key in keys)
        check_hashes(found, f"the keys of {what}")
    texts = found if keys == list(found) else tuple(map(key_text, found))
    if len(set(found)) != len(found) or len(set(texts)) != len(texts):
        raise CorruptError(f"{what} has two children of the same name")
    if any(type(key) is tuple and _holds_text(key) for key in found):
        raise CorruptError(
            f"{what} has a tuple for a key that holds the text of an object; such a tuple is text itself"
        )
    return found


def _holds_text(key: tuple[Any, ...]) -> bool:
    return any(type(item) is ForeignKey or (type(item) is tuple and _holds_text(item)) for item in key)


# ------------------------------------------------------------------------------------------------------------ key texts


def check_keys(structure: Sequence[Token], keys: Sequence[str]) -> None:
    """Require that the key texts are those that the structure gives.

    Raises:
        CorruptError: they are not, or the structure is not one tree or more than 1,024 levels deep, or two leaves have
            one key.

    Example:
        >>> check_keys([Container(node="dict", keys=("a", "b")), 2], ["a", "b"])
        >>> check_keys([Container(node="dict", keys=("a", "b")), 2], ["a", "c"])
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: leaf 1 has the key 'c', the structure says 'b'
    """
    leaf = 0
    with raising_corrupt(FormatError):
        for above, names in iter_runs(structure):
            there = keys[leaf : leaf + len(names)]
            # The keys that are there bound what is made to compare them with.
            if len(above) * len(names) <= sum(map(len, there)) and [above + name for name in names] == there:
                leaf += len(names)
                continue
            for name in names:
                if leaf == len(keys):
                    raise CorruptError(f"the structure has more leaves than the {pluralize(leaf, 'keys')}")
                if keys[leaf] != above + name:
                    shown, said = _short(keys[leaf]), _short(above + name)
                    raise CorruptError(f"leaf {leaf} has the key {shown}, the structure says {said}")
                leaf += 1
    if leaf != len(keys):
        raise CorruptError(f"the structure has {pluralize(leaf, 'leaves')}, there are {pluralize(len(keys), 'keys')}")
    if len(set(keys)) != len(keys):
        raise CorruptError("two leaves have the same key")


def _short(key: str) -> str:
    return repr(key) if len(key) <= _SHOWN else f"{key[:_SHOWN]!r}..."
