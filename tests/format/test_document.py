"""An index as a document and back, and the headers of data files, which follow from it."""

from __future__ import annotations

import dataclasses
import json
import struct
from array import array
from pathlib import Path

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tests.format.indexes import ATTEMPT, index_of, indexes
from tests.properties.strategies import quick
from treering._format.document import data_name, encode_index, parse_index, read_summary
from treering._format.index import Index, LeafType, damage_error, file_digest, file_digests
from treering._format.safetensors import check_single_file, header_bytes, lay_out, parse_safetensors, single_file
from treering._values.checkpoint_names import is_data
from treering._values.checksums import digest
from treering.errors import CorruptError, TreeringError, UnsupportedError

F32 = LeafType(kind="numpy", dtype="float32", shape=(20_000,))


@quick(150)
@given(indexes())
def test_an_index_comes_back(index: Index) -> None:
    data = encode_index(index)
    back = parse_index(data)
    assert back == index
    assert encode_index(back) == data
    assert data.isascii()


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
    assert len(set(file_digests(index, [b"header"] * 50))) == 50
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
