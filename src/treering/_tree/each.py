"""Items of a tree that keep their own state, and those of which each process of a job has another one.

Only dicts lead to such items. A state is a small tree of its own: a document of its structure and values, and then the
bytes of its arrays. The states of all processes are one text of bytes: how many bytes each has, and then one after the
other. So a job of a thousand processes has two leaves more for an item, and no file more for each process.
``docs/spec/checkpoint.md`` says how they lie there.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Self, TypeAlias

import numpy as np

from treering._codec.array_bytes import wire_blocks
from treering._codec.documents import decode_text, json_text, parse_json
from treering._format.columns import EACH_STATES, decode_tree, encode_tree
from treering._format.index import MAX_LEVELS, LeafType, TreeColumns, leaf_bytes
from treering._format.structure import build, key_text, register_node
from treering._printable import kind_of
from treering._tree.flatten import flatten
from treering._tree.static_values import key_value
from treering._values.dtypes import check_writable, lookup, numpy_dtype
from treering._values.human import pluralize
from treering._values.keys import GlobSet, escape_part, split_key
from treering.errors import CorruptError, MismatchError, UnsupportedError

MOST_BYTES: Final = 1 << 20
"""What one process may save of its own states, in bytes: process 0 gathers those of all."""

STATES: Final = "states"
"""Name of the field of `EachStates` that is the bytes of all states."""

SIZE: Final = 8
"""Each state has so many bytes in front of all, its size."""

_SIZE: Final = struct.Struct("<Q")
_ARRAYS: Final = frozenset({"numpy", "numpy scalar"})
_REFUSED: Final = {
    "jax": "make it numpy.asarray(x)",
    "key": "make it numpy.asarray(jax.random.key_data(x))",
    "opaque": "leave it out of the state",
}
Merge: TypeAlias = Callable[[list[Any]], Any]
Split: TypeAlias = Callable[[Any, int], Sequence[Any]]
Place: TypeAlias = tuple[Any, ...]
"""The keys of the dicts that lead to an object; empty for the tree itself."""


class Each:
    """An item of a tree that has another state in each process; ``treering.each`` makes it.

    It is iterated as the item is.

    Attributes:
        item: the item.
    """

    __slots__ = ("_merge", "_split", "item")
    is_used: ClassVar[bool] = False
    """Whether this process has made one; where not, no tree is looked through for them."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        Each.is_used = True
        return super().__new__(cls)

    def __init__(self, item: Any, merge: Merge | None = None, split: Split | None = None) -> None:
        self.item = item
        self._merge: Merge | None = merge or _method(item, "merge")
        self._split: Split | None = split or _method(item, "split")

    def get_state(self) -> Any:
        """Return the state of this process."""
        return self.item.get_state() if gives_state(type(self.item)) else self.item

    def set_state(self, state: Any, /) -> None:
        """Let the item go on from a state of this process; a state takes the place of a state."""
        if gives_state(type(self.item)):
            self.item.set_state(state)
        else:
            self.item = state

    def regroup(self, states: Sequence[Any], count: int) -> Sequence[Any]:
        """Return the states of ``count`` processes, made of those of another number of processes.

        Raises:
            MismatchError: the item has no function for that, or it gave another number of states.
        """
        before, here = pluralize(len(states), "processes"), pluralize(count, "processes")
        wanted = [("merge", self._merge)] * (len(states) > 1) + [("split", self._split)] * (count > 1)
        if lacking := [f"{name}=" for name, function in wanted if function is None]:
            hint = f"pass {' and '.join(lacking)} to treering.each, or load it with as many processes as saved it"
            raise MismatchError(f"it has the states of {before}, and here {here} load it", hint=hint)
        merged = self._merge(list(states)) if self._merge is not None and len(states) > 1 else states[0]
        parts = self._split(merged, count) if self._split is not None and count > 1 else [merged]
        if len(parts) != count:
            raise MismatchError(f"its split gave {pluralize(len(parts), 'states')} for {here}")
        return parts

    def __iter__(self) -> Iterator[Any]:
        return iter(self.item)

    def __next__(self) -> Any:
        return next(self.item)

    def __repr__(self) -> str:
        return f"each({self.item!r})"


def each(item: Any, *, merge: Merge | None = None, split: Split | None = None) -> Each:
    """Mark an item of a tree whose state is another one in each process of the job, such as an iterator over its shard.

    Every process saves its own state, and the process of the same number gets it back. Only dicts may lead to the
    marker, or it is the whole tree. ``like`` and ``load_or_init`` take one at the same place; without ``like`` the
    place has `treering.checkpoint.EachStates`, the states of all.

    A job of another number of processes asks ``merge`` and ``split``; without them loading is an error. Each process
    calls them by itself, so they have to give the same everywhere.

    Args:
        item: an object with ``get_state()`` and ``set_state(state)``, or a state itself: a pytree of Python values and
            numpy arrays, of up to 1 MiB with all other such items. ``.item`` of the marker has it after a load.
        merge: ``merge(states)`` returns one state of everything, given the list of the states of all processes that
            saved. Default: the item's method of this name, if it has one.
        split: ``split(state, count)`` returns the list of the states of ``count`` processes. Default: as for ``merge``.

    Example:
        >>> import os, tempfile
        >>> import treering as tr
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> tr.save(path, {"w": 1.5, "data": tr.each({"shard": 3, "position": 17})})
        >>> tr.load(path, like={"w": 0.0, "data": tr.each(None)})["data"].item
        {'shard': 3, 'position': 17}
        >>> tr.load(path)["data"][0]
        {'shard': 3, 'position': 17}
    """
    return Each(item, merge, split)


def gives_state(kind: type) -> bool:
    """Tell whether instances of a class give their state away and take it back.

    Example:
        >>> gives_state(Each), gives_state(dict)
        (True, False)
    """
    return callable(getattr(kind, "get_state", None)) and callable(getattr(kind, "set_state", None))


def _method(item: Any, name: str) -> Any:
    return getattr(item, name, None) if gives_state(type(item)) else None


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class EachStates(Sequence[Any]):
    """The states that `treering.each` saved, by the number of the process; each is read from its bytes when asked for.

    Saved again, it stays what it is.
    """

    processes: int
    """How many processes saved them."""
    states: bytes
    """The bytes of all."""

    def __len__(self) -> int:
        self._require_states()
        return self.processes

    def __getitem__(self, process: Any) -> Any:
        self._require_states()
        blobs = unpack(self.states, self.processes)
        return list(map(decode_state, blobs[process])) if isinstance(process, slice) else decode_state(blobs[process])

    def _require_states(self) -> None:
        odd: tuple[Any, Any] = self.processes, self.states
        if tuple(map(type, odd)) != (int, bytes) or self.processes < 0:
            raise CorruptError(f"{self!r} holds no states")

    def __repr__(self) -> str:
        # In an abstract tree something else stands for them, in one of views too.
        return f"EachStates(of {pluralize(self.processes, 'processes')}, {kind_of(self.states)})"


# By the name that stands in files.
Each.__module__, EachStates.__module__ = [EACH_STATES.rpartition(".")[0]] * 2
register_node(EachStates)


# ------------------------------------------------------------------------------------------------------------- items


def find_items(tree: Any, wanted: Callable[[type], bool]) -> dict[Place, Any]:
    """Return the objects of some classes that only dicts lead to, at any depth, or the tree itself if it is one.

    Example:
        >>> find_items({"w": 1.5, "data": {"train": each(7)}}, lambda kind: kind is Each)
        {('data', 'train'): each(7)}
    """
    found: dict[Place, Any] = {}
    # By class: there are few of them, and perhaps thousands of leaves.
    known, leading = set[type](), set[type]()
    pending: list[tuple[Place, Any]] = [((), tree)]
    while pending:
        place, node = pending.pop()
        if wanted(type(node)):
            found[place] = node
        elif len(place) > MAX_LEVELS:
            return found  # it may hold itself: it is refused where it is flattened
        elif type(node) is dict:
            kinds = set(map(type, node.values()))
            leading |= {kind for kind in kinds - known if kind is dict or wanted(kind)}
            known |= kinds
            if not kinds.isdisjoint(leading):
                inner = reversed(node.items())
                pending += [((*place, name), item) for name, item in inner if type(item) in leading]
    return found


def is_each(kind: type) -> bool:
    """Tell whether a class is that of the marker."""
    return kind is Each


def put_items(like: Any, tree: Any, items: Mapping[Place, Any]) -> Any:
    """Return a tree with items at their places, and the dicts above them in the order of ``like``."""
    if () in items:
        return items[()]
    below = by_first(items)
    return {
        name: put_items(item, tree.get(name, {}), below[name]) if name in below else tree[name]
        for name, item in like.items()
    }


def by_first(items: Mapping[Place, Any]) -> dict[Any, dict[Place, Any]]:
    """Return items by the first key of their places, with the rest of these."""
    below: dict[Any, dict[Place, Any]] = {}
    for place, item in items.items():
        below.setdefault(place[0], {})[place[1:]] = item
    return below


def key_of(place: Place) -> str:
    """Return the key text of a place."""
    return "/".join(escape_part(key_text(key_value(name))) for name in place)


def hold_states(tree: Any, count: int, only: Sequence[str] | None = None) -> tuple[Any, dict[str, bytes]]:
    """Return what is saved of a tree with markers, and the own states by the keys of the leaves that get those of all.

    A process that saves alone has them in the tree; in a job they are put there when process 0 has those of all.

    Args:
        tree: the tree.
        count: how many processes save it together.
        only: the globs of what is saved; no state is asked of an item that they leave out.

    Raises:
        UnsupportedError: a state cannot be saved, or all of them are too large.
        MismatchError: a glob keeps a part of the states of an item.
    """
    if not (found := find_items(tree, is_each) if Each.is_used else {}):
        return tree, {}
    held = dict[Place, bytes]()
    globs = None if only is None else GlobSet(only)
    for place, item in found.items():
        if globs is not None and not _keeps(globs, place):
            continue
        try:
            held[place] = encode_state(item.get_state())
        except UnsupportedError as error:
            error.path = (*split_key(key_of(place)), *(error.path or ()))
            raise
    if (total := sum(map(len, held.values()))) > MOST_BYTES:
        what = f"the states that this process has marked with treering.each have {pluralize(total, 'bytes')}"
        raise UnsupportedError(f"{what}, more than {MOST_BYTES}", hint="save what is large as arrays of the tree")
    items = {place: EachStates(count, pack([held[place]]) if count == 1 and place in held else b"") for place in found}
    own = {key_of((*place, STATES)): blob for place, blob in held.items()} if count > 1 else {}
    return put_items(tree, tree, items), own


def _keeps(globs: GlobSet, place: Place) -> bool:
    """Tell whether globs keep the states of an item.

    Raises:
        MismatchError: they keep a part of them.
    """
    state = globs.start
    for part in (key_text(key_value(name)) for name in place):
        if globs.accepted(state):
            return True
        state = globs.step(state, part)
    inside = [bool(globs.accepted(globs.step(state, field.name))) for field in dataclasses.fields(EachStates)]
    if globs.accepted(state) or all(inside):
        return True
    if any(inside):
        key = key_of(place)
        raise MismatchError(f"only= keeps a part of the states at {key!r:.200}", hint=f"keep {key!r:.200}, or leave it")
    return False


# ------------------------------------------------------------------------------------------------------------- bytes


def pack(blobs: Sequence[bytes]) -> bytes:
    """Return texts of bytes as one.

    Example:
        >>> unpack(pack([b"tree", b"", b"ring"]), 3)
        [b'tree', b'', b'ring']
    """
    return b"".join([*(_SIZE.pack(len(blob)) for blob in blobs), *blobs])


def unpack(data: bytes, count: int) -> list[bytes]:
    """Return the texts that `pack` joined.

    Raises:
        CorruptError: they are not so many.
    """
    return [data[start:stop] for start, stop in places(data[: SIZE * max(0, count)], count, len(data))]


def places(head: bytes, count: int, nbytes: int) -> list[tuple[int, int]]:
    """Return where each of the texts that `pack` joined begins and ends.

    Args:
        head: the first 8 bytes for each text.
        count: how many there are.
        nbytes: how many bytes there are in all.

    Raises:
        CorruptError: that cannot be.
    """
    sizes = [size for (size,) in _SIZE.iter_unpack(head)] if len(head) == SIZE * count else []
    if not 0 < count == len(sizes) or len(head) + sum(sizes) != nbytes:
        raise CorruptError(f"{pluralize(nbytes, 'bytes')} are not the states of {pluralize(count, 'processes')}")
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=len(head))))


def encode_state(state: Any) -> bytes:
    """Return a state as bytes.

    Raises:
        UnsupportedError: it has a leaf that is neither a Python value nor an array of numpy.
    """
    flat = flatten(state)
    types: dict[LeafType, int] = {}
    leaf_types: list[int] = []
    values: dict[int, Any] = {}
    arrays: list[bytes] = []
    for number, (key, kind, leaf) in enumerate(zip(flat.keys, flat.kinds, flat.leaves, strict=True)):
        if (hint := _REFUSED.get(kind)) is not None:
            what = f"{kind_of(leaf)} cannot be in the state of one process"
            raise UnsupportedError(what, path=split_key(key), hint=hint)
        if kind in _ARRAYS:
            array = np.asarray(leaf)
            one = LeafType(kind=kind, dtype=check_writable(array.dtype).name, shape=array.shape)
            arrays += map(bytes, wire_blocks(array, 0, array.size))
        else:
            one = LeafType(kind=kind)
            values[number] = leaf
        leaf_types.append(types.setdefault(one, len(types)))
    tree = TreeColumns(structure=flat.tokens, keys=flat.keys, types=tuple(types), leaf_types=leaf_types, values=values)
    document = json_text(dict(encode_tree(tree))).encode("ascii")
    return b"".join([_SIZE.pack(len(document)), document, *arrays])


def decode_state(data: bytes) -> Any:
    """Return the state that `encode_state` wrote.

    Raises:
        CorruptError: it is damaged.
        FormatError, UnsupportedError: a newer version wrote it.

    Example:
        >>> decode_state(encode_state({"at": (7, None)}))
        {'at': (7, None)}
    """
    what = "the state of a process"
    (length,) = _SIZE.unpack(data[:SIZE]) if len(data) >= SIZE else (0,)
    tree = decode_tree(parse_json(decode_text(data[SIZE : SIZE + length], what, "ASCII"), what), what)
    at, leaves = SIZE + length, []
    for leaf in range(len(tree.keys)):
        one = tree.type_of(leaf)
        if not one.stored:
            leaves.append(tree.values[leaf])
            continue
        piece, known = data[at : at + leaf_bytes(one)], lookup(one.dtype or "")
        if one.kind not in _ARRAYS or known is None or len(piece) != leaf_bytes(one):
            raise CorruptError(f"{what} does not hold its array {tree.keys[leaf]!r:.200}")
        array = np.frombuffer(bytearray(piece), numpy_dtype(known)).reshape(one.shape or ())
        leaves.append(array[()] if one.kind == "numpy scalar" else array)
        at += len(piece)
    if at != len(data):
        raise CorruptError(f"{what} has {pluralize(len(data), 'bytes')}, not {at}")
    return build(tree.structure, leaves)
