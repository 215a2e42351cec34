"""What a listing says of a file: its tree, with a record in place of every leaf that takes room."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["LeafRecord", "Listing"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafRecord:
    """One leaf that was not read: what it is, how large, and where its bytes lie."""

    kind: str
    """"array", "numpy scalar", "str" or "bytes"."""

    dtype: str | None
    """Name of the dtype of an array or numpy scalar, else None."""

    shape: tuple[int, ...] | None
    """Shape of an array or numpy scalar, else None."""

    nbytes: int
    """Bytes of the leaf's value, without its headers."""

    offset: int
    """Where these bytes start in the file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A file seen through its headers."""

    file_bytes: int
    """Size of the file, or of what its gzip form unpacks to."""

    root: Any
    """Nested dicts, lists and tuples as the file has them, in file order. Leaves: ``LeafRecord`` for arrays, numpy
    scalars and long text; None, bool, int, float, complex, ``msgpack.Timestamp``, and str and bytes of up to 256
    bytes are there themselves, so that a list of a million numbers stays small."""
