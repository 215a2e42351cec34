"""The marker of an attempt: which version of the key it is based on. ``docs/design/buckets.md`` says what follows."""

from __future__ import annotations

from typing import Any, Final

from treering._codec.signed import SignedForm
from treering._store.objects.requests import ObjectVersion
from treering.errors import Corrupt, Format, Unsupported

_FORM: Final = SignedForm("treering_marker", 1, "the marker", hint="only its age says whether its attempt can commit")


def encode_marker(base: ObjectVersion) -> bytes:
    """Return the marker of an attempt that is based on that version.

    Example:
        >>> read_marker(encode_marker(ObjectVersion("a1", "17")))
        ObjectVersion(e_tag='a1', generation='17')
    """
    return _FORM.encode([("base", base.text())])


def read_marker(data: bytes) -> ObjectVersion | None:
    """Return the base that a marker holds; None for what is damaged, newer, or the marker of another kind of store.

    Example:
        >>> read_marker(b"") is None
        True
    """
    try:
        return _FORM.read(data, _read_base)
    except (Corrupt, Format, Unsupported):
        return None


def _read_base(document: Any) -> ObjectVersion:
    base = document.get("base")
    if not isinstance(base, str) or not base:
        raise Corrupt("it names no base")
    return ObjectVersion.of_text(base)
