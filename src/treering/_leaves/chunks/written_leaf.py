"""A leaf that is being written into a leaves directory."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

from treering._arrays.outgoing import Source
from treering._codec.zarr import ZarrArray, chunk_bytes, chunk_count, chunk_name, zarray_bytes
from treering._leaves.chunks.read_back import ZARRAY
from treering._values.checksums import block_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What leaves of one layout have in common."""

    array: ZarrArray
    """The layout."""
    document: bytes
    """Its ``.zarray``."""
    count: int
    """Of its chunks."""
    chunk: int
    """Bytes of one, before any compressor."""
    block: int
    """Bytes of a checksummed block."""
    name: str | None
    """Of the file of a leaf that is one chunk and raw."""


def form_of(zarr: ZarrArray) -> Form:
    """Return what leaves of a layout have in common."""
    count, chunk = chunk_count(zarr), chunk_bytes(zarr)
    return Form(
        array=zarr,
        document=zarray_bytes(zarr),
        count=count,
        chunk=chunk,
        block=block_bytes(chunk),
        name=chunk_name(zarr, 0) if zarr.compressor is None and zarr.chunks == zarr.shape else None,
    )


class WrittenLeaf:
    """A leaf, and what is known of its files when they are written.

    Attributes:
        folder: its folder.
        form: how it is cut.
        sources: the boxes in which it lies in memory.
        numbers: which of its chunks this process writes, ascending.
        head: its ``.zarray`` as a file, if this process writes that.
        sizes: bytes of those chunk files, if they are compressed.
        checksums: those of all blocks of those chunk files.
    """

    __slots__ = ("checksums", "folder", "form", "head", "numbers", "sizes", "sources")

    def __init__(
        self, folder: str, form: Form, sources: Sequence[Source], numbers: Sequence[int], *, headed: bool
    ) -> None:
        self.folder = folder
        self.form = form
        self.sources = sources
        self.numbers = numbers
        self.head = ((ZARRAY, form.document),) if headed else ()
        self.sizes: Sequence[int] = ()
        self.checksums = array("Q")

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that this process writes, before any compressor."""
        return len(self.numbers) * self.form.chunk
