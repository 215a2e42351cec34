"""One file -> a damaged or hostile one. The same random source gives the same input again."""

from __future__ import annotations

import dataclasses
import gzip
import random
import struct
from collections.abc import Callable

from torture.wire import Token, tokens

__all__ = ["damage_bytes", "mutated"]

_LARGEST = 1 << 20
# Values are looked for in the beginning of a file only.
_WALKED = 6 << 10
_LENGTHS = (0, 1, 2, 15, 16, 31, 32, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
# Heads of every kind, some with lengths that lie; ext codes 1 to 3 are flax's, 4 is another library's, -1 a timestamp.
_HEADS_IN_HEX = """
    c0 c1 c2 c3 00 7f 80 81 8f 90 91 9f a0 bf e0 ff ca cb7ff8 cfffffffffffffffff d38000000000000000
    c4ff c5ffff c6ffffffff c70501 c8001001 c90000001001 c9ffffffff01 c70802 c70803 c70804 c70cff d401 d6ff d7ff d803
    d9ff dbffffffff dcffff ddffffffff deffff dfffffffff
"""
_HEADS = tuple(bytes.fromhex(text) for text in _HEADS_IN_HEX.split())
_WORDS = b"""
    bfloat16 float32 float64 object O V8 U1000000 datetime64[ns] int4 float8_e5m2 >f4 complex128 str shape chunks 0 1 -1
    __msgpack_chunked_array__
"""
_TEXTS = (*_WORDS.split(), b"", b"\xff\xfe", b"\0", b"a" * 300)
_NESTS = (b"\x91", b"\x81\xa1a", b"\x92\xc0", b"\xdd\x00\x00\x00\x01", b"\x81\xc0", b"\xdc\x00\x01", b"\x81\x91")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    data: bytes
    """What is damaged."""
    other: bytes
    """Where parts may be taken from."""
    source: random.Random
    """Of all choices."""


def mutated(seed: bytes, other: bytes, source: random.Random) -> bytes:
    """Return a damaged form of ``seed``; some damages take a part of ``other``."""
    if seed[:2] == b"\x1f\x8b" and source.random() < 0.7:
        inner = mutated(gzip.decompress(seed), other, source)
        return gzip.compress(inner, source.choice((0, 1, 6)), mtime=0)
    data = seed
    for _ in range(source.choice((1, 1, 1, 2, 2, 3, 6))):
        data = source.choice(_DAMAGES)(_Case(data=data, other=other, source=source))[:_LARGEST]
    return data


def damage_bytes(data: bytes, source: random.Random) -> bytes:
    """Return ``data`` with one damage that needs to know nothing of its form."""
    return source.choice(_BLIND)(_Case(data=data, other=data, source=source))[:_LARGEST]


def _flip(case: _Case) -> bytes:
    data, source = case.data, case.source
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 8))):
        if changed:
            changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
    return bytes(changed)


def _set(case: _Case) -> bytes:
    data, source = case.data, case.source
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 4))):
        if changed:
            changed[source.randrange(len(changed))] = source.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xDD, 0xFF))
    return bytes(changed)


def _cut(case: _Case) -> bytes:
    data, source = case.data, case.source
    return data[: source.randrange(len(data) + 1)]


def _drop(case: _Case) -> bytes:
    data, source = case.data, case.source
    start = source.randrange(len(data) + 1)
    return data[:start] + data[start + source.choice((1, 1, 2, 4, 8, 64)) :]


def _splice(case: _Case) -> bytes:
    data, other, source = case.data, case.other, case.source
    return data[: source.randrange(len(data) + 1)] + other[source.randrange(len(other) + 1) :]


def _insert(case: _Case) -> bytes:
    data, source = case.data, case.source
    at = source.randrange(len(data) + 1)
    return data[:at] + source.choice((*_HEADS, *_TEXTS, source.randbytes(4))) + data[at:]


def _repeat(case: _Case) -> bytes:
    data, source = case.data, case.source
    start = source.randrange(len(data) + 1)
    part = data[start : start + source.choice((1, 4, 32, 256))]
    return data[:start] + part * source.choice((2, 3, 50, 1000)) + data[start:]


def _nest(case: _Case) -> bytes:
    data, source = case.data, case.source
    deep = source.choice((1, 30, 600, 1100, 20_000, 140_000))
    if deep > 5000 and source.random() < 0.97:  # the deepest ones take many milliseconds each
        deep = 40
    at = source.choice((0, source.randrange(len(data) + 1)))
    return data[:at] + source.choice(_NESTS) * deep + data[at:]


def _picked(data: bytes, source: random.Random) -> Token | None:
    found = tokens(data[:_WALKED])
    return source.choice(found) if found else None


def _length(case: _Case) -> bytes:
    data, source = case.data, case.source
    sized = [token for token in tokens(data[:_WALKED]) if token.width]
    if not sized:
        return _set(case)
    token = source.choice(sized)
    field = slice(token.start + 1, token.start + 1 + token.width)
    now = int.from_bytes(data[field])
    new = source.choice((now - 1, now + 1, now * 2, len(data) - token.start, source.choice(_LENGTHS)))
    return data[: field.start] + (new % 256**token.width).to_bytes(token.width) + data[field.stop :]


def _head(case: _Case) -> bytes:
    data, source = case.data, case.source
    token = _picked(data, source)
    if token is None:
        return data
    return data[: token.start] + source.choice(_HEADS) + data[token.start + 1 + token.width :]


def _text(case: _Case) -> bytes:
    data, source = case.data, case.source
    token = _picked(data, source)
    if token is None:
        return data
    text = source.choice(_TEXTS)
    head = bytes((0xA0 | len(text),)) if len(text) < 32 else b"\xda" + struct.pack(">H", len(text))
    return data[: token.start] + head + text + data[token.end :]


def _trade(case: _Case) -> bytes:
    """Put a whole value of one file (or of the other) in the place of another value."""
    data, other, source = case.data, case.other, case.source
    token, given = _picked(data, source), other if source.random() < 0.5 else data
    found = _picked(given, source)
    if token is None or found is None:
        return data
    return data[: token.start] + given[found.start : found.end] + data[token.end :]


def _twice(case: _Case) -> bytes:
    data, source = case.data, case.source
    token = _picked(data, source)
    if token is None:
        return data
    value = data[token.start : token.end]
    return data[: token.start] + value * source.choice((2, 3, 17)) + data[token.end :]


def _gone(case: _Case) -> bytes:
    data, source = case.data, case.source
    token = _picked(data, source)
    return data if token is None else data[: token.start] + data[token.end :]


def _wrapped(case: _Case) -> bytes:
    """Put a value into an ext of some code, with a right length."""
    data, source = case.data, case.source
    token = _picked(data, source)
    if token is None:
        return data
    value = data[token.start : token.end]
    code = source.choice((0, 1, 2, 3, 4, 5, 127, 128, 255))
    return data[: token.start] + b"\xc9" + struct.pack(">IB", len(value), code) + value + data[token.end :]


_DAMAGES: tuple[Callable[[_Case], bytes], ...] = (
    _flip, _flip, _set, _cut, _drop, _splice, _insert, _repeat, _nest,
    _length, _length, _length, _head, _head, _text, _text, _trade, _twice, _gone, _wrapped,
)  # fmt: skip
_BLIND: tuple[Callable[[_Case], bytes], ...] = (_flip, _flip, _set, _cut, _drop, _splice, _insert, _repeat)
