"""For packages that read or write a format of their own: what such a reader or writer is made of.

A reader is a module with ``recognise(place)`` and ``open_foreign(place, files)``. A writer is one with
``find_losses(source, part, metadata)`` and ``write(source, part, save, watch)``. Entry points of the groups
``treering.readers`` and ``treering.writers`` name them. ``docs/reference/plug-points.md`` has an example of each, and
``treering.testing`` the tests that they have to pass.

All of this is provisional: a later version may change it, and the changelog will say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treering._checkpoint.forms import Loss
from treering._codec.documents import parse_json
from treering._codec.zarr import ZarrArray
from treering._foreign.foreign_tree import (
    FolderFiles,
    ForeignLeaf,
    ForeignStep,
    ForeignTree,
    GridLeaf,
    build_index,
    build_tree,
    flat_dict,
)
from treering._format.index import DataFile, LeafType, leaf_bytes
from treering._format.leaf_values import check_shape
from treering._store.resolve import is_folder, open_file
from treering.checkpoint import later_names

if TYPE_CHECKING:
    from treering._arrays.source_arrays import SourceArray
    from treering._checkpoint.save_files import write_buffers

__all__ = [
    "DataFile", "FolderFiles", "ForeignLeaf", "ForeignStep", "ForeignTree", "GridLeaf", "LeafType", "Loss",
    "SourceArray", "ZarrArray", "build_index", "build_tree", "check_shape", "flat_dict", "is_folder", "leaf_bytes",
    "open_file", "parse_json", "write_buffers",
]  # fmt: skip

# What needs numpy or jax, which a reader that lists headers does not.
_LATER = {"SourceArray": "_arrays.source_arrays", "write_buffers": "_checkpoint.save_files"}


if not TYPE_CHECKING:  # a type checker sees the imports above, and so a mistyped name
    __getattr__ = later_names(__name__, _LATER)


def __dir__() -> list[str]:
    return sorted(__all__)
