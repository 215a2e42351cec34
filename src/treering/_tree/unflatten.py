"""The way back into a target's own containers, and what differs between its classes and those that were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from treering._format.index import Container, ForeignKey, OpaqueLeaf, Token
from treering._format.leaf_values import same_value
from treering._format.structure import KEYS, key_text, walk
from treering._printable import printable, shorten
from treering._tree.flatten import flatten_like, open_node
from treering._tree.flatten_leaves import KINDS
from treering._values.human import pluralize
from treering._values.keys import join_key

_LONGEST: Final = 120


def unflatten(like: Any, leaves: Sequence[Any]) -> Any:
    """Return a tree of ``like``'s containers around other leaves; nothing of ``like`` is changed.

    Classes, static fields, the order of dicts and their keys are those of ``like``. A dataclass that nobody
    registered is copied and its fields are set; its other attributes are those of ``like``'s instance.

    Args:
        like: any tree that ``flatten_like`` takes.
        leaves: one for each leaf of ``like``, in the order of ``flatten_like(like)``.

    Raises:
        ValueError: another number of leaves.

    Example:
        >>> unflatten({"b": [1, 2], "a": None}, [7, 8, 9])
        {'b': [7, 8], 'a': 9}
    """
    taken = 0
    root: list[Any] = []
    # A level: the children of like's node still to come, those of the new node, and how to make it.
    levels: list[tuple[Iterator[Any], list[Any], Callable[[list[Any]], Any]]] = [(iter((like,)), root, list)]
    while levels:
        children, results, rebuild = levels[-1]
        for child in children:
            node = None if type(child) in KINDS else open_node(child)
            if node is not None:
                levels.append((iter(node.children), [], node.rebuild))
                break
            if taken == len(leaves):
                raise ValueError(f"like has more leaves than the {taken} that were given")
            results.append(leaves[taken])
            taken += 1
        else:
            levels.pop()
            if levels:
                levels[-1][1].append(rebuild(results))
    if taken != len(leaves):
        raise ValueError(f"like has {pluralize(taken, 'leaves')}, {len(leaves)} were given")
    return root[0]


def static_differences(saved: Iterable[Token], like: Iterable[Token], *, called: str = "like") -> list[str]:
    """Return one line for each container of ``like`` whose class or static fields are not those that were saved.

    Containers are compared at equal key paths; one that only one side has is no difference here. ``called`` is what the
    user calls ``like``.

    Example:
        >>> saved = [Container(node="other", keys=("w",), class_name="m.Layer", static=(("act", "relu"),)), 1]
        >>> like = [Container(node="other", keys=("w",), class_name="m.Layer", static=(("act", "gelu"),)), 1]
        >>> static_differences(saved, like)
        ["act of m.Layer: saved 'relu', like has 'gelu'"]
    """
    wanted = dict(containers_of(like))
    lines: list[str] = []
    for path, container in containers_of(saved):
        if (other := wanted.get(path)) is not None:
            where = f"{join_key(path)}: " if path else ""
            lines += [f"{where}{line}" for line in _differences(container, other, called)]
    return lines


def containers_of(tokens: Iterable[Token]) -> Iterator[tuple[tuple[str, ...], Container]]:
    """Yield the containers of a structure with their key paths."""
    levels: list[tuple[tuple[str, ...], Container]] = []
    for depth, place, token in walk(tokens):
        if isinstance(token, Container):
            del levels[depth:]
            path = (*levels[-1][0], key_text(levels[-1][1].keys[place])) if levels else ()
            levels.append((path, token))
            yield path, token


def _differences(saved: Container, like: Container, called: str) -> Iterator[str]:
    if saved.thinned and like.node == "dict":
        return  # as it comes back without like
    if _named(saved) != _named(like):
        yield f"saved as {_named(saved)}, {called} has {_named(like)}"
        return
    static, wanted = dict(saved.static), dict(like.static)
    for name in {**static, **wanted}:
        if name == KEYS and saved.keys != like.keys:
            continue  # other keys are other leaves, which is said of them
        if name not in static:
            yield f"{name} of {_named(like)}: not saved, {called} has {_shown(wanted[name])}"
        elif name not in wanted:
            yield f"{name} of {_named(like)}: saved {_shown(static[name])}, {called} has none"
        elif not same_value(static[name], wanted[name]):
            yield f"{name} of {_named(like)}: saved {difference(static[name], wanted[name], called)}"


def difference(saved: Any, here: Any, called: str) -> str:
    """Say what was saved and what ``like`` has instead; two values may have the same text.

    Example:
        >>> difference("relu", "gelu", "like"), difference(0.5, 0.5, "like")
        ("'relu', like has 'gelu'", '0.5, like has another value with the same text')
    """
    texts = _shown(saved), _shown(here)
    return f"{texts[0]}, {called} has {texts[1] if texts[0] != texts[1] else 'another value with the same text'}"


def _named(container: Container) -> str:
    return container.class_name or container.node


def _shown(value: Any) -> str:
    text = value.text if isinstance(value, ForeignKey | OpaqueLeaf) else repr(value)
    return shorten(printable(text), _LONGEST)


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
        {'b.table': 'a builtins.object', 'f/1': 'the inside of treering._tree.unflatten.<lambda>'}
    """
    flat = flatten_like(tree)
    nodes = containers_of(flat.tokens)
    found = [(f"{join_key(path)}.{name}", value) for path, node in nodes for name, value in node.static]
    found += [(flat.keys[number], value) for number, value in flat.opaque.items()]
    return {place: value.left_out or "it was saved without a digest" for place, value in _find_left_out(found)}


def _find_left_out(found: list[tuple[str, Any]]) -> Iterator[tuple[str, ForeignKey | OpaqueLeaf]]:
    for place, value in found:
        if isinstance(value, tuple):
            yield from _find_left_out([(f"{place}[{number}]", item) for number, item in enumerate(value)])
        elif isinstance(value, ForeignKey | OpaqueLeaf) and (value.left_out or value.digest is None):
            yield place, value
