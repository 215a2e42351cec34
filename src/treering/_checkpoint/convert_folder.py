"""An opened tree -> a checkpoint of treering, which can hold all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._arrays.written import divide_save
from treering._background.save_job import Watch
from treering._checkpoint.save_folder import commit_index, make_index, write_data
from treering._checkpoint.save_options import SaveOptions
from treering._checkpoint.targets import Loss, key_texts
from treering._checkpoint.transaction import CheckpointFolder
from treering._format.document import read_names
from treering._format.index import Container, OpaqueLeaf
from treering._format.selection import Selection
from treering._format.structure import node_keys
from treering._printable import kind_of
from treering._tree.flatten import Flattened


def find_losses(source: Source, part: Selection, metadata: Mapping[str, Any]) -> Iterator[Loss]:
    """Yield the leaves that only msgpack knows."""
    del metadata
    index = source.index
    for key, leaf in zip(part.keys, part.leaves, strict=True):
        if index.type_of(leaf).kind == "opaque" and not isinstance(index.values[leaf], OpaqueLeaf):
            yield Loss("objects", key, f"leaf {key!r:.200}: {kind_of(index.values[leaf])}")


def write(source: Source, part: Selection, save: SaveOptions, watch: Watch) -> None:
    """Write the folder, which has checksums of its own."""
    flat = flatten_source(source, part)
    with closing(CheckpointFolder(save.path, overwrite=save.overwrite, names_in=read_names)) as folder, folder:
        layout = divide_save(flat.keys, describe_source(source, part), 1).files(folder.attempt, [0])
        checksums = write_data(layout, folder, save)
        index = make_index(flat, layout, checksums, save.json_metadata(), attempt=folder.attempt)
        commit_index(folder, index, layout.headers, watch)


def flatten_source(source: Source, part: Selection) -> Flattened:
    """Return a part of an opened tree as what a save takes, without its leaves; what is thinned becomes a dict."""
    kinds = [source.index.type_of(leaf).kind for leaf in part.leaves]
    tokens = [
        Container(node="dict", keys=node_keys(token)) if isinstance(token, Container) and token.thinned else token
        for token in part.structure
    ]
    # The keys of a foreign tree may be other texts.
    return Flattened(tokens=tokens, keys=key_texts(tokens), kinds=kinds, structured=source.structured)
