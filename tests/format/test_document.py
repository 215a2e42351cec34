"""An index as a document and back, the headers that follow from it, and what no reader may accept."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

import treering
from tests.checkpoint.documents import Document, document_of, rewrite, sample, signed
from tests.checkpoint.test_mutations import mutated
from tests.format.indexes import ATTEMPT, index_of, indexes
from tests.properties.strategies import quick
from treering._format.document import data_name, encode_index, parse_index, read_summary
from treering._format.index import Chunks, Index, LeafType, damage_error, file_digest, sign_files
from treering._format.leaf_values import decode_type
from treering._format.safetensors import check_single_file, header_bytes, lay_out, parse_safetensors, single_file
from treering._values.checkpoint_names import is_data
from treering._values.checksums import block_checksums, digest
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError

F32 = LeafType(kind="numpy", dtype="float32", shape=(20_000,))


@quick(150)
@given(indexes())
def test_an_index_comes_back(index: Index) -> None:
    data = encode_index(index)
    back = parse_index(data)
    assert back == index
    assert encode_index(back) == data
    assert data.isascii()


def test_a_header_that_no_memory_holds() -> None:
    index = index_of(["w"], [F32], [0], [[(0, None)]])
    file = dataclasses.replace(index.files[0], header=1 << 42, nbytes=(1 << 42) + index.chunks.nbytes[0])
    chunks = dataclasses.replace(index.chunks, offset=[1 << 42])
    with pytest.raises(CorruptError, match="4398046511104 are its header"):
        parse_index(encode_index(dataclasses.replace(index, files=[file], chunks=chunks)))


@quick(150)
@given(indexes(), st.data())
def test_every_byte_is_under_the_digest(index: Index, data: st.DataObject) -> None:
    good = encode_index(index)
    place = data.draw(st.integers(0, len(good) - 1))
    bad = good[:place] + bytes([good[place] ^ data.draw(st.integers(1, 255))]) + good[place + 1 :]
    with pytest.raises(CorruptError):
        parse_index(bad)
    with pytest.raises(CorruptError):
        parse_index(good[:place])
    with pytest.raises(CorruptError):
        parse_index(good + b"\n")


def test_the_first_line_is_as_specified() -> None:
    data = encode_index(index_of(["a"], [F32], [0], [[(0, None)]]))
    assert data.startswith(b'{"treering": 1, "digest": "xxh3-128:')
    assert data[68:70] == b'",'
    assert data[27:68].decode() == digest((data[:27], data[68:]))
    # A member a line.
    lines = data.decode().splitlines()
    assert [next(iter(json.loads("{" + line.removeprefix("{").rstrip(",") + "}"))) for line in lines[:-1]] == [
        name for name in json.loads(data) if name not in ("digest", "metadata")
    ]


def test_a_member_that_is_unknown_is_ignored() -> None:
    index = index_of(["a"], [F32], [0], [[(0, None)]])
    document = json.loads(encode_index(index))
    del document["treering"], document["digest"]
    for node in (document, document["types"][0], document["chunks"], document["files"][0], document["checksums"]):
        node["later"] = [1, {"x": None}]
    body = json.dumps(document)[1:]
    head, rest = '{"treering": 1, "digest": "', '",\n' + body
    assert parse_index(f"{head}{digest((head.encode(), rest.encode()))}{rest}".encode()) == index


def test_who_wrote_a_file_is_told_only_where_several_did() -> None:
    index = index_of(["a"], [F32], [0], [[(0, None)]])
    assert b'"process"' not in encode_index(index)
    files = [dataclasses.replace(index.files[0], process=2)]
    several = dataclasses.replace(index, files=files, processes=3)
    assert json.loads(encode_index(several))["files"][0]["process"] == 2
    assert parse_index(encode_index(several)) == several
    with pytest.raises(CorruptError, match="processes"):
        parse_index(encode_index(dataclasses.replace(several, processes=2)))


def test_names_of_files_are_those_that_the_store_knows() -> None:
    for name in (data_name(ATTEMPT, 0, 1), data_name(ATTEMPT, 99_999, 100_000), data_name(ATTEMPT, 123_456, 200_000)):
        assert is_data(name)
        index = index_of(["a"], [F32], [0], [[(0, None)]])
        files = [dataclasses.replace(index.files[0], name=name)]
        assert parse_index(encode_index(dataclasses.replace(index, files=files))).files[0].name == name


def test_what_metadata_cannot_be_is_refused_before_anything_is_written() -> None:
    index = index_of(["a"], [F32], [0], [[(0, None)]])
    with pytest.raises(UnsupportedError, match=r"metadata\['a'\] is a tuple"):
        encode_index(dataclasses.replace(index, metadata={"a": (1,)}))


def test_an_embedded_index_names_no_file_and_others_do() -> None:
    inside = index_of(["a"], [F32], [0], [[(0, None)]], single=True)
    assert parse_index(encode_index(inside), embedded=True) == inside
    outside = index_of(["a"], [F32], [0], [[(0, None)]])
    for index, embedded in ((inside, False), (outside, True)):
        with pytest.raises(TreeringError):
            parse_index(encode_index(index), embedded=embedded)


def test_many_files_do_not_count_the_blocks_of_all_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def counting(nbytes: int, block: int) -> int:
        counted.append(nbytes)
        return -(-nbytes // block)

    monkeypatch.setattr("treering._format.index.block_count", counting)
    index = index_of(
        [f"k{number}" for number in range(50)], [F32], [0] * 50, [[(number, None)] for number in range(50)]
    )
    index = dataclasses.replace(index, chunks=dataclasses.replace(index.chunks))  # a new one, of which nothing is known
    counted.clear()
    unsigned = dataclasses.replace(index, files=[dataclasses.replace(file, digest=None) for file in index.files])
    signed = sign_files(unsigned, [b"header"] * 50)
    assert len({file.digest for file in signed.files} - {None}) == 50
    assert len(counted) == 50


def test_a_digest_binds_header_and_checksums() -> None:
    index = index_of(["a", "b"], [F32], [0, 0], [[(0, None), (1, None)]])
    first = file_digest(index, 0, b"header")
    assert first == file_digest(index, 0, [b"hea", b"der"])
    assert first != file_digest(index, 0, b"headed")
    changed = array("Q", index.checksums)
    changed[1] ^= 1
    assert first != file_digest(dataclasses.replace(index, checksums=changed), 0, b"header")
    # As they lie in the file, not as they stand in the table.
    chunks = dataclasses.replace(index.chunks, offset=list(index.chunks.offset)[::-1])
    assert first != file_digest(dataclasses.replace(index, chunks=chunks), 0, b"header")


def test_damage_names_everything() -> None:
    index = index_of(["a", "b"], [F32], [0, 0], [[(0, None)], [(1, ((0, 15_000),)), (1, ((15_000, 20_000),))]])
    error = damage_error(index, 0, 1, 0x1234)
    name = data_name(ATTEMPT, 0, 2)
    assert str(error) == (
        f"leaf 'a' is damaged: bytes {4096 + 65536} to {4096 + 80000} of {name} have the checksum 0000000000001234 "
        f"instead of {index.checksums[1]:016x}; use another copy; `treering verify` lists all damage"
    )
    assert "leaf 'b'[0:15000] is damaged" in str(damage_error(index, 1, 0, 0))


GOLDEN = Path(__file__).parents[1] / "compat" / "golden"


@pytest.mark.parametrize("index", sorted(GOLDEN.rglob("treering.json")), ids=lambda path: path.parent.name)
def test_an_index_that_is_written_again_is_the_same(index: Path) -> None:
    data = index.read_bytes()
    assert encode_index(parse_index(data)) == data
    assert read_summary(data).names == tuple(file["name"] for file in json.loads(data)["files"])


# ------------------------------------------------------------------------------------------------ headers of data files

SIZES = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 10).map(lambda n: 64 * n)), max_size=20)


@quick(200)
@given(SIZES)
def test_files_are_laid_out_without_gaps_and_aligned(sizes: list[int]) -> None:
    order, offsets = lay_out(sizes)
    assert sorted(order) == list(range(len(sizes)))
    at = 0
    for number in order:
        assert offsets[number] == at
        at += sizes[number]
    assert all(offsets[number] % 64 == 0 for number, size in enumerate(sizes) if size % 64 == 0)
    lines = [sizes[number] for number in order if sizes[number] % 64 == 0]
    rest = [sizes[number] for number in order if sizes[number] % 64]
    assert lines == sorted(lines, reverse=True)
    assert rest == sorted(rest, reverse=True)
    assert [sizes[number] for number in order] == lines + rest


@quick(150)
@given(indexes())
def test_headers_follow_from_the_index(index: Index) -> None:
    blank = dataclasses.replace(index, checksums=array("Q"))
    for number, file in enumerate(index.files):
        header = header_bytes(blank, number)
        assert len(header) == file.header
        assert len(header) % 4096 == 0
        found = safetensors.deserialize(header + bytes(file.nbytes - file.header))
        assert len(found) == list(index.chunks.file).count(number)


@quick(150)
@given(indexes(single=True), st.data())
def test_single_files_come_back_and_every_bit_of_the_header_counts(index: Index, data: st.DataObject) -> None:
    moved, header, _ = single_file(index, header_bytes(index, 0))
    content = header + bytes(moved.files[0].nbytes - len(header))

    def parsed(content: bytes) -> Index:
        return parse_safetensors(len(content), lambda offset, count: content[offset : offset + count])

    assert parsed(content) == moved
    assert len(header) % 4096 == 0
    safetensors.deserialize(content)
    place = data.draw(st.integers(0, len(header) - 1))
    bad = content[:place] + bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :]
    with pytest.raises(CorruptError):
        parsed(bad)


def test_half_a_character_in_the_index_is_damage() -> None:
    """JSON can spell half of a pair of surrogates, which is no text: one bit makes it of a pair."""
    kind = LeafType(kind="numpy", dtype="uint8", shape=(3,))
    index = index_of(["w"], [kind], [0], [[(0, None)]], single=True)
    _, header, _ = single_file(index, header_bytes(index, 0))
    wanted = rb'"treering.index":"{'
    assert wanted in header
    bad = header.replace(wanted, wanted[:-1] + rb"\ud83c")[: len(header)]  # the header ends in spaces
    content = bad + bytes(3)
    with pytest.raises(CorruptError):
        parse_safetensors(len(content), lambda offset, count: content[offset : offset + count])


@pytest.mark.parametrize("leaves", [0, 1, 30, 300, 3000])
def test_single_files_of_many_sizes(leaves: int) -> None:
    kind = LeafType(kind="numpy", dtype="uint8", shape=(3,))
    keys = [f"leaf {number}" for number in range(leaves)]
    index = index_of(keys, [kind], [0] * leaves, [[(number, None) for number in range(leaves)]], single=True)
    moved, header, _ = single_file(index, header_bytes(index, 0))
    content = header + bytes(moved.files[0].nbytes - len(header))
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
    assert parse_safetensors(len(content), lambda offset, count: content[offset : offset + count]) == moved


def test_all_that_a_single_file_cannot_hold_is_listed_up_to_twenty() -> None:
    kinds = [LeafType(kind="int")]
    with pytest.raises(UnsupportedError) as error:
        check_single_file([f"n{number}" for number in range(25)], kinds, [0] * 25)
    assert "leaf 'n19': an int" in str(error.value)
    assert "'n20'" not in str(error.value)
    assert "and 5 more" in str(error.value)


@pytest.mark.parametrize(
    ("impl", "dtype", "shape", "good"),
    [
        ("threefry2x32", "uint32", [2], True),
        ("threefry2x32", "uint32", [5, 2], True),
        ("rbg", "uint32", [4], True),
        ("unsafe_rbg", "uint32", [0, 4], True),
        ("somebody's", "uint64", [], True),
        ("threefry2x32", "uint32", [4], False),
        ("threefry2x32", "uint32", [], False),
        ("threefry2x32", "uint64", [2], False),
        ("rbg", "uint32", [2], False),
        ("unsafe_rbg", "uint32", [4, 1], False),
        ("somebody's", "int32", [2], False),
        ("somebody's", "float32", [2], False),
        ("somebody's", "uint4", [2], False),
    ],
)
def test_the_data_of_keys(impl: str, dtype: str, shape: list[int], good: bool) -> None:
    node = {"kind": "key", "dtype": dtype, "shape": shape, "impl": impl}
    if good:
        assert decode_type(node, 0).impl == impl
    else:
        with pytest.raises(CorruptError, match="keys of"):
            decode_type(node, 0)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_jax_are_as_the_table_says(tmp_path: Path, impl: str) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), 3)
    treering.save(tmp_path / "ckpt", keys)
    assert treering.verify(tmp_path / "ckpt")
    assert (treering.load(tmp_path / "ckpt") == keys).all()


def test_a_numpy_scalar_has_no_axes() -> None:
    assert decode_type({"kind": "numpy scalar", "dtype": "int8", "shape": []}, 0).shape == ()
    with pytest.raises(CorruptError, match="numpy scalar"):
        decode_type({"kind": "numpy scalar", "dtype": "int8", "shape": [1]}, 0)


# -------------------------------------------------------------------------------------------------------- newer writers


def document() -> Document:
    index = index_of(["a"], [LeafType(kind="numpy", dtype="float32", shape=(2,))], [0], [[(0, None)]])
    found: Document = json.loads(encode_index(index))
    del found["treering"], found["digest"]
    return found


def set_node(found: Document) -> None:
    found["structure"][0]["node"] = "set"


def set_key(found: Document) -> None:
    found["structure"][0]["keys"] = [{"decimal": "1.5"}]


def set_kind(found: Document) -> None:
    found["types"][0]["kind"] = "sparse"


def set_codec(found: Document) -> None:
    found["chunks"]["codec"] = "zstd"


def set_algorithm(found: Document) -> None:
    found["checksums"]["algorithm"] = "blake3"


def set_dtype(found: Document) -> None:
    found["types"][0]["dtype"] = "float5"


@pytest.mark.parametrize("change", [set_node, set_key, set_kind, set_codec, set_algorithm, set_dtype])
def test_what_is_newer_is_no_damage(change: Callable[[Document], None]) -> None:
    found = document()
    change(found)
    with pytest.raises(UnsupportedError if change is set_dtype else FormatError) as caught:
        parse_index(signed(found))
    assert not isinstance(caught.value, CorruptError)
    assert str(caught.value).startswith("treering.json: ")
    assert str(caught.value).endswith("; use a newer treering")


@pytest.mark.parametrize(
    "keys",
    [
        [{"int": "1"}, "1"],
        [{"int": "1"}, {"float": "0x1.0000000000000p+0"}],
        [{"int": "1"}, {"bool": True}],
        [{"float": "nan"}, {"float": "nan:7ff8000000000001"}],
        [{"tuple": [{"text": "x", "class": "m.C"}]}, "b"],
        [{"tuple": [{"tuple": [{"text": "x", "class": "m.C"}]}]}, "b"],
    ],
    ids=json.dumps,
)
def test_keys_of_one_container(keys: list[Any]) -> None:
    found = document()
    empty = {"node": "dict", "keys": []}
    found["structure"] = [{"node": "dict", "keys": ["a", "more"]}, 1, {"node": "dict", "keys": keys}, empty, empty]
    with pytest.raises(CorruptError, match=r"same name|holds the text"):
        parse_index(signed(found))
    found["structure"][2]["keys"] = ["x", {"tuple": [{"int": "1"}]}]
    assert len(parse_index(signed(found)).structure) == 5


# --------------------------------------------------------------------------------------------------------- single files


@pytest.mark.parametrize(
    "kind",
    [
        LeafType(kind="int"),
        LeafType(kind="key", dtype="uint32", shape=(2,), impl="rbg2"),
        LeafType(kind="bytes", dtype="uint8", shape=(9,)),
        LeafType(kind="numpy", dtype="int4", shape=(2,)),
    ],
    ids=str,
)
def test_a_single_file_holds_arrays_and_none_only(kind: LeafType) -> None:
    rows = [(0, None)] if kind.stored else []
    index = index_of(["a"], [kind], [0], [rows], values={} if kind.stored else {0: 7}, single=True)
    moved, header, _ = single_file(index, header_bytes(index, 0))
    content = header + bytes(moved.files[0].nbytes - len(header))
    with pytest.raises(CorruptError, match="which no safetensors file holds"):
        parse_safetensors(len(content), lambda offset, n: content[offset : offset + n])


def test_a_single_file_holds_no_parts() -> None:
    kind = LeafType(kind="numpy", dtype="int8", shape=(2,))
    index = index_of(["a"], [kind], [0], [[(0, ((0, 1),)), (0, ((1, 2),))]], single=True)
    moved, header, _ = single_file(index, header_bytes(index, 0))
    content = header + bytes(moved.files[0].nbytes - len(header))
    with pytest.raises(CorruptError, match="in parts"):
        parse_safetensors(len(content), lambda offset, n: content[offset : offset + n])


# ----------------------------------------------------------------------------------------------------------------- text


def replaced_text(folder: Path, content: bytes) -> None:
    """Put other bytes of equal length into the only leaf, with checksums and digests that fit them."""
    (data,) = folder.glob("data-*")
    raw = data.read_bytes()
    header = raw[: 8 + struct.unpack("<Q", raw[:8])[0]]
    assert len(raw) == len(header) + len(content)
    data.write_bytes(header + content)

    def change(found: Document) -> None:
        sums = np.array(block_checksums(memoryview(content), found["chunks"]["block"][0]), "<u8").tobytes()
        found["checksums"]["table"] = codecs.encode(sums, "base64").decode().replace("\n", "")
        found["files"][0]["digest"] = digest((header, sums))

    rewrite(folder, change)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"\xff" + b"x" * 4999, 0),
        (b"x" * 4999 + b"\xc3", 0),
        (b"x" * 4998 + b"\xc3(", 0),
        (b"x" * (2 * MIB + 5) + b"\xfe", 2 * MIB),
        (b"x" * (MIB - 1) + b"\xe2\x28" + b"x" * 9, MIB),
    ],
    ids=["first", "cut short", "last", "third piece", "over a seam"],
)
def test_text_that_is_no_utf_8_is_named(tmp_path: Path, content: bytes, where: int) -> None:
    treering.save(tmp_path / "ckpt", {"note/s": "x" * len(content)})
    replaced_text(tmp_path / "ckpt", content)
    found = treering.verify(tmp_path / "ckpt")
    (finding,) = found.findings
    (data,) = (tmp_path / "ckpt").glob("data-*")
    header = data.stat().st_size - len(content)
    assert (finding.key, finding.file, finding.start) == ("note~1s", data.name, header + where)
    assert "UTF-8" in str(finding)
    with pytest.raises(TreeringError):
        treering.load(tmp_path / "ckpt")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("around", range(6))
def test_characters_on_a_seam_are_text(tmp_path: Path, around: int) -> None:
    text = "x" * (MIB - around) + "\U0001f332\ud800é" + "x" * 9
    treering.save(tmp_path / "ckpt", {"a": text})
    assert treering.verify(tmp_path / "ckpt")
    assert treering.load(tmp_path / "ckpt")["a"] == text


def test_damaged_text_is_one_finding(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {"a": "x" * 5000})
    (data,) = (tmp_path / "ckpt").glob("data-*")
    raw = bytearray(data.read_bytes())
    raw[-1] = 0xFF
    data.write_bytes(raw)
    (finding,) = treering.verify(tmp_path / "ckpt").findings
    assert finding.problem == "is damaged"


@quick(150)
@given(data=st.data())
def test_what_is_taken_is_written_again_alike(sampled: Document, data: st.DataObject) -> None:
    changed = data.draw(mutated(sampled))
    with contextlib.suppress(TreeringError):
        index = parse_index(signed(changed))
        assert parse_index(encode_index(index)) == index


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Document:
    return document_of(sample(tmp_path_factory.mktemp("again") / "ckpt"))


def test_empty_arrays_lie_before_the_one_that_starts_where_they_are() -> None:
    rows: dict[str, Any] = {"leaf": [0, 1, 2, 3], "box": [None] * 4, "block": [65536] * 4, "file": [0] * 4}
    assert Chunks(**rows, offset=[8, 0, 8, 0], nbytes=[4, 8, 0, 0]).of_file(0) == [3, 1, 2, 0]
