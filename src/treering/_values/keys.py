"""Key text: the path of a leaf as one line, and the globs that select leaves.

The parts of a path are joined with ``/``. Inside a part ``~`` is written ``~0`` and ``/`` is written ``~1``, so
that ``("a/b",)`` and ``("a", "b")`` never collide. The root is the empty text; a path of one empty part, which
would look the same, is written ``~``. A ``*`` in a key stands for itself; a glob that means it has ``~2``.

Source: the two escapes are those of JSON Pointer, RFC 6901, section 3.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

from treering.errors import Format, TreeringError

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

    Raises ``Format`` where a ``~`` stands alone.

    Example:
        >>> unescape_part("a~1b~0c")
        'a/b~c'
    """
    if text.count("~") != text.count("~0") + text.count("~1"):
        raise Format(f"{text!r} is not a part of a key: a '~' stands alone", hint="write '~0' for '~' and '~1' for '/'")
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

    Raises ``Format`` where a ``~`` stands alone.

    Example:
        >>> split_key("params/a~1b/kernel")
        ('params', 'a/b', 'kernel')
        >>> split_key("")
        ()
    """
    if key in ("", _LONE_EMPTY_PART):
        return ("",) if key else ()
    return tuple(map(unescape_part, key.split("/")))


@contextlib.contextmanager
def naming_leaf(key: str) -> Iterator[None]:
    """Name the leaf that an error of the block is about.

    Example:
        >>> with naming_leaf("params/w"):
        ...     raise Format("its dtype is unknown")
        Traceback (most recent call last):
            ...
        treering.errors.Format: leaf 'params/w': its dtype is unknown
    """
    try:
        yield
    except TreeringError as error:
        error.path = split_key(key)
        raise


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Glob:
    """A pattern over key texts: ``*`` is any run inside one part, ``**`` any number of parts, also none.

    A glob walks down a tree one part at a time: from `start`, `step` gives the state below a part, and `accepts`
    says whether the path so far matches. A state is a set of places in the pattern, kept as the bits of an integer,
    so a match costs at most (parts of the path) x (parts of the pattern), whatever the pattern.

    Example:
        >>> glob = Glob.parse("params/**/kernel")
        >>> glob.matches(("params", "dense", "kernel")), glob.matches(("params", "dense", "bias"))
        (True, False)
        >>> below = glob.step(glob.start, "params")
        >>> glob.accepts(below), glob.accepts(glob.step(below, "kernel"))
        (False, True)
        >>> glob.step(glob.start, "opt_state")  # 0: nothing below can match
        0
    """

    text: str
    """The pattern as it was given."""
    parts: tuple[tuple[str, ...] | None, ...]
    """For each part the pieces between its stars, None where the part is ``**``."""

    @classmethod
    def parse(cls, text: str) -> Glob:
        """Read a pattern: key text with stars, in which ``~2`` is a star that the key itself has.

        Raises ``Format`` where a ``~`` stands alone.

        Example:
            >>> Glob.parse("a~2/**").matches(("a*", "w")), Glob.parse("a~2/**").matches(("ab", "w"))
            (True, False)
        """
        # The stars are found before the escapes are read; no escape holds one.
        written = [] if not text else [""] if text == _LONE_EMPTY_PART else text.split("/")
        parts = [None if part == "**" else tuple(map(_unescape_piece, part.split("*"))) for part in written]
        return cls(text=text, parts=tuple(parts))

    @property
    def start(self) -> int:
        """The state at the root, before any part."""
        return self._with_skips(1)

    def step(self, state: int, part: str) -> int:
        """Walk from ``state`` down to the child called ``part``; 0 when nothing at or below it can match."""
        reached = 0
        for place, pieces in enumerate(self.parts):
            if state >> place & 1:
                if pieces is None:
                    reached |= 1 << place
                elif _matches_part(pieces, part):
                    reached |= 1 << place + 1
        return self._with_skips(reached)

    def accepts(self, state: int) -> bool:
        """Tell whether the path that led to ``state`` matches the whole pattern."""
        return bool(state >> len(self.parts) & 1)

    def matches(self, path: Iterable[str]) -> bool:
        """Tell whether a path, a sequence of parts, matches."""
        state = self.start
        for part in path:
            state = self.step(state, part)
            if not state:
                return False
        return self.accepts(state)

    def _with_skips(self, state: int) -> int:
        """Add the places behind each ``**``, which may stand for no part at all."""
        for place, pieces in enumerate(self.parts):
            if pieces is None and state >> place & 1:
                state |= 1 << place + 1
        return state


class GlobSet:
    """Many patterns, walked down a tree together: plain parts are looked up, however many patterns have them.

    A state is the places that a path has reached, each shared by all patterns that begin alike.

    Example:
        >>> globs = GlobSet([Glob.parse("params/a"), Glob.parse("**/b"), Glob.parse("params")])
        >>> below = globs.step(globs.start, "params")
        >>> sorted(globs.iter_accepted(below)), sorted(globs.iter_accepted(globs.step(below, "b")))
        ([2], [1])
    """

    def __init__(self, globs: Iterable[Glob]) -> None:
        root = _GlobPlace()
        for number, glob in enumerate(globs):
            place = root
            for pieces in glob.parts:
                place = place.advance(pieces)
            place.ends.append(number)
        self.start: tuple[_GlobPlace, ...] = _with_skips([root])
        """The state at the root, before any part."""

    def step(self, state: tuple[_GlobPlace, ...], part: str) -> tuple[_GlobPlace, ...]:
        """Walk from ``state`` down to the child called ``part``; () when nothing at or below it can match."""
        reached: list[_GlobPlace] = []
        for place in state:
            if place.stays:
                reached.append(place)
            exact = place.exact.get(part)
            if exact is not None:
                reached.append(exact)
            reached += [after for pieces, after in place.patterns.items() if _matches_part(pieces, part)]
        return _with_skips(reached) if reached else ()

    def iter_accepted(self, state: tuple[_GlobPlace, ...]) -> Iterator[int]:
        """Yield the numbers of the patterns that the path which led to ``state`` matches."""
        for place in state:
            yield from place.ends


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
        place = part.find(piece, place)
        if place < 0:
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
