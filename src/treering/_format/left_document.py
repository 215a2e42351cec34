"""What a save that goes back writes before it is committed: which later steps are left behind once it is.

``docs/spec/run.md`` is the specification. A document without its commit means nothing, and neither does one that was
not written to its end.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from treering._codec.documents import member
from treering._format.document_parts import matching
from treering._format.run_document import step_in
from treering._format.signed import SignedForm
from treering._store.run_folder import LEFT_DOCUMENT
from treering.errors import Corrupt

_FORM: Final = SignedForm(
    member="treering_left", version=1, name=LEFT_DOCUMENT, hint="it says which steps are there no more"
)
_SIXTEEN: Final = re.compile(r"[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftDocument:
    """The content of ``.run.json.left``."""

    step: int
    """The step that is gone back to."""
    mark: str
    """The save of it that this is about: its note has the same."""
    left: Mapping[int, str | None]
    """The later steps, each with the attempt of its index; None where the index could not be read."""


def encode_left(document: LeftDocument) -> bytes:
    """Return ``.run.json.left``.

    Example:
        >>> print(encode_left(LeftDocument(step=3, mark="0" * 16, left={5: "f" * 16, 7: None})).decode(), end="")
        {"treering_left": 1, "digest": "xxh3-128:03e9156b0086dbe9b143e1bdc34fb9f6",
        "step": 3,
        "mark": "0000000000000000",
        "left": [{"step":5,"attempt":"ffffffffffffffff"},{"step":7,"attempt":null}]}
    """
    return _FORM.encoded(_members(document))


def parse_left(data: bytes) -> LeftDocument:
    """Return what a ``.run.json.left`` says.

    Raises:
        Corrupt: it is damaged, or was not written to its end.
        Format: a newer version wrote it.

    Example:
        >>> document = LeftDocument(step=3, mark="0" * 16, left={5: "f" * 16, 7: None})
        >>> parse_left(encode_left(document)) == document
        True
    """
    return _FORM.read(data, _document)


def _members(document: LeftDocument) -> Iterator[tuple[str, Any]]:
    yield "step", document.step
    yield "mark", document.mark
    yield "left", [{"step": step, "attempt": attempt} for step, attempt in document.left.items()]


def _document(document: Any) -> LeftDocument:
    step = step_in(document, LEFT_DOCUMENT)
    left = dict(map(_left, member(document, "left", list, LEFT_DOCUMENT)))
    if min(left, default=step + 1) <= step:
        raise Corrupt("it leaves steps behind that are not later")
    mark = matching(_SIXTEEN, member(document, "mark", str, LEFT_DOCUMENT), "the mark")
    return LeftDocument(step=step, mark=mark, left=left)


def _left(node: Any) -> tuple[int, str | None]:
    what = "a step that is left behind"
    step = step_in(node, what)
    if node.get("attempt", "") is None:
        return step, None
    return step, matching(_SIXTEEN, member(node, "attempt", str, what), "the attempt")
