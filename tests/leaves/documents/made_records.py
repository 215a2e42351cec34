"""Records of leaves directories for tests, made without saving anything."""

from __future__ import annotations

import dataclasses
import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from treering._codec.zarr import chunk_count
from treering._format.index import Container, LeafType
from treering._leaves.documents.record import ChunkLayout, LeavesRecord, arrays_of, folder_of
from treering._values.checksums import block_bytes, block_count, digest
from treering._values.keys import join_key

__all__ = ["ATTEMPT", "F32", "changed", "flat", "nested", "records", "signed", "signed_text"]

ATTEMPT = "0123456789abcdef"
F32 = LeafType(kind="jax", dtype="float32", shape=(4, 6))
ZSTD = '{"id":"zstd","level":1}'

Spec = tuple[LeafType, ChunkLayout | None]
"""Type and layout of a stored leaf; ``(type, None)``: one plain chunk."""


def flat(leaves: Mapping[str, Spec | Any], *, prefix: str | None = None, attempt: str = ATTEMPT) -> LeavesRecord:
    """A record of a flat dict; leaves that are no specification are Python ints, or None."""
    names = tuple(leaves)
    keys = [join_key((name,)) for name in names]
    types: list[LeafType] = []
    layouts: list[ChunkLayout] = []
    leaf_types, leaf_layouts, folders = [], [], []
    values: dict[int, Any] = {}
    for number, (key, spec) in enumerate(zip(keys, leaves.values(), strict=True)):
        if isinstance(spec, tuple):
            kind = spec[0]
            layout = spec[1] or ChunkLayout(chunks=tuple(max(length, 1) for length in kind.shape or ()))
            if layout not in layouts:
                layouts.append(layout)
            leaf_layouts.append(layouts.index(layout))
            folders.append(folder_of(prefix, key))
        else:
            kind = LeafType(kind="none" if spec is None else "int")
            values[number] = spec
        if kind not in types:
            types.append(kind)
        leaf_types.append(types.index(kind))
    record = LeavesRecord(
        prefix=prefix,
        attempt=attempt,
        written={"by": "tests", "at": "2026-01-01"},
        meshes=["x=2"],
        structure=[Container(node="dict", keys=names), *([len(names)] if names else [])],
        keys=keys,
        types=types,
        leaf_types=leaf_types,
        values=values,
        folders=folders,
        layouts=layouts,
        leaf_layouts=leaf_layouts,
        sizes=[],
        checksums=array("Q"),
    )
    return with_files(record)


def with_files(record: LeavesRecord) -> LeavesRecord:
    """The record with sizes and checksums made up."""
    sizes: list[int] = []
    blocks = 0
    for found in arrays_of(record):
        count = chunk_count(found)
        if found.compressor is None:
            items = math.prod(found.chunks)
            size = items * {"float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1, "float64": 8}[found.dtype]
            blocks += count * block_count(size, block_bytes(size))
        else:
            mine = [1 + number * 40_000 for number in range(count)]
            sizes += mine
            blocks += sum(block_count(size, block_bytes(size)) for size in mine)
    table = array("Q", [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(blocks)])
    return dataclasses.replace(record, sizes=sizes, checksums=table)


def signed(document: Mapping[str, Any]) -> bytes:
    """A document with the right digest, whatever is in it."""
    lines = [f'"{name}": {json.dumps(value)}' for name, value in document.items()]
    return signed_text(",\n".join(lines) + "}\n")


def signed_text(body: str) -> bytes:
    """The same, of the text behind the first line."""
    head, rest = '{"treering leaves": 1, "digest": "', '",\n' + body
    return f"{head}{digest((head.encode(), rest.encode()))}{rest}".encode()


def changed(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A record with something changed in it, and the right digest."""
    document = json.loads(data)
    del document["treering leaves"], document["digest"]
    change(document)
    return signed(document)


@st.composite
def records(draw: st.DrawFn, *, prefixes: Sequence[str | None] = (None, "model", "a.b")) -> LeavesRecord:
    """Records of some leaves: plain, ragged, compressed, empty, and Python values."""
    names = st.text(st.sampled_from("abé_.%/\U0001f332\ud800"), max_size=3)
    kinds = st.sampled_from(["float32", "bfloat16", "int8", "float64", "uint4"])
    leaves: dict[str, Any] = {}
    for name in draw(st.lists(names, unique=True, max_size=6)):
        if draw(st.integers(0, 4)) == 0:
            leaves[name] = draw(st.sampled_from([None, 7, -(2**70)]))
            continue
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        chunks = tuple(draw(st.integers(1, max(length, 1))) for length in shape)
        layout = ChunkLayout(chunks=chunks, compressor=draw(st.sampled_from([None, None, ZSTD])))
        leaves[name] = (LeafType(kind="jax", dtype=draw(kinds), shape=shape), layout)
    return flat(leaves, prefix=draw(st.sampled_from(prefixes)), attempt=f"{draw(st.integers(1, 2**64 - 1)):016x}")


def nested(levels: int) -> list[Any]:
    """Lists inside each other."""
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found
