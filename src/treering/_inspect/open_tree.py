"""A checkpoint, leaves directory or file -> its leaves one by one, for verbs that look into a few; never with jax."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from treering._checkpoint.detect import Form, detect
from treering._checkpoint.forms import read_source
from treering._format.listing import LeafRecord, Listing, list_index
from treering._inspect.inspect import Fetch, read_msgpack
from treering._store.asked import asking
from treering._store.resolve import kept, open_file
from treering.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treering._checkpoint.open import LeafView

ArrayView: TypeAlias = "LeafView | MsgpackArray"
"""An array that still lies in its file; slicing it reads."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenTree:
    """An open checkpoint, leaves directory or file."""

    listing: Listing
    """What its headers say."""
    array: Callable[[LeafRecord], ArrayView]
    """``array(record)`` returns the view of a stored array."""
    text: Callable[[LeafRecord], Any]
    """``text(record)`` reads a long str, bytes or bytearray."""


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
        checkpoint = Checkpoint(os.fspath(path), source, closing)
        index = source.index
        if isinstance(source, LeavesSource):
            listing = build_listing(index, source.branches)
        else:
            nbytes = sum(file.nbytes for file in index.files)
            listing = list_index(index, form=detect(path).value, files=(), file_bytes=nbytes)

        def stored(record: LeafRecord) -> Any:
            return checkpoint[index.keys[record.number or 0]]

        yield OpenTree(listing, stored, stored)


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
