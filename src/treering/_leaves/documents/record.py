"""The record of one save into a leaves directory: its tree, how its leaves lie there, and the checksums of all files.

From the record follow the index entries, every ``.zarray`` byte for byte, and the name and size of every chunk file.
``docs/spec/leaves.md`` is its specification.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from treering._codec.documents import (
    SignedForm,
    check_hashes,
    check_json,
    check_name,
    check_texts,
    join_lines,
    member,
    member_line,
    raising_corrupt,
    show,
)
from treering._codec.zarr import ZarrArray, check_compressor, chunk_bytes, chunk_count, stored_dtype
from treering._format import columns
from treering._format.index import TreeColumns
from treering._values.checkpoint_names import ATTEMPT
from treering._values.checksums import block_count
from treering._values.human import pluralize
from treering._values.keys import split_key
from treering.errors import CorruptError, UnsupportedError

# An empty part, and a bare array that has no prefix, need a name; no escape and no ordinary part looks like it.
_EMPTY: Final = "%-"
_LONGEST: Final = 255  # bytes of a name, on every file system in use

# What separates parts here or in another program's keys, what is no text, and what no terminal should be shown.
_UNSAFE: Final = r"./\\:\x00-\x1f\x7f-\x9f\ud800-\udfff"
_LOOKS_ESCAPED: Final = re.compile(r"%(?:-|[0-9A-F]{2})")
_NOT_ORDINARY: Final = re.compile(rf"[{_UNSAFE}]|%(?:-|[0-9A-F]{{2}})")
_ESCAPED_CHARACTERS: Final = re.compile(rf"[{_UNSAFE}%]")
_ESCAPES: Final = re.compile(r"(?:%[0-9A-F]{2})+")
# Key texts that may be no folder as they stand: an unsafe character, an escape of either kind, an empty part.
_NEEDS_A_LOOK: Final = re.compile(rf"[{_UNSAFE.replace('/', '')}%~]|//|\A/|/\Z|\A\Z")
_PREFIX_SEPARATORS: Final = re.compile(r"[./]")


def folder_of(prefix: str | None, key: str) -> str:
    """Return the folder of a leaf, relative to the directory: the prefix's parts and the key's, joined with ``/``.

    A bare array lies in the prefix's own folder, and in ``%-`` where there is no prefix.

    Args:
        prefix: as the user gave it; None and "" are no prefix.
        key: key text of the leaf.

    Raises:
        UnsupportedError: the prefix cannot be a folder, or a part takes more than 255 bytes when it is escaped.
        FormatError: ``key`` is no key text.

    Example:
        >>> folder_of(None, "params/dense/kernel"), folder_of("model", "layer.0/w")
        ('params/dense/kernel', 'model/layer%2E0/w')
        >>> folder_of(None, ""), folder_of("model", "")
        ('%-', 'model')
    """
    above = prefix_folder(prefix) if prefix else ""
    if (len(key) <= _LONGEST and key.isascii()) and not _NEEDS_A_LOOK.search(key):
        below = key
    else:
        parts = split_key(key)
        folders = [escape(part) for part in parts]
        for folder in folders:
            if len(folder) > _LONGEST or len(folder.encode()) > _LONGEST:
                raise UnsupportedError(
                    f"a part of the key is {pluralize(len(folder.encode()), 'bytes')} long as the name of a folder;"
                    f" {_LONGEST} is the maximum of file systems",
                    path=parts,
                    hint="shorten the key",
                )
        below = "/".join(folders)
    return f"{above}/{below}" if above and below else above or below or _EMPTY


@functools.lru_cache(maxsize=64)
def prefix_folder(prefix: str) -> str:
    """Return the folder of a prefix: its parts, split at ``.`` and ``/``, joined with ``/``.

    Raises:
        UnsupportedError: a part is empty, or has a character that would have to be escaped; nothing is escaped here,
            since other programs look for the prefix where it says.

    Example:
        >>> prefix_folder("model.ema"), prefix_folder("model/ema")
        ('model/ema', 'model/ema')
        >>> prefix_folder("../model")
        Traceback (most recent call last):
        ...
        treering.errors.UnsupportedError: the prefix '../model' is not a path of folders: it has an empty part
    """
    parts = _PREFIX_SEPARATORS.split(prefix)
    for part in parts:
        if not part:
            raise UnsupportedError(f"the prefix {prefix[:200]!r} is not a path of folders: it has an empty part")
        if _NOT_ORDINARY.search(part):
            raise UnsupportedError(
                f"the prefix {prefix[:200]!r} is not a path of folders: {part[:200]!r} is not a plain name",
                hint="use letters, digits, '_' and '-', with '.' or '/' between folders",
            )
        if len(part.encode()) > _LONGEST:
            raise UnsupportedError(f"a part of the prefix {prefix[:200]!r} is longer than {_LONGEST} bytes")
    return "/".join(parts)


def escape(part: str) -> str:
    """Return one part of a key as the name of a folder; different parts have different names.

    Example:
        >>> escape("kernel"), escape("layer.0"), escape(""), escape("50%"), escape("%2E")
        ('kernel', 'layer%2E0', '%-', '50%', '%252E')
    """
    if not part:
        return _EMPTY
    return _ESCAPED_CHARACTERS.sub(_percent_encode, part) if _NOT_ORDINARY.search(part) else part


def _percent_encode(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass"))


def unescape(name: str) -> str:
    """Return the part that the name of a folder stands for; a name that `escape` never gives stands for itself.

    Example:
        >>> unescape("layer%2E0"), unescape("%-"), unescape("50%"), unescape("%41")
        ('layer.0', '', '50%', '%41')
    """
    if name == _EMPTY:
        return ""
    if not _LOOKS_ESCAPED.search(name):
        return name
    try:
        part = _ESCAPES.sub(_percent_decode, name)
    except UnicodeDecodeError:
        return name
    return part if escape(part) == name else name


def _percent_decode(found: re.Match[str]) -> str:
    return bytes.fromhex(found[0].replace("%", "")).decode("utf-8", "surrogatepass")


def parts_of_folder(folder: str, prefix: str | None) -> tuple[str, ...]:
    """Return the path of the leaf in a folder, below the prefix: what an index of another program says by it.

    A folder that does not lie below its prefix keeps all its parts. ``.`` is the directory itself: the bare array.

    Raises:
        CorruptError: the folder is no plain path below the directory: absolute, or with an empty part, ``.`` or ``..``.

    Example:
        >>> parts_of_folder("model/layer%2E0/w", "model"), parts_of_folder("model", "model")
        (('layer.0', 'w'), ())
        >>> parts_of_folder("../etc", None)
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: the folder '../etc' of a leaf leads out of the directory, or is not a path
    """
    if folder == ".":
        return ()
    parts = folder.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in folder:
        raise CorruptError(f"the folder {folder[:200]!r} of a leaf leads out of the directory, or is not a path")
    above = [part for part in _PREFIX_SEPARATORS.split(prefix) if part] if prefix else []
    if parts[: len(above)] == above:
        parts = parts[len(above) :]
    return tuple(map(unescape, parts))


def find_overlap(folders: Iterable[str]) -> tuple[str, str] | None:
    """Return two folders that are equal, or of which the second lies in the first; None where there are none.

    Example:
        >>> find_overlap(["a/b", "c", "a"]), find_overlap(["a", "a"]), find_overlap(["a", "ab", "a-b"])
        (('a', 'a/b'), ('a', 'a'), None)
    """
    # In the order of texts, everything that begins as a folder does follows right behind it.
    ends = sorted(f"{folder}/" for folder in folders)
    for outer, inner in itertools.pairwise(ends):
        if inner.startswith(outer):
            return outer[:-1], inner[:-1]
    return None


RECORD_VERSION: Final = 1
"""Version of the record. It grows when a reader of the old version would read something wrong."""

MOST_AXES: Final = 32
"""An array that lies in folders has at most as many: TensorStore opens no others."""

UNMARKED: Final = "0" * 16
"""The attempt of a made up record: arrays of another writer, whose ``.zarray`` has no marker."""

_FORM: Final = SignedForm(
    member="treering leaves",
    version=RECORD_VERSION,
    name="the record",
    hint="treering.leaves.index_leaves takes the copy under .treering if that is whole; "
    "else use another copy of the directory",
)
_WRITTEN_ATTEMPT: Final = re.compile(rb'\n"attempt": "([0-9a-f]{16})"')
_LIMIT: Final = 1 << 63


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """How an array is cut into chunk files; many leaves have the same."""

    chunks: tuple[int, ...]
    """Lengths of a chunk, at least 1 for each axis."""
    compressor: str | None = None
    """Canonical JSON of the compressor's configuration; None where the files hold plain bytes."""
    order: str = "C"
    """"F" only in another writer's arrays."""
    separator: str = "."
    """"/" only in another writer's arrays."""
    big_endian: bool = False
    """True only in another writer's arrays."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeavesRecord(TreeColumns):
    """Everything that is known of one save: of the branch under one prefix, or of the tree without prefix.

    Its keys are without the prefix.
    """

    prefix: str | None
    """The prefix as the user gave it."""
    attempt: str = UNMARKED
    """16 hexadecimal digits, different for each save; ``UNMARKED`` where another writer made the arrays."""
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Who wrote it: versions and time."""
    meshes: Sequence[str] = ()
    """The meshes of its arrays, as text for people."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What another program wrote beside the tree."""
    structured: bool = True
    """False where its containers are those of another form, which did not have the tree's own."""
    folders: Sequence[str]
    """Folder of each stored leaf, in the order of the leaves. It follows from prefix and key, and is not written."""
    layouts: Sequence[ChunkLayout]
    """The different layouts."""
    leaf_layouts: Sequence[int]
    """Number of the layout of each stored leaf."""
    sizes: Sequence[int] = ()
    """Bytes of each chunk file of the compressed leaves, leaf after leaf; those of plain ones follow."""
    checksums: array[int] = dataclasses.field(default_factory=lambda: array("Q"))
    """Checksums of the blocks of the chunk files: leaf after leaf, chunk after chunk in C order of the grid."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenBranch:
    """One branch of a leaves directory that can be read."""

    record: LeavesRecord
    """What is in it; made up from its ``.zarray`` files where another program wrote it."""
    arrays: Sequence[ZarrArray]
    """What the ``.zarray`` of each stored leaf has to say, in the order of the leaves."""
    attempt: str | None
    """The save whose staged files are not all moved yet: files are looked for there first. None: nothing is staged."""
    verified: bool
    """Whether the record has checksums; False for another program's branch."""

    def chunk_sizes(self) -> Iterator[Sequence[int]]:
        """Yield the bytes of the chunk files of each stored leaf; none where the record does not say them."""
        packed = iter(self.record.sizes)
        for zarr in self.arrays:
            count = chunk_count(zarr) if self.verified else 0
            yield [chunk_bytes(zarr)] * count if zarr.compressor is None else list(itertools.islice(packed, count))


# ------------------------------------------------------------------------------------------------- what follows from it


def arrays_of(record: LeavesRecord) -> list[ZarrArray]:
    """Return what the ``.zarray`` of each stored leaf says; leaves of one type and layout share the object.

    Raises:
        UnsupportedError: zarr has no form for a dtype.
    """
    marker = None if record.attempt == UNMARKED else record.attempt
    made: dict[tuple[int, int], ZarrArray] = {}
    pairs = _pairs(record)
    for number, layout in set(pairs):
        kind, cut = record.types[number], dataclasses.asdict(record.layouts[layout])
        dtype = stored_dtype(kind.dtype or "")
        made[number, layout] = ZarrArray(shape=kind.shape or (), dtype=dtype, marker=marker, **cut)
    return [made[pair] for pair in pairs]


def _pairs(record: LeavesRecord) -> list[tuple[int, int]]:
    """Return the numbers of type and layout of each stored leaf."""
    stored = [kind.stored for kind in record.types]
    kinds = [number for number in record.leaf_types if stored[number]]
    return list(zip(kinds, record.leaf_layouts, strict=True))


def first_checksums(record: LeavesRecord) -> list[int]:
    """Return where in ``checksums`` those of each stored leaf begin, and behind the last leaf how many there are.

    For a record without checksums, as another writer's branch has it, all of them are 0.
    """
    arrays = arrays_of(record)
    if record.attempt == UNMARKED:
        return [0] * (len(arrays) + 1)
    return list(itertools.accumulate(_blocks(arrays, record.sizes), initial=0))


def _blocks(arrays: Sequence[ZarrArray], sizes: Sequence[int]) -> Iterator[int]:
    """Yield how many blocks the chunk files of each leaf have; ``sizes`` are those of the compressed ones."""
    plain: dict[int, int] = {}
    taken = 0
    for found in arrays:
        if found.compressor is None:
            blocks = plain.get(id(found))
            if blocks is None:
                blocks = plain[id(found)] = chunk_count(found) * block_count(chunk_bytes(found))
            yield blocks
        else:
            count = chunk_count(found)
            yield sum(map(block_count, sizes[taken : taken + count]))
            taken += count


# -------------------------------------------------------------------------------------------------------------- writing


def encode_record(record: LeavesRecord) -> bytes:
    """Return the record as a document.

    Raises:
        UnsupportedError: ``written``, or a key or static field of the structure, has no form in it.
    """
    return _FORM.sign(join_lines([member_line(name, value) for name, value in _members(record)]))


def _members(record: LeavesRecord) -> Iterator[tuple[str, Any]]:
    check_json(record.written, "written")
    yield "attempt", record.attempt
    yield "prefix", record.prefix
    yield "written", record.written
    yield "meshes", list(record.meshes)
    yield from columns.encode_tree(record)
    cuts = [(list(each.chunks), json.loads(each.compressor or "null")) for each in record.layouts]
    yield "layouts", [{"chunks": chunks, "compressor": compressor} for chunks, compressor in cuts]
    yield "layout", list(record.leaf_layouts)
    yield "sizes", list(record.sizes)
    yield "checksums", columns.encode_checksums(record.checksums)
    if not record.structured:
        yield "structured", False


# -------------------------------------------------------------------------------------------------------------- reading


def attempt_of(data: bytes) -> str | None:
    """Return the attempt that a record names, without reading the rest; None where it is damaged."""
    found = _WRITTEN_ATTEMPT.search(data)
    return found[1].decode() if found is not None and _FORM.is_whole(data) else None


def parse_record(data: bytes) -> LeavesRecord:
    """Return the record that a document holds, with everything in it checked.

    Raises:
        CorruptError: it is damaged, or contradicts itself; the message names the leaf.
        FormatError: a newer version wrote it: its version, or a kind of leaf, container, key or checksum is unknown.
        UnsupportedError: it has a dtype that this version does not know.
    """
    return _FORM.read(data, _record)


def _record(document: Any) -> LeavesRecord:
    what = _FORM.name
    tree = columns.decode_tree(document, what)
    prefix = document.get("prefix", "")
    if prefix is not None and (type(prefix) is not str or not prefix):
        raise CorruptError(f"its prefix is {show(prefix)}, which is none")
    layouts = [_layout(node, number) for number, node in enumerate(member(document, "layouts", list, what))]
    check_hashes([layout.chunks for layout in layouts], "the chunks of the layouts")
    leaf_layouts = member(document, "layout", list, what)
    sizes = member(document, "sizes", list, what)
    columns.check_ints(sizes, _LIMIT, "the column of sizes")
    stored = tree.stored_leaves()
    columns.check_ints(leaf_layouts, len(layouts), "the column of layouts")
    if len(leaf_layouts) != len(stored):
        there = pluralize(len(leaf_layouts), "layouts")
        raise CorruptError(f"{pluralize(len(stored), 'leaves lie')} in files, there are {there} of them")
    record = LeavesRecord(
        prefix=prefix,
        attempt=check_name(ATTEMPT, member(document, "attempt", str, what), "the attempt"),
        written=columns.read_free_json(document, "written", what),
        meshes=check_texts(member(document, "meshes", list, what), "the list of meshes"),
        **tree.columns(),
        folders=_folders(prefix, [tree.keys[leaf] for leaf in stored]),
        layouts=layouts,
        leaf_layouts=leaf_layouts,
        sizes=sizes,
        checksums=columns.decode_checksums(document.get("checksums")),
        structured=member(document, "structured", bool, what) if "structured" in document else True,
    )
    if record.attempt == UNMARKED:
        raise CorruptError("its attempt is not one of a save")
    _check_files(record)
    return record


def _layout(node: Any, number: int) -> ChunkLayout:
    what = f"layout {number}"
    chunks = member(node, "chunks", list, what)
    columns.check_ints(chunks, _LIMIT, f"the chunk of {what}")
    if len(chunks) > MOST_AXES or 0 in chunks:
        raise CorruptError(f"{what} has chunks of {pluralize(len(chunks), 'axes')} or of length 0, which no array has")
    compressor = node.get("compressor")
    try:
        text = None if compressor is None else check_compressor(compressor)
    except UnsupportedError as error:
        raise CorruptError(f"{what}: {error.message}") from None
    return ChunkLayout(chunks=tuple(chunks), compressor=text)


def _folders(prefix: str | None, keys: Sequence[str]) -> list[str]:
    with raising_corrupt(UnsupportedError):
        if prefix is not None:
            prefix_folder(prefix)
        folders = list(map(functools.partial(folder_of, prefix), keys))
    clash = find_overlap(folders)
    if clash is not None:
        raise CorruptError(f"two leaves lie in {clash[0]!r:.200} and {clash[1]!r:.200}, the one inside the other")
    return folders


def _check_files(record: LeavesRecord) -> None:
    """Require that layouts fit the shapes, and sizes and checksums the chunk files.

    Nothing here counts up to a number of chunks: the record may claim any.
    """
    for number, layout in set(_pairs(record)):
        kind, chunks = record.types[number], record.layouts[layout].chunks
        shape = kind.shape or ()
        if len(chunks) != len(shape) or any(
            chunk > max(length, 1) for chunk, length in zip(chunks, shape, strict=True)
        ):
            raise CorruptError(f"layout {layout} has chunks of {list(chunks)}, which no array of {list(shape)} has")
    with raising_corrupt(UnsupportedError):
        arrays = arrays_of(record)
    files = sum(chunk_count(found) for found in arrays if found.compressor is not None)
    if files != len(record.sizes) or 0 in record.sizes:
        raise CorruptError(f"the compressed leaves have {files} chunk files, there are {len(record.sizes)} sizes")
    blocks = sum(_blocks(arrays, record.sizes))
    if blocks != len(record.checksums):
        found = pluralize(len(record.checksums), "checksums")
        raise CorruptError(f"the chunk files have {pluralize(blocks, 'blocks')}, there are {found}")
