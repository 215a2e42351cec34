"""Strict JSON: what our documents are written in, and read with less goodwill than ``json.loads`` has.

Refused on the way in: a member twice, NaN and infinity, numbers that are none, nesting without end. Refused on the way
out: whatever would come back as something else. The first line of a signed document holds its version and a digest of
every other byte; each member stands on a line of its own, so that ``head`` and ``grep`` are of use.

Source: RFC 8259; RFC 7493 (I-JSON) for what is refused beyond it.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any, Final, NoReturn, TypeVar

from treering._printable import kind_of, shorten
from treering._values.checksums import digest
from treering._values.human import pluralize
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError

MAX_NESTING: Final = 100
"""Lists and objects inside each other, at most, in what a user adds to a document."""

# Python turns no text of more digits into an int, and no int of more into text.
_MAX_INT_BITS: Final = 14_000
_END: Final = object()
_SHOWN: Final = 60

_Kind = TypeVar("_Kind")

quote = json.encoder.encode_basestring_ascii
"""``quoted(text)`` is the text as a JSON string in ASCII."""
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False)
# Python's own coincidences stay below: 35 floats that are powers of two have the same hash, 17 ints of 64 bits.
_MOST_COLLIDING: Final = 64


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise CorruptError(f"the member {show(twice)} is twice in one JSON object")
    return found


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{show(text)} is too large for a number")
    return number


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
_PYTHON_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object)


def parse_json(text: str, what: str, *, finite: bool = True) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the text, white space around it allowed.
        what: what it is, for messages.
        finite: whether NaN and infinity, which Python writes, are refused.

    Raises:
        CorruptError: it is no JSON, or holds a member twice, a number that is not finite, or thousands of nested lists.

    Example:
        >>> parse_json('{"a": [1, 2.5]}', "the note")
        {'a': [1, 2.5]}
        >>> parse_json('{"a": 1, "a": 2}', "the note")
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: the note: the member 'a' is twice in one JSON object
    """
    try:
        return (_DECODER if finite else _PYTHON_DECODER).decode(text)
    except CorruptError as error:
        raise CorruptError(f"{what}: {error.message}") from None
    except json.JSONDecodeError as error:
        raise CorruptError(f"{what} is not JSON: {error.msg}", offset=error.pos) from None
    except RecursionError:
        raise CorruptError(f"{what} is nested too deep") from None
    except ValueError as error:
        raise CorruptError(f"{what} is not JSON: {error}") from None


def decode_text(data: bytes, what: str, encoding: str = "UTF-8", at: int = 0) -> str:
    """Return bytes as text; ``at`` is where they begin in their file.

    Raises:
        CorruptError: they are not of this encoding.

    Example:
        >>> decode_text(b"tree", "the note", "ASCII")
        'tree'
    """
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise CorruptError(f"{what} is not {encoding}", offset=at + error.start) from None


FIRST_BYTES: Final = 48
"""So many bytes of a file tell whether it is a text."""
_POINTER: Final = b"version https://git-lfs.github.com/spec/"


def describe_text(first: bytes) -> str | None:
    """Say what a text is whose first bytes, cut off anywhere, these are; None where they are no UTF-8 text.

    Example:
        >>> describe_text(b"<html>"), describe_text(bytes(8))
        ('it looks like text', None)
    """
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(first)
    except UnicodeDecodeError:
        return None
    if not text or not all(each.isprintable() or each.isspace() for each in text.removeprefix("\ufeff")):
        return None
    pointer = "it is a pointer of Git LFS in place of the file: run `git lfs pull` to fetch the file"
    return pointer if first.startswith(_POINTER) else "it looks like text"


def json_text(value: Any) -> str:
    """Return a value as compact JSON in ASCII; `check_json` says beforehand whether it has such a form.

    Example:
        >>> json_text({"a": [1, None, "x"]})
        '{"a":[1,null,"x"]}'
    """
    return _ENCODER.encode(value)


def member(node: Any, name: str, kind: type[_Kind], what: str) -> _Kind:
    """Return one member of a parsed object, of exactly the type ``kind``: True is no int, 1.0 neither.

    Raises:
        CorruptError: ``node`` is no object, has no such member, or one of another type.

    Example:
        >>> member({"n": 3}, "n", int, "the note")
        3
    """
    if type(node) is not dict:
        raise CorruptError(f"{what} is not a JSON object")
    if name not in node:
        raise CorruptError(f"{what} has no member {name!r}")
    found = node[name]
    if type(found) is not kind:
        raise CorruptError(f"{what}: the member {name!r} is {show(found)}, but must be of type {kind.__name__}")
    return found


def members(node: Any, what: str, **kinds: type) -> list[Any]:
    """Return several members of a parsed object, of exactly these types; raises as `member` does.

    Example:
        >>> members({"n": 3, "name": "w"}, "the note", name=str, n=int)
        ['w', 3]
    """
    return [member(node, name, kind, what) for name, kind in kinds.items()]


@contextlib.contextmanager
def add_hint(hint: str) -> Iterator[None]:
    """Give an error for damage the hint, unless it has one.

    Example:
        >>> with add_hint("use another copy"):
        ...     parse_json("[", "the note")
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: the note is not JSON: Expecting value (at byte 1); use another copy
    """
    try:
        yield
    except CorruptError as error:
        error.hint = error.hint or hint
        raise


@contextlib.contextmanager
def raising_corrupt(kind: type[TreeringError]) -> Iterator[None]:
    """Raise an error of this kind as damage: what was read never had such a form.

    Example:
        >>> with raising_corrupt(UnsupportedError):
        ...     check_json({"a": (1,)}, "the note")
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: the note['a'] is a tuple, which JSON cannot hold
    """
    try:
        yield
    except kind as error:
        raise CorruptError(error.message, path=error.path) from None


def check_json(value: Any, what: str) -> None:
    """Require a value that comes back from JSON as it was: None, bool, int, finite float, str, and lists and dicts.

    Raises:
        UnsupportedError: something in it is of another type (a tuple, a numpy number), a key is no str, a number is not
            finite, or it is nested more than 100 levels deep; the message says where.

    Example:
        >>> check_json({"step": 3, "loss": [0.5, None]}, "metadata")
        >>> check_json({"sizes": (1, 2)}, "metadata")
        Traceback (most recent call last):
        ...
        treering.errors.UnsupportedError: metadata['sizes'] is a tuple, which JSON cannot hold; make it a list
    """
    root = object()
    levels: list[tuple[Any, int, Iterator[tuple[Any, Any]]]] = [(root, id(None), iter([(root, value)]))]
    open_ones: set[int] = set()

    def where(step: Any) -> str:
        steps = (*(level[0] for level in levels), step)
        return what + "".join(f"[{show(each)}]" for each in steps if each is not root)

    while levels:
        _, container, items = levels[-1]
        step, item = next(items, (_END, None))
        if step is _END:
            open_ones.discard(container)
            levels.pop()
            continue
        if type(item) is dict:
            for key in item:
                if type(key) is not str:
                    raise UnsupportedError(f"{where(step)} has the key {show(key)}; keys in JSON are str")
            inner: Iterator[tuple[Any, Any]] = iter(item.items())
        elif type(item) is list:
            inner = iter(enumerate(item))
        else:
            if item is not None and type(item) not in (bool, str) and (problem := _find_problem(item)):
                raise UnsupportedError(f"{where(step)} {problem[0]}", hint=problem[1])
            continue
        if len(levels) > MAX_NESTING or id(item) in open_ones:
            raise UnsupportedError(f"{what} is nested more than {MAX_NESTING} levels deep, or holds itself")
        open_ones.add(id(item))
        levels.append((step, id(item), inner))


def _find_problem(item: Any) -> tuple[str, str] | None:
    """Say what is wrong with a number or object, and what to do; None where it comes back as it was."""
    if type(item) is int:
        bits = item.bit_length()
        return (f"is an int of {pluralize(bits, 'bits')}", "write it as text") if bits > _MAX_INT_BITS else None
    if type(item) is float:
        return None if math.isfinite(item) else (f"is {item}, which JSON cannot hold", "write it as text")
    hint = "make it a list" if isinstance(item, tuple) else "put arrays and other objects into the tree"
    return f"is {kind_of(item)}, which JSON cannot hold", hint


def show(value: Any) -> str:
    """Return a parsed value for a message: short, however long or deep it is.

    Example:
        >>> show("x" * 1000)[:10], show(7), show({"a": 1})
        ("'xxxxxxxxx", '7', 'a dict')
    """
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        return "a huge int"
    text = repr(value) if isinstance(value, str | int | float) or value is None else f"{kind_of(value)}"
    return shorten(text, _SHOWN)


def collide(values: Collection[Hashable]) -> bool:
    """Tell whether more than 64 different values collide in a dict, as numbers and tuples of numbers can be made to do.

    Text and bytes cannot: Python hashes them with a secret key. The answer takes time in proportion to the values.

    Example:
        >>> collide(range(100_000)), collide([number * (2**61 - 1) for number in range(100)])
        (False, True)
    """
    if len(values) <= _MOST_COLLIDING:
        return False
    counts = collections.Counter(map(hash, values))
    if max(counts.values()) <= _MOST_COLLIDING:
        return False
    seen: dict[int, list[Hashable]] = {number: [] for number, count in counts.items() if count > _MOST_COLLIDING}
    for value in values:
        if (same := seen.get(hash(value))) is not None and value not in same:
            same.append(value)
            if len(same) > _MOST_COLLIDING:
                return True
    return False


def check_hashes(values: Collection[Hashable], what: str, error: type[TreeringError] = CorruptError) -> None:
    """Require that no more than 64 different values collide.

    Raises:
        CorruptError: more have; or ``error``.

    Example:
        >>> check_hashes([number * (2**61 - 1) for number in range(100)], "the keys")
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: more than 64 of the keys collide, which would make a dict of them quadratic
    """
    if collide(values):
        raise error(f"more than {_MOST_COLLIDING} of {what} collide, which would make a dict of them quadratic")


def check_texts(nodes: list[Any], what: str) -> list[str]:
    """Return a list that has to hold nothing but text.

    Raises:
        CorruptError: something else is in it.
    """
    if not set(map(type, nodes)) <= {str}:
        raise CorruptError(f"{what} holds something other than text")
    return nodes


def check_name(pattern: re.Pattern[str], text: str, what: str) -> str:
    """Return a name that has to match a pattern.

    Raises:
        CorruptError: it does not.

    Example:
        >>> check_name(re.compile("[a-f]+"), "fade", "the attempt")
        'fade'
    """
    if not pattern.fullmatch(text):
        raise CorruptError(f"{what} is called {text[:100]!r}, which is not a valid name")
    return text


_Read = TypeVar("_Read")

DIGEST: Final = re.compile(r"xxh3-128:[0-9a-f]{32}")
"""The digest of a document, as text."""

_FIRST_LINE: Final = re.compile(rb'\{"([^"\\]{1,64})": ([1-9][0-9]{0,8}), "digest": "(xxh3-128:[0-9a-f]{32})",\n')
_OTHER_VERSION: Final = re.compile(rb'\{"([^"\\]{1,64})": ([1-9][0-9]{0,8})[,}]')


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
    also: tuple[int, ...] = ()
    """Further versions that are read; the member of the first line tells ``read`` which it is."""

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
        return self._match(_FIRST_LINE, data) is not None and is_whole(data)

    def read_digest(self, head: bytes) -> str | None:
        """Return the digest in the first line of a document; None when that is no first line."""
        first = self._match(_FIRST_LINE, head)
        return None if first is None else first[3].decode()

    def _match(self, pattern: re.Pattern[bytes], data: bytes) -> re.Match[bytes] | None:
        """Match the beginning of a document of this form, whose first group is the name of its first member."""
        found = pattern.match(data)
        return found if found is not None and found[1] == self.member.encode() else None

    def _parse(self, data: bytes) -> Any:
        first = self._match(_FIRST_LINE, data)
        is_right = first is not None and is_whole(data)
        # A newer version may sign in another way, but a digest that is wrong is damage.
        version, known = first or self._match(_OTHER_VERSION, data), (self.version, *self.also)
        if version is not None and (is_right or not first) and int(version[2]) not in known:
            problem = f"is of version {version[2].decode()}; this treering reads version {' or '.join(map(str, known))}"
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
    return f'"{name}": {_ENCODER.encode(value)}'


def join_lines(lines: list[str]) -> bytes:
    """Return members, each as its line, as what follows the first line of a document; the list is empty afterwards."""
    text = ",\n".join(lines)
    lines.clear()  # of a large tree they take as much memory as the document
    return text.encode("ascii") + b"}\n"


def is_whole(data: bytes) -> bool:
    """Tell whether the digest of a document of any form is right.

    Example:
        >>> data = SignedForm("note", 1, "the note", hint="").encode([("text", "tree")])
        >>> is_whole(data), is_whole(data[:-1])
        (True, False)
    """
    first = _FIRST_LINE.match(data)
    return first is not None and digest((data[: first.start(3)], data[first.end(3) :])) == first[3].decode()
