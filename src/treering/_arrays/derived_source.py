"""Opened trees made of opened trees: seen through a key map, or laid over each other as one.

Through a key map, boxes of new leaves are read from boxes of the stored ones. Trees that lie over each other have the
containers of all, and of each leaf the highest tree that has it: a base and its adapter are the usual case. Containers
merge by the texts of their keys. What is merged is the indexes alone; the arrays of each tree are read by its own means
when they are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import Progress, aligned_empty, split_by_bytes
from treering._arrays.source import Arrays, HeldArrays, Source
from treering._format.columns import EACH_STATES
from treering._format.index import NO_CHUNKS, Container, Index, LeafType, Token
from treering._format.leaf_values import same_value
from treering._format.selection import choose_dtypes
from treering._format.structure import assemble, flatten_nodes, iter_runs, key_text, nest_paths, node_keys
from treering._keymap.key_map import KeyMap, MappedLeaf, MapPlan, SourceBox
from treering._keymap.key_rule import MapLeaf, Piece
from treering._plan.load import StoredChunk
from treering._printable import list_lines
from treering._values.boxes import Box, bounding_box, picked_shape, relative, size_of, slices, whole
from treering._values.casts import NotKept, cast_array, float_dtypes
from treering._values.dtypes import lookup, numpy_dtype
from treering._values.human import build_mismatch
from treering._values.keys import join_key, key_name, naming_leaf, split_key
from treering.errors import MismatchError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ARRAYS: Final = frozenset({"jax", "numpy", "numpy scalar"})
# Stored boxes are read beside the arrays that they are copied into, about so many bytes at a time.
_SLAB_BYTES: Final = 32 << 20


def map_source(source: Source, key_map: KeyMap) -> Source:
    """Return an opened tree with the keys, shapes and dtypes that a map gives its leaves, in nested dicts.

    Raises:
        MismatchError: the map does not fit; the error has every finding.
    """
    return _apply(source, key_map.plan(_map_leaves(source.index)))


def map_index(index: Index, key_map: KeyMap) -> Index:
    """Return the index that `map_source` gives a tree; raises as that does."""
    return map_source(Source(index, HeldArrays({})), key_map).index


def unmap_source(source: Source, key_map: KeyMap) -> Source:
    """Return a tree with the leaves that it is stored as, so that `map_source` with the same map gives it again.

    Raises:
        MismatchError: the map does not fit, or two leaves that are copies of one by the map differ.
    """
    plan = key_map.plan_save(_map_leaves(source.index))
    stored = _apply(source, plan)
    if plan.dropped:
        _check_copies(source, map_source(stored, key_map), plan.dropped)
    return stored


def cast_floats(source: Source, dtype: Any) -> Source:
    """Return an opened tree in which arrays of floats have the dtypes that `float_dtypes` takes.

    Raises:
        UnsupportedError: one is not a dtype of floats.
        MismatchError: nothing matches a glob.
    """
    index = source.index
    types = [index.types[number] for number in index.leaf_types]
    chosen = choose_dtypes(index.structure, index.keys, types, float_dtypes(dtype))
    leaves = []
    for number, key in enumerate(index.keys):
        leaf = _map_leaf(key, index.type_of(number))
        axes = tuple(range(len(leaf.shape or ())))
        piece = Piece(whole(leaf.shape or ()), number, (0,) * len(axes), axes)
        name = chosen.get(number)
        leaves.append(MappedLeaf(key, leaf.shape, name or leaf.dtype, (piece,), renamed=name is None))
    return _replace_leaves(source, leaves)


def _map_leaves(index: Index) -> Iterator[MapLeaf]:
    return (_map_leaf(key, index.type_of(number)) for number, key in enumerate(index.keys))


def _apply(source: Source, plan: MapPlan) -> Source:
    structure, order = nest_paths([split_key(leaf.key) for leaf in plan.leaves])
    leaves = [plan.leaves[number] for number in order]
    return _replace_leaves(source, leaves, structure=structure, keys=[leaf.key for leaf in leaves])


def _replace_leaves(source: Source, leaves: Sequence[MappedLeaf], **columns: Any) -> Source:
    index = source.index
    types: dict[LeafType, int] = {}
    leaf_types = [types.setdefault(_new_type(index, leaf), len(types)) for leaf in leaves]
    stored = [leaf.pieces[0].leaf for leaf in leaves]
    values = {number: index.values[leaf] for number, leaf in enumerate(stored) if leaf in index.values}
    mapped = dataclasses.replace(
        index, types=tuple(types), leaf_types=leaf_types, values=values, chunks=NO_CHUNKS, **columns
    )
    made_of = [[source.origins[piece.leaf] for piece in leaf.pieces] for leaf in leaves] if source.layers else []
    origins = [tuple(sorted(set(itertools.chain.from_iterable(of)))) for of in made_of]
    # A new one, whatever class of sources this is.
    return Source(
        mapped, MappedArrays(source.arrays, leaves), structured=False, raw_keys=source.raw_keys, mapped=source.mapped,
        held=source.held, is_current=source.is_current, most_tries=source.most_tries,
        opened=source.opened, layers=source.layers, paths=source.paths, origins=origins,
    )  # fmt: skip


def _map_leaf(key: str, kind: LeafType) -> MapLeaf:
    return MapLeaf(key, kind.shape or (), kind.dtype) if kind.kind in _ARRAYS and kind.stored else MapLeaf(key)


def _check_copies(tree: Source, loaded: Source, copies: Sequence[int]) -> None:
    """Refuse leaves that a map makes of others, and that are not what it makes of them any more."""
    numbers = {key: number for number, key in enumerate(loaded.index.keys)}
    odd: list[str] = []
    for leaf in copies:
        key = tree.index.keys[leaf]
        if not same_value(_read_whole(tree, leaf), _read_whole(loaded, numbers[key])):
            odd.append(f"{key_name(key)}: it is not what the key map makes of the leaf that is saved for it")
    if odd:
        hint = "give such a leaf a rule of its own instead of copy=True"
        raise build_mismatch(f"the key map would lose leaves:{list_lines(odd)}", odd, hint)


def _read_whole(source: Source, leaf: int) -> Any:
    if leaf in source.index.values:
        return source.index.values[leaf]
    request = ReadRequest(leaf, [whole(source.index.type_of(leaf).shape or ())])
    source.arrays.read([request])
    return request.arrays[0].tobytes()


def _new_type(index: Index, leaf: MappedLeaf) -> LeafType:
    old = index.type_of(leaf.pieces[0].leaf)
    if leaf.renamed:
        return old
    kind = "numpy" if old.kind == "numpy scalar" and leaf.shape else old.kind
    return LeafType(kind=kind, dtype=leaf.dtype, shape=leaf.shape)


class _Copy(NamedTuple):
    """A box that is to be read, and the array that it is copied into."""

    part: SourceBox
    target: NDArray[Any]
    nbytes: int
    key: str


class MappedArrays:
    """Gives boxes of new leaves.

    Args:
        arrays: gives boxes of the stored leaves.
        leaves: what each new leaf is made of.
    """

    def __init__(self, arrays: Arrays, leaves: Sequence[MappedLeaf]) -> None:
        self._arrays = arrays
        self._leaves = leaves

    def check_files(self) -> None:
        """Require every file to be there and its header to be intact."""
        self._arrays.check_files()

    def dtype_of(self, leaf: int) -> np.dtype[Any]:
        """Return the dtype of a new leaf."""
        made = self._leaves[leaf]
        known = None if made.renamed else lookup(made.dtype or "")
        return self._arrays.dtype_of(made.pieces[0].leaf) if known is None else numpy_dtype(known)

    def stored_chunks(self, leaf: int) -> tuple[StoredChunk, ...]:
        """Return how a leaf lies that only has another key; nothing for others, which are not exchanged."""
        made = self._leaves[leaf]
        return self._arrays.stored_chunks(made.pieces[0].leaf) if made.renamed else ()

    def largest_block(self, leaf: int) -> int | None:
        """Return what `largest_block` does; a run of items lies all over a stored leaf of another order of axes."""
        pieces = self._leaves[leaf].pieces
        kept = [[axis for axis in piece.axes if axis is not None] for piece in pieces]
        blocks = [largest_block(self._arrays, piece.leaf) for piece in pieces]
        known = [block for block in blocks if block is not None]
        return max(known) if len(known) == len(blocks) and all(axes == sorted(axes) for axes in kept) else None

    def read(self, requests: Sequence[ReadRequest], progress: Progress | None = None) -> None:
        """Fill ``arrays`` of every request.

        Raises:
            MismatchError: a cast would change a number by more than rounding.
            CorruptError, StoreError: as those of the stored leaves.
        """
        straight: list[tuple[ReadRequest, ReadRequest]] = []
        copies: list[_Copy] = []
        for request in requests:
            leaf = self._leaves[request.leaf]
            if leaf.renamed:
                stored = ReadRequest(leaf.pieces[0].leaf, request.boxes, steps=request.steps)
                straight.append((request, stored))
                continue
            dtype = self.dtype_of(request.leaf)
            with naming_leaf(leaf.key):
                request.arrays = [aligned_empty(picked_shape(box, request.steps), dtype) for box in request.boxes]
            for box, array in zip(request.boxes, request.arrays, strict=True):
                copies += self._plan_copies(leaf, box, request.steps, array)
        done, total = 0, sum(copy.nbytes for copy in copies)
        if straight:
            self._arrays.read([stored for _, stored in straight], None if copies else progress)
        for request, stored in straight:
            request.arrays, stored.arrays = stored.arrays, []
        for some, nbytes in split_by_bytes(copies, lambda copy: copy.nbytes, _SLAB_BYTES):
            self._read_copies(some)
            done += nbytes
            if progress is not None:
                progress(done, total)

    def _plan_copies(
        self, leaf: MappedLeaf, box: Sequence[tuple[int, int]], steps: Sequence[int] | None, target: NDArray[Any]
    ) -> Iterator[_Copy]:
        """Yield what a box of a new leaf is copied from, large boxes in slabs."""
        for part in leaf.find_boxes(tuple(box), steps):
            itemsize = self._arrays.dtype_of(part.leaf).itemsize
            count = 1
            if part.steps is None and size_of(part.box) * itemsize > _SLAB_BYTES:
                chunks = self._arrays.stored_chunks(part.leaf)
                # Where a chunk is decoded as a whole, each slab would decode it again.
                if chunks and max(chunk.block for chunk in chunks) <= _SLAB_BYTES:
                    count = -(-size_of(part.box) * itemsize // _SLAB_BYTES)
            for slab in _cut(part, count):
                yield _Copy(slab, target, size_of(slab.into) * itemsize, leaf.key)

    def _read_copies(self, copies: Sequence[_Copy]) -> None:
        wanted: dict[tuple[int, tuple[int, ...] | None], dict[Box, int]] = {}
        for copy in copies:
            boxes = wanted.setdefault((copy.part.leaf, copy.part.steps), {})
            boxes.setdefault(copy.part.box, len(boxes))
        requests = {key: ReadRequest(key[0], list(boxes), steps=key[1]) for key, boxes in wanted.items()}
        outers: dict[Any, Box] = {}
        for key, boxes in wanted.items():
            # Boxes side by side, as the heads of a kernel are, are read in one go.
            if key[1] is None and size_of(outer := bounding_box(boxes)) <= sum(map(size_of, boxes)):
                outers[key], requests[key].boxes = outer, [outer]
        self._arrays.read(list(requests.values()))
        for copy in copies:
            key, box = (copy.part.leaf, copy.part.steps), copy.part.box
            array = requests[key].arrays[0 if key in outers else wanted[key][box]]
            array = np.asarray(array[slices(relative(box, outers[key]))]) if key in outers else array
            at: Any = (*slices(copy.part.into), ...)  # an array of a leaf without axes too, not its item
            into = copy.target[at]
            try:
                view = _view_as_new(array, copy.part.axes)
                into[...] = view if view.dtype == into.dtype else cast_array(view, into.dtype)
            except NotKept as error:
                text = f"the value {error.value!s} does not fit {copy.target.dtype.name}"
                raise MismatchError(text, path=split_key(copy.key), hint="the key map, or dtype=, casts it") from None


def largest_block(arrays: Arrays, leaf: int) -> int | None:
    """Return how many bytes of a leaf are read together at least; None where a run of items needs all of it."""
    if isinstance(arrays, MappedArrays):
        return arrays.largest_block(leaf)
    return max((chunk.block for chunk in arrays.stored_chunks(leaf)), default=None)


def _cut(part: SourceBox, count: int) -> Iterator[SourceBox]:
    """Cut a box along its longest axis into about so many."""
    axis = max(
        (axis for axis in part.axes if axis is not None), key=lambda a: part.box[a][1] - part.box[a][0], default=0
    )
    if count < 2 or axis not in part.axes:  # noqa: PLR2004 - it stays one
        yield part
        return
    start, stop = part.box[axis]
    into = part.axes.index(axis)
    first = part.into[into][0]
    step = -(-(stop - start) // count)
    for low in range(start, stop, step):
        high = min(low + step, stop)
        box = (*part.box[:axis], (low, high), *part.box[axis + 1 :])
        place = (first + low - start, first + high - start)
        yield part._replace(box=box, into=(*part.into[:into], place, *part.into[into + 1 :]))


def _view_as_new(array: NDArray[Any], axes: Sequence[int | None]) -> NDArray[Any]:
    """Return what was read of a stored leaf with the axes of the new one."""
    kept = [axis for axis in axes if axis is not None]
    gone = [axis for axis in range(array.ndim) if axis not in kept]
    sides = [1 if axis is None else array.shape[axis] for axis in axes]
    return array.transpose((*gone, *kept)).reshape(sides)


# ------------------------------------------------------------------------------------------------- laid over each other


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
    structure, places = flatten_nodes(root.children.values(), _open)
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


def _open(child: _Node | _Place) -> tuple[Container, list[_Node | _Place]] | None:
    return (
        (child.head, [child.children[key_text(key)] for key in child.head.keys]) if isinstance(child, _Node) else None
    )


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
