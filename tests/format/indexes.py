"""Indexes for the tests of documents and headers, made without saving anything."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from treering._format.document import data_name
from treering._format.index import Container, DataFile, Index, LeafType, Token
from treering._format.packed import pack
from treering._format.safetensors import lay_out_files
from treering._format.structure import iter_runs
from treering._values.boxes import Box

__all__ = ["ATTEMPT", "index_of", "indexes", "keys_of"]

ATTEMPT = "0123456789abcdef"


def keys_of(tokens: Sequence[Token]) -> list[str]:
    """Return the key text of each leaf, in the order of the structure."""
    return [above + name for above, names in iter_runs(tokens) for name in names]


def index_of(
    keys: Sequence[str],
    types: Sequence[LeafType],
    leaf_types: Sequence[int],
    files: Sequence[Sequence[tuple[int, Box | None]]],
    *,
    values: dict[int, Any] | None = None,
    single: bool = False,
) -> Index:
    """An index of a flat dict, with checksums and digests made up."""
    chunks, headers = lay_out_files(ATTEMPT, keys, types, leaf_types, files)
    sizes = [len(header) for header in headers]
    for file, nbytes in zip(chunks.file, chunks.nbytes, strict=True):
        sizes[file] += nbytes
    entries = [
        DataFile(
            name="" if single else data_name(ATTEMPT, number, len(files)),
            nbytes=size,
            header=len(header),
            digest=None if single else f"xxh3-128:{number:032x}",
        )
        for number, (header, size) in enumerate(zip(headers, sizes, strict=True))
    ]
    return Index(
        attempt=ATTEMPT,
        written={"by": "tests"},
        processes=len(files) or 1,
        meshes=["x=2"],
        structure=[Container(node="dict", keys=tuple(keys)), *([len(keys)] if keys else [])],
        keys=list(keys),
        types=list(types),
        leaf_types=list(leaf_types),
        values=values or {},
        chunks=chunks,
        checksums=array("Q", [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(chunks.first_blocks()[-1])]),
        files=entries,
        replaces=[data_name("f" * 16, 0, 1)],
        metadata={"note": 1},
    )


def halves(shape: tuple[int, ...]) -> list[Box | None]:
    """The array in two parts along its first axis, or whole where that cannot be."""
    if not shape or shape[0] < 2 or not math.prod(shape):
        return [None]
    rest = tuple((0, length) for length in shape[1:])
    return [((0, shape[0] // 2), *rest), ((shape[0] // 2, shape[0]), *rest)]


KINDS = ("float32", "int8", "complex128", "bfloat16", "int4", "float64", "bool")


@st.composite
def indexes(draw: st.DrawFn, *, single: bool = False) -> Index:
    """Indexes of some leaves, in files, whole and in parts, or without any data."""
    dtypes = [name for name in KINDS if not single or name not in ("complex128", "int4")]
    shapes = st.one_of(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from([(64,), (1000,), (400, 70)]))
    stored = st.builds(LeafType, kind=st.sampled_from(["jax", "numpy"]), dtype=st.sampled_from(dtypes), shape=shapes)
    types = [*draw(st.lists(stored, max_size=4)), LeafType(kind="none"), *([] if single else [LeafType(kind="int")])]
    names = st.text(st.sampled_from("abé_\U0001f332"), min_size=1, max_size=4)
    keys = draw(st.lists(st.one_of(names, st.just("__metadata__")), unique=True, max_size=8))
    leaf_types = [draw(st.integers(0, len(types) - 1)) for _ in keys]
    values = {
        leaf: None if types[n].kind == "none" else leaf for leaf, n in enumerate(leaf_types) if not types[n].stored
    }
    count = 1 if single else draw(st.integers(1, 3))
    files: list[list[tuple[int, Box | None]]] = [[] for _ in range(count)]
    for leaf, number in enumerate(leaf_types):
        if types[number].stored:
            boxes = halves(types[number].shape or ()) if not single and draw(st.booleans()) else [None]
            for box in boxes:
                files[draw(st.integers(0, count - 1))].append((leaf, box))
    return index_of(keys, types, leaf_types, files, values=values, single=single)


def packed_column(numbers: Sequence[int]) -> Any:
    """Return a column of numbers as an index of version 4 holds it."""
    return pack(numbers)
