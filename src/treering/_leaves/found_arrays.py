"""Arrays that lie in a leaves directory and that no record knows: found, and listed as another program would."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from treering._codec.zarr import ZarrArray, parse_zarray
from treering._leaves.branches import read_zarray
from treering._leaves.documents.index import Branch, Entry, LeavesIndex, encode_leaves_index
from treering._leaves.folder.leaves_folder import OpenLeaves
from treering._store.failures import LinkRefused
from treering.errors import Corrupt, Format, NotFound, Unsupported


def found_arrays(folder: OpenLeaves, known: Collection[str]) -> dict[str, ZarrArray]:
    """Return the zarr v2 arrays at key paths, by folder, except those in ``known`` folders.

    What cannot be read as a leaf, such as an array of records, is none.
    """
    found = {}
    for name in folder.array_folders():
        if name in known:
            continue
        try:
            found[name] = parse_zarray(read_zarray(folder, name, None))
        except (NotFound, Corrupt, Format, LinkRefused, Unsupported):
            continue
    return found


def index_of_others(arrays: Mapping[str, ZarrArray], taken: Collection[str | None]) -> bytes:
    """Return an index of arrays that came without one.

    They are a tree without prefix. Where there is such a tree already, each is under a prefix of its own folders, the
    shortest that is free: one branch cannot be checked in one part and not in another.

    Args:
        arrays: by folder.
        taken: prefixes of other trees.
    """
    entries: dict[str | None, list[Entry]] = {}
    for name, array in arrays.items():
        document = {"path": name or ".", "shape": list(array.shape), "dtype": array.dtype}
        entries.setdefault(_free_prefix(name, taken), []).append(Entry(name, document))
    branches = {
        prefix: Branch(prefix=prefix, entries=listed, record=None, moving=None) for prefix, listed in entries.items()
    }
    return encode_leaves_index(LeavesIndex(branches=branches, document={}))


def _free_prefix(name: str, taken: Collection[str | None]) -> str | None:
    if None not in taken:
        return None
    parts = name.split("/")
    texts = ("/".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((text for text in texts if text not in taken), name)
