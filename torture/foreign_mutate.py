"""One undamaged tree -> a damaged or hostile one, whose digests are right again where the format has some.

A damage reaches the layer that it is for: the JSON of a document, the header of a safetensors file, the entries of an
archive, the nodes of a database, the content of a packed chunk. What lies around it is written anew.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import io
import json
import random
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from torture.foreign_images import Image, frame_tensors
from torture.foreign_writers import Liar, close_shard, write_database, write_zip
from torture.mutate import damage_bytes
from treering._codec.compression import zstd_compress, zstd_decompress_unsized
from treering.errors import TreeringError

__all__ = ["OUTSIDE", "mutated_image", "mutated_map", "write_databases"]

OUTSIDE = b"OUTSIDE!"
"""The bytes of arrays that lie outside of what the doors are given: no door may let them in."""

_LARGEST_COPIES = 8 << 20
_BOMB_BYTES = 64 << 20
_RATES = (0.0, 0.0, 0.003, 0.02, 0.1)
_LONGEST_NUMBER = 5000
_HOSTILE: tuple[Any, ...] = (
    0, -1, 1, 2, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 1.5, 1e308, True, False, None,
    "", ".", "..", "../../x", "/etc/passwd", "a/b", "a\0b", "\ud800", "~", "x" * 300, "y" * 70_000, [], {}, [[]],
    [0], [1], [-1], [2**40], [2**20] * 3, [1] * 33, [1] * 65, [2**31, 2**31], [1.0], ["1"], {"name": "bytes"},
    "<f4", "|O", "bfloat16", "int4", "float128", "F4", "BF16", "PLACEHOLDER://w", "jax.Array", "scalar", "string",
    "Dict", "zstd", "blosc", "sharding_indexed", "random_key_impl", {"id": "zlib", "level": 1}, {"id": "blosc"},
)  # fmt: skip
_NESTED = (b"[", b"]"), (b'{"a":', b"}"), (b"[[],", b"]")
_MARK = "@@ here @@"
_DESCRIPTIONS = (
    b"'<f4'", b"'>f8'", b"'|O'", b"'|V2'", b"'<U4'", b"'<U1000000000'", b"'|S3'", b"'<f16'", b"[('a', '<f4')]",
    b"'<M8[ns]'", b"'?'", b"'<i9999999999999999999999'", b"__import__('os')",
)  # fmt: skip
_SHAPES = (b"()", b"(0,)", b"(1,)", b"(48,)", b"(9223372036854775807,)", b"(" + b"1, " * 70 + b")", b"(-1,)", b"(6, 8)")
_NPY = re.compile(rb"\x93NUMPY\x01\x00..(\{.*?\}\s*)", re.DOTALL)


class _Case:
    """A tree while it is being damaged.

    Args:
        image: the undamaged one.
        source: of all choices.
    """

    def __init__(self, image: Image, source: random.Random) -> None:
        self.source = source
        self.liar = Liar(source, source.choice(_RATES))
        self.place = image.place
        self.files = dict(image.files)
        self.links = dict(image.links)
        self.holes: dict[str, int] = {}
        self.pipes: list[str] = []
        self.databases = {folder: dict(values) for folder, values in image.databases.items()}

    def pick(self) -> tuple[dict[str, bytes], str] | None:
        """Choose a file, or a value of a database: return what holds it, and its name there."""
        groups = [group for group in (self.files, *self.databases.values()) if group]
        if not groups:
            return None
        group = self.source.choice(groups)
        return group, self.source.choice(sorted(group))

    def close(self) -> Image:
        """Return what became of it."""
        image = Image(
            place=self.place,
            files=self.files,
            links=self.links,
            holes=self.holes,
            pipes=tuple(self.pipes),
            databases=self.databases,
        )
        return write_databases(image, self.liar)


def write_databases(image: Image, liar: Liar) -> Image:
    """Return a tree in which its databases are files."""
    files = dict(image.files)
    for folder, values in image.databases.items():
        for name, data in write_database(values, liar).items():
            files[f"{folder}{name}"] = data
    return dataclasses.replace(image, files=files, databases={})


def mutated_image(seed: Image, source: random.Random) -> Image:
    """Return a damaged form of a tree."""
    case = _Case(seed, source)
    for _ in range(source.choice((0, 1, 1, 1, 2, 2, 3))):
        source.choice(_DAMAGES)(case)
    image = case.close()
    if source.random() < 0.1 and image.files:
        name = source.choice(sorted(image.files))
        image = dataclasses.replace(image, files={**image.files, name: damage_bytes(image.files[name], source)})
    return image


def mutated_map(seed: bytes, source: random.Random) -> bytes:
    """Return a damaged form of a key map in TOML."""
    data = seed
    for _ in range(source.choice((1, 1, 2, 3))):
        values = [found.span() for found in _TOML_VALUE.finditer(data)]
        if values and source.random() < 0.7:
            start, stop = source.choice(values)
            others = [data[slice(*source.choice(values))] for _ in range(30)]
            new = source.choice((*_TOML_VALUES, *others))
            data = data[:start] + new + data[stop:]
        else:
            data = damage_bytes(data, source)
    return data


_TOML_VALUE = re.compile(rb'(?<== )("[^"\n]*"|-?\d+|\[[^\]\n]*\]|\{[^\n]*\}|true)|(?<=")[^"\n]+(?=")|[,.{}*/]')
_TOML_VALUES = (
    b"0", b"-1", b"99999999999999999999", b"1e400", b"nan", b"true", b'""', b'"{"', b'"{a}"', b'"{a**}"', b'"{a}{b}"',
    b'"{a}/{a}"', b'"' + b"{a}." * 40 + b'"', b'"' + b"{x**}a" * 12 + b'"', b'"a~b"', b'"\\ud800"', b'"\\u0000"', b"[]",
    b"[1, 0]", b"[0, 0]", b"[[[[0]]]]", b"[" * 3000 + b"]" * 3000, b"{}", b"{i = 0}", b"{i = -1}", b"{i = 99}",
    b"{i = 0, j = 0}", b'["float32", "bfloat16"]', b'["float32"]', b'["a", "b"]', b"1979-05-27", b"'''", b'"w"',
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- content of a file


def _content(case: _Case) -> None:
    """Damage one file or value by what it is."""
    if (found := case.pick()) is None:
        return
    group, name = found
    data, source = group[name], case.source
    if source.random() < 0.15:
        group[name] = damage_bytes(data, source)
    elif name.endswith(".safetensors"):
        size = int.from_bytes(data[:8], "little")
        header = _damage_json(data[8 : 8 + size], source)
        framed = frame_tensors(header, data[8 + size :])
        group[name] = framed if not case.liar.lies() else case.liar(len(header)).to_bytes(8, "little") + framed[8:]
    elif data[:2] == b"PK":
        group[name] = _damage_archive(data, case.liar)
    elif data[:6] == b"\x93NUMPY":
        group[name] = _damage_npy(data, source)
    elif data[:1] in (b"{", b"["):
        group[name] = _damage_json(data, source)
    elif data[:4] == b"\x28\xb5\x2f\xfd" or data[:2] == b"\x1f\x8b":
        group[name] = _damage_packed(data, source)
    else:
        group[name] = _damage_shard(data, case.liar)


def _damage_json(data: bytes, source: random.Random) -> bytes:
    try:
        root = json.loads(data)
    except (ValueError, RecursionError):
        return damage_bytes(data, source)
    places: list[tuple[Any, Any]] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        steps = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for step in steps:
            places.append((node, step))
            waiting.append(node[step])
    if not places:
        return damage_bytes(data, source)
    node, step = source.choice(places)
    kind = source.randrange(8)
    encoded = [(each, key) for each, key in places if isinstance(each[key], str) and len(each[key]) > 60]
    if encoded and source.random() < 0.3:
        (node, step), kind = source.choice(encoded), 7
    if kind == 0:
        del node[step]
    elif kind == 1 and isinstance(node, dict):
        node[str(source.choice(_HOSTILE))[:400]] = node.pop(step)
    elif kind == 2:
        node[step] = _MARK
    elif kind == 3:
        other_node, other_step = source.choice(places)
        node[step] = other_node[other_step] if not isinstance(other_node[other_step], dict | list) else None
    else:
        node[step] = _damage_value(node[step], source)
    text = json.dumps(root).encode()
    if kind == 2:
        first, last = source.choice(_NESTED)
        deep = source.choice((30, 150, 600, 1100, 9000, 120_000))
        inserted = first * deep + b"0" + last * deep
        text = text.replace(f'"{_MARK}"'.encode(), source.choice((inserted, b"9" * _LONGEST_NUMBER, b"NaN", b"1e999")))
    if kind == 4 and isinstance(step, str):
        # A member twice.
        text = text.replace(b"{", b"{" + json.dumps(step).encode() + b": 1, ", source.choice((1, -1)))
    return text


def _damage_value(old: Any, source: random.Random) -> Any:
    """Return another value, near to the old one or far from it."""
    if source.random() < 0.5:
        return source.choice(_HOSTILE)
    if isinstance(old, int):
        return source.choice((old + 1, old - 1, old * 2, -old, old * 2**40, float(old), str(old)))
    if not isinstance(old, str):
        return source.choice(_HOSTILE)
    if old[:1] == "{":  # a document inside of a document
        return _damage_json(old.encode("utf-8", "surrogatepass"), source).decode("utf-8", "replace")
    if len(old) > 60 and source.random() < 0.9:  # bytes in base64
        with contextlib.suppress(ValueError):
            return base64.b64encode(damage_bytes(base64.b64decode(old, validate=True), source)).decode()
    at = source.randrange(len(old) + 1)
    return f"{old[:at]}{source.choice(('/', '..', chr(0), '~', 'x'))}{old[at:]}"


def _damage_npy(data: bytes, source: random.Random) -> bytes:
    if (found := _NPY.match(data)) is None:
        return damage_bytes(data, source)
    header = found[1]
    kind = source.randrange(4)
    if kind == 0:
        header = re.sub(rb"'descr': [^,]*", b"'descr': " + source.choice(_DESCRIPTIONS), header)
    elif kind == 1:
        header = re.sub(rb"'shape': \([^)]*\)", lambda _: b"'shape': " + source.choice(_SHAPES), header)
    elif kind == 2:
        header = header.replace(b"False", source.choice((b"True", b"None", b"1")))
    else:
        header = damage_bytes(header, source)
    length = min(len(header), 2**16 - 1).to_bytes(2, "little")
    return data[:8] + length + header + data[found.end() :]


def _damage_archive(data: bytes, liar: Liar) -> bytes:
    source = liar.source
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [(name.encode(), archive.read(name), source.choice((0, 8))) for name in archive.namelist()]
    except Exception:  # noqa: BLE001 - zipfile has many for what was damaged before
        return damage_bytes(data, source)
    if not entries:
        return data
    at = source.randrange(len(entries))
    name, content, method = entries[at]
    kind = source.randrange(5)
    if kind == 0:
        name = source.choice((b"../x.npy", b"/x.npy", b"\xff.npy", b"x", b".npy", b"a\0b.npy", b"~.npy", b"x" * 70_000))
    elif kind == 1:
        content = _damage_npy(content, source)
    elif kind == 2:
        content = content[: content.find(b"\n") + 1] + bytes(source.choice((1 << 10, 32 << 20)))
    elif kind == 3:
        # An entry that was made large before is not made so 300 times: that would take minutes before anything is fed.
        entries += [entries[at]] * min(source.choice((1, 2, 300)), max(1, _LARGEST_COPIES // (len(content) + 1)))
    entries[at] = (name[:65535], content, method)
    return write_zip(entries, liar)


def _damage_packed(data: bytes, source: random.Random) -> bytes:
    """Pack other content, or far more than a chunk takes."""
    if source.random() < 0.3:
        return _bomb(data[:2])
    try:
        if data[:2] == b"\x1f\x8b":
            content = zlib.decompress(data, 31)
            packer = zlib.compressobj(1, zlib.DEFLATED, 31)
            return packer.compress(damage_bytes(content, source)) + packer.flush()
        return zstd_compress(memoryview(damage_bytes(zstd_decompress_unsized(data, 1 << 20), source)), 1)
    except (zlib.error, TreeringError):
        return damage_bytes(data, source)


@functools.cache
def _bomb(magic: bytes) -> bytes:
    content = bytes(_BOMB_BYTES)
    return zlib.compress(content, 9, wbits=31) if magic == b"\x1f\x8b" else zstd_compress(memoryview(content), 19)


def _damage_shard(data: bytes, liar: Liar) -> bytes:
    """Write the index of a shard anew; of anything else, damage the bytes."""
    source = liar.source
    if source.random() < 0.5 or len(data) < 40:
        return damage_bytes(data, source)
    count = source.choice((1, 2, 4))
    size = 16 * count + 4
    numbers = [int.from_bytes(data[at : at + 8], "little") for at in range(len(data) - size, len(data) - 4, 8)]
    lying = Liar(source, 0.4)
    return close_shard(data[:-size], [lying(number) for number in numbers])


# ------------------------------------------------------------------------------------------------------ files of a tree


def _lies(case: _Case) -> None:
    """Let the writers of databases and archives lie more often."""
    case.liar = Liar(case.source, case.source.choice((0.003, 0.02, 0.1, 0.3)))


def _lost(case: _Case) -> None:
    if (found := case.pick()) is not None:
        del found[0][found[1]]


def _moved(case: _Case) -> None:
    """Give a file another name, or a second one, also such that lead out of the folder."""
    if (found := case.pick()) is None:
        return
    group, name = found
    new = case.source.choice(
        ("../x", "x/../../y", "z" * 300, "a\0b", "\ud800", "", f"{name}/0", f"{name}x", "w/.zarray")
    )
    if group is case.files:
        new = f"{PurePosixPath(name).parent}/{new.replace('..', 'up') or 'empty'}"
    group[new] = group[name] if case.source.random() < 0.5 else group.pop(name)


def _exchanged(case: _Case) -> None:
    """Let one file have the content of another."""
    one, other = case.pick(), case.pick()
    if one is not None and other is not None:
        one[0][one[1]] = other[0][other[1]]


def _became_folder(case: _Case) -> None:
    if case.files:
        name = case.source.choice(sorted(case.files))
        case.files[f"{name}/{case.source.choice(('x', '.zarray', 'zarr.json', '_METADATA'))}"] = case.files.pop(name)


def _became_hole(case: _Case) -> None:
    """Make a file very long, with nothing behind its content."""
    if case.files:
        name = case.source.choice(sorted(case.files))
        case.holes[name] = case.source.choice((1 << 20, 1 << 33, 1 << 40))


def _became_pipe(case: _Case) -> None:
    if names := [name for name in sorted(case.files) if name != case.place]:
        name = case.source.choice(names)
        del case.files[name]
        case.pipes.append(name)


def _became_link(case: _Case) -> None:
    """Make a file or a folder a link: out of what the doors are given, to itself, or to what never ends."""
    names = [name for name in sorted(case.files) if name != case.place]
    if not names:
        return
    source = case.source
    name = source.choice(names)
    parent = str(PurePosixPath(name).parent)
    kind = source.randrange(6)
    if kind == 0:
        del case.files[name]
        case.links[name] = source.choice(
            ("/dev/zero", "/dev/stdin", "/proc/self/mem", PurePosixPath(name).name, "..", ".")
        )
    elif kind == 1 and parent not in (".", "") and parent != case.place and not case.place.startswith(f"{parent}/"):
        below = [each for each in case.files if each.startswith(f"{parent}/")]
        for each in below:
            case.files[f"outside/{each.removeprefix(f'{parent}/')}"] = _from_outside(each, case.files.pop(each))
        case.links[parent] = "../" * parent.count("/") + "outside"
    else:
        outside = f"outside/{PurePosixPath(name).name}"
        case.files[outside] = _from_outside(name, case.files.pop(name))
        case.links[name] = "../" * name.count("/") + outside


def _from_outside(name: str, data: bytes) -> bytes:
    """Return the content of a file outside: the same document, or other items of an array."""
    start = 8 + int.from_bytes(data[:8], "little") if name.endswith(".safetensors") else 0
    if data[:1] in (b"{", b"[") or b"\x0c\xdb" in data[:4]:
        return data
    return data[:start] + (OUTSIDE * (len(data) // len(OUTSIDE) + 1))[: max(0, len(data) - start)]


_DAMAGES: tuple[Callable[[_Case], None], ...] = (
    *[_content] * 14, *[_lies] * 3, _lost, _moved, _exchanged, _became_folder, _became_hole, _became_pipe,
    *[_became_link] * 3,
)  # fmt: skip
