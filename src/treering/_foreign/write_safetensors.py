"""An opened tree -> one safetensors file that carries its own index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._background.writer import Watch
from treering._checkpoint.save_files import SafetensorsSave
from treering._checkpoint.save_folder import flatten_source
from treering._checkpoint.save_options import SaveOptions
from treering._checkpoint.targets import Loss, lost_leaves, lost_members
from treering._format.safetensors import RESERVED, why_not_stored
from treering._format.selection import Selection


def find_losses(source: Source, part: Selection, metadata: Mapping[str, Any]) -> Iterator[Loss]:
    """Yield the leaves that are no arrays of its dtypes, and what the file says itself."""
    yield from lost_leaves(source, part, why_not_stored)
    yield from lost_members(name for name in metadata if name in RESERVED)


def write(source: Source, part: Selection, save: SaveOptions, watch: Watch) -> None:
    """Write the file, which has checksums of its own."""
    SafetensorsSave(flatten_source(source, part), describe_source(source, part)).write(save, watch)
