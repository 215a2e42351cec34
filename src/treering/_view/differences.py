"""Two listings -> what they do not have in common, from headers alone; and how a difference reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from treering._format.index import ForeignKey, OpaqueLeaf
from treering._format.leaf_values import same_value
from treering._format.listing import LeafRecord, Listing, Named
from treering._format.run_document import remove_note
from treering._values.human import pluralize
from treering._view.plain import json_text, visible
from treering._view.rows import branch_kind, child_key, children_of, is_branch, record_of, value_text
from treering._view.tree_text import leaf_cells

ABSENT: Final = object()
"""Stands for a node that one of two trees does not have."""

_LONGEST_KEY = 300
_LONGEST_SIDE = 100
_LOOSE_KINDS = frozenset({"jax", "numpy", "numpy scalar", "array"})


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two checkpoints do not have in common; its text is one line.

    Example:
        >>> print(Difference(key="params/w", what="shape", a="[2, 3]", b="[3, 2]"))
        params/w: shape: [2, 3] in A, [3, 2] in B
        >>> print(Difference(key="params/w", what="missing", a=None, b="float32 [3]"))
        params/w: only in B: float32 [3]
    """

    key: str
    """Key text of the leaf or branch, or of the metadata member."""
    what: str
    """"missing", "kind", "dtype", "shape", "size", "value" or "values" of leaves; "node" or "static" of containers;
    "metadata"."""
    a: str | None
    """What stands in the first one, as text; None where nothing does."""
    b: str | None
    """What stands in the second one, as text; None where nothing does."""
    detail: str = ""
    """For "values" how many items differ, and where the first of them is."""

    def __str__(self) -> str:
        key = visible(self.key, _LONGEST_KEY) or "(the root)"
        a, b = (None if side is None else visible(side, _LONGEST_SIDE) for side in (self.a, self.b))
        if a is None or b is None:
            sides = f"only in A: {a}" if b is None else f"only in B: {b}"
        elif self.what == "metadata":
            sides = f"{a} in A, {b} in B"
        else:
            detail = f"{self.detail}: " if self.detail else ""
            sides = f"{self.what}: {detail}{a} in A, {b} in B"
        return f"{'metadata ' if self.what == 'metadata' else ''}{key}: {sides}"


def compare_listings(a: Listing, b: Listing) -> Iterator[Difference]:
    """Compare two listings: structure, leaves, small values, metadata. The order of a dict's keys does not count.

    Kinds of containers are compared where both forms keep them, and so is what an array was in Python. Where an
    array lay on devices, who wrote a file and when, and what a run notes of its step, is no difference.

    Example:
        >>> one = Listing(form="msgpack", file_bytes=1, root={"step": 7})
        >>> two = Listing(form="msgpack", file_bytes=1, root={"step": 8})
        >>> [str(each) for each in compare_listings(one, two)]
        ['step: value: 7 in A, 8 in B']
    """
    exact = a.structured and b.structured
    nodes = exact or (a.form.startswith("msgpack") and b.form.startswith("msgpack"))
    for key, left, right in pair_nodes(a.root, b.root):
        yield from _place(key, left, right, exact=exact, nodes=nodes)
    yield from _metadata(remove_note(a.metadata), remove_note(b.metadata))


def pair_nodes(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Walk through two trees together, with ``ABSENT`` for what one of them lacks. A leaf beside a branch ends the way.

    Example:
        >>> [key for key, _, right in pair_nodes({"x": 1, "y": [2]}, {"x": 1}) if right is ABSENT]
        ['y', 'y/0']
    """
    yield "", a, b
    stack = [("", 0, _pairs(a, b))]
    while stack:
        above, depth, pairs = stack[-1]
        for name, left, right in pairs:
            key = child_key(above, depth, name)
            yield key, left, right
            if is_branch(left) or is_branch(right):
                stack.append((key, depth + 1, _pairs(left, right)))
                break
        else:
            stack.pop()


def _pairs(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Pair the children of two nodes by name; a leaf beside a branch has none."""
    if not all(node is ABSENT or is_branch(node) for node in (a, b)):
        return
    others = _children(b)
    yield from ((name, left, others.pop(name, ABSENT)) for name, left in _children(a).items())
    yield from ((name, ABSENT, right) for name, right in others.items())


def _children(node: Any) -> dict[str, Any]:
    children: dict[str, Any] = {}
    for name, child in () if node is ABSENT else children_of(node):
        unique = name
        while unique in children:
            # 1 and "1" in one map of a msgpack file.
            unique += "'"
        children[unique] = child
    return children


def needs_reading(a: Any, b: Any) -> bool:
    """Tell whether two nodes are leaves alike as far as headers go, and at least one has bytes that have to be read.

    Example:
        >>> needs_reading(7, 8)
        False
    """
    sides = a, b
    if any(node is ABSENT or is_branch(node) for node in sides) or LeafRecord not in map(type, sides):
        return False
    left, right = record_of(a), record_of(b)
    is_same_kind = left.dtype is not None or left.kind == right.kind
    return is_same_kind and (left.dtype, left.shape, left.nbytes) == (right.dtype, right.shape, right.nbytes)


def _place(key: str, a: Any, b: Any, *, exact: bool, nodes: bool) -> Iterator[Difference]:
    """Compare what stands at one key."""
    if a is ABSENT or b is ABSENT:
        there = b if a is ABSENT else a
        # A branch that only one side has shows in its leaves, unless it is empty.
        if not is_branch(there) or (nodes and not there):
            left, right = (None if node is ABSENT else _text(node) for node in (a, b))
            yield Difference(key, "missing", left, right)
    elif is_branch(a) != is_branch(b):
        yield Difference(key, "node", _text(a), _text(b))
    elif not is_branch(a):
        yield from _leaves(key, a, b, exact=exact)
    elif nodes:
        yield from _branches(key, a, b)


def _branches(key: str, a: Any, b: Any) -> Iterator[Difference]:
    if _text(a).removeprefix("empty ") != _text(b).removeprefix("empty "):
        yield Difference(key, "node", _text(a), _text(b))
    left, right = (dict(node.static) if isinstance(node, Named) else {} for node in (a, b))
    for name in {**left, **right}:
        if name not in left or name not in right or not same_value(left[name], right[name]):
            texts = [_static_text(side[name]) if name in side else "not there" for side in (left, right)]
            yield Difference(f"{key}.{name}", "static", *_tell_apart(left.get(name), right.get(name), texts))


def _leaves(key: str, a: Any, b: Any, *, exact: bool) -> Iterator[Difference]:
    left, right = record_of(a), record_of(b)
    is_same_kind = _kind(left, exact=exact) == _kind(right, exact=exact)
    if not is_same_kind:
        yield Difference(key, "kind", _describe_leaf(left, a), _describe_leaf(right, b))
    if left.dtype is not None and right.dtype is not None:
        if left.dtype != right.dtype:
            yield Difference(key, "dtype", left.dtype, right.dtype)
        if left.shape != right.shape:
            yield Difference(key, "shape", str(list(left.shape or ())), str(list(right.shape or ())))
    elif is_same_kind and (isinstance(a, LeafRecord) or isinstance(b, LeafRecord)):
        if left.nbytes != right.nbytes:
            yield Difference(key, "size", pluralize(left.nbytes, "bytes"), pluralize(right.nbytes, "bytes"))
    elif is_same_kind and not same_value(a, b):
        texts = ["None" if leaf is None else value_text(leaf) or record_of(leaf).kind for leaf in (a, b)]
        yield Difference(key, "value", *_tell_apart(a, b, texts))


def _kind(leaf: LeafRecord, *, exact: bool) -> tuple[str, str | None]:
    """Name the kind of a leaf; where a form does not keep it, only that it is an array."""
    if exact:
        return leaf.kind, leaf.impl
    return ("array" if leaf.kind in _LOOSE_KINDS or leaf.kind == "key" else leaf.kind), None


def _metadata(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key, left, right in _members(a, b):
        one, other = (None if side is ABSENT else json_text(side) for side in (left, right))
        if one is None or other is None or json.dumps(left, sort_keys=True) != json.dumps(right, sort_keys=True):
            yield Difference(key, "metadata", one, other)


def _members(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value, other value) of all members, those of objects inside included where both sides have them."""
    waiting: list[tuple[str, int, Any, Any]] = [("", 0, a, b)]
    while waiting:
        key, depth, left, right = waiting.pop()
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            waiting += [
                (child_key(key, depth, name), depth + 1, left.get(name, ABSENT), right.get(name, ABSENT))
                for name in reversed({**left, **right})
            ]
        else:
            yield key, left, right


def _text(node: Any) -> str:
    """Describe a branch or leaf in a few words."""
    if isinstance(node, Named):
        return f"{node.node} {node.class_name}" if node.node == "namedtuple" else node.class_name
    if is_branch(node):
        kind = "dict" if branch_kind(node) == "map" else branch_kind(node)
        return kind if node else f"empty {kind}"
    dtype, detail = leaf_cells(node)
    return f"{dtype} {detail}".rstrip()


def _describe_leaf(leaf: LeafRecord, node: Any) -> str:
    """Describe a leaf with the kind that it was."""
    if leaf.dtype is None:
        return _text(node)
    impl = f" {leaf.impl}" if leaf.impl else ""
    return f"{leaf.kind}{impl} {leaf.dtype}{list(leaf.shape or ())}"


def _static_text(static: Any) -> str:
    return static.text if isinstance(static, ForeignKey) else repr(static)


def _tell_apart(a: Any, b: Any, texts: list[str]) -> list[str]:
    """Add their digests to values whose texts are the same."""
    if texts[0] != texts[1]:
        return texts
    return [f"{text} ({_digests(value)})" for text, value in zip(texts, (a, b), strict=True)]


def _digests(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(filter(None, map(_digests, value)))
    return (value.digest if isinstance(value, ForeignKey | OpaqueLeaf) else None) or ""
