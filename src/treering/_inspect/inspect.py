"""A checkpoint, leaves directory, run or file -> what its headers say, and its leaves one by one; never with jax."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from treering._checkpoint.detect import ForeignForm, Form, detect
from treering._checkpoint.forms import list_headers, read_source
from treering._format.index import Index
from treering._format.listing import FileRecord, LeafRecord, Listing, list_index
from treering._printable import show_path
from treering._store.api import Reader, asking
from treering._store.resolve import kept, located, open_file
from treering._values.boxes import Box
from treering._values.checkpoint_names import INDEX
from treering._values.human import bytes_text
from treering._values.outline import InNotebook, Outline
from treering._view.listings import fit_on_screens, form_text, notes_of, tree_outline
from treering._view.plain import members_of
from treering._view.rows import lay_out, leaves_of, record_of
from treering._view.tree_text import totals_text, tree_lines
from treering.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treering._checkpoint.open import LeafView
    from treering._foreign.foreign_tree import ForeignSteps
    from treering._view.run_text import RunListing

Fetch: TypeAlias = Callable[[int, int], bytes]
"""``fetch(offset, n)`` returns ``n`` bytes."""
ArrayView: TypeAlias = "LeafView | MsgpackArray"
"""An array that still lies in its file; slicing it reads."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection(InNotebook, Listing):
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
        layout = fit_on_screens(self.root)
        return "\n".join(tree_lines(layout, title=self.path, file_bytes=self.nbytes, notes=notes_of(self)))

    def __repr__(self) -> str:
        totals = lay_out(self.root, depth=0).everything
        return f"<Inspection of {show_path(self.path)!r}: {form_text(self)}; {totals_text(totals)}>"

    def _outline(self) -> Outline:
        return tree_outline(self.root, title=self.path, notes=[("size", bytes_text(self.nbytes)), *notes_of(self)])


def finish_saves(path: str | os.PathLike[str]) -> None:
    """Wait for the saves to a path that this process has begun; an error that one of them failed with is raised."""
    if (saves := sys.modules.get("treering._background.saves")) is not None:  # else jax need not be imported
        saves.finish_saves(path)


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
    finish_saves(path)
    listing = list_headers(path)
    names = (field.name for field in dataclasses.fields(listing))
    return Inspection(path=os.fspath(path), **members_of(listing, *names))


def find_foreign_steps(path: str | os.PathLike[str], form: Form | ForeignForm) -> ForeignSteps | None:
    """Return the steps in a folder of a form of another program; None for everything else."""
    if not isinstance(form, ForeignForm):
        return None
    from treering._foreign.foreign_tree import find_steps

    return find_steps(path, form)


def list_steps(path: str | os.PathLike[str]) -> RunListing | None:
    """List the steps of a run, or in a folder of another program; None for everything else. Raises as ``detect``."""
    form = detect(path)
    steps = find_foreign_steps(path, form)
    if form is not Form.RUN and steps is None:
        return None
    from treering._runs.reports import list_foreign_steps, list_run

    return list_run(path) if steps is None else list_foreign_steps(path, steps)


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
    from treering._codec.msgpack.scan import WINDOW_BYTES
    from treering._format.listing import list_msgpack

    first = file.read(0, min(file.size, WINDOW_BYTES))
    if not first.startswith(GZIP_MAGIC):
        return list_msgpack(first, file.size, file.read), file.read
    data = gzip_decompress(file.read(0, file.size), None)

    def fetch(offset: int, count: int) -> bytes:
        return data[offset : offset + count]

    return dataclasses.replace(list_msgpack(data[:WINDOW_BYTES], len(data), fetch), form=Form.GZIP.value), fetch


# --------------------------------------------------------------------------------------------------------- leaf by leaf


Checksums: TypeAlias = list[tuple[Box | None, int, bytes]]
"""Each box of a leaf, the bytes of its blocks, and their checksums."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenTree:
    """An open checkpoint, leaves directory or file."""

    listing: Listing
    """What its headers say."""
    array: Callable[[LeafRecord], ArrayView]
    """``array(record)`` returns the view of a stored array."""
    text: Callable[[LeafRecord], Any]
    """``text(record)`` reads a long str, bytes or bytearray."""
    checksums: Callable[[LeafRecord], Checksums | None] = lambda _: None
    """``checksums(record)`` returns those of the bytes that were saved; None where the form has none."""


@contextlib.contextmanager
def open_leaf_by_leaf(path: str | os.PathLike[str]) -> Iterator[OpenTree]:
    """Open what stands at ``path``, of a run the latest step, to look at leaves one by one."""
    path = kept(path)
    with contextlib.ExitStack() as held:
        with asking(once=True):
            opened = _open_msgpack if detect(path) in (Form.MSGPACK, Form.GZIP) else _open_indexed
            tree = held.enter_context(opened(path))
        yield tree


@contextlib.contextmanager
def _open_msgpack(path: str | os.PathLike[str]) -> Iterator[OpenTree]:
    """Open a msgpack file, or one in gzip form."""
    with open_file(path) as file:
        listing, fetch = read_msgpack(file)

        def text(record: LeafRecord) -> str | bytes:
            data = fetch(record.offset or 0, record.nbytes)
            try:
                return data.decode("utf-8") if record.kind == "str" else data
            except UnicodeDecodeError as error:
                raise CorruptError("the text is not UTF-8", offset=(record.offset or 0) + error.start) from None

        yield OpenTree(listing, lambda record: MsgpackArray(record, fetch), text)


@contextlib.contextmanager
def _open_indexed(path: str | os.PathLike[str]) -> Iterator[OpenTree]:
    """Open a form whose leaves an index lists."""
    from treering._checkpoint.open import Checkpoint
    from treering._leaves.branches import build_listing
    from treering._leaves.source import LeavesSource

    with read_source(path, mapped=False) as source, contextlib.ExitStack() as closing:
        checkpoint = Checkpoint([os.fspath(path)], source, closing)
        index = source.index
        if isinstance(source, LeavesSource):
            listing = build_listing(index, source.branches)
        else:
            nbytes = sum(file.nbytes for file in index.files)
            listing = list_index(index, form=detect(path).value, files=(), file_bytes=nbytes)

        def stored(record: LeafRecord) -> Any:
            return checkpoint[index.keys[record.number or 0]]

        @functools.cache
        def known() -> dict[int, Checksums]:
            return _checksums_of(index) if index.verified and not isinstance(source, LeavesSource) else {}

        yield OpenTree(listing, stored, stored, lambda record: known().get(record.number or 0))


def _checksums_of(index: Index) -> dict[int, Checksums]:
    """Return the checksums of each leaf, box by box; they cost no read."""
    chunks, starts, table = index.chunks, index.chunks.first_blocks(), memoryview(index.checksums)
    found: dict[int, Checksums] = {}
    for row, (leaf, box, block) in enumerate(zip(chunks.leaf, chunks.box, chunks.block, strict=True)):
        found.setdefault(leaf, []).append((box, block, table[starts[row] : starts[row + 1]].tobytes()))
    return found


class MsgpackArray:
    """An array in a msgpack file, in one piece or several. A slice reads the rows that it needs."""

    def __init__(self, record: LeafRecord, fetch: Fetch) -> None:
        from treering._values.dtypes import lookup, numpy_dtype

        if (known := lookup(record.dtype or "")) is None or record.shape is None:
            raise TypeError(f"{record} is not an array")
        self.shape = record.shape
        self.dtype = numpy_dtype(known)
        self._parts = record.parts or ((record.offset or 0, record.nbytes),)
        self._fetch = fetch

    def __getitem__(self, key: Any) -> NDArray[Any]:
        import numpy as np

        from treering._arrays.source import box_and_rest
        from treering._values.boxes import slices

        box, steps, rest = box_and_rest(key, self.shape)
        row = self.dtype.itemsize * math.prod(self.shape[1:])
        first, last = box[0] if box else (0, 1)
        rows = np.frombuffer(self._read(first * row, last * row), self.dtype)
        array = rows.reshape(last - first, *self.shape[1:]) if box else rows.reshape(())
        selected = array[slices(((0, last - first), *box[1:]), steps)] if box else array
        return cast("NDArray[Any]", selected[rest])

    def _read(self, start: int, stop: int) -> bytes:
        """Read bytes ``start`` to ``stop`` of the array, from whichever pieces hold them."""
        begins = itertools.accumulate((nbytes for _, nbytes in self._parts), initial=0)
        spans = [
            (offset - at, max(start, at), min(stop, at + nbytes))
            for (offset, nbytes), at in zip(self._parts, begins, strict=False)
        ]
        return b"".join([self._fetch(shift + low, high - low) for shift, low, high in spans if low < high])
