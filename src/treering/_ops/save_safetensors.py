"""A tree of arrays -> one safetensors file that carries its own index; durable when this returns."""

from __future__ import annotations

import dataclasses
import secrets
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treering._arrays.incoming import Progress
from treering._arrays.outgoing import Outgoing, Source, checked_bytes, outgoing
from treering._codec.documents import check_json
from treering._format.blocks import chunks_of_file, first_blocks
from treering._format.index import Chunks, DataFile
from treering._format.safetensors import check_single_file, laid_out, single_file
from treering._ops.save import Counted, index_of
from treering._ops.save_file import require_free
from treering._store.local import replace_file
from treering._tree.flatten import flatten
from treering._values.boxes import slices, whole
from treering._values.checksums import block_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["save_safetensors"]


def save_safetensors(
    path: Path, tree: Any, *, metadata: Mapping[str, Any], overwrite: bool, progress: Progress | None
) -> None:
    """Write ``tree`` into the file ``path``; ``treering.save`` says more.

    The checksums stand in the header, which comes first: every array is read twice.

    Raises:
        Unsupported: leaves that the form cannot hold, by name.
    """
    flat = flatten(tree)
    leaves = _gathered(outgoing(flat))
    check_single_file(flat.keys, leaves.types, leaves.leaf_types)
    check_json(metadata, "metadata")
    require_free(path, overwrite=overwrite)
    attempt = secrets.token_hex(8)
    rows = [(number, None) for number in leaves.sources]
    chunks, (plain,) = laid_out(attempt, flat.keys, leaves.types, leaves.leaf_types, [rows])
    checksums = _checksums(chunks, leaves)
    size = sum(chunks.nbytes)
    file = DataFile(name="", nbytes=len(plain) + size, header=len(plain), digest=None)
    index, header = single_file(index_of(flat, leaves, chunks, checksums, [file], attempt, (), metadata))
    report = Counted(progress, size)
    replace_file(path, _content(header, index.chunks, leaves, report), len(header) + size)


@dataclasses.dataclass(frozen=True, slots=True)
class _Whole:
    """A leaf in parts, put together when its turn comes."""

    shape: tuple[int, ...]
    parts: tuple[Source, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        del dtype, copy
        result = np.empty(self.shape, self.parts[0].data.dtype)
        for part in self.parts:
            result[slices(part.box)] = np.asarray(part.data)
        return result


def _gathered(leaves: Outgoing) -> Outgoing:
    """Let every leaf be one box: readers of safetensors know no parts."""
    sources = dict(leaves.sources)
    for number, parts in leaves.sources.items():
        if len(parts) > 1:
            shape = leaves.types[leaves.leaf_types[number]].shape or ()
            sources[number] = (Source(whole(shape), _Whole(shape, parts)),)
    return dataclasses.replace(leaves, sources=sources)


def _checksums(chunks: Chunks, leaves: Outgoing) -> array[int]:
    starts = first_blocks(chunks)
    checksums = array("Q", bytes(8 * starts[-1]))
    for leaf, block, first in zip(chunks.leaf, chunks.block, starts, strict=False):
        for _ in checked_bytes(leaves.sources[leaf][0].data, block, checksums, first):
            pass
    return checksums


def _content(header: bytes, chunks: Chunks, leaves: Outgoing, report: Counted) -> Iterator[bytes | memoryview]:
    yield header
    again = array("Q", bytes(8 * max(map(block_count, chunks.nbytes, chunks.block), default=0)))
    for chunk in chunks_of_file(chunks, 0):
        for piece in checked_bytes(leaves.sources[chunks.leaf[chunk]][0].data, chunks.block[chunk], again, 0):
            yield piece
            report(len(piece))


