"""Headers of data files: made from the index alone, the same each time, read by the real library."""

from __future__ import annotations

import dataclasses
import struct
from array import array

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tests.format.indexes import index_of, indexes
from tests.properties.strategies import quick
from treering._format.headers import header_bytes, lay_out
from treering._format.index import Index, LeafType
from treering._format.safetensors import check_single_file, parse_safetensors, single_file
from treering.errors import Corrupt, Unsupported

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
    moved, header = single_file(index)
    content = header + bytes(moved.files[0].nbytes - len(header))

    def parsed(content: bytes) -> Index:
        return parse_safetensors(len(content), lambda offset, count: content[offset : offset + count])

    assert parsed(content) == moved
    assert len(header) % 4096 == 0
    safetensors.deserialize(content)
    place = data.draw(st.integers(0, len(header) - 1))
    bad = content[:place] + bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :]
    with pytest.raises(Corrupt):
        parsed(bad)


def test_half_a_character_in_the_index_is_damage() -> None:
    """JSON can spell half of a pair of surrogates, which is no text: one bit makes it of a pair."""
    kind = LeafType(kind="numpy", dtype="uint8", shape=(3,))
    _, header = single_file(index_of(["w"], [kind], [0], [[(0, None)]], single=True))
    wanted = rb'"treering.index":"{'
    assert wanted in header
    bad = header.replace(wanted, wanted[:-1] + rb"\ud83c")[: len(header)]  # the header ends in spaces
    content = bad + bytes(3)
    with pytest.raises(Corrupt):
        parse_safetensors(len(content), lambda offset, count: content[offset : offset + count])


@pytest.mark.parametrize("leaves", [0, 1, 30, 300, 3000])
def test_single_files_of_many_sizes(leaves: int) -> None:
    kind = LeafType(kind="numpy", dtype="uint8", shape=(3,))
    keys = [f"leaf {number}" for number in range(leaves)]
    index = index_of(keys, [kind], [0] * leaves, [[(number, None) for number in range(leaves)]], single=True)
    moved, header = single_file(index)
    content = header + bytes(moved.files[0].nbytes - len(header))
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
    assert parse_safetensors(len(content), lambda offset, count: content[offset : offset + count]) == moved


def test_all_that_a_single_file_cannot_hold_is_listed_up_to_twenty() -> None:
    kinds = [LeafType(kind="int")]
    with pytest.raises(Unsupported) as error:
        check_single_file([f"n{number}" for number in range(25)], kinds, [0] * 25)
    assert "leaf 'n19': an int" in str(error.value)
    assert "'n20'" not in str(error.value)
    assert "and 5 more" in str(error.value)
