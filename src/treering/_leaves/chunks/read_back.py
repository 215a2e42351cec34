"""An array that another writer put into a staged folder: what it is, and the checksums of its files."""

from __future__ import annotations

import dataclasses
from array import array
from typing import TYPE_CHECKING, Final

from treering._codec.compressors import check_chunk_file
from treering._codec.zarr import ZarrArray, chunk_names, parse_zarray, stored_dtype
from treering._values.checksums import block_bytes, block_checksums
from treering.errors import Corrupt, Unsupported

if TYPE_CHECKING:
    from treering._format.index import LeafType
    from treering._leaves.folder.staged_leaves import StagedLeaves
    from treering._store.posix.reading import LocalFile

ZARRAY: Final = ".zarray"
"""Name of the document in an array's folder."""

_PIECE_BYTES: Final = 8 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenArray:
    """An array as it lies in its folder."""

    zarr: ZarrArray
    """What its ``.zarray`` says."""
    sizes: list[int]
    """Bytes of each chunk file."""
    checksums: array[int]
    """Checksums of the blocks, chunk after chunk."""


def read_back(staged: StagedLeaves, folder: str, leaf_type: LeafType) -> WrittenArray:
    """Read an array that another writer put into a staged folder, to its last byte.

    Raises:
        Unsupported: it is no zarr v2 array, or of a form in which leaves are not stored.
        Corrupt: it is not the leaf's array, or a chunk is missing or short.
        StoreFailed: the system refuses.
    """
    names = set(staged.names(folder))
    if ZARRAY not in names:
        raise Unsupported("the manager wrote no zarr v2 array: there is no .zarray", hint="use one that writes zarr v2")
    with staged.open(folder, ZARRAY) as file:
        found = parse_zarray(file.read(0, file.size))
    _check_form(found, leaf_type)
    sizes, checksums = [], array("Q")
    for name in chunk_names(found):
        if name not in names:
            raise Corrupt(f"the manager wrote no chunk {name!r}")
        with staged.open(folder, name) as file:
            check_chunk_file(found, file.size)
            sizes.append(file.size)
            checksums += _checksums_of(file)
    if len(names) > len(sizes) + 1:
        extra = min(names.difference(chunk_names(found), [ZARRAY]))
        raise Unsupported(f"the manager wrote {extra!r}, which is no part of a zarr v2 array")
    return WrittenArray(zarr=found, sizes=sizes, checksums=checksums)


def _check_form(found: ZarrArray, leaf_type: LeafType) -> None:
    if (found.dtype, found.shape) != (stored_dtype(leaf_type.dtype or ""), leaf_type.shape):
        wanted = f"{leaf_type.dtype}{list(leaf_type.shape or ())}"
        raise Corrupt(f"the manager was given {wanted} and wrote {found.dtype}{list(found.shape)}")
    if (found.order, found.separator, found.big_endian) != ("C", ".", False):
        raise Unsupported('the manager wrote an array in order F, big endian, or with "/" in the names of its chunks')
    if any(chunk > max(length, 1) for chunk, length in zip(found.chunks, found.shape, strict=True)):
        raise Unsupported(f"the manager wrote chunks of {list(found.chunks)}, larger than the array")


def _checksums_of(file: LocalFile) -> array[int]:
    """Return the checksums of a file, which may be larger than memory."""
    block = block_bytes(file.size)
    found = array("Q")
    for start in range(0, file.size, _PIECE_BYTES):
        piece = file.read(start, min(_PIECE_BYTES, file.size - start))
        found += block_checksums(memoryview(piece), block)
    return found
