"""What a module that reads a foreign format returns, the files that it reads, and what every verb does with both.

Listings need no numpy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

from treering._checkpoint.detect import ForeignForm
from treering._codec.documents import decode_text, parse_json
from treering._codec.zarr import ZarrArray
from treering._format.findings import Finding
from treering._format.index import MAX_LEVELS, Chunks, Container, DataFile, Index, LeafType, Token, leaf_bytes
from treering._format.listing import LeafRecord, Listing, list_index
from treering._format.structure import flatten_nodes
from treering._store.api import Reader, remembered, require_range
from treering._store.failures import naming
from treering._store.open_folder import OpenedFiles
from treering._store.resolve import absolute, find_at, is_seen, located, names_at, open_file, opened_store, resolved
from treering._values.boxes import Box, boxes_of_range, size_of
from treering._values.checksums import block_bytes
from treering._values.dtypes import itemsize_of
from treering._values.human import join_first, pluralize
from treering._values.keys import join_key
from treering.errors import CorruptError, NotFoundError, StoreError, UnsupportedError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from treering._arrays.incoming import DataReader

ANOTHER_COPY: Final = "use another copy of the checkpoint"
"""What to do about one that is damaged or incomplete."""

_MOST_OPEN: Final = 128
_LARGEST_DOCUMENT: Final = 256 << 20


class ByteRange(NamedTuple):
    """Bytes that can be read by place: those of a file, a part of one, or some in memory."""

    size: int
    """How many there are."""
    read: Callable[[int, int], bytes]
    """Returns so many bytes from an offset on; ``CorruptError`` where there are fewer. Any thread may call it."""
    file: str | None = None
    """Name of the file in which they lie as they are, if there is one."""
    offset: int = 0
    """Where they begin in it."""


Fetch: TypeAlias = "Callable[[int], bytes | ByteRange | None]"
"""Returns the bytes of a chunk by its number, or where they are; None where there is none. Any thread may call it."""


class GridLeaf(NamedTuple):
    """A leaf whose chunks have to be decoded."""

    layout: ZarrArray
    """Its shape, the shape of a chunk, and how the bytes of a chunk are encoded, in the terms of zarr v2."""
    fetch: Fetch
    """Returns the bytes of a chunk by its number in the grid."""
    absent_is_zero: bool = False
    """Whether a chunk that is not there is one of zeros, and not lost."""
    located: bool = False
    """Whether it is known where the chunks lie, without a look at any file."""


class ForeignLeaf(NamedTuple):
    """One leaf of a foreign tree."""

    type: LeafType
    """What it is."""
    value: Any = None
    """Its value, of a kind that is no array."""
    pieces: Sequence[tuple[Box | None, int, int]] = ()
    """Box, number of the file and offset of each part that lies raw; a leaf that has a grid has none."""
    grid: GridLeaf | None = None
    """How its chunks are decoded."""
    crc: tuple[int, int] | None = None
    """The CRC-32 of what is before a leaf that lies raw in one piece, and the CRC-32 of that and the leaf."""


class FolderFiles:
    """The files below a folder by their names, which are relative and lead nowhere else, by no link either.

    Args:
        place: the folder.
        files: closes those that stay open.

    Attributes:
        opened: those that were opened.
        threads: how many threads read faster than fewer.
        nbytes: bytes of the files that stayed open.
    """

    def __init__(self, place: Path, files: contextlib.ExitStack) -> None:
        self.place = absolute(place)  # the program may change its current folder
        self._inside = resolved(place)
        self._open: dict[str, Reader] = {}
        self._files = files
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[int, int]] = {}
        self._listed: dict[str, frozenset[str]] = {}
        self.opened = OpenedFiles(folder=place)
        self.threads = 2
        self.nbytes = 0

    def has(self, name: str) -> bool:
        """Tell whether anything is known to be there under a name; raises as `find`, but for the store."""
        return not self._is_unlisted(name) and is_seen(self._place(name))

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder, sorted; none where it is not there."""
        place = self._place(folder) if folder else self.place
        found = remembered((FolderFiles.names, place), lambda: sorted(names_at(place)))
        if found:  # else perhaps nobody may list it
            self._listed[folder] = frozenset(found)
        return found

    def list_names(self, folder: str = "") -> list[str]:
        """Return the names in a folder, sorted; none in a file.

        Raises:
            NotFoundError: it is not there, where the store can tell.
            CorruptError: the name leads out of the folder.
            StoreError: the store refuses.
        """
        place = self._place(folder) if folder else self.place
        is_file = contextlib.suppress(NotADirectoryError)
        with naming(os.fspath(place), "read"), is_file, opened_store(place, quick=True) as store:
            return sorted(store.names())
        return []

    def find(self, name: str) -> ByteRange | None:
        """Return the bytes of a file; None where there is none.

        Raises:
            CorruptError: the name leads out of the folder.
            StoreError: the store refuses.
        """
        try:
            with self.open_file(name) as file:
                return ByteRange(file.size, functools.partial(self.read, name), name)
        except NotFoundError:
            return None

    def read(self, name: str, offset: int, count: int) -> bytes:
        """Return bytes of a file.

        Raises:
            NotFoundError: it is not there.
            CorruptError: it is shorter, or the name leads out of the folder.
            StoreError: the store refuses.
        """
        with self.open_file(name) as file:
            return file.read(offset, count)

    def modified(self, name: str) -> float:
        """Return when a file was written, in POSIX seconds; 0 where there is none.

        Raises:
            StoreError: the store refuses.
        """
        found = find_at(self._place(name))
        return 0.0 if found is None else found.modified

    def document(self, name: str, *, finite: bool = True) -> Any:
        """Return the value of a JSON file; None where there is none. ``finite`` is as for ``parse_json``.

        Raises:
            CorruptError: it is no JSON, or too large.
            StoreError: the store refuses.
        """
        try:
            opened = self.open_file(name)
        except NotFoundError:
            return None
        with opened as file:
            if file.size > _LARGEST_DOCUMENT:
                raise CorruptError(f"{name} has {pluralize(file.size, 'bytes')}, more than any tree needs")
            data = file.read(0, file.size)
        return parse_json(decode_text(data, name), name, finite=finite)

    def number_of(self, found: ByteRange) -> int:
        """Return the number that the file of a range has in `data_files`."""
        number, end = self._rows.get(found.file or "", (len(self._rows), 0))
        self._rows[found.file or ""] = number, max(end, found.offset + found.size)
        return number

    def data_files(self) -> tuple[list[DataFile], list[FolderFile]]:
        """Return the files that have a number: as an index has them, up to the last range, and what reads them."""
        ends = [(name, end) for name, (_, end) in self._rows.items()]
        rows = [DataFile(name=name, nbytes=end, header=0, digest=None) for name, end in ends]
        return rows, [FolderFile(self, name, end) for name, end in ends]

    def open_file(self, name: str) -> contextlib.AbstractContextManager[Reader]:
        """Open a file for a block; the first ones stay open behind it.

        Raises:
            NotFoundError: it is not there.
            CorruptError: the name leads out of the folder, or another file had it before.
            StoreError: the store refuses.
        """
        if (kept := self._open.get(name)) is not None:
            return contextlib.nullcontext(kept)
        if self._is_unlisted(name):
            raise NotFoundError(f"there is no {name!r:.200} in {os.fspath(self.place)!r}")
        place = self._place(name)
        file = open_file(place)
        try:
            self.opened.add(place, file)
        except CorruptError:
            file.close()
            raise
        with self._lock:
            if len(self._open) >= _MOST_OPEN or name in self._open:
                return file
            self._open[name] = self._files.enter_context(file)
            self.threads = max(self.threads, file.threads)
            self.nbytes += file.size
        return contextlib.nullcontext(file)

    def _is_unlisted(self, name: str) -> bool:
        """Tell whether the names in its folder were listed, and it is none of them."""
        folder, _, last = name.rpartition("/")
        return folder in self._listed and last not in self._listed[folder]

    def _place(self, name: str) -> Path:
        parts = name.split("/")
        if "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
            raise CorruptError(f"the name {name!r:.200} leads out of the folder")
        place = self.place.joinpath(*parts)
        if not resolved(place).is_relative_to(self._inside):
            hint = "treering follows no link out of a checkpoint"
            raise CorruptError(f"{name!r:.200} is a link that leads out of the folder", hint=hint)
        return place


class FolderFile:
    """A file of a folder with arrays that lie raw in it; it is opened when one is read."""

    def __init__(self, files: FolderFiles, name: str, end: int) -> None:
        self._files = files
        self._name = name
        self._end = end

    def read_into(self, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes from its offset on."""
        with self._files.open_file(self._name) as file:
            file.read_into(jobs)

    def refetch(self, _jobs: Sequence[tuple[int, memoryview]]) -> bool:
        """Return False: there are no checksums."""
        return False

    def map(self) -> ReadableBuffer:
        """Map the whole file, read-only."""
        with self._files.open_file(self._name) as file:
            require_range(file, 0, self._end)
            return file.map()


_SHOWN = 5
_WINDOW = 8 << 20
_BLOB = re.compile("[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SHA_1_DIGITS = 40
PARTLY: ContextVar[bool] = ContextVar("PARTLY", default=False)
"""Whether this is inside of `reading_partly`."""
_NO_CHECKSUMS = "all its arrays could be read; it has no checksums to compare them with"


class ForeignStep(NamedTuple):
    """What is known of a step in a folder of another program's steps, beside its tree."""

    saved: float
    """When it was saved, in POSIX seconds."""
    version: str
    """Another save of the same step has another text."""
    metrics: Mapping[str, float]
    """What was measured at it; the metadata of its tree have all of it as ``metrics``."""
    metadata: Mapping[str, Any]
    """What goes into its metadata beside those of its tree."""
    losses: Mapping[str, str]
    """What each part is that treering does not read, for people, by its name."""


class ForeignSteps(NamedTuple):
    """A folder of another program's steps. A module that reads such ones has two functions for it.

    ``list_steps(place)`` returns the committed steps: number -> name of the folder, ascending; nothing where the folder
    is no such one. ``describe_step(place, name)`` returns a `ForeignStep`.
    """

    place: Path
    form: ForeignForm
    names: Mapping[int, str]

    def path_of(self, step: int) -> Path:
        """Return the folder of a step."""
        return self.place / self.names[step]

    def describe(self, step: int) -> ForeignStep:
        """Return what is known of a step; raises as ``open_foreign``."""
        module = importlib.import_module(self.form.module)
        return cast("ForeignStep", module.describe_step(self.place, self.names[step]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTree:
    """An opened foreign tree; its files are open until the stack that was passed closes them."""

    index: Index
    """What is in it."""
    files: Sequence[DataReader | None] = ()
    """The data files of the index, in its order."""
    leaves: Sequence[ForeignLeaf] = ()
    """Those of the index; none where all lie raw in files, and without a checksum."""
    checks: str = _NO_CHECKSUMS
    """What `verify` says that it did."""
    unread: Sequence[str] = ()
    """The names of its parts that cannot be read; where there are some, no verb opens it as if it were whole."""
    nbytes: int = 0
    """Bytes of the files together."""
    notes: Sequence[str] = ()
    """What a listing says beside the tree."""
    structured: bool = False
    """Whether its containers are those that were saved."""
    threads: int = 2
    """How many threads read faster than fewer."""
    opened: OpenedFiles | None = None
    """The files that were opened, and those that will be, where ``files`` are not all of them."""


def build_index(
    structure: Sequence[Token],
    keys: Sequence[str],
    leaves: Sequence[ForeignLeaf],
    files: Sequence[DataFile],
    metadata: Mapping[str, Any] | None = None,
) -> Index:
    """Return the index of a foreign tree, which has no checksums.

    Example:
        >>> kind = LeafType(kind="numpy", dtype="int8", shape=(3,))
        >>> file = DataFile(name="a.npy", nbytes=131, header=128, digest=None)
        >>> index = build_index([1], ["a"], [ForeignLeaf(kind, pieces=[(None, 0, 128)])], [file])
        >>> index.type_of(0).shape, index.chunks.offset
        ((3,), [128])
    """
    numbers: dict[LeafType, int] = {}
    leaf_types = [numbers.setdefault(leaf.type, len(numbers)) for leaf in leaves]
    rows = [(number, *piece) for number, leaf in enumerate(leaves) for piece in leaf.pieces]
    kinds = [(leaves[number].type, box) for number, box, *_ in rows]
    sizes = [leaf_bytes(kind) if box is None else size_of(box) * itemsize_of(kind.dtype) for kind, box in kinds]
    chunks = Chunks(
        leaf=[number for number, *_ in rows],
        box=[box for _, box, *_ in rows],
        file=[file for *_, file, _ in rows],
        offset=[offset for *_, offset in rows],
        nbytes=sizes,
        block=list(map(block_bytes, sizes)),
    )
    values = {number: leaf.value for number, leaf in enumerate(leaves) if not leaf.type.stored}
    return Index(
        attempt="0" * 16,
        structure=structure,
        keys=keys,
        types=tuple(numbers),
        leaf_types=leaf_types,
        values=values,
        chunks=chunks,
        files=files,
        metadata=metadata or {},
        verified=False,
    )


def folder_tree(
    folder: FolderFiles,
    structure: Sequence[Token],
    keys: Sequence[str],
    leaves: Sequence[ForeignLeaf],
    metadata: Mapping[str, Any] | None = None,
    *,
    notes: Sequence[str] = (),
    structured: bool = False,
    unread: Sequence[str] = (),
) -> ForeignTree:
    """Return the tree of a folder of files; the arguments are as for `ForeignTree`."""
    rows, data = folder.data_files()
    return ForeignTree(
        index=build_index(structure, keys, leaves, rows, metadata),
        files=data,
        leaves=leaves,
        nbytes=folder.nbytes,
        notes=notes,
        structured=structured,
        unread=unread,
        threads=folder.threads,
        opened=folder.opened,
    )


def flat_dict(names: Sequence[str]) -> tuple[list[Token], list[str]]:
    """Return the structure and the key texts of one dict with these keys.

    Example:
        >>> flat_dict(["a/b", "c"])
        ([Container(node='dict', keys=('a/b', 'c'), class_name=None, static=()), 2], ['a/b', 'c'])
    """
    structure: list[Token] = [Container(node="dict", keys=tuple(names)), *([len(names)] if names else [])]
    return structure, [join_key([name]) if "~" in name or not name else name for name in names]


def find_steps(path: str | os.PathLike[str], form: ForeignForm) -> ForeignSteps | None:
    """Return the steps in a folder of a form; None where it is no folder of steps.

    Raises:
        UnsupportedError: which steps there are is not clear.
        StoreError: the store refuses.
    """
    module, place = importlib.import_module(form.module), located(path)
    names = module.list_steps(place) if hasattr(module, "list_steps") else {}
    return ForeignSteps(place, form, names) if names else None


def open_tree(form: ForeignForm, path: str | os.PathLike[str], files: contextlib.ExitStack) -> ForeignTree:
    """Open the foreign tree of a form at ``path`` by the module that reads it.

    Raises:
        CorruptError, FormatError, UnsupportedError: it is damaged, newer, or holds what treering cannot.
        StoreError: the store refuses.
    """
    tree = cast("ForeignTree", importlib.import_module(form.module).open_foreign(located(path), files))
    if tree.unread and not PARTLY.get():
        hint = "pass the path of an item in it that treering reads"
        raise UnsupportedError(f"treering does not read its items {join_first(tree.unread, _SHOWN)}", hint=hint)
    return tree


@contextlib.contextmanager
def reading_partly() -> Iterator[None]:
    """Let trees be opened that are not read as a whole, by those who tell or ask what is not read of them."""
    token = PARTLY.set(True)
    try:
        yield
    finally:
        PARTLY.reset(token)


def list_tree(form: ForeignForm, path: str | os.PathLike[str]) -> Listing:
    """List a foreign tree; raises as `open_tree` does."""
    with contextlib.ExitStack() as files:
        tree = open_tree(form, path, files)
        listing = list_index(tree.index, form=form.value, files=(), file_bytes=_bytes_of_files(tree))
    return dataclasses.replace(listing, structured=tree.structured, notes=(f"format: {form.version}", *tree.notes))


def _bytes_of_files(tree: ForeignTree) -> int:
    """Return the bytes of all files of a tree: those of chunks, which a listing does not open, included."""
    folder = None if tree.opened is None else tree.opened.folder
    if tree.leaves and folder is not None:
        with contextlib.suppress(StoreError), opened_store(folder, quick=True) as store:
            return sum(entry.size for entry in store.list())
    return tree.nbytes


def compare_hashes(files: Sequence[object], findings: list[Finding]) -> str | None:
    """Compare files that the cache of the hub names by a hash of them with it; return what was done, if anything.

    Args:
        files: those of them that are open files are looked at.
        findings: gets what is damaged.
    """
    named = [(file, name) for file in files if isinstance(file, Reader) and (name := _hash_in_name(file))]
    for file, name in named:
        # Files that git itself holds, which are small, have its own hash.
        is_git = len(name) == _SHA_1_DIGITS
        state = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False) if is_git else hashlib.sha256()
        for at in range(0, file.size, _WINDOW):
            state.update(file.read(at, min(_WINDOW, file.size - at)))
        if state.hexdigest() != name:
            problem = "is damaged: it has another hash than the one that the cache of the hub names it by"
            findings.append(Finding(key=None, file=os.fspath(file.path), start=None, stop=None, problem=problem))
    what = "its files were compared with the hashes that the cache of the hub names them by"
    return f"{what}, {len(named)} of {len(files)}" if named else None


def _hash_in_name(file: Reader) -> str | None:
    """Return the hash that a file of the cache of the hub has as its name; None for every other file."""
    place = resolved(file.path)
    is_blob = place.parent.name == "blobs" and _BLOB.fullmatch(place.name) and is_seen(place.parents[1] / "snapshots")
    return place.name if is_blob else None


def leaf_of_record(record: LeafRecord, kind: str, file: int) -> ForeignLeaf:
    """Return what lies in a file of flax's msgpack as a leaf of a kind; ``file`` is the number of the file."""
    shape = (record.nbytes,) if record.shape is None else record.shape
    pieces: list[tuple[Box | None, int, int]] = [] if record.parts else [(None, file, record.offset or 0)]
    itemsize, done = itemsize_of(record.dtype), 0
    for offset, nbytes in record.parts:  # a flat piece of an array is several boxes
        at = offset
        for box in boxes_of_range(shape, done, done + nbytes // itemsize):
            pieces.append((box, file, at))
            at += size_of(box) * itemsize
        done += nbytes // itemsize
    return ForeignLeaf(LeafType(kind=kind, dtype=record.dtype or "uint8", shape=shape), pieces=pieces)


Step: TypeAlias = tuple[str, bool]
"""A key in a container, and whether that is a list, where it is an index."""

Entry: TypeAlias = "tuple[Sequence[Step], ForeignLeaf | Container]"
"""A leaf or an empty container by its path."""

Containers: TypeAlias = dict[tuple[str, ...], Container]
"""Containers that are recorded beside the leaves, by their paths: tuples and namedtuples."""

EMPTY: dict[str, Container] = {
    "Dict": Container(node="dict", keys=()),
    "List": Container(node="list", keys=()),
    "Tuple": Container(node="tuple", keys=()),
    # Orbax does not record of which class.
    "NamedTuple": Container(node="namedtuple", keys=(), class_name="orbax.checkpoint.EmptyNamedTuple"),
}
"""The containers without children, which stand where leaves do."""

_FREE_STEPS: Final = 1 << 20
_STEP_RATIO: Final = 64


class _Items(dict[str, Any]):
    """The items of a list by their indices; the children of a dict are in a dict itself."""


def build_tree(
    entries: Iterable[Entry], containers: Containers | None = None
) -> tuple[list[Token], list[str], list[ForeignLeaf]]:
    """Return the structure, the key texts and the leaves of a tree; without entries it is an empty dict.

    Args:
        entries: its leaves and empty containers by their paths.
        containers: the containers that are no dicts and lists.

    Raises:
        CorruptError: a path leads through a leaf, two are the same, a list has other indices than 0 to n-1, or a
            container other children than it should.
        UnsupportedError: containers are nested too deep.

    Example:
        >>> from treering._format.index import LeafType
        >>> one = ForeignLeaf(LeafType(kind="none"))
        >>> structure, keys, _ = build_tree([([("a", False), ("0", True)], one), ([("b", False)], one)])
        >>> keys, [token if isinstance(token, int) else token.node for token in structure]
        (['a/0', 'b'], ['dict', 'list', 2])
    """
    top: dict[str, Any] = {}
    for path, leaf in entries:
        if len(path) > MAX_LEVELS:
            raise UnsupportedError(f"containers are nested more than {MAX_LEVELS} levels deep")
        here, key = top, ""
        for name, listed in path:
            kind = _Items if listed else dict
            below = here.setdefault(key, kind())
            if type(below) is not kind:
                raise _clash(path)
            here, key = below, name
        if key in here:
            raise _clash(path)
        here[key] = leaf
    root: tuple[tuple[str, ...], Any] = ((), top.get("", EMPTY["Dict"]))
    structure, found = flatten_nodes([root], functools.partial(_open_node, containers=containers or {}))
    return structure, [join_key(trail) for trail, _ in found], [leaf for _, leaf in found]


def _open_node(
    item: tuple[tuple[str, ...], Any], containers: Containers
) -> tuple[Container, Iterable[tuple[tuple[str, ...], Any]]] | None:
    """Return the head of a node at a path, and its children with theirs; None for a leaf."""
    trail, node = item
    if isinstance(node, ForeignLeaf):
        return None
    if isinstance(node, Container):
        return node, ()
    names, listed = list(node), isinstance(node, _Items)
    if listed:
        names = [str(number) for number in range(len(node))]
        if missing := [name for name in names if name not in node]:
            raise CorruptError(f"the list {join_key(trail)!r:.200} has no item {missing[0]}")
    places: tuple[Any, ...] = tuple(range(len(names))) if listed else tuple(names)
    head = Container(node="list" if listed else "dict", keys=places)
    if (known := containers.get(trail)) is not None:
        if sorted(known.keys) != sorted(places):
            what = f"the {known.node} {join_key(trail)!r:.200}"
            raise CorruptError(f"{what} has other children than are recorded of it")
        head, names = known, [str(place) for place in known.keys]
    return head, [((*trail, name), node[name]) for name in names]


def _clash(path: Sequence[Step]) -> CorruptError:
    return CorruptError(f"the leaf {join_key(keys_of(path))!r:.200} does not fit beside the others")


def nested_leaves(
    root: Any, left: float = math.inf, what: str | None = None
) -> tuple[list[tuple[tuple[Step, ...], Any]], Containers]:
    """Return the leaves and empty containers of nested dicts, lists and tuples by their paths, and the tuples.

    Args:
        root: the outermost of them.
        left: how many steps all paths together may have, as `most_steps` says.
        what: what is read, for messages.

    Raises:
        UnsupportedError: containers are nested too deep.

    Example:
        >>> nested_leaves({"a": [7, {}]})[0]
        [((('a', False), ('0', True)), 7), ((('a', False), ('1', True)), {})]
    """
    leaves: list[tuple[tuple[Step, ...], Any]] = []
    containers: Containers = {}
    waiting: list[tuple[tuple[Step, ...], Any]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        left -= len(path)
        if len(path) > MAX_LEVELS or left < 0:
            raise UnsupportedError(f"{what}: containers are nested too deep")
        if not node or not isinstance(node, dict | list | tuple):
            leaves.append((path, node))
            continue
        if isinstance(node, tuple):
            containers[keys_of(path)] = Container(node="tuple", keys=tuple(range(len(node))))
        items, listed = (node.items(), False) if isinstance(node, dict) else (enumerate(node), True)
        waiting.extend(reversed([((*path, (str(key), listed)), child) for key, child in items]))
    return leaves, containers


def keys_of(path: Sequence[Step]) -> tuple[str, ...]:
    """Return the keys of a path alone."""
    return tuple([key for key, _ in path])


def most_steps(nbytes: int) -> int:
    """Return how long the paths of a tree may be in all that a file of so many bytes nests.

    Deep inside of each other, a few bytes could make any number of long paths.
    """
    return _FREE_STEPS + _STEP_RATIO * nbytes
