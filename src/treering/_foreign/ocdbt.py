"""OCDBT databases, as TensorStore writes them: a manifest, and a B+ tree of keys in data files.

All nodes are read at once, each is checked against its CRC-32C, and what they may take is bounded by their own bytes.
TensorStore writes such databases.

Source: https://google.github.io/tensorstore/kvstore/ocdbt/index.html, "Storage format".
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, Self, TypeAlias

from treering._codec.compression import zstd_decompress_unsized
from treering._foreign.foreign_tree import ANOTHER_COPY, FolderFiles
from treering._values.checksums import crc32c
from treering._values.human import pluralize
from treering.errors import CorruptError, StoreError, UnsupportedError

MANIFEST: Final = "manifest.ocdbt"
"""The file that makes a folder a database."""

_MANIFEST_MAGIC: Final = 0x0CDB3A2A
_NODE_MAGIC: Final = 0x0CDB20DE
_FRAME_BYTES: Final = 16
_FOOTER: Final = 4
_MOST_ARITY: Final = 16
_MISSING: Final = (1 << 64) - 1
_LONGEST_NAME: Final = (1 << 16) - 1
_MOST_ENTRIES: Final = 1 << 20
_LARGEST_NODE: Final = 256 << 20
# What the entries take in memory, beside their keys and values; and what that may be in all, for so many bytes read.
_ENTRY_BYTES: Final = 128
_FREE_BYTES: Final = 64 << 20
_FREE_RATIO: Final = 256
# The data files of a database, and those of the databases of the processes that were merged into it.
_DATA_FILE: Final = re.compile(rb"(?:\w[\w.-]*/)?d/[0-9a-f]{32}", re.ASCII)


def memory_limit(nbytes: int) -> int:
    """Return how much memory keys may take that lie in so many bytes; their prefixes could unfold to far more."""
    return _FREE_BYTES + _FREE_RATIO * nbytes


class Stretch(NamedTuple):
    """Where a value lies."""

    file: str
    """Name of the data file, relative to the folder of all."""
    offset: int
    """Its first byte."""
    length: int
    """How many bytes it has."""


Value: TypeAlias = bytes | Stretch
"""A small value itself, or where a larger one lies."""


class _File(NamedTuple):
    base: bytes
    """What its own references begin with."""
    path: bytes


class _Node(NamedTuple):
    file: _File
    offset: int
    length: int
    height: int
    prefix: bytes


def read_database(files: FolderFiles, folder: str = "") -> Mapping[str, Value]:
    """Return all keys of the latest version of the database in a folder, in their order, with their values.

    Args:
        files: the files of what it belongs to.
        folder: empty, or the folder's name below that, with a ``/`` at its end.

    Raises:
        NotFoundError: there is no manifest.
        CorruptError: a node has another checksum than it was written with, or says what cannot be.
        UnsupportedError: it is of a version or a kind that has no reader here.
        StoreError: the store refuses.
    """
    reader = _Database(files, folder)
    waiting = reader.find_root()
    while waiting:
        waiting.extend(reversed(reader.read_node(waiting.pop())))
    return reader.found


@dataclasses.dataclass(slots=True)
class _Database:
    files: FolderFiles
    folder: str
    found: dict[str, Value] = dataclasses.field(default_factory=dict)
    _last: bytes | None = None
    _largest: int = _LARGEST_NODE
    _read: int = 0
    _taken: int = 0
    _seen: set[tuple[bytes, int]] = dataclasses.field(default_factory=set)

    def find_root(self) -> list[_Node]:
        """Read the manifest; return the root of the latest version, none where that is empty."""
        name = self.folder + MANIFEST
        with self.files.open_file(name) as manifest:
            body = self._unwrap(manifest.read(0, min(manifest.size, _LARGEST_NODE)), _MANIFEST_MAGIC, name)
        if body.take(17)[16]:
            raise UnsupportedError(f"{name}: its manifests are numbered files", hint="Orbax writes one manifest")
        self._largest = min(body.varints(2)[1], _LARGEST_NODE)
        arity = body.take(1)[0]
        if body.varint():
            body.take(4)
        if not 0 < arity <= _MOST_ARITY:
            raise body.error(f"a version tree cannot have the arity 2**{arity}")
        table = body.files(b"")
        count = body.varint()
        if not 0 < count <= 1 << arity:
            raise body.error(f"it cannot have {count} versions")
        body.varints(count)
        heights = body.take(count)
        ids, offsets, lengths = body.varints(count), body.varints(count), body.varints(count)
        if lengths[-1] in (0, _MISSING):
            return []
        return [_Node(body.pick(table, ids[-1]), offsets[-1], lengths[-1], heights[-1], b"")]

    def read_node(self, node: _Node) -> list[_Node]:
        """Take in the entries of a leaf, or return the nodes below."""
        file, offset, length, height, prefix = node
        name = self.folder + file.path.decode("ascii")
        if length > 2 * self._largest:
            raise UnsupportedError(f"{name}: a node of {pluralize(length, 'bytes')} is too large")
        if (file.path, offset) in self._seen:
            raise CorruptError(f"{name}: two nodes refer to the node at byte {offset}", hint=ANOTHER_COPY)
        self._seen.add((file.path, offset))
        body = self._unwrap(self.files.read(name, offset, length), _NODE_MAGIC, f"{name}, the node at byte {offset}")
        if body.take(1)[0] != height:
            raise body.error(f"its height is not the one that is said above it, {height}")
        table = body.files(file.base)
        if not 0 < (count := body.varint()) <= _MOST_ENTRIES:
            raise body.error(f"it cannot have {count} entries")
        shared = [0, *body.varints(count - 1, _LONGEST_NAME)]
        own = body.varints(count, _LONGEST_NAME)
        common = body.varints(count, _LONGEST_NAME) if height else ()
        self._taken += sum(shared) + sum(own) + count * (_ENTRY_BYTES + len(prefix))
        if self._taken > memory_limit(self._read):
            raise body.error("its keys take far more memory than it has bytes")
        keys = body.names(shared, own)
        if not height:
            self._take_values(prefix, keys, table, body)
            return []
        places = [body.varints(count) for _ in range(3)]  # files, offsets and lengths
        return [
            _Node(body.pick(table, number), offset, length, height - 1, prefix + key[:size])
            for key, size, number, offset, length in zip(keys, common, *places, strict=True)
        ]

    def _take_values(self, prefix: bytes, keys: list[bytes], table: list[_File], body: _Body) -> None:
        lengths = body.varints(len(keys))
        kinds = body.take(len(keys))
        if kinds.strip(b"\0\1"):
            raise body.error("a value is of an unknown kind")
        far = kinds.count(1)
        ids, offsets = iter(body.varints(far)), iter(body.varints(far))
        small = body.take(sum([length for length, kind in zip(lengths, kinds, strict=True) if not kind]))
        at = 0
        for key, length, kind in zip(keys, lengths, kinds, strict=True):
            full = prefix + key
            if self._last is not None and full <= self._last:
                raise body.error("its keys are not in order")
            self._last = full
            try:
                name = full.decode()
            except UnicodeDecodeError:
                raise body.error("a key is not UTF-8") from None
            if kind:
                path = body.pick(table, next(ids)).path.decode("ascii")
                self.found[name] = Stretch(self.folder + path, next(offsets), length)
            else:
                self.found[name] = small[at : at + length]
                at += length

    def _unwrap(self, data: bytes, magic: int, what: str) -> _Body:
        """Check a manifest or node as a whole, and return what is in it."""
        size = len(data)
        stored = int.from_bytes(data[-_FOOTER:], "little")
        if size < _FRAME_BYTES or int.from_bytes(data[:4], "big") != magic:
            raise CorruptError(f"{what} is no part of an OCDBT database", hint=ANOTHER_COPY)
        if int.from_bytes(data[4:12], "little") != size or crc32c(memoryview(data)[:-_FOOTER]) != stored:
            raise CorruptError(f"{what} has another length or checksum than it was written with", hint=ANOTHER_COPY)
        self._read += size
        body = _Body(data[:-_FOOTER], what, 12)
        if version := body.varint():
            raise UnsupportedError(f"{what} is of version {version} of OCDBT, this reads version 0")
        match body.varint():
            case 0:
                return body
            case 1:
                most = min(self._largest, memory_limit(size))
                return _Body(zstd_decompress_unsized(body.take(body.left), most), what)
            case other:
                raise UnsupportedError(f"{what} is compressed by method {other}, not by zstd")


class _Body:
    """The bytes of a manifest or node, taken from their beginning."""

    def __init__(self, data: bytes, what: str, at: int = 0) -> None:
        self._data = data
        self._at = at
        self.what = what

    def error(self, problem: str) -> CorruptError:
        return CorruptError(f"{self.what}: {problem}", hint=ANOTHER_COPY)

    def take(self, count: int) -> bytes:
        start = self._at
        self._at = stop = start + count
        if stop > len(self._data):
            raise self.error("it ends too early")
        return self._data[start:stop]

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def varint(self) -> int:
        return self.varints(1)[0]

    def varints(self, count: int, most: int = _MISSING) -> list[int]:
        data, at, found = self._data, self._at, []
        if count > len(data) - at:
            raise self.error("it ends too early")
        try:
            for _ in range(count):
                number = data[at]
                shift = 7
                at += 1
                if number >= 128:  # noqa: PLR2004
                    number &= 127
                    while True:
                        byte = data[at]
                        at += 1
                        number |= (byte & 127) << shift
                        shift += 7
                        if byte < 128 or shift > 63:  # noqa: PLR2004
                            break
                if number > most:
                    raise self.error(f"{number} is larger than it may be")
                found.append(number)
        except IndexError:
            raise self.error("it ends too early") from None
        self._at = at
        return found

    def names(self, shared: list[int], own: list[int]) -> list[bytes]:
        """Return texts of which each has its first bytes in common with the one before."""
        found: list[bytes] = []
        data, at, before = self.take(sum(own)), 0, b""
        for same, more in zip(shared, own, strict=True):
            if same > len(before) or same + more > _LONGEST_NAME:
                raise self.error("a key is longer than it may be")
            before = before[:same] + data[at : at + more]
            at += more
            found.append(before)
        return found

    def files(self, base: bytes) -> list[_File]:
        """Return the files that the entries refer to by number."""
        if not (count := self.varint()):
            return []
        shared = [0, *self.varints(count - 1, _LONGEST_NAME)]
        own = self.varints(count, _LONGEST_NAME)
        bases = self.varints(count, _LONGEST_NAME)
        if sum(shared) > _FREE_BYTES:
            raise self.error("the names of its files take too much memory")
        paths = zip(self.names(shared, own), bases, strict=True)
        return [_File(base + path[:size], base + path) for path, size in paths]

    def pick(self, table: list[_File], number: int) -> _File:
        if number >= len(table):
            raise self.error(f"it refers to a file {number} of {len(table)}")
        if not _DATA_FILE.fullmatch(table[number].path):
            raise self.error(f"{table[number].path!r:.200} is not the name of a data file of this database")
        return table[number]


_TOGETHER: Final = 32 << 20
_CONFIG: Final = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}


class DatabaseWriter:
    """A database that TensorStore writes, a context manager.

    Args:
        path: its folder, which is there.
        shown: what the folder is called in errors.

    Raises:
        StoreError: TensorStore could not write.
    """

    def __init__(self, path: str, shown: str) -> None:
        import tensorstore  # here: it is slow to import

        self._begin = functools.partial(tensorstore.Transaction, atomic=True)
        self._shown = shown
        spec = {"driver": "ocdbt", "base": {"driver": "file", "path": path}, "config": _CONFIG}
        # What is in the folder becomes durable as a whole; nothing of it is read again.
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False})
        with self._naming():
            self._store = tensorstore.KvStore.open(spec, context=context).result()
        self._change: Any = None
        self._committing: Any = None
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._commit()
        elif self._change is not None:
            self._change.abort()
        with contextlib.nullcontext() if kind is None else contextlib.suppress(StoreError):
            self._wait()

    def put(self, key: str, data: bytes) -> None:
        """Put a value there; it is in memory until about 32 MiB are."""
        with self._naming():
            self._change = self._change or self._begin()
            self._store.with_transaction(self._change).write(key.encode(), data).result()
        self._held += len(data)
        if self._held >= _TOGETHER:
            self._commit()

    def _commit(self) -> None:
        """Begin to commit what is held, when what came before it is committed."""
        self._wait()
        if self._change is not None:
            self._committing = self._change.commit_async()
        self._change, self._held = None, 0

    def _wait(self) -> None:
        if self._committing is not None:
            with self._naming():
                self._committing.result()
        self._committing = None

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:  # what TensorStore makes of any refusal
            raise StoreError(f"{self._shown!r}: TensorStore could not write: {error}") from error
