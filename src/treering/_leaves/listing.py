"""A leaves directory -> what its headers say, prefixes as branches; neither jax nor numpy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence

from treering._checkpoint.detect import Form
from treering._codec.zarr import ZarrArray, chunk_bytes, chunk_count, chunk_name, zarray_bytes
from treering._format.index import Index
from treering._format.listing import list_index
from treering._format.records import FileRecord, Listing, Place
from treering._leaves.branches import read_branches
from treering._leaves.documents.foreign import add_structure
from treering._leaves.documents.index import LEAVES_INDEX, IndexBranch
from treering._leaves.documents.join import join_records
from treering._leaves.documents.record import OpenBranch
from treering._store.failures import LinkRefused
from treering._store.leaves_folder.open_leaves import OpenLeaves
from treering._store.leaves_places import open_leaves
from treering.errors import NotFound, StoreFailed


def list_leaves(path: str | os.PathLike[str]) -> Listing:
    """Return the listing of a leaves directory from its index, and of other programs' arrays from their ``.zarray``.

    Raises:
        NotFound: there is no index.
        Corrupt, Format, Unsupported: the index, a record or a ``.zarray`` is damaged, of another format, or newer.
        StoreFailed: the system refuses.
    """
    with open_leaves(path) as folder:
        branches, read = read_branches(folder)
        branches = [add_structure(folder, branch) for branch in branches]
        index = join_records([each.record for each in branches], verified=all(each.verified for each in branches))
        listing = build_listing(index, branches)
        size = len(folder.read_index())
        return dataclasses.replace(
            listing,
            files=(FileRecord(name=LEAVES_INDEX, nbytes=size),),
            file_bytes=size + sum(_file_bytes(folder, branch) for branch in branches),
            notes=describe_state(folder, read),
        )


def build_listing(index: Index, branches: Sequence[OpenBranch]) -> Listing:
    """Return the branches of a leaves directory as a listing; how large its files are is not looked at.

    Args:
        index: what the branches are together.
        branches: all that are in it.
    """
    listing = list_index(index, form=Form.LEAVES.value, files=(), file_bytes=0, places=list(_places(branches)))
    return dataclasses.replace(
        listing,
        prefixes=[branch.record.prefix or "" for branch in branches],
        unverified=[branch.record.prefix or "" for branch in branches if not branch.verified],
    )


def describe_state(folder: OpenLeaves, read: Sequence[IndexBranch]) -> list[str]:
    """Say what a save left to do in a directory that is whole without it.

    Args:
        folder: the directory.
        read: the branches of its index.
    """
    moving = [repr(branch.prefix) if branch.prefix else "no prefix" for branch in read if branch.moving is not None]
    notes = []
    if moving:
        what = f"the save of {', '.join(moving)} has not moved all its files to their key paths"
        notes.append(f"{what}; the next save does, and until then other programs do not see it whole")
    try:
        waiting = len(folder.pending())
    except (LinkRefused, StoreFailed) as error:
        # No reader needs what lies there.
        return [*notes, f"saves without an index cannot be listed: {error}"]
    if waiting:
        saves = "1 save is" if waiting == 1 else f"{waiting} saves are"
        notes.append(f"{saves} not in the index; treering.leaves.index_leaves adds saves without one")
    return notes


def _places(branches: Sequence[OpenBranch]) -> Iterator[Place]:
    """Walk through the stored leaves of all branches."""
    for branch in branches:
        # Thousands of leaves share a few layouts.
        known: dict[ZarrArray, Place] = {}
        for name, array in zip(branch.record.folders, branch.arrays, strict=True):
            place = known.get(array)
            if place is None:
                count = chunk_count(array)
                place = known[array] = Place(
                    file=chunk_name(array, 0) if count else None,
                    chunks=count,
                    chunk_shape=array.chunks,
                    compressor=array.compressor,
                    verified=branch.verified,
                )
            # Another program may have put an array into the directory itself.
            yield dataclasses.replace(place, file=f"{name}/{place.file}") if place.file and name else place


def _file_bytes(folder: OpenLeaves, branch: OpenBranch) -> int:
    """Add up the files of one branch, as its record says."""
    total = sum(branch.record.sizes)
    for name, array in zip(branch.record.folders, branch.arrays, strict=True):
        total += len(zarray_bytes(array))
        if array.compressor is None:
            total += chunk_count(array) * chunk_bytes(array)
        elif not branch.verified:
            total += sum(_sizes_there(folder, name, array))
    return total


def _sizes_there(folder: OpenLeaves, name: str, array: ZarrArray) -> Iterator[int]:
    """Walk through the chunk files of an array that no record describes, up to the first that is missing."""
    for number in range(chunk_count(array)):
        try:
            with folder.open(name, chunk_name(array, number), None) as file:
                yield file.size
        except NotFound:
            return
