"""Whether two small values of a checkpoint are the same: leaves without bytes of their own, keys, static fields."""

from __future__ import annotations

import struct
from typing import Any

from treering._format.index import ForeignKey, OpaqueLeaf


def same_value(one: Any, other: Any, *, in_file: bool = False) -> bool:
    """Compare bit for bit: True is not 1, 0.0 is not -0.0, and NaN is itself.

    Values that no file holds are compared by their digests where both have one of one scheme, else by their text.

    Args:
        one: a value.
        other: another one.
        in_file: whether they have to be the same in a file, text and digest.

    Example:
        >>> same_value((1, 0.5), (1, 0.5)), same_value((1,), (True,)), same_value(0.0, -0.0), same_value(2.0, 2)
        (True, False, False, False)
        >>> same_value(ForeignKey("m.C", "[0 ... 9]", "s:1"), ForeignKey("m.C", "[0 ... 9]", "s:2"))
        False
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(
            same_value(a, b, in_file=in_file) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, ForeignKey | OpaqueLeaf):
        if in_file:
            return bool(one == other and one.digest == other.digest)
        digests = _scheme(one) is not None and _scheme(one) == _scheme(other)
        return one.class_name == other.class_name and one.digest == other.digest if digests else bool(one == other)
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, complex):
        return same_value(one.real, other.real) and same_value(one.imag, other.imag)
    return bool(one == other)


def _scheme(value: ForeignKey | OpaqueLeaf) -> str | None:
    return None if value.digest is None else value.digest.rpartition(":")[0]
