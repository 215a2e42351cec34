"""The record of a save, equal when it comes back and under its digest; the folders of its leaves, never outside."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tracemalloc
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.properties.strategies import quick
from treering._codec.zarr import ZarrArray, chunk_count, zarray_bytes
from treering._format.index import Container, LeafType
from treering._leaves.documents.record import (
    UNMARKED,
    ChunkLayout,
    LeavesRecord,
    arrays_of,
    attempt_of,
    encode_record,
    escape,
    find_overlap,
    first_checksums,
    folder_of,
    parse_record,
    parts_of_folder,
    prefix_folder,
    unescape,
)
from treering._values.checksums import block_bytes, block_count, digest
from treering._values.keys import join_key
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError

# Records that are made without saving anything.
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


# ------------------------------------------------------------------------------------------------------- records

Document = dict[str, Any]
RAGGED = ChunkLayout(chunks=(3, 6))
PACKED = ChunkLayout(chunks=(2, 6), compressor=ZSTD)
RECORD = flat({"w": (F32, None), "n": 7, "ragged": (F32, RAGGED), "packed": (F32, PACKED)}, prefix="model")


@quick(100)
@given(records())
def test_a_record_comes_back(record: LeavesRecord) -> None:
    data = encode_record(record)
    back = parse_record(data)
    assert back == record
    assert encode_record(back) == data
    assert attempt_of(data) == record.attempt
    assert data.isascii()


@quick(100)
@given(records(), st.data())
def test_every_byte_is_under_the_digest(record: LeavesRecord, data: st.DataObject) -> None:
    good = encode_record(record)
    place = data.draw(st.integers(0, len(good) - 1))
    bad = good[:place] + bytes([good[place] ^ data.draw(st.integers(1, 255))]) + good[place + 1 :]
    for damaged in (bad, good[:place], good + b"\n"):
        with pytest.raises(CorruptError, match=r"^the record"):
            parse_record(damaged)
        assert attempt_of(damaged) is None


def test_the_record_as_specified() -> None:
    assert encode_record(RECORD).decode().splitlines() == [
        '{"treering leaves": 1, "digest": "xxh3-128:' + encode_record(RECORD)[43:75].decode() + '",',
        f'"attempt": "{ATTEMPT}",',
        '"prefix": "model",',
        '"written": {"by":"tests","at":"2026-01-01"},',
        '"meshes": ["x=2"],',
        '"structure": [{"node":"dict","keys":["w","n","ragged","packed"]},4],',
        '"types": [{"kind":"jax","dtype":"float32","shape":[4,6]},{"kind":"int"}],',
        '"leaves": {"key":["w","n","ragged","packed"],"type":[0,1,0,0]},',
        '"values": [7],',
        '"layouts": [{"chunks":[4,6],"compressor":null},{"chunks":[3,6],"compressor":null},'
        '{"chunks":[2,6],"compressor":{"id":"zstd","level":1}}],',
        '"layout": [0,1,2],',
        '"sizes": [1,40001],',
        '"checksums": {"algorithm":"xxh3-64","table":"AAAAAAAAAAAVfEp/uXk3nir4lP5y8248P3TffSxtptpU8Cn95ebdeA=="}}',
    ]


def test_what_follows_from_a_record() -> None:
    assert RECORD.stored_leaves() == [0, 2, 3]
    assert RECORD.folders == ["model/w", "model/ragged", "model/packed"]
    whole, ragged, packed = arrays_of(RECORD)
    assert ragged == ZarrArray(shape=(4, 6), chunks=(3, 6), dtype="float32", marker=ATTEMPT)
    assert json.loads(zarray_bytes(packed)) == {
        "chunks": [2, 6],
        "compressor": {"id": "zstd", "level": 1},
        "dimension_separator": ".",
        "dtype": "<f4",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": [4, 6],
        "treering": ATTEMPT,
        "zarr_format": 2,
    }
    assert whole.plain
    # One chunk, two chunks, two chunks of one block each.
    assert first_checksums(RECORD) == [0, 1, 3, 5]


def test_first_checksums_of_large_chunks() -> None:
    large = LeafType(kind="jax", dtype="float32", shape=(40_000,))
    record = flat({"a": (large, ChunkLayout(chunks=(20_000,))), "b": (F32, None), "e": (E, None), "c": (large, None)})
    # Blocks of 64 KiB: 80,000 bytes are two, 160,000 are three.
    assert first_checksums(record) == [0, 4, 5, 5, 8]


E = LeafType(kind="numpy", dtype="int8", shape=(0, 3))


def test_equal_leaves_share_their_array() -> None:
    arrays = arrays_of(flat(dict.fromkeys("abc", (F32, None))))
    assert len(set(map(id, arrays))) == 1


def test_a_dtype_that_zarr_lacks_lies_there_as_ints() -> None:
    kind = LeafType(kind="jax", dtype="uint4", shape=(3,))
    record = parse_record(encode_record(flat({"a": (kind, None)})))
    assert record.types == [kind]
    assert arrays_of(record)[0].dtype == "uint8"


def test_a_made_up_record_has_no_marker_and_is_never_read() -> None:
    record = dataclasses.replace(RECORD, attempt=UNMARKED)
    assert {found.marker for found in arrays_of(record)} == {None}
    assert first_checksums(record) == [0, 0, 0, 0]
    with pytest.raises(CorruptError, match="not one of a save"):
        parse_record(encode_record(record))


def test_a_member_that_is_unknown_is_ignored() -> None:
    def change(document: Document) -> None:
        for node in (document, document["types"][0], document["layouts"][0], document["checksums"]):
            node["later"] = [1, {"x": None}]

    assert parse_record(changed(encode_record(RECORD), change)) == RECORD


# -------------------------------------------------------------------------------------------------------------- hostile


def setting(name: str, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        document[name] = value

    return change


def layout(**members: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        document["layouts"][0] |= members

    return change


def kind(**members: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        document["types"][0] |= members

    return change


def lost(name: str) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        del document[name]

    return change


TABLE = {"algorithm": "xxh3-64"}
CASES: dict[str, tuple[Callable[[Document], None], str]] = {
    **{
        f"without {name}": (lost(name), name)
        for name in ("attempt", "prefix", "structure", "types", "leaves", "values", "layouts", "layout", "sizes")
    },
    "no checksums": (lost("checksums"), "checksums"),
    "prefix of dots": (setting("prefix", "../model"), "empty part"),
    "empty prefix": (setting("prefix", ""), "prefix"),
    "prefix that is a number": (setting("prefix", 5), "prefix"),
    "prefix with a colon": (setting("prefix", "a:b"), "plain name"),
    "attempt": (setting("attempt", "../../etc/passwd"), "attempt"),
    "huge attempt": (setting("attempt", "0" * 17), "attempt"),
    "layout out of range": (setting("layout", [0, 1, 3]), "column of layouts"),
    "negative layout": (setting("layout", [0, 1, -1]), "column of layouts"),
    "layout missing": (setting("layout", [0, 1]), "3 leaves lie in files, there are 2"),
    "size missing": (setting("sizes", [1]), "2 chunk files, there are 1"),
    "size too many": (setting("sizes", [1, 2, 3]), "2 chunk files, there are 3"),
    "size of nothing": (setting("sizes", [1, 0]), "sizes"),
    "size of 2**63": (setting("sizes", [1, 1 << 63]), "column of sizes"),
    "size true": (setting("sizes", [True, 1]), "column of sizes"),
    "size of 2**62": (setting("sizes", [1, 1 << 62]), "blocks, there are 5 checksums"),
    "chunk of nothing": (layout(chunks=[4, 0]), "of length 0"),
    "chunk below nothing": (layout(chunks=[4, -6]), "not from 0"),
    "chunk of text": (layout(chunks=["4", 6]), "whole numbers"),
    "chunk with too few axes": (layout(chunks=[24]), "no array of"),
    "chunk larger than the array": (layout(chunks=[5, 6]), "no array of"),
    "chunk of 2**62": (layout(chunks=[1 << 62, 6]), "no array of"),
    "chunks of 100,000 axes": (layout(chunks=[1] * 100_000), "100000 axes"),
    "compressor without a name": (layout(compressor={"level": 3}), "id"),
    "compressor that is text": (layout(compressor="zstd"), "compressor"),
    "compressor in the depths": (layout(compressor={"id": "x", "y": nested(200)}), "nested"),
    "compressor without end": (layout(compressor={"id": "x" * 100_000}), "any codec needs"),
    "compressor where there was none": (layout(compressor={"id": "zstd"}), "3 chunk files, there are 2"),
    "shape of 2**62": (kind(shape=[1 << 62, 6]), "larger than any memory"),
    "shape of another array": (kind(shape=[8, 6]), "chunk files"),
    "a million chunks": (kind(shape=[1 << 40, 6]), "chunk files"),
    "an axis of nothing": (kind(shape=[0, 6]), "no array of"),
    "array of 16-byte floats": (kind(dtype="float128"), "zarr v2 cannot represent"),
    "table too short": (setting("checksums", TABLE | {"table": "AAAAAAAAAAA="}), "5 blocks, there are 1"),
    "table cut": (setting("checksums", TABLE | {"table": "AAAA"}), "not 8 for each"),
    "table that is none": (setting("checksums", TABLE | {"table": "*"}), "base64"),
    "values too many": (setting("values", [7, 7]), "2 values"),
    "written without end": (setting("written", {"a": nested(200)}), "nested"),
    "keys of another tree": (setting("leaves", {"key": ["w", "n", "r", "packed"], "type": [0, 1, 0, 0]}), "leaf 2"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_what_contradicts_itself(name: str) -> None:
    change, message = CASES[name]
    with pytest.raises(CorruptError, match=message) as caught:
        parse_record(changed(encode_record(RECORD), change))
    assert str(caught.value).startswith("the record")
    assert "use another copy of the directory" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (setting("checksums", {"algorithm": "blake3", "table": ""}), FormatError),
        (kind(kind="sparse"), FormatError),
        (kind(dtype="float5"), UnsupportedError),
    ],
    ids=["algorithm", "kind", "dtype"],
)
def test_what_is_newer_is_no_damage(change: Callable[[Document], None], error: type[TreeringError]) -> None:
    with pytest.raises(error, match="use a newer treering") as caught:
        parse_record(changed(encode_record(RECORD), change))
    assert not isinstance(caught.value, CorruptError)


def test_a_newer_version_says_so() -> None:
    newer = encode_record(RECORD).replace(b'leaves": 1,', b'leaves": 2,')
    with pytest.raises(CorruptError):  # the digest is over the version too
        parse_record(newer)
    with pytest.raises(FormatError, match="version 2; this treering reads version 1"):
        parse_record(b'{"treering leaves": 2, "something": "else"}')


@pytest.mark.parametrize(
    "body",
    ['"attempt": NaN}\n', '"a": 1, "a": 2}\n', '"a": ' + "[" * 100_000, '"a": 1e999}\n', '"a": "é"}\n', "[]", ""],
    ids=["NaN", "twice", "nested", "infinite", "not ASCII", "a list", "nothing"],
)
def test_what_is_no_json_of_ours(body: str) -> None:
    with pytest.raises(CorruptError):
        parse_record(signed_text(body))


def test_absurd_claims_take_no_memory() -> None:
    huge = [
        changed(encode_record(RECORD), kind(shape=[1 << 55, 6])),
        changed(encode_record(RECORD), setting("sizes", [(1 << 63) - 1] * 2)),
        changed(
            encode_record(flat({"a": (LeafType(kind="jax", dtype="int8", shape=(1,)), None)})),
            lambda document: document["types"][0].update(shape=[1 << 62]),
        ),
        changed(
            encode_record(flat({"a": (LeafType(kind="jax", dtype="int8", shape=(1,)), None)})),
            lambda document: document["structure"].__setitem__(0, {"node": "list", "length": 1 << 60}),
        ),
    ]
    tracemalloc.start()
    for data in huge:
        with pytest.raises(TreeringError):
            parse_record(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_key_too_long_for_a_folder_is_refused() -> None:
    record = flat({"n": 1})
    long = "x" * 256
    record = dataclasses.replace(
        record, structure=[Container(node="dict", keys=(long,)), 1], keys=[long], types=[E], leaf_types=[0], values={},
        layouts=[ChunkLayout(chunks=(1, 3))], leaf_layouts=[0], checksums=array("Q"),
    )  # fmt: skip
    with pytest.raises(CorruptError, match="file systems"):
        parse_record(encode_record(record))


any_character = st.characters(exclude_categories=())
parts = st.one_of(st.text(any_character, max_size=8), st.text(alphabet="a%-.2E0/\\~:é\ud800\udc00\x00", max_size=8))
paths = st.lists(parts, max_size=4).map(tuple)


@given(parts)
@example("%")
@example("%-")
@example("%2e")
@example("%C3%A9")
@example("\ud83d\ude00")
def test_a_part_survives_its_escape(part: str) -> None:
    name = escape(part)
    assert unescape(name) == part
    assert name not in {"", ".", ".."}
    assert not any(character in name for character in "./\\:\0\n")
    name.encode()  # half surrogates would fail


@given(parts, parts)
def test_different_parts_have_different_names(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@given(parts)
def test_a_name_that_no_escape_gives_stands_for_itself(name: str) -> None:
    part = unescape(name)
    assert part == name or escape(part) == name


@given(paths)
def test_the_parts_of_a_key_lie_in_their_folder(path: tuple[str, ...]) -> None:
    folder = folder_of(None, join_key(path))
    assert folder == ("/".join(map(escape, path)) or "%-")
    if path:
        assert parts_of_folder(folder, None) == path
    assert parts_of_folder(folder_of("a.b", join_key(path)), "a.b") == path


@given(st.lists(paths, min_size=2, max_size=2, unique=True))
def test_different_keys_lie_in_different_folders(two: list[tuple[str, ...]]) -> None:
    if set(two) != {(), ("",)}:  # a bare array is the only leaf of its tree
        assert len({folder_of(None, join_key(path)) for path in two}) == 2
    assert len({folder_of("p", join_key(path)) for path in two}) == 2


@pytest.mark.parametrize(
    ("prefix", "path", "folder"),
    [
        (None, ("params", "dense", "kernel"), "params/dense/kernel"),
        (None, ("layers", "10"), "layers/10"),
        (None, ("Größe", "重み", "a b"), "Größe/重み/a b"),
        (None, ("50%", "100%x", "%2e", "% 2E"), "50%/100%x/%2e/% 2E"),
        (None, ("layer.0",), "layer%2E0"),
        (None, ("a/b", "c\\d", "e:f"), "a%2Fb/c%5Cd/e%3Af"),
        (None, (".", ".."), "%2E/%2E%2E"),
        (None, ("%2E", "%-"), "%252E/%25-"),
        (None, ("é.",), "é%2E"),
        (None, ("\x85", "\x7f", "\n"), "%C2%85/%7F/%0A"),
        (None, ("\ud800",), "%ED%A0%80"),
        (None, ("~", "~0"), "~/~0"),
        (None, (".treering", "x"), "%2Etreering/x"),
        (None, ("tensorstore_index.json",), "tensorstore_index%2Ejson"),
        (None, (".zarray",), "%2Ezarray"),
        (None, (), "%-"),
        (None, ("",), "%-"),
        (None, ("a", ""), "a/%-"),
        ("", ("a",), "a"),
        ("model", (), "model"),
        ("model", ("",), "model/%-"),
        ("model.ema/x", ("w",), "model/ema/x/w"),
    ],
    ids=ascii,
)
def test_folders_by_example(prefix: str | None, path: tuple[str, ...], folder: str) -> None:
    assert folder_of(prefix, join_key(path)) == folder


def test_a_key_text_has_to_be_one() -> None:
    with pytest.raises(FormatError, match="stands alone"):
        folder_of(None, "a~/b")


@pytest.mark.parametrize("part", ["a" * 255, "é" * 127, "." * 85], ids=["ascii", "two bytes", "escaped"])
def test_the_longest_names_can_be_made(part: str, tmp_path: Path) -> None:
    (tmp_path / folder_of(None, join_key((part,)))).mkdir()
    with pytest.raises(UnsupportedError, match="bytes long") as caught:
        folder_of("model", join_key(("x", part + part[0], "y")))
    assert caught.value.path == ("x", part + part[0], "y")


def test_many_short_parts_are_no_long_name() -> None:
    assert folder_of(None, "/".join(["abc"] * 200)) == "/".join(["abc"] * 200)


@pytest.mark.parametrize(
    "prefix",
    ["/a", "a/", "a//b", "..", "a..b", ".", "a\\b", "a:b", "a\0", "a\n", "%2E", "x%-", "\ud800", "a" * 256, "é" * 128],
    ids=ascii,
)
def test_prefixes_that_are_no_path_are_refused(prefix: str) -> None:
    with pytest.raises(UnsupportedError, match="the prefix"):
        prefix_folder(prefix)
    with pytest.raises(ValueError, match="the prefix"):
        folder_of(prefix, "w")


@pytest.mark.parametrize(
    ("folder", "prefix", "path"),
    [
        (".", None, ()),
        ("model", "model", ()),
        ("model/w", "model", ("w",)),
        ("model/w", None, ("model", "w")),
        ("models/w", "model", ("models", "w")),
        ("other/w", "model", ("other", "w")),
        ("a/b/w", "a.b", ("w",)),
        ("a/b/w", "/a/b/", ("w",)),
        ("a\\b/w.x", "a\\b", ("w.x",)),
        ("layer%2E0/%-", None, ("layer.0", "")),
        ("%41/%ED%A0/%FF", None, ("%41", "%ED%A0", "%FF")),
    ],
    ids=ascii,
)
def test_what_a_folder_says(folder: str, prefix: str | None, path: tuple[str, ...]) -> None:
    assert parts_of_folder(folder, prefix) == path


@pytest.mark.parametrize("folder", ["", "/etc", "a/../b", "..", "a//b", "a/", "./a", "a/.", "a\0b"], ids=ascii)
def test_folders_outside_are_refused(folder: str) -> None:
    with pytest.raises(CorruptError, match="leads out"):
        parts_of_folder(folder, None)


@given(st.lists(st.sampled_from(["a", "a/b", "a/b/c", "ab", "a-b", "a.b", "a b", "b", "a/b-", "a/b0"]), max_size=6))
def test_overlaps_are_found_as_a_naive_search_finds_them(folders: list[str]) -> None:
    naive = {
        (one, other)
        for (i, one), (j, other) in itertools.permutations(enumerate(folders), 2)
        if other.startswith(f"{one}/") or (one == other and i < j)
    }
    found = find_overlap(folders)
    assert (found in naive) if naive else found is None


def test_overlaps_among_many_and_deep_folders_take_no_time_to_find() -> None:
    many = [f"params/layer_{number}/kernel" for number in range(50_000)]
    assert find_overlap(many) is None
    assert find_overlap([*many, "params/layer_7"]) == ("params/layer_7", "params/layer_7/kernel")
    deep = "/".join("a" * 100_000)
    assert find_overlap([deep, deep[:-2]]) == (deep[:-2], deep)
