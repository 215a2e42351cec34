"""A checkpoint, leaves directory, run or file -> what its headers say, and its leaves one by one; never with jax."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, TypeAlias

from treering._checkpoint.detect import Form
from treering._checkpoint.forms import list_headers
from treering._format.listing import FileRecord, LeafRecord, Listing, list_index
from treering._printable import show_path
from treering._store.api import Reader
from treering._store.resolve import located, open_file
from treering._values.checkpoint_names import INDEX
from treering._view.listings import form_text, notes_of
from treering._view.plain import members_of
from treering._view.rows import USUAL_DEPTH, TreeLayout, lay_out, leaves_of, record_of
from treering._view.tree_text import totals_text, tree_lines

Fetch: TypeAlias = Callable[[int, int], bytes]
"""``fetch(offset, n)`` returns ``n`` bytes."""

_MOST_ROWS = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection(Listing):
    """What a checkpoint or file says about itself. Printing it shows the tree, and so does a notebook."""

    path: str
    """Where it is, as it was given."""

    @property
    def nbytes(self) -> int:
        """Bytes of its files together; of a gzip file what it unpacks to."""
        return self.file_bytes

    @property
    def leaves(self) -> dict[str, LeafRecord]:
        """Every leaf by its key text, in order.

        Of each ``kind``, ``dtype``, ``shape``, ``nbytes``, a small ``value``; and how it is split, as ``sharding``,
        ``chunks``, ``grid`` and ``processes``.
        """
        return {key: record_of(leaf) for key, leaf in leaves_of(self.root)}

    def __str__(self) -> str:
        layout = _fit_on_screens(self.root)
        return "\n".join(tree_lines(layout, title=self.path, file_bytes=self.nbytes, notes=notes_of(self)))

    def __repr__(self) -> str:
        totals = lay_out(self.root, depth=0).everything
        return f"<Inspection of {show_path(self.path)!r}: {form_text(self)}; {totals_text(totals)}>"

    def _repr_html_(self) -> str:
        from treering._view.listings import html_text

        layout = _fit_on_screens(self.root)
        return html_text(layout, title=self.path, file_bytes=self.nbytes, notes=notes_of(self))


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Look at a checkpoint, a leaves directory, a safetensors file or a msgpack file through its headers alone.

    No array is read, so that any size takes a moment. Neither jax nor numpy is imported.

    Args:
        path: a checkpoint's folder, a leaves directory, in which prefixes are branches, a run, whose latest step is
            meant, or a file.

    Raises:
        NotFoundError: nothing is there, or a folder that is neither.
        CorruptError: the headers are damaged.
        FormatError: another form, or a newer version.
        StoreError: not readable.

    Example:
        >>> from treering import serialization
        >>> serialization.save_to_file({"params": {"w": [1.5, 2.0]}, "step": 7}, "state.msgpack")
        >>> found = inspect("state.msgpack")
        >>> found.form, list(found.leaves), found.leaves["step"].value
        ('msgpack', ['params/w/0', 'params/w/1', 'step'], 7)
    """
    listing = list_headers(path)
    return Inspection(
        path=os.fspath(path), **members_of(listing, *(field.name for field in dataclasses.fields(listing)))
    )


# What reads a form is imported when such a file is there: together they take longer than a small file.


def list_checkpoint(path: str | os.PathLike[str]) -> Listing:
    """List a checkpoint; raises as `inspect` does."""
    from treering._format.document import parse_index
    from treering._store.failures import naming
    from treering._store.open_folder import OpenFolder
    from treering._store.waiting import describe_waiting

    with OpenFolder(located(path)) as folder:
        data = folder.read_index()
        index = parse_index(data)
        with naming(os.fspath(path), "read"):
            waits = describe_waiting(folder.store, data) if index.superseded else None
    files = [FileRecord(name=INDEX, nbytes=len(data))]
    for file in index.files:
        process = file.process if index.processes > 1 else None
        files.append(FileRecord(name=file.name, nbytes=file.nbytes, process=process))
    nbytes = sum(file.nbytes for file in files)
    listing = list_index(index, form=Form.CHECKPOINT.value, files=files, file_bytes=nbytes)
    return listing if waits is None else dataclasses.replace(listing, notes=(waits,))


def list_safetensors(path: str | os.PathLike[str]) -> Listing:
    """List a safetensors file; raises as `inspect` does."""
    from treering._format.safetensors import parse_safetensors

    with open_file(located(path)) as file:
        index = parse_safetensors(file.size, file.read)
        return list_index(index, form=Form.SAFETENSORS.value, files=(), file_bytes=file.size)


def list_msgpack_file(path: str | os.PathLike[str]) -> Listing:
    """List a msgpack file, or one in gzip form; raises as `treering.inspect` does."""
    with open_file(path) as file:
        return read_msgpack(file)[0]


def read_msgpack(file: Reader) -> tuple[Listing, Fetch]:
    """List a msgpack file, and return what reads from it; one in gzip form is unpacked in memory first.

    Raises:
        CorruptError, FormatError: it is damaged.
        StoreError: the system refuses.
    """
    from treering._codec.compression import GZIP_MAGIC, gzip_decompress
    from treering._codec.msgpack.window import WINDOW_BYTES
    from treering._format.listing import list_msgpack

    first = file.read(0, min(file.size, WINDOW_BYTES))
    if not first.startswith(GZIP_MAGIC):
        return list_msgpack(first, file.size, file.read), file.read
    data = gzip_decompress(file.read(0, file.size), None)

    def fetch(offset: int, count: int) -> bytes:
        return data[offset : offset + count]

    return dataclasses.replace(list_msgpack(data[:WINDOW_BYTES], len(data), fetch), form=Form.GZIP.value), fetch


def _fit_on_screens(root: Any) -> TreeLayout:
    """Lay a tree out so that it fits on a few screens, folding as many levels as that takes."""
    layout = lay_out(root, depth=USUAL_DEPTH)
    if len(layout.rows) <= _MOST_ROWS:
        return layout
    depths = sorted({row.depth for row in layout.rows})
    for depth in reversed(depths[1:-1]):
        if sum(row.depth <= depth for row in layout.rows) <= _MOST_ROWS:
            return lay_out(root, depth=depth)
    return lay_out(root, depth=1) if len(depths) > 1 else layout
