"""Long text among the leaves: its bytes may be those that were written, and yet be no UTF-8."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Final

from treering._format.findings import BadBlock
from treering._format.index import Index
from treering._store.api import Reader
from treering.errors import Corrupt, StoreFailed

_PIECE_BYTES: Final = 1 << 20


def bad_text(index: Index, files: Sequence[Reader | None], damaged: set[int]) -> Iterator[BadBlock]:
    """Yield the chunk, and where in it, of each str leaf whose bytes no reader can turn into text.

    Reads a piece at a time, however long a text is.

    Args:
        index: the checkpoint's.
        files: its data files, None for those that cannot be opened.
        damaged: numbers of the chunks of which more is known already; their leaves are left out.
    """
    texts = [kind.stored and kind.kind == "str" for kind in index.types]
    if not any(texts):
        return
    chunks = index.chunks
    parts: dict[int, list[int]] = {}
    for chunk, leaf in enumerate(chunks.leaf):
        if texts[index.leaf_types[leaf]]:
            parts.setdefault(leaf, []).append(chunk)
    for leaf_chunks in parts.values():
        if damaged.isdisjoint(leaf_chunks) and all(files[chunks.file[chunk]] is not None for chunk in leaf_chunks):
            bad = _first_bad(index, files, sorted(leaf_chunks, key=index.box_of))
            if bad is not None:
                yield bad


def _first_bad(index: Index, files: Sequence[Reader | None], parts: list[int]) -> BadBlock | None:
    """Decode one text, part after part, and return the piece in which it ends to be UTF-8."""
    chunks = index.chunks
    decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    for chunk in parts:
        file, nbytes = files[chunks.file[chunk]], chunks.nbytes[chunk]
        for start in range(0, nbytes, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, nbytes)
            last = chunk == parts[-1] and stop == nbytes
            try:
                decoder.decode(b"" if file is None else file.read(chunks.offset[chunk] + start, stop - start), last)
            except UnicodeDecodeError:
                return BadBlock(chunk, start, stop, "is no UTF-8, which a text has to be")
            except (Corrupt, StoreFailed):
                return None  # that it cannot be read was found before
    return None
