"""Key text: the path of a leaf as one line, and the globs that select leaves.

The parts of a path are joined with ``/``. Inside a part ``~`` is written ``~0`` and ``/`` is written ``~1``, so
that ``("a/b",)`` and ``("a", "b")`` never collide. The root is the empty text; a path of one empty part, which
would look the same, is written ``~``. A ``*`` in a key stands for itself; a glob that means it has ``~2``.

Source: the two escapes are those of JSON Pointer, RFC 6901, section 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from treering.errors import FormatError, TreeringError

_LONE_EMPTY_PART = "~"
_STAR = "~2"
Trail = tuple["Trail", str] | None
"""None at the root, else the trail of the container and the key in it."""


def escape_part(part: str) -> str:
    """Write one part of a path so that it holds no ``/``.

    Example:
        >>> escape_part("a/b~c")
        'a~1b~0c'
    """
    return part.replace("~", "~0").replace("/", "~1")


def unescape_part(text: str) -> str:
    """Read one part of a key text; the inverse of `escape_part`.

    Raises ``FormatError`` where a ``~`` stands alone.

    Example:
        >>> unescape_part("a~1b~0c")
        'a/b~c'
    """
    if text.count("~") != text.count("~0") + text.count("~1"):
        hint = "write '~0' for '~' and '~1' for '/'"
        raise FormatError(f"{text!r} is not a part of a key: a '~' stands alone", hint=hint)
    return text.replace("~1", "/").replace("~0", "~")


def join_key(path: Iterable[str]) -> str:
    """Write a path, a sequence of parts from the root down, as key text.

    Example:
        >>> join_key(("params", "a/b", "kernel"))
        'params/a~1b/kernel'
        >>> join_key(()), join_key(("",)), join_key(("", ""))
        ('', '~', '/')
    """
    parts = tuple(path)
    return _LONE_EMPTY_PART if parts == ("",) else "/".join(map(escape_part, parts))


def split_key(key: str) -> tuple[str, ...]:
    """Read key text back into the path; the inverse of `join_key`.

    Raises ``FormatError`` where a ``~`` stands alone.

    Example:
        >>> split_key("params/a~1b/kernel")
        ('params', 'a/b', 'kernel')
        >>> split_key("")
        ()
    """
    if key in ("", _LONE_EMPTY_PART):
        return ("",) if key else ()
    return tuple(map(unescape_part, key.split("/")))


def key_name(key: str) -> str:
    """Return what people are shown for a key text: the root, whose text is empty, has a name.

    Example:
        >>> key_name("params/w"), key_name("")
        ('params/w', '(the root)')
    """
    return key or "(the root)"


def quoted_key(key: str) -> str:
    """Return the same for a sentence: the text in quotes, cut to a length.

    Example:
        >>> quoted_key("params/w"), quoted_key("")
        ("'params/w'", '(the root)')
    """
    return f"{key!r:.200}" if key else key_name(key)


@contextlib.contextmanager
def naming_leaf(key: str) -> Iterator[None]:
    """Name the leaf that an error of the block is about.

    Example:
        >>> with naming_leaf("params/w"):
        ...     raise FormatError("its dtype is unknown")
        Traceback (most recent call last):
            ...
        treering.errors.FormatError: its dtype is unknown (at leaf 'params/w')
    """
    try:
        yield
    except TreeringError as error:
        error.path = split_key(key)
        raise


class GlobSet:
    """Patterns over key texts: ``*`` is any run inside one part, ``**`` any number of parts, also none.

    They walk down a tree together, one part at a time: from `start`, `step` gives the state below a part, and
    `accepted` says which of them match the path so far. A state is the places that a path has reached, each shared by
    all patterns that begin alike. A match costs at most (parts of the path) x (parts of the patterns), whatever
    these are, and plain parts are looked up, however many patterns have them.

    Args:
        globs: key texts with stars, in which ``~2`` is a star that the key itself has.

    Raises:
        FormatError: a ``~`` stands alone.

    Example:
        >>> globs = GlobSet(["params/a", "**/b", "params", "a~2/**"])
        >>> below = globs.step(globs.start, "params")
        >>> globs.accepted(below), globs.accepted(globs.step(below, "b"))
        ((2,), (1,))
        >>> globs.accepted(globs.step(globs.start, "a*")), globs.accepted(globs.step(globs.start, "ab"))
        ((3,), ())
    """

    def __init__(self, globs: Iterable[str]) -> None:
        root = _GlobPlace()
        for number, text in enumerate(globs):
            place = root
            # The stars are found before the escapes are read; no escape holds one.
            for part in [] if not text else [""] if text == _LONE_EMPTY_PART else text.split("/"):
                place = place.advance(None if part == "**" else tuple(map(_unescape_piece, part.split("*"))))
            place.ends.append(number)
        self.start: tuple[_GlobPlace, ...] = _with_skips([root])
        """The state at the root, before any part."""

    def step(self, state: tuple[_GlobPlace, ...], part: str) -> tuple[_GlobPlace, ...]:
        """Walk from ``state`` down to the child called ``part``; () when nothing at or below it can match."""
        reached: list[_GlobPlace] = []
        for place in state:
            if place.stays:
                reached.append(place)
            if (exact := place.exact.get(part)) is not None:
                reached.append(exact)
            reached += [after for pieces, after in place.patterns.items() if _matches_part(pieces, part)]
        return _with_skips(reached) if reached else ()

    def accepted(self, state: tuple[_GlobPlace, ...]) -> tuple[int, ...]:
        """Return the numbers of the patterns that the path which led to ``state`` matches."""
        return tuple(number for place in state for number in place.ends)


class _GlobPlace:
    """A place in patterns that begin alike."""

    __slots__ = ("ends", "exact", "patterns", "skip", "stays")

    def __init__(self, *, stays: bool = False) -> None:
        self.exact: dict[str, _GlobPlace] = {}
        self.patterns: dict[tuple[str, ...], _GlobPlace] = {}
        self.skip: _GlobPlace | None = None
        """The place behind a ``**``, which is reached without any part."""
        self.stays = stays
        """Whether it is behind a ``**``, so that any part leads back to it."""
        self.ends: list[int] = []
        """Numbers of the patterns that end here."""

    def advance(self, pieces: tuple[str, ...] | None) -> _GlobPlace:
        """Return the place behind one part of a pattern."""
        if pieces is None:
            self.skip = self.skip or _GlobPlace(stays=True)
            return self.skip
        if len(pieces) == 1:
            return self.exact.setdefault(pieces[0], _GlobPlace())
        return self.patterns.setdefault(pieces, _GlobPlace())


def _with_skips(places: Iterable[_GlobPlace]) -> tuple[_GlobPlace, ...]:
    found: dict[_GlobPlace, None] = {}
    for first in places:
        place: _GlobPlace | None = first
        while place is not None and place not in found:
            found[place] = None
            place = place.skip
    return tuple(found)


def _unescape_piece(text: str) -> str:
    """Read what stands between two stars of a glob; a ``~2`` there is never the end of another escape."""
    return "*".join(map(unescape_part, text.split(_STAR)))


def _matches_part(pieces: tuple[str, ...], part: str) -> bool:
    """Match one part greedily: first and last piece at the ends, the others each at the earliest place."""
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return part == first
    if not part.startswith(first):
        return False
    place = len(first)
    for piece in pieces[1:-1]:
        if (place := part.find(piece, place)) < 0:
            return False
        place += len(piece)
    return len(part) - place >= len(last) and part.endswith(last)


def unwind(trail: Trail) -> tuple[str, ...]:
    """Return the key path, outermost part first.

    Example:
        >>> unwind(((None, "a"), "b"))
        ('a', 'b')
    """
    parts: list[str] = []
    while trail is not None:
        trail, part = trail
        parts.append(part)
    return tuple(reversed(parts))
