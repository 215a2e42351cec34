"""Documents of ours whose first line holds their version and a digest of every other byte: strict JSON in ASCII.

A member stands on a line of its own, so that ``head`` and ``grep`` are of use.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from treering._codec.documents import add_hint, decode_text, json_text, parse_json
from treering._values.checksums import digest
from treering.errors import CorruptError, FormatError, UnsupportedError

_Read = TypeVar("_Read")

DIGEST: Final = re.compile(r"xxh3-128:[0-9a-f]{32}")
"""The digest of a document, as text."""

_ANY_FIRST_LINE: Final = re.compile(rb'\{"[^"\\]{1,64}": [1-9][0-9]{0,8}, "digest": "(xxh3-128:[0-9a-f]{32})",\n')
_FIRST_LINE: Final = r'\{"%s": ([1-9][0-9]{0,8}), "digest": "(xxh3-128:[0-9a-f]{32})",\n'
_OTHER_VERSION: Final = r'\{"%s": ([1-9][0-9]{0,8})[,}]'


@dataclasses.dataclass(frozen=True, slots=True)
class SignedForm:
    """One form of such documents.

    Example:
        >>> form = SignedForm("note", 1, "the note", hint="write it again")
        >>> data = form.encode([("text", "tree"), ("number", 7)])
        >>> print(data.decode(), end="")
        {"note": 1, "digest": "xxh3-128:e26dc71b8e95c6027990d86998e3afe5",
        "text": "tree",
        "number": 7}
        >>> form.read(data, lambda document: document["number"])
        7
        >>> form.read(data.replace(b"7", b"8"), lambda document: document["number"])
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: the note is damaged: its digest is not that of its bytes; write it again
    """

    member: str
    """Name of the first member, which holds the version."""
    version: int
    """The version that is written, and read."""
    name: str
    """What such a document is called in messages."""
    hint: str
    """What to do about a damaged one."""

    def encode(self, members: Iterable[tuple[str, Any]]) -> bytes:
        """Return a document of these members."""
        return self.sign(join_lines([member_line(name, value) for name, value in members]))

    def sign(self, lines: bytes) -> bytes:
        """Return the document that has these lines after its first one."""
        head, end = f'{{"{self.member}": {self.version}, "digest": "'.encode(), b'",\n'
        return b"".join((head, digest((head, end, lines)).encode(), end, lines))

    def read(self, data: bytes, read: Callable[[Any], _Read]) -> _Read:
        """Return what ``read`` makes of the parsed document, once its digest is found right.

        Raises:
            CorruptError: it is damaged, or ``read`` finds that it contradicts itself.
            FormatError: a newer version wrote it.
            UnsupportedError: ``read`` finds something in it that this version does not know.
        """
        with add_hint(self.hint):
            document = self._parse(data)
            try:
                return read(document)
            except (CorruptError, FormatError, UnsupportedError) as error:
                if not isinstance(error, CorruptError):
                    error.message = f"{self.name}: {error.message}"
                elif not error.message.startswith(self.name):
                    error.message = f"{self.name} contradicts itself: {error.message}"
                raise

    def is_whole(self, data: bytes) -> bool:
        """Tell whether the digest of a document is right, whichever version wrote it."""
        return self._first_line(data) is not None and is_whole(data)

    def read_digest(self, head: bytes) -> str | None:
        """Return the digest in the first line of a document; None when that is no first line."""
        first = self._first_line(head)
        return None if first is None else first[2].decode()

    def _first_line(self, data: bytes) -> re.Match[bytes] | None:
        return _first_line(self.member).match(data)

    def _parse(self, data: bytes) -> Any:
        first = self._first_line(data)
        is_right = first is not None and is_whole(data)
        # A newer version may sign in another way, but a digest that is wrong is damage.
        version = first or re.match((_OTHER_VERSION % re.escape(self.member)).encode(), data)
        if version is not None and (is_right or not first) and int(version[1]) != self.version:
            problem = f"is of version {version[1].decode()}; this treering reads version {self.version}"
            raise FormatError(f"{self.name} {problem}", hint="it was written by a newer treering: use that version")
        if not is_right:
            problem = "its digest is not that of its bytes" if first else "it does not begin like an index"
            raise CorruptError(f"{self.name} is damaged: {problem}")
        return parse_json(decode_text(data, self.name, "ASCII"), self.name)


def member_line(name: str, value: Any) -> str:
    """Return a member of a document as its line.

    Example:
        >>> member_line("number", 7)
        '"number": 7'
    """
    return f'"{name}": {json_text(value)}'


def join_lines(lines: list[str]) -> bytes:
    """Return members, each as its line, as what follows the first line of a document; the list is empty afterwards."""
    text = ",\n".join(lines)
    lines.clear()  # of a large tree they take as much memory as the document
    return text.encode("ascii") + b"}\n"


@functools.cache
def _first_line(member: str) -> re.Pattern[bytes]:
    return re.compile((_FIRST_LINE % re.escape(member)).encode())


def is_whole(data: bytes) -> bool:
    """Tell whether the digest of a document of any form is right.

    Example:
        >>> data = SignedForm("note", 1, "the note", hint="").encode([("text", "tree")])
        >>> is_whole(data), is_whole(data[:-1])
        (True, False)
    """
    first = _ANY_FIRST_LINE.match(data)
    return first is not None and digest((data[: first.start(1)], data[first.end(1) :])) == first[1].decode()
