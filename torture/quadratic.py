"""Files of some megabytes, built so that a careless reader takes time with the square of a count, at every reader.

Each case is read at two sizes. Four times the input may take four times the time, and some more; never sixteen times.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgpack

import treering
from treering._codec.documents import parse_json
from treering._codec.zarr import parse_zarray
from treering._format.document import INDEX_NAME, parse_index
from treering._format.packed import pack
from treering._format.run_document import parse_run, parse_superseded
from treering._format.safetensors import parse_safetensors
from treering._inspect.inspect import inspect
from treering._keymap.key_map import parse_rules
from treering._leaves.documents.index import LEAVES_INDEX, parse_leaves_index, record_of
from treering._leaves.documents.record import parse_record
from treering._values.checksums import digest
from treering.errors import TreeringError
from treering.serialization import from_bytes, msgpack_restore

__all__ = ["CASES", "SIZES", "Timed", "colliding_pairs", "colliding_shapes", "quadratic", "timed"]

SIZES: Final = (1 << 20, 4 << 20)
"""Bytes of the smaller and of the larger input of each case; the larger one is four times the other."""

_MOST_GROWTH: Final = 10.0
_FREE_SECONDS: Final = 1.5
_MOST_SECONDS_PER_MB: Final = 25.0

_MODULUS: Final = (1 << 61) - 1
_MASK: Final = (1 << 64) - 1
# CPython's hash of a tuple, Objects/tupleobject.c: xxHash without a key.
_PRIMES: Final = (11400714785074694791, 14029467366897019727, 2870177450012600261)

Build = Callable[[int], bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Input for one reader."""

    build: Build
    """Returns about so many bytes."""
    parse: Callable[[bytes], object]
    """The reader alone."""
    name: str | None = None
    """Name of the file that all doors read too; None where there is none."""
    folder: bool = False
    """Whether the doors are given the folder that the file lies in."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """How long one case took at both sizes, in seconds of CPU."""

    nbytes: int
    """Bytes of the larger input."""
    small: float
    large: float

    @property
    def linear(self) -> bool:
        """Whether that grows as the input does, within a factor."""
        most = _MOST_SECONDS_PER_MB * self.nbytes / (1 << 20)
        return self.large < _FREE_SECONDS or (self.large < self.small * _MOST_GROWTH and self.large < most)


def colliding_pairs(count: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Yield pairs (first or more, any) that collide."""
    p1, p2, p5 = _PRIMES
    back1, back2 = pow(p1, -1, 1 << 64), pow(p2, -1, 1 << 64)
    wanted = (0x1234567 * back1) & _MASK
    wanted = (wanted >> 31 | wanted << 33) & _MASK
    while count:
        inner = (p5 + first * p2) & _MASK
        inner = ((inner << 31 | inner >> 33) & _MASK) * p1 & _MASK
        last = (wanted - inner) * back2 & _MASK
        if first < last < _MODULUS:
            yield first, last
            count -= 1
        first += 1


# ------------------------------------------------------------------------------------------------------------ documents


def _signed(member: str, members: Mapping[str, Any], version: int = 1) -> bytes:
    head, rest = f'{{"{member}": {version}, "digest": "', '",\n' + json.dumps(members, separators=(",", ":"))[1:]
    return f"{head}{digest((head.encode(), rest.encode()))}{rest}".encode()


_ATTEMPT: Final = "0123456789abcdef"
_NONE: Final = [{"kind": "none"}]
_NO_CHUNKS: Final[dict[str, Any]] = {name: [] for name in ("leaf", "file", "offset", "nbytes", "block", "box")} | {
    "codec": None
}


def _tree(structure: list[Any], keys: list[str], **members: Any) -> dict[str, Any]:
    return {
        "attempt": _ATTEMPT, "written": {}, "processes": 1, "meshes": [], "structure": structure, "types": _NONE,
        "leaves": {"key": keys, "type": [0] * len(keys)}, "values": [None] * len(keys), "chunks": _NO_CHUNKS,
        "checksums": {"algorithm": "xxh3-64", "table": ""}, "files": [], "replaces": [], "metadata": {},
        "prefix": None, "layouts": [], "layout": [], "sizes": [],
    } | members  # fmt: skip


def _dict(keys: Sequence[Any], texts: Sequence[str] = (), **members: Any) -> dict[str, Any]:
    texts = list(texts or map(str, keys))
    return _tree([{"node": "dict", "keys": list(keys)}, *([len(texts)] if texts else [])], texts, **members)


def _of_types(types: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
    count = len(types)
    names = _named(count)
    chunks = {
        "leaf": list(range(count)), "file": [0] * count, "offset": [4096] * count, "nbytes": [0] * count,
        "block": [65536] * count, "box": [None] * count, "codec": None,
    }  # fmt: skip
    name = f"data-{_ATTEMPT}-00000-of-00001.safetensors"
    files = [{"name": name, "nbytes": 4096, "header": 4096, "digest": f"xxh3-128:{0:032x}"}]
    leaves = {"key": names, "type": list(range(count))}
    return _dict(names, types=types, leaves=leaves, values=[], chunks=chunks, files=files, **members)


def _array(shape: Sequence[int]) -> dict[str, Any]:
    return {"kind": "jax", "dtype": "int8", "shape": list(shape)}


def colliding_shapes(count: int) -> list[tuple[int, ...]]:
    """Shapes without items that collide: zeros and ones in front, and the last length solved for."""
    p1, p2, p5 = _PRIMES
    back1, back2 = pow(p1, -1, 1 << 64), pow(p2, -1, 1 << 64)
    wanted = (0x1234567 * back1) & _MASK
    wanted = (wanted >> 31 | wanted << 33) & _MASK
    found: list[tuple[int, ...]] = []
    number = 0
    while len(found) < count:
        bits = [0, *(number >> place & 1 for place in range(20))]
        inner = p5
        for lane in bits:
            inner = (inner + lane * p2) & _MASK
            inner = ((inner << 31 | inner >> 33) & _MASK) * p1 & _MASK
        last = (wanted - inner) * back2 & _MASK
        if last < _MODULUS:
            found.append((*bits, last))
        number += 1
    return found


_POWERS: Final = [2.0**power for power in range(-900, 900)]


def _float(number: float) -> dict[str, str]:
    return {"float": number.hex()}


def _named(count: int) -> list[str]:
    return [f"k{number}" for number in range(count)]


# A dict: how many bytes an item of the case takes, about -> the document for so many items.
Documents = dict[str, tuple[int, Callable[[int], dict[str, Any]]]]


def _ints(count: int) -> list[Any]:
    return [{"int": hex(number * _MODULUS)} for number in range(1 << 12, (1 << 12) + count)]


def _pairs(count: int) -> list[Any]:
    return [{"tuple": [{"int": str(one) if one < 1 << 53 else hex(one)} for one in pair]} for pair in _whole(count)]


def _whole(count: int) -> Iterator[tuple[int, int]]:
    return colliding_pairs(count, 1)


def _int_texts(count: int) -> list[str]:
    return [str(number * _MODULUS) for number in range(1 << 12, (1 << 12) + count)]


def _deep(count: int) -> dict[str, Any]:
    # Chains as deep as may be, a leaf at the end of each.
    structure: list[Any] = [{"node": "list", "length": count}]
    for _ in range(count):
        structure += [{"node": "dict", "keys": [""]}] * 1000 + [1]
    return _tree(structure, [f"{number}/{'/' * 999}" for number in range(count)])


def _stairs(count: int) -> dict[str, Any]:
    # Containers whose first child is a leaf, each inside the one before.
    structure: list[Any] = [{"node": "list", "length": count}]
    keys: list[str] = []
    for number in range(count):
        for level in range(500):
            structure += [{"node": "tuple", "length": 2 if level < 499 else 1}, 1]
            keys.append(f"{number}/{'1/' * level}0")
    return _tree(structure, keys)


def _boxes(count: int) -> dict[str, Any]:
    document = _of_types([_array([0, 1 << 61])])
    chunks = document["chunks"]
    for name in ("leaf", "file", "offset", "nbytes", "block"):
        chunks[name] *= count
    chunks["box"] = [[[0, 0], list(pair)] for pair in colliding_pairs(count)]
    return document


def _parts(count: int) -> dict[str, Any]:
    document = _of_types([_array([count])])
    chunks = document["chunks"]
    for name in ("leaf", "file", "block"):
        chunks[name] *= count
    chunks |= {"offset": list(range(4096, 4096 + count)), "nbytes": [1] * count}
    chunks["box"] = [[[number, number + 1]] for number in reversed(range(count))]
    document["files"][0]["nbytes"] += count
    table = bytes(8 * count)
    document["checksums"]["table"] = base64.b64encode(table).decode()
    return document


_TREES: Documents = {
    "colliding ints": (50, lambda n: _dict(_ints(n), _int_texts(n))),
    "colliding pairs": (95, lambda n: _dict(_pairs(n), [f"({a}, {b})" for a, b in _whole(n)])),
    "colliding floats": (60, lambda n: _dict([*map(_float, _POWERS), *_named(n)], [*map(str, _POWERS), *_named(n)])),
    "colliding keys of an ordered dict": (
        70,
        lambda n: _tree(
            [
                {
                    "node": "other",
                    "class": "collections.OrderedDict",
                    "fields": _int_texts(n),
                    "static": {"keys": {"tuple": _ints(n)}},
                },
                n,
            ],
            _int_texts(n),
        ),
    ),
    "a key twice": (20, lambda n: _dict([*_named(n), "k1"])),
    "one level of many": (20, lambda n: _dict(_named(n))),
    "ints": (40, lambda n: _dict([{"int": str(i)} for i in range(n)], list(map(str, range(n))))),
    "deep chains": (26000, _deep),
    "stairs": (300_000, _stairs),
    "empty dicts": (30, lambda n: _tree([{"node": "list", "length": n}, *[{"node": "dict", "keys": []}] * n], [])),
    "different namedtuples": (
        60,
        lambda n: _tree(
            [
                {"node": "list", "length": n},
                *({"node": "namedtuple", "class": f"a.C{i}", "fields": []} for i in range(n)),
            ],
            [],
        ),
    ),
    "a namedtuple of many fields": (
        24,
        lambda n: _tree(
            [{"node": "namedtuple", "class": "a.C", "fields": [f"f{i}" for i in range(n)]}, n],
            [f"f{i}" for i in range(n)],
        ),
    ),
    "many classes": (
        60,
        lambda n: _tree(
            [
                {"node": "list", "length": n},
                *({"node": "other", "class": f"a.C{i}", "fields": [], "static": {"x": {"int": "1"}}} for i in range(n)),
            ],
            [],
        ),
    ),
    "many static fields": (
        40,
        lambda n: _tree(
            [{"node": "other", "class": "a.C", "fields": [], "static": {f"s{i}": {"int": str(i)} for i in range(n)}}],
            [],
        ),
    ),
    "lists of one": (
        26,
        lambda n: _tree(
            [{"node": "list", "length": n}, *[part for _ in range(n) for part in ({"node": "list", "length": 1}, 1)]],
            [f"{i}/0" for i in range(n)],
        ),
    ),
    "runs of one leaf": (16, lambda n: _tree([{"node": "list", "length": n}, *[1] * n], list(map(str, range(n))))),
    "escapes in keys": (60, lambda n: _dict([f"{i}/~" * 3 for i in range(n)], [f"{i}~1~0" * 3 for i in range(n)])),
    "one key of all": (2, lambda n: _dict(["~/" * n], ["~0~1" * (n)])),
    "surrogates in keys": (
        60,
        lambda n: _dict([{"base64": "7aCA" + _b64(i)} for i in range(n)], [f"~ud800{i:06}" for i in range(n)]),
    ),
    "long ints": (
        1100,
        lambda n: _dict([{"int": hex((1 << 4000) + i)} for i in range(n)], [str((1 << 4000) + i) for i in range(n)]),
    ),
    "types that collide": (170, lambda n: _of_types(list(map(_array, colliding_shapes(n))))),
    "types that are never used": (50, lambda n: _dict(["a"], types=[*_NONE, *(_array([i, 0]) for i in range(n))])),
    "boxes that collide": (95, _boxes),
    "an array in many parts": (60, _parts),
    "metadata": (20, lambda n: _dict(["a"], metadata={f"m{i}": [i] for i in range(n)})),
    "nested metadata": (200, lambda n: _dict(["a"], metadata={"m": [_nested(90)] * n})),
    "meshes": (10, lambda n: _dict(["a"], meshes=[f"x={i}" for i in range(n)])),
    "replaced files": (
        60,
        lambda n: _dict(["a"], replaces=[f"data-{i:016x}-00000-of-00001.safetensors" for i in range(n)]),
    ),
    "many files": (
        190,
        lambda n: _dict(
            ["a"],
            files=[
                {
                    "name": f"data-{i:016x}-00000-of-00001.safetensors",
                    "nbytes": 4096,
                    "header": 4096,
                    "digest": f"xxh3-128:{i:032x}",
                }
                for i in range(n)
            ],
        ),
    ),
    "long values": (2, lambda n: _dict(["a"], types=[{"kind": "int"}], values=[hex((1 << 4 * n) - 1)])),
    "opaque leaves": (
        60,
        lambda n: _dict(
            _named(n), types=[{"kind": "opaque"}], values=[{"class": "a.b", "text": f"f{i}"} for i in range(n)]
        ),
    ),
}


def _b64(number: int) -> str:
    return base64.b64encode(f"{number:06}".encode()).decode()


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


# -------------------------------------------------------------------------------------------------------------- readers


def _doors(path: Path) -> None:
    """Everything that a user does with a path, as far as it goes."""
    keys: list[str] = []

    def look() -> None:
        with treering.open(path) as file:
            repr(file)
            keys.extend(list(file.keys())[:: max(1, len(file.keys()) // 3)])

    for enter in (
        look,
        lambda: treering.load(path),
        lambda: treering.load(path, like={"no": 1}),
        lambda: treering.load(path, only=["**/nothing", *keys]),
        lambda: treering.load(path, at=keys[-1] if keys else "nothing"),
        lambda: inspect(path),
        lambda: treering.verify(path),
        lambda: treering.diff(path, path),
    ):
        with contextlib.suppress(TreeringError, KeyError):
            enter()


def _parsed_leaves(data: bytes) -> None:
    record_of(next(iter(parse_leaves_index(data).branches.values())))


def _parsed_safetensors(data: bytes) -> None:
    parse_safetensors(len(data), lambda offset, nbytes: data[offset : offset + nbytes])


def _parsed_wire(data: bytes) -> None:
    for enter in (msgpack_restore, functools.partial(from_bytes, {"a": 1}), functools.partial(from_bytes, None)):
        with contextlib.suppress(TreeringError):
            enter(data)


def _safetensors(header: Mapping[str, Any], nbytes: int = 0) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(nbytes)


def _entry(shape: Sequence[int]) -> dict[str, Any]:
    return {"dtype": "I8", "shape": list(shape), "data_offsets": [0, 0]}


def _packed(pairs: int, key: Callable[[int], bytes]) -> bytes:
    return b"\xdf" + pairs.to_bytes(4) + b"".join(key(number) + b"\xc0" for number in range(pairs))


def _steps(count: int) -> dict[str, Any]:
    steps = [
        {
            "step": i, "attempt": _ATTEMPT, "saved": "2026-01-01T00:00:00.000000Z", "metrics": {"loss": 0.5},
            "temporary": False, "nbytes": 1, "seconds": None, "index_nbytes": 1, "index_digest": f"xxh3-128:{i:032x}",
        }
        for i in range(count)
    ]  # fmt: skip
    return {"keep": None, "save_every": None, "steps": steps}


def _metrics(count: int) -> dict[str, Any]:
    document = _steps(1)
    document["steps"][0]["metrics"] = {f"m{i}": float(i) for i in range(count)}
    return document


def _leaves_index(entries: list[Any], **members: Any) -> bytes:
    return json.dumps({"format": "tensorstore", "version": "1.0", "arrays": entries, **members}).encode()


def _zarray(**members: Any) -> bytes:
    plain = {"zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "<f4", "compressor": None, "filters": None}
    return json.dumps(plain | {"order": "C", "fill_value": None} | members).encode()


def _sized(per_item: int, build: Callable[[int], bytes]) -> Build:
    return lambda nbytes: build(max(nbytes // per_item, 1))


def _pack_tree(members: dict[str, Any]) -> dict[str, Any]:
    """Return what an index with packed columns says instead."""
    texts = [json.dumps(token) for token in members["structure"]]
    kinds = {text: number for number, text in enumerate(dict.fromkeys(t for t in texts if t.startswith("{")))}
    tokens = [kinds[text] if text in kinds else len(kinds) - 1 + int(text) for text in texts]
    chunks = members["chunks"]
    rows = {name: pack(chunks[name]) for name in ("leaf", "file", "offset", "nbytes", "block")}
    return members | {
        "structure": {"containers": [*map(json.loads, kinds)], "tokens": pack(tokens)},
        "leaves": {"type": pack(members["leaves"]["type"])},
        "chunks": rows | {"boxes": chunks["box"], "box": pack(range(len(chunks["box"]))), "codec": None},
    }


def _indexes() -> Iterator[tuple[str, Case]]:
    for name, (per_item, make) in _TREES.items():

        def index(count: int, make: Callable[[int], dict[str, Any]] = make) -> bytes:
            return _signed("treering", make(count))

        def record(count: int, make: Callable[[int], dict[str, Any]] = make) -> bytes:
            return _signed("treering leaves", make(count))

        def inside(count: int, make: Callable[[int], dict[str, Any]] = make) -> bytes:
            return _leaves_index([], treering={"": {"record": record(count, make).decode()}})

        def packed(count: int, make: Callable[[int], dict[str, Any]] = make) -> bytes:
            return _signed("treering", _pack_tree(make(count)), 4)

        yield f"checkpoint: {name}", Case(_sized(per_item, index), parse_index, INDEX_NAME, folder=True)
        yield f"packed: {name}", Case(_sized(per_item, packed), parse_index, INDEX_NAME, folder=True)
        yield f"record: {name}", Case(_sized(per_item, record), parse_record)
        if not make(1)["chunks"]["leaf"]:
            yield f"leaves: {name}", Case(_sized(per_item, inside), _parsed_leaves, LEAVES_INDEX, folder=True)


def _small_array() -> bytes:
    payload = msgpack.packb([[1], "int8", b"x"])
    return bytes(msgpack.packb(msgpack.ExtType(1, payload)))


def _chunked(count: int) -> bytes:
    part = msgpack.ExtType(1, msgpack.packb([[1], "int8", b"x"]))
    chunks = {str(number): part for number in range(count)}
    shape = {"0": count}
    return bytes(msgpack.packb({"__msgpack_chunked_array__": True, "shape": shape, "chunks": chunks}))


CASES: Final[Mapping[str, Case]] = {
    **dict(_indexes()),
    "leaves: many entries": Case(
        _sized(50, lambda n: _leaves_index([{"path": f"a/k{i}", "shape": [1], "dtype": "<f4"} for i in range(n)])),
        _parsed_leaves,
        LEAVES_INDEX,
        folder=True,
    ),
    "leaves: deep entries": Case(
        _sized(2100, lambda n: _leaves_index([{"path": "a/" * 1000 + f"k{i}", "shape": []} for i in range(n)])),
        _parsed_leaves,
        LEAVES_INDEX,
        folder=True,
    ),
    "leaves: many prefixes": Case(
        _sized(30, lambda n: _leaves_index([], prefixes={f"p{i}": [] for i in range(n)})),
        _parsed_leaves,
        LEAVES_INDEX,
        folder=True,
    ),
    "leaves: members of others": Case(
        _sized(20, lambda n: _leaves_index([], more={f"p{i}": i for i in range(n)})),
        _parsed_leaves,
        LEAVES_INDEX,
        folder=True,
    ),
    "safetensors: many arrays": Case(
        _sized(65, lambda n: _safetensors({f"k{i}": _entry([0]) for i in range(n)})),
        _parsed_safetensors,
        "a.safetensors",
    ),
    "safetensors: names with tildes": Case(
        _sized(70, lambda n: _safetensors({f"~{i}~": _entry([0]) for i in range(n)})),
        _parsed_safetensors,
        "a.safetensors",
    ),
    "safetensors: colliding shapes": Case(
        _sized(150, lambda n: _safetensors({f"k{i}": _entry(shape) for i, shape in enumerate(colliding_shapes(n))})),
        _parsed_safetensors,
        "a.safetensors",
    ),
    "safetensors: metadata": Case(
        _sized(20, lambda n: _safetensors({"__metadata__": {f"k{i}": str(i) for i in range(n)}})),
        _parsed_safetensors,
        "a.safetensors",
    ),
    "safetensors: one long name": Case(
        _sized(2, lambda n: _safetensors({"~/" * n: _entry([0])})), _parsed_safetensors, "a.safetensors"
    ),
    "run.json: steps": Case(_sized(230, lambda n: _signed("treering_run", _steps(n))), parse_run),
    "run.json: metrics": Case(_sized(20, lambda n: _signed("treering_run", _metrics(n))), parse_run),
    "run.json.left": Case(
        _sized(
            50,
            lambda n: _signed(
                "treering_left",
                {"step": 0, "mark": _ATTEMPT, "left": [{"step": i + 1, "attempt": None} for i in range(n)]},
            ),
        ),
        parse_superseded,
    ),
    ".zarray: axes": Case(_sized(4, lambda n: _zarray(shape=[1] * n, chunks=[1] * n)), parse_zarray),
    ".zarray: members": Case(_sized(12, lambda n: _zarray(**{f"m{i}": i for i in range(n)})), parse_zarray),
    ".zarray: a compressor": Case(
        _sized(12, lambda n: _zarray(compressor={"id": "zstd"} | {f"m{i}": i for i in range(n)})), parse_zarray
    ),
    "JSON: a member twice": Case(
        _sized(10, lambda n: b"[" + b'{"a":1,"b":2,"a":1},' * n + b"1]"), lambda data: parse_json(data.decode(), "it")
    ),
    "JSON: lists in lists": Case(_sized(1, lambda n: b"[" * n), lambda data: parse_json(data.decode(), "it")),
    "JSON: a long number": Case(_sized(1, lambda n: b"1" * n), lambda data: parse_json(data.decode(), "it")),
    "msgpack: colliding ints": Case(
        _sized(10, lambda n: _packed(n, lambda i: b"\xcf" + (i % 8 * _MODULUS + i // 8).to_bytes(8))),
        _parsed_wire,
        "a.msgpack",
    ),
    "msgpack: floats": Case(
        _sized(10, lambda n: _packed(n, lambda i: msgpack.packb(float((i + 1) << (i % 50))))), _parsed_wire, "a.msgpack"
    ),
    "msgpack: text": Case(_sized(8, lambda n: _packed(n, lambda i: msgpack.packb(f"k{i}"))), _parsed_wire, "a.msgpack"),
    "msgpack: bytes": Case(
        _sized(10, lambda n: _packed(n, lambda i: msgpack.packb(f"k{i}".encode()))), _parsed_wire, "a.msgpack"
    ),
    "msgpack: maps in maps": Case(_sized(3, lambda n: b"\x81\xa1a" * n + b"\xc0"), _parsed_wire, "a.msgpack"),
    "msgpack: lists in lists": Case(_sized(1, lambda n: b"\x91" * n + b"\xc0"), _parsed_wire, "a.msgpack"),
    "msgpack: empty lists": Case(_sized(1, lambda n: b"\xdd" + n.to_bytes(4) + b"\x90" * n), _parsed_wire, "a.msgpack"),
    "msgpack: pages of maps": Case(
        _sized(5, lambda n: b"\xdd" + n.to_bytes(4) + b"\x81\xa1a\xa1b" * n), _parsed_wire, "a.msgpack"
    ),
    "msgpack: small arrays": Case(
        _sized(20, lambda n: b"\xdd" + n.to_bytes(4) + _small_array() * n), _parsed_wire, "a.msgpack"
    ),
    "msgpack: tuples": Case(
        _sized(6, lambda n: b"\xdd" + n.to_bytes(4) + b"\xc7\x01\x04\x90" * n), _parsed_wire, "a.msgpack"
    ),
    "msgpack: a chunked array": Case(_sized(50, _chunked), _parsed_wire, "a.msgpack"),
    "key map: one key": Case(_sized(2, lambda n: b"a." * n + b"a = 1"), parse_rules),
    "key map: tables": Case(_sized(20, lambda n: b"".join(b"[a.b.c.d.e%d]\n" % i for i in range(n))), parse_rules),
    "key map: rules": Case(_sized(32, lambda n: b'[[rule]]\nfrom = "a"\nto = "b"\n' * n), parse_rules),
    "key map: quotes that do not end": Case(_sized(4, lambda n: b'a = """' + b'\\"""' * n), parse_rules),
    "key map: a text that does not end": Case(_sized(2, lambda n: b'a = "' + b'\\"' * n), parse_rules),
    "key map: a long number": Case(_sized(1, lambda n: b"a = " + b"9" * n), parse_rules),
}


def timed(name: str, *, doors: bool, sizes: tuple[int, int] = SIZES) -> Timed:
    """Read one case at both sizes, without a limit: with the reader alone, or through every door."""
    case = CASES[name]
    seconds = []
    for nbytes in sizes:
        data = case.build(nbytes)
        with tempfile.TemporaryDirectory(prefix="treering-quadratic-") as folder:
            path = Path(folder) / (case.name or "none")
            path.write_bytes(data)
            start = time.process_time()
            with contextlib.suppress(TreeringError):
                case.parse(data)
            if doors and case.name is not None:
                _doors(path.parent if case.folder else path)
            seconds.append(time.process_time() - start)
    return Timed(nbytes=sizes[1], small=seconds[0], large=seconds[1])


def quadratic(chosen: Sequence[str] | None) -> int:
    """Read all cases through all doors, or those whose name has one of the texts; return 1 when one grew too fast."""
    wrong = 0
    for name in CASES:
        if chosen and not any(text in name for text in chosen):
            continue
        took = timed(name, doors=True)
        wrong += not took.linear
        print(f"{took.small:7.2f} s {took.large:7.2f} s  {name}{'' if took.linear else '  GREW TOO FAST'}", flush=True)
    print(f"{wrong} violations")
    return 1 if wrong else 0
