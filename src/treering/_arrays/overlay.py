"""Opened trees laid over each other, as one: the containers of all, and of each leaf the highest tree that has it.

A base and its adapter are the usual case. Containers merge by the texts of their keys. What is merged is the indexes
alone; the arrays of each tree are read by its own means when they are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import Progress
from treering._arrays.source import Source
from treering._format.columns import EACH_STATES
from treering._format.index import Chunks, Container, Index, LeafType, Token
from treering._format.structure import assemble, iter_runs, key_text, nest_paths, node_keys
from treering._plan.exchange import StoredChunk
from treering._values.keys import join_key, split_key
from treering.errors import MismatchError

if TYPE_CHECKING:
    import numpy as np

_Place: TypeAlias = tuple[int, int]
"""The number of a tree, and that of a leaf in it."""
_SEQUENCES: Final = ("list", "tuple")


@dataclasses.dataclass(slots=True)
class _Node:
    """A container of the trees so far."""

    head: Container
    tree: int
    """The number of the highest tree that says what it is."""
    children: dict[str, _Node | _Place]
    """By the texts of their keys."""


def lay_over(layers: Sequence[Source], paths: Sequence[str]) -> Source:
    """Return opened trees as one, in which later ones win.

    Args:
        layers: the trees, the lowest first, at least one.
        paths: where they are.

    Raises:
        MismatchError: two have different containers at one place, or one a leaf and the other a container.
    """
    index, places = merge_indexes([layer.index for layer in layers], paths)
    return Source(
        index,
        _OverlaidArrays(layers, places),
        structured=all(layer.structured for layer in layers),
        raw_keys=any(layer.raw_keys for layer in layers),
        mapped=any(layer.mapped for layer in layers),
        held=any(layer.held for layer in layers),
        is_current=lambda: all(layer.is_current() for layer in layers),
        most_tries=min(layer.most_tries for layer in layers),
        layers=layers,
        paths=paths,
        origins=[(tree,) for tree, _ in places],
    )


def merge_indexes(indexes: Sequence[Index], paths: Sequence[str]) -> tuple[Index, list[_Place]]:
    """Return what is in trees that lie over each other, and the tree and leaf that each leaf of it is.

    Raises:
        MismatchError: as `lay_over` says.
        FormatError: the names of a flat form are paths of which one lies inside another.
    """
    root = _nest(0, indexes[0])
    for number, index in enumerate(indexes[1:], 1):
        _merge(root, _nest(number, index), indexes, paths)
    structure, places = _flatten(root)
    types: dict[LeafType, int] = {}
    leaf_types = [types.setdefault(indexes[tree].type_of(leaf), len(types)) for tree, leaf in places]
    held = [index.values for index in indexes]
    values = {number: held[tree][leaf] for number, (tree, leaf) in enumerate(places) if leaf in held[tree]}
    merged = Index(
        attempt="",
        written=indexes[-1].written,
        meshes=tuple(dict.fromkeys(mesh for index in indexes for mesh in index.meshes)),
        structure=structure,
        keys=_key_texts(structure),
        types=tuple(types),
        leaf_types=leaf_types,
        values=values,
        chunks=Chunks(leaf=(), box=(), file=(), offset=(), nbytes=(), block=()),
        metadata={name: value for index in indexes for name, value in index.metadata.items()},
        verified=all(index.verified for index in indexes),
        structured=all(index.structured for index in indexes),
        part=tuple(glob for index in indexes for glob in index.part) if all(index.part for index in indexes) else (),
    )
    return merged, places


def _nest(number: int, index: Index) -> _Node:
    """Return a tree as nodes, below one that holds nothing else."""

    def make(head: Container, children: list[Any]) -> _Node:
        return _Node(head, number, dict(zip(map(key_text, head.keys), children, strict=True)))

    structure: Sequence[Token] = index.structure
    order: Sequence[int] = range(len(index.keys))
    if _key_texts(structure) != list(index.keys):  # a flat form, whose names are paths
        structure, order = nest_paths(map(split_key, index.keys))
    places = [(number, leaf) for leaf in order]
    return _Node(Container(node="dict", keys=("",)), number, {"": assemble(structure, places, make)})


def _key_texts(structure: Sequence[Token]) -> list[str]:
    return [above + name for above, names in iter_runs(structure) for name in names]


def _merge(lower: _Node, upper: _Node, indexes: Sequence[Index], paths: Sequence[str]) -> None:
    """Put a tree over another one, which is changed."""
    pairs: list[tuple[_Node, _Node, tuple[str, ...]]] = [(lower, upper, ())]
    while pairs:
        lower, upper, path = pairs.pop()
        for text, above in upper.children.items():
            below = lower.children.get(text)
            # The states of processes are one thing, whatever a state was before.
            if isinstance(below, _Node) and isinstance(above, _Node) and _is_each(below) == _is_each(above):
                fits = "dict" in (below.head.node, above.head.node) or _name(below) == _name(above)
                pairs.append((below, above, (*path, text)))
            else:
                is_empty = isinstance(below, tuple) and indexes[below[0]].type_of(below[1]).kind == "none"
                fits = below is None or is_empty or type(below) is type(above)
                lower.children[text] = above
            if not fits:
                key = join_key((*path, text)[1:])
                has = " and ".join(f"{paths[_tree(one)]!r:.200} has {_name(one)}" for one in (below, above) if one)
                where = f"at {key!r:.200}" if key else "at the root"
                what = f"the checkpoints do not fit over each other {where}: {has}"
                hint = "save the upper one with only=, so that it holds nothing but its own leaves"
                raise MismatchError(what, hint=hint)
        lower.head, lower.tree = _merge_heads(lower.head, upper.head), upper.tree


def _is_each(node: _Node) -> bool:
    return node.head.class_name == EACH_STATES


def _name(child: _Node | _Place) -> str:
    return (child.head.class_name or child.head.node) if isinstance(child, _Node) else "a leaf"


def _tree(child: _Node | _Place) -> int:
    return child.tree if isinstance(child, _Node) else child[0]


def _merge_heads(below: Container, above: Container) -> Container:
    """Return what has the children of both: a dict takes the class of the other, unless that has no place for them."""
    keys = {key_text(key): key for one in (above, below) for key in node_keys(one)}
    order = {key_text(key): None for one in (below, above) for key in node_keys(one)}
    head = below if above.node == "dict" else above
    if head.node != "dict" and keys.keys() == set(map(key_text, head.keys)):
        return head
    if head.node in _SEQUENCES and keys.keys() == set(map(str, range(len(keys)))):
        return dataclasses.replace(head, keys=tuple(range(len(keys))))
    thinned = head.node != "dict" or (below.thinned and above.thinned)
    return Container(node="dict", keys=tuple(map(keys.__getitem__, order)), thinned=thinned)


def _flatten(root: _Node) -> tuple[list[Token], list[_Place]]:
    """Return the containers below a node in pre-order, and the leaves in their order."""
    structure: list[Token] = []
    places: list[_Place] = []
    run = 0
    levels: list[Iterator[_Node | _Place]] = [iter(root.children.values())]
    while levels:
        if (child := next(levels[-1], None)) is None:
            levels.pop()
        elif isinstance(child, _Node):
            structure += [run, child.head] if run else [child.head]
            run = 0
            children = child.children
            levels.append(iter([children[key_text(key)] for key in child.head.keys]))
        else:
            places.append(child)
            run += 1
    return [*structure, run] if run else structure, places


class _OverlaidArrays:
    """Gives boxes of the leaves of trees that lie over each other.

    Args:
        layers: the trees.
        places: the tree and the leaf in it that each leaf is.
    """

    def __init__(self, layers: Sequence[Source], places: Sequence[_Place]) -> None:
        self._arrays = [layer.arrays for layer in layers]
        self._places = places

    def check_files(self) -> None:
        """Require every file of all trees to be there and its header to be intact."""
        for arrays in self._arrays:
            arrays.check_files()

    def dtype_of(self, leaf: int) -> np.dtype[Any]:
        """Return the dtype of what is stored of a leaf."""
        tree, number = self._places[leaf]
        return self._arrays[tree].dtype_of(number)

    def stored_chunks(self, leaf: int) -> tuple[StoredChunk, ...]:
        """Return how a stored leaf lies."""
        tree, number = self._places[leaf]
        return self._arrays[tree].stored_chunks(number)

    def read(self, requests: Sequence[ReadRequest], progress: Progress | None = None) -> None:
        """Fill ``arrays`` of every request, one tree after the other; raises as the trees do."""
        by_tree: dict[int, list[tuple[ReadRequest, ReadRequest]]] = {}
        for request in requests:
            tree, number = self._places[request.leaf]
            own = ReadRequest(number, request.boxes, steps=request.steps)
            by_tree.setdefault(tree, []).append((request, own))
        done = 0
        for tree, pairs in by_tree.items():
            self._arrays[tree].read([own for _, own in pairs], progress and functools.partial(_go_on, progress, done))
            for request, own in pairs:
                request.arrays = own.arrays
                done += sum(array.nbytes for array in own.arrays)


def _go_on(progress: Progress, before: int, done: int, total: int) -> None:
    progress(before + done, before + total)
