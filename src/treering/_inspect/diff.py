"""Two checkpoints or files -> what they do not have in common, from headers, and block by block; never with jax."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import xxhash

from treering._format.index import ForeignKey, OpaqueLeaf
from treering._format.leaf_values import same_value
from treering._format.listing import LeafRecord, Listing, Named
from treering._format.run_document import remove_note
from treering._inspect.inspect import ArrayView, Checksums, OpenTree, finish_saves, open_leaf_by_leaf
from treering._printable import printable, show_path
from treering._store.resolve import kept
from treering._values.human import pluralize
from treering._values.keys import key_name
from treering._values.outline import InNotebook, Outline, OutlineRow
from treering._view.plain import cut, json_text, visible
from treering._view.progress import Progress, reporter, showing
from treering._view.rows import branch_kind, children_of, is_branch, record_of, value_text, walk_tree
from treering._view.tree_text import leaf_cells

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK_BYTES: Final = 8 << 20
_MOST_LINES: Final = 100
_LONGEST_KEY: Final = 300
_LONGEST_SIDE: Final = 100
_LOOSE_KINDS: Final = frozenset({"jax", "numpy", "numpy scalar", "array"})
ABSENT: Final = object()
"""Stands for a node that one of two trees does not have."""


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
    """For "values" how many items differ and where the first of them is, or that the checksums do."""

    def __str__(self) -> str:
        key = key_name(visible(self.key, _LONGEST_KEY))
        a, b = (None if side is None else printable(cut(side, _LONGEST_SIDE)) for side in (self.a, self.b))
        if a is None or b is None:
            sides = f"only in A: {a}" if b is None else f"only in B: {b}"
        elif self.what == "metadata":
            sides = f"{a} in A, {b} in B"
        else:
            detail = f"{self.detail}: " if self.detail else ""
            sides = f"{self.what}: {detail}{a} in A, {b} in B"
        return f"{'metadata ' if self.what == 'metadata' else ''}{key}: {sides}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diff(InNotebook):
    """What two checkpoints do not have in common. It is true when there are differences, like a list of them."""

    a: str
    """The first path, as it was given."""
    b: str
    """The second path."""
    differences: tuple[Difference, ...]
    """Each with ``key``, ``what``, ``a`` and ``b``; the order is that of the first one's tree."""
    leaves: int
    """Leaves that were compared, those that only one side has included."""
    values: bool
    """Whether the values of arrays were read and compared."""
    checksums: bool = False
    """Whether the checksums of all arrays that both have were compared, which shows a change without reading them."""

    def __len__(self) -> int:
        return len(self.differences)

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.differences)

    def __str__(self) -> str:
        if not self.differences:
            return sameness(self, reading="values=True")
        count = len(self.differences)
        lines = [f"{pluralize(count, 'differences', ',')} between A = {self.a!r} and B = {self.b!r}:"]
        lines += [f"  {difference}" for difference in self.differences[:_MOST_LINES]]
        if count > _MOST_LINES:
            lines.append(f"  ... and {count - _MOST_LINES:,} more")
        return "\n".join(lines)

    def _outline(self) -> Outline:
        found = [(key_name(each.key), each.what, each.a or "", each.b or "", each.detail) for each in self]
        more = [(f"and {left:,} more", "", "", "", "")] if (left := len(found) - _MOST_LINES) > 0 else []
        return Outline(
            title="Diff",
            detail=pluralize(len(found), "differences", ",") if found else sameness(self, reading="values=True"),
            notes=[("A", show_path(self.a)), ("B", show_path(self.b))],
            heads=("key", "what", "in A", "in B", "detail") if found else (),
            rows=[OutlineRow(1, cells) for cells in (*found[:_MOST_LINES], *more)],
        )


def sameness(found: Diff, *, reading: str) -> str:
    """Say how far two checkpoints without differences are the same, or how arrays were compared where there are some.

    ``reading`` is what makes a diff read arrays.
    """
    known = "checksums" if found.checksums else "headers"
    if found:
        return f"arrays were compared by {'value' if found.values else f'{known} ({reading} reads them)'}"
    how = "equal bit for bit" if found.values else f"equal as far as {known} tell ({reading} reads the arrays)"
    return f"{pluralize(found.leaves, 'leaves', ',')}, {how}"


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    values: bool = False,
    progress: Progress | bool | None = None,
) -> Diff:
    """Compare two checkpoints or files: structure, kinds, dtypes, shapes, small values, metadata and checksums.

    Arrays of two checkpoints that lie in the same boxes are compared by the checksums of what was saved, without a
    read: a change of one bit shows, and with ``values`` also where it is. Of other forms the headers are compared.

    Any two forms can be compared; what only one of them keeps (kinds of containers, whether an array was numpy's) is
    then no difference. Neither is the order of a dict's keys, where arrays lay on devices, who wrote it and when.

    Args:
        a: a checkpoint's folder, a leaves directory, a file, or a run, whose latest step is meant.
        b: another one.
        values: also read all arrays that both have, and compare them bit for bit: NaN equals the same NaN, 0.0 and
            -0.0 differ. Memory stays at some MiB for each side, whatever the arrays' size.
        progress: called as ``progress(done, total)`` with bytes of arrays. True shows a bar on a terminal.

    Raises:
        NotFoundError, StoreError: one of them cannot be read.
        CorruptError: one of them is damaged.
        FormatError: one of them has another form.

    Example:
        >>> from treering import serialization
        >>> serialization.save_to_file({"step": 7, "w": [1.0, 2.0]}, "a.msgpack")
        >>> serialization.save_to_file({"step": 8, "w": [1.0, 2.0]}, "b.msgpack")
        >>> found = diff("a.msgpack", "b.msgpack")
        >>> bool(found), [str(difference) for difference in found]
        (True, ['step: value: 7 in A, 8 in B'])
    """
    told = reporter(progress, "comparing")
    a, b = kept(a), kept(b)
    for one in (a, b):
        finish_saves(one)
    with showing(told), open_leaf_by_leaf(a) as left, open_leaf_by_leaf(b) as right:
        found = list(compare_listings(left.listing, right.listing))
        pairs = pair_nodes(left.listing.root, right.listing.root)
        count = sum(1 for _, *nodes in pairs if any(node is not ABSENT and not is_branch(node) for node in nodes))
        by_sums, is_all = ([], False) if values else _differing_checksums(left, right)
        found += _differing_values(left, right, told) if values else by_sums
        shown = show_path(os.fspath(a)), show_path(os.fspath(b))
        same = Diff(a=shown[0], b=shown[1], differences=tuple(found), leaves=count, values=values)
        return dataclasses.replace(same, checksums=is_all)


# ------------------------------------------------------------------------------------------------------------- headers


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
    return ((key, left, right) for key, (left, right) in walk_tree((a, b), _pairs))


def _pairs(pair: tuple[Any, Any]) -> Iterator[tuple[str, tuple[Any, Any]]] | None:
    """Pair the children of two nodes by name; a leaf beside a branch has none."""
    if not all(node is ABSENT or is_branch(node) for node in pair):
        return None
    one, other = map(_children, pair)
    return ((name, (one.get(name, ABSENT), other.get(name, ABSENT))) for name in one | other)


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
        yield from _branches(key, a, b, exact=exact)


def _branches(key: str, a: Any, b: Any, *, exact: bool) -> Iterator[Difference]:
    if _text(a).removeprefix("empty ") != _text(b).removeprefix("empty "):
        yield Difference(key, "node", _text(a), _text(b))
    left, right = (dict(node.static) if isinstance(node, Named) else {} for node in (a, b))
    for name in {**left, **right}:
        if name not in left or name not in right or not same_value(left[name], right[name]):
            both = left.get(name, ABSENT), right.get(name, ABSENT)
            texts = [
                "not there" if one is ABSENT else one.text if isinstance(one, ForeignKey) else repr(one) for one in both
            ]
            yield Difference(f"{key}.{name}", "static", *_tell_apart(both, texts, _digests))
    if exact and isinstance(a, dict) and isinstance(b, dict):  # keys of one name may be of other types: 1 and "1"
        one, other = ({name: each for (name, _), each in zip(children_of(node), node, strict=True)} for node in (a, b))
        for name in one:
            if name in other and not same_value(one[name], other[name]):
                yield Difference(key, "node", *(f"the key {side[name]!r}" for side in (one, other)))


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
        yield Difference(key, "value", *_tell_apart((a, b), texts, _digests))


def _kind(leaf: LeafRecord, *, exact: bool) -> tuple[str, str | None]:
    """Name the kind of a leaf; where a form does not keep it, only that it is an array."""
    if exact:
        return leaf.kind, leaf.impl
    return ("array" if leaf.kind in _LOOSE_KINDS or leaf.kind == "key" else leaf.kind), None


def _metadata(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key, (left, right) in walk_tree((a, b), _members):
        if _members((left, right)) is not None:  # what lies in it follows
            continue
        one, other = (None if side is ABSENT else json_text(side) for side in (left, right))
        if one is None or other is None or json.dumps(left, sort_keys=True) != json.dumps(right, sort_keys=True):
            yield Difference(key, "metadata", one, other)


def _members(pair: tuple[Any, Any]) -> Iterator[tuple[str, tuple[Any, Any]]] | None:
    """Pair the members of two objects; None where one is no object."""
    a, b = pair
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return None
    return ((name, (a.get(name, ABSENT), b.get(name, ABSENT))) for name in {**a, **b})


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


def _tell_apart(values: Sequence[Any], texts: list[str], say: Callable[[Any], str]) -> list[str]:
    """Say more of values whose texts are the same."""
    if texts[0] != texts[1]:
        return texts
    more = [say(value) for value in values]
    return [f"{text} ({each})" if each else text for text, each in zip(texts, more, strict=True)]


def _digests(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(filter(None, map(_digests, value)))
    if isinstance(value, complex):
        return ", ".join(map(_digests, (value.real, value.imag)))
    if type(value) is float:
        return f"0x{struct.pack('>d', value).hex()}"
    if type(value) is int:  # a long one, of which both ends look the same
        return f"xxh3-64:{xxhash.xxh3_64_hexdigest(value.to_bytes(value.bit_length() // 8 + 1, signed=True))}"
    return (value.digest if isinstance(value, ForeignKey | OpaqueLeaf) else None) or ""


# -------------------------------------------------------------------------------------------------------------- values


def blocks_of(shape: tuple[int, ...], itemsize: int, limit: int = _BLOCK_BYTES) -> Iterator[tuple[slice, ...]]:
    """Cut an array into boxes of at most ``limit`` bytes, in C order, each as few rows as fit.

    Example:
        >>> [box[0] for box in blocks_of((5, 100), 4, limit=800)]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
        >>> len(list(blocks_of((2, 4), 8, limit=16))), list(blocks_of((), 4))
        (4, [()])
    """
    row = itemsize * math.prod(shape[1:])
    if not shape or row * shape[0] <= limit:
        yield tuple(slice(0, length) for length in shape)
    elif row <= limit:
        step = limit // row
        inner = tuple(slice(0, length) for length in shape[1:])
        for start in range(0, shape[0], step):
            yield (slice(start, min(start + step, shape[0])), *inner)
    else:
        for start in range(shape[0]):
            for inner in blocks_of(shape[1:], itemsize, limit):
                yield (slice(start, start + 1), *inner)


def _differing_checksums(a: OpenTree, b: OpenTree) -> tuple[list[Difference], bool]:
    """Compare the checksums of what both sides have; tell also whether all of it has some that can be compared."""
    found: list[Difference] = []
    compared: list[bool] = []
    for key, left, right in pair_nodes(a.listing.root, b.listing.root):
        if needs_reading(left, right):
            one, other = a.checksums(record_of(left)), b.checksums(record_of(right))
            # Of other boxes, as those of another mesh, the checksums differ anyway.
            compared.append(one is not None and other is not None and [s[:2] for s in one] == [s[:2] for s in other])
            if compared[-1] and one != other:
                found.append(Difference(key, "values", _sum_of(one), _sum_of(other), "the checksums differ"))
    return found, all(compared)


def _sum_of(checksums: Checksums | None) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(table for *_, table in checksums or ()))


def _differing_values(a: OpenTree, b: OpenTree, progress: Progress | None) -> Iterator[Difference]:
    """Read what both sides have in one form, and compare it."""
    pairs = [each for each in pair_nodes(a.listing.root, b.listing.root) if needs_reading(*each[1:])]
    total = sum(record_of(left).nbytes for _, left, _ in pairs)
    done = 0
    for key, left, right in pairs:
        before = done

        def report(read: int, before: int = before) -> None:
            if progress is not None:
                progress(before + read, total)

        is_array = isinstance(left, LeafRecord) and left.dtype is not None
        found = _arrays(key, a.array(left), b.array(right), report) if is_array else _texts(key, a, left, b, right)
        if found is not None:
            yield found
        done += record_of(left).nbytes
        report(record_of(left).nbytes)


def _texts(key: str, a: OpenTree, left: Any, b: OpenTree, right: Any) -> Difference | None:
    """Compare two texts, of which one or both still lie in their file."""
    x = a.text(left) if isinstance(left, LeafRecord) else left
    y = b.text(right) if isinstance(right, LeafRecord) else right
    if x == y:
        return None
    first = next((at for at, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
    sides = [repr(text[max(first - 10, 0) : first + 30]) for text in (x, y)]
    return Difference(key=key, what="values", a=sides[0], b=sides[1], detail=f"from place {first} on")


def _arrays(key: str, a: ArrayView, b: ArrayView, report: Callable[[int], None]) -> Difference | None:
    """Compare two arrays of one dtype and shape, block by block."""
    import numpy as np

    from treering._values.casts import showable

    differing = items = done = 0
    where: tuple[int, ...] = ()
    sides: list[str] = []
    for box in blocks_of(a.shape, a.dtype.itemsize):
        left, right = np.asarray(a[box], order="C"), np.asarray(b[box], order="C")
        items += left.size
        if (unequal := unequal_items(left, right)) is not None:
            if not differing:
                inner = np.unravel_index(int(unequal.argmax()), left.shape)
                where = tuple(int(at) + side.start for at, side in zip(inner, box, strict=True))
                pair = left[inner], right[inner]
                # Two NaNs look the same, and their bits differ.
                texts = [str(showable(item)) for item in pair]
                sides = _tell_apart(pair, texts, lambda item: f"0x{item.tobytes()[::-1].hex()}")
            differing += int(unequal.sum())
        done += left.nbytes
        report(done)
    if not differing:
        return None
    detail = f"{differing:,} of {pluralize(items, 'items', ',')} differ, the first at {[*where]}"
    return Difference(key=key, what="values", a=sides[0], b=sides[1], detail=detail)


def unequal_items(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any] | None:
    """Mark the items whose bits differ, as a flat array; None where all are equal."""
    import numpy as np

    left, right = (array.reshape(-1).view(np.uint8) for array in (a, b))
    if np.array_equal(left, right):
        return None
    return cast("NDArray[Any]", (left != right).reshape(-1, a.dtype.itemsize).any(axis=1))
