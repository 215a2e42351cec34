"""A tree of arrays -> one safetensors file that carries its own index; durable when this returns."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treering._arrays.jobs import Progress
from treering._arrays.outgoing import Outgoing, Source, outgoing
from treering._arrays.parted import Parted
from treering._arrays.written import Layout, Written, content
from treering._background.save_job import UNWATCHED, Watch
from treering._checkpoint.save import index_of
from treering._codec.documents import check_json
from treering._format.headers import laid_out
from treering._format.index import DataFile
from treering._format.safetensors import check_single_file, check_single_metadata, single_file
from treering._store.posix.local import replace_file
from treering._tree.flatten import Flattened, flatten
from treering._values.boxes import whole
from treering._values.keys import split_key
from treering._wire.save_file import claimed_last, require_free
from treering.errors import Unsupported


def save_safetensors(
    path: Path, tree: Any, *, metadata: Mapping[str, Any], overwrite: bool, progress: Progress | None
) -> None:
    """Write ``tree`` into the file ``path``; ``treering.save`` says more.

    The checksums stand in the header, which comes first: every array is read twice.

    Raises:
        Unsupported: leaves that the form cannot hold, by name.
    """
    flat = flatten(tree)
    leaves = outgoing(flat)
    require_holdable(flat, leaves, metadata)
    write_safetensors(path, flat, leaves, metadata=metadata, overwrite=overwrite, progress=progress)


def require_holdable(flat: Flattened, leaves: Outgoing, metadata: Mapping[str, Any]) -> None:
    """Refuse what the form cannot hold.

    Raises:
        Unsupported: leaves, by name, or metadata.
    """
    check_single_file(flat.keys, leaves.types, leaves.leaf_types)
    check_json(metadata, "metadata")
    check_single_metadata(metadata)


def write_safetensors(
    path: Path,
    flat: Flattened,
    leaves: Outgoing,
    *,
    metadata: Mapping[str, Any],
    overwrite: bool,
    progress: Progress | None,
    watch: Watch = UNWATCHED,
) -> None:
    """Write leaves that the form can hold."""
    leaves = _gathered(leaves)
    require_free(path, overwrite=overwrite)
    attempt = secrets.token_hex(8)
    rows = [(number, None) for number in leaves.sources]
    chunks, headers = laid_out(attempt, flat.keys, leaves.types, leaves.leaf_types, [rows])
    layout = Layout(leaves=leaves, chunks=chunks, headers=headers)
    first = Written(layout, None)
    for _ in first.data_of(0, kept=False):
        pass
    file = DataFile(name="", nbytes=layout.sizes()[0], header=len(headers[0]), digest=None)
    index = index_of(flat, layout, first.checksums, [file], metadata=metadata, attempt=attempt)
    _, header = single_file(index)
    content = claimed_last(_unchanged(header, layout, first, progress, flat.keys), watch)
    replace_file(path, content, len(header) + layout.data_bytes)


def _unchanged(
    header: bytes, layout: Layout, first: Written, progress: Progress | None, keys: Sequence[str]
) -> Iterator[bytes | memoryview]:
    """Yield the file; at its end, require that the second reading of the arrays found what the first one did."""
    second = Written(layout, progress)
    yield from content(header, second.data_of(0))
    changed = second.first_other(first)
    if changed is not None:
        error = Unsupported("the array was changed while it was being saved", hint="save again; nothing was replaced")
        error.path = split_key(keys[changed])
        raise error


def _gathered(leaves: Outgoing) -> Outgoing:
    """Let every leaf be one box: readers of safetensors know no parts."""
    sources = dict(leaves.sources)
    for number, parts in leaves.sources.items():
        if len(parts) > 1:
            shape = leaves.types[leaves.leaf_types[number]].shape or ()
            sources[number] = (Source(whole(shape), Parted(shape, [(part.box, part.data) for part in parts])),)
    return dataclasses.replace(leaves, sources=sources)
