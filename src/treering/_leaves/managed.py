"""Leaves that a manager of the caller's writes, such as jax's ``GlobalAsyncCheckpointManager``.

It writes jax arrays into the staged folders of the save. When it has, what lies there is read back, compared with the
tree, and committed: in the manager's own commit callback, after the call returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from array import array
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from treering._arrays.outgoing import DescribedLeaves
from treering._checkpoint.source import read_pieces
from treering._codec import zarr
from treering._codec.zarr_chunks import check_chunk_file
from treering._format.index import LeafType
from treering._leaves.commit import commit_record
from treering._leaves.documents.record import ChunkLayout, LeavesRecord, arrays_of
from treering._printable import kind_of
from treering._store.api import Store
from treering._store.failures import naming
from treering._store.leaves_api import LeafWriter, LeavesSave, opened_at
from treering._tree.flatten import Flattened
from treering._values.checksums import block_bytes, block_checksums, block_count
from treering._values.keys import naming_leaf
from treering._values.leaves_names import ZARRAY, parts_of, staged_leaves
from treering._values.telemetry import report
from treering.errors import CorruptError, UnsupportedError


def begin_writes(
    manager: Any, flat: Flattened, managed: Mapping[int, str], writer: LeafWriter, finish: Callable[[], None]
) -> None:
    """Give a manager its leaves, and the folders where they are staged; it calls ``finish`` when they are written."""
    above = writer.store.path.joinpath(*staged_leaves(writer.attempt))
    for folder in managed.values():
        writer.require_room(folder)
        writer.write(folder.rpartition("/")[0], ())  # what a manager makes is its folder, not those on the way
    arrays = [flat.leaves[number] for number in managed]
    paths = [os.fspath(above.joinpath(*parts_of(folder))) for folder in managed.values()]
    manager.serialize_with_paths(arrays, paths, on_commit_callback=finish)


def check_manager(manager: object) -> None:
    """Refuse what has not the methods of a manager."""
    for name in ("serialize_with_paths", "wait_until_finished"):
        if not callable(getattr(manager, name, None)):
            raise UnsupportedError(f"the manager, {kind_of(manager)}, has no method {name!r}")


def managed_leaves(
    flat: Flattened, leaves: DescribedLeaves, folders: Iterable[str], *, spread: bool = False
) -> dict[int, str]:
    """Return the numbers of the leaves that a manager can be given, and their folders.

    Args:
        flat: the tree.
        leaves: its leaves.
        folders: the folder of each stored leaf.
        spread: only those that lie with several processes: of others each process would write its own, in one place.
    """
    known = [kind.dtype is not None and zarr.stored_dtype(kind.dtype) == kind.dtype for kind in leaves.types]
    return {
        number: folder
        for number, folder in zip(leaves.sources, folders, strict=True)
        if flat.kinds[number] == "jax"
        and known[leaves.leaf_types[number]]
        and (not spread or _is_spread(leaves, number))
    }


def _is_spread(leaves: DescribedLeaves, number: int) -> bool:
    return len({owner for _, owners in leaves.shared_by(number) or () for owner in owners}) > 1


@dataclasses.dataclass(eq=False, kw_only=True, repr=False)
class ManagedSave:
    """A save that waits for its manager.

    It holds no array and no manager: an array that the caller drops is freed, and where the manager fails, it drops
    this object, and the staged files are removed with it.
    """

    path: Path
    """The directory; absolute, since it is committed later, when the program may work in another folder."""
    staged: LeavesSave
    """The save."""
    record: LeavesRecord
    """What it holds, but for what the manager writes."""
    managed: Container[int]
    """Numbers of the leaves that the manager writes."""
    commit_callback: Callable[[], object] | None
    """Called when it is committed."""
    write_index: bool
    """Whether the index names it."""

    def __post_init__(self) -> None:
        # Not at the end of the program: a forked child has that too, and the next save sweeps what is left.
        weakref.finalize(self, self.staged.close).atexit = False

    def finish(self) -> None:
        """Commit what the manager wrote."""
        with report("save", self.path), contextlib.closing(self.staged) as staged:
            record = _add_managed(self.record, self.managed, staged)
            commit_record(self.path, staged, record, write_index=self.write_index)
        if self.commit_callback is not None:
            self.commit_callback()


def _add_managed(record: LeavesRecord, managed: Container[int], staged: LeavesSave) -> LeavesRecord:
    """Return the whole record: with the layouts and checksums of what the manager wrote, which gets our marker."""
    layouts: dict[ChunkLayout, int] = {}
    leaf_layouts: list[int] = []
    sizes: list[int] = []
    checksums, own, done = array("Q"), record.checksums, 0
    for number, folder, planned in zip(record.stored_leaves(), record.folders, arrays_of(record), strict=True):
        if number in managed:
            with naming_leaf(record.keys[number]):
                written, lengths, blocks = _take_over(staged, folder, record.types[record.leaf_types[number]])
            found = dataclasses.replace(written, marker=record.attempt)
            marked = zarr.zarray_bytes(found)
            staged.write(folder, [(ZARRAY, [marked], len(marked))])
            checksums += blocks
            sizes += lengths if found.compressor is not None else ()
        else:
            found = planned
            count = zarr.chunk_count(found) * block_count(zarr.chunk_bytes(found))
            checksums += own[done : done + count]
            done += count
        layout = ChunkLayout(chunks=found.chunks, compressor=found.compressor)
        leaf_layouts.append(layouts.setdefault(layout, len(layouts)))
    return dataclasses.replace(
        record, layouts=tuple(layouts), leaf_layouts=leaf_layouts, sizes=sizes, checksums=checksums
    )


def _take_over(staged: LeavesSave, folder: str, leaf_type: LeafType) -> tuple[zarr.ZarrArray, list[int], array[int]]:
    """Read an array that another writer staged, to its last byte, and remove its ``.zarray``, in whose place ours goes.

    Returns:
        What its ``.zarray`` says, the bytes of each chunk file, and the checksums of the blocks, chunk after chunk.

    Raises:
        UnsupportedError: it is no zarr v2 array, or of a form in which leaves are not stored.
        CorruptError: it is not the leaf's array, or a chunk is missing or short.
        StoreError: the system refuses.
    """
    parts = (*staged_leaves(staged.attempt), *parts_of(folder))
    with (
        naming(os.fspath(staged.store.path), "read"),
        contextlib.suppress(FileNotFoundError),
        opened_at(staged.store, parts) as place,
    ):
        read = _read_back(place, leaf_type)
        place.remove(ZARRAY)
        return read
    raise UnsupportedError(
        "the manager wrote no zarr v2 array: there is no .zarray", hint="use one that writes zarr v2"
    )


def _read_back(place: Store, leaf_type: LeafType) -> tuple[zarr.ZarrArray, list[int], array[int]]:
    names = set(place.names())
    with place.open_file(ZARRAY) as file:
        found = zarr.parse_zarray(file.read(0, file.size))
    _check_form(found, leaf_type)
    sizes, checksums = [], array("Q")
    for name in zarr.chunk_names(found):
        if name not in names:
            raise CorruptError(f"the manager wrote no chunk {name!r}")
        with place.open_file(name) as file:
            check_chunk_file(found, file.size)
            sizes.append(file.size)
            for piece in read_pieces(file, file.size):  # of whole blocks; it may be larger than memory
                checksums += block_checksums(memoryview(piece), block_bytes(file.size))
    if len(names) > len(sizes) + 1:
        extra = min(names.difference(zarr.chunk_names(found), [ZARRAY]))
        raise UnsupportedError(f"the manager wrote {extra!r}, which is not a part of a zarr v2 array")
    return found, sizes, checksums


def _check_form(found: zarr.ZarrArray, leaf_type: LeafType) -> None:
    if (found.dtype, found.shape) != (zarr.stored_dtype(leaf_type.dtype or ""), leaf_type.shape):
        wanted = f"{leaf_type.dtype}{list(leaf_type.shape or ())}"
        raise CorruptError(f"the manager was given {wanted} and wrote {found.dtype}{list(found.shape)}")
    if (found.order, found.separator, found.big_endian) != ("C", ".", False):
        raise UnsupportedError(
            'the manager wrote an array in order F, big endian, or with "/" in the names of its chunks'
        )
    if any(chunk > max(length, 1) for chunk, length in zip(found.chunks, found.shape, strict=True)):
        raise UnsupportedError(f"the manager wrote chunks of {list(found.chunks)}, larger than the array")
